"""Eras of kernels: each recorded decode step is predicted with the kernels that it ran."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

from ladder.kernels.limits import MAX_ROWS
from ladder.perf.machine import Machine
from ladder.perf.nodes import with_former_kernels, with_older_kernels, with_uncut_kernels
from ladder.perf.riders import TODAY, Kernels

Era = Literal[  # newest first
    "today", "uncut", "narrow", "branching", "riding", "beside", "inside", "behind", "older",
]  # fmt: skip
ERAS: tuple[Era, ...] = get_args(Era)
SAID: dict[Era, str] = {
    "today": "",
    "uncut": "former cuts of one and two rows",
    "narrow": "smaller tiles beside other kernels",
    "branching": "parts of a layer beside each other",
    "riding": "riding beside tiles",
    "beside": "keys read after the wait",
    "inside": "riding inside tiles",
    "behind": "riding behind tiles",
    "older": "older kernels",
}
# Steps recorded before that day, and those of these commits, ran older kernels.
NEWER_KERNELS, OLDER_COMMITS = "2026-11-23", ("239831f",)
# In steps before that day, and those of BEHIND_COMMITS, all sends and landings ride behind tiles.
# In steps of INSIDE_COMMITS some ride inside tiles, in those of BESIDE_COMMITS some beside them. In
# all of these, attention waited for QKV's product before it read keys. Prompts and training before
# that day are predicted with the machine file that was shipped then, if it is kept.
RIDES_INSIDE, BEHIND_COMMITS = "2026-11-27", ("a6535fa",)
INSIDE_COMMITS = ("41aaacd", "e5d7e80", "0f6c05e")
BESIDE_COMMITS = ("64ebca5",)
# In steps before that day, and of these commits, sends and landings ride, and all is on one stream.
TWO_STREAMS, RIDING_COMMITS = "2026-11-28", ("5c18ef3", "e8b240c", "8b38687")
# In steps of these commits attention and MLP of `parallel` are on two streams also with 33 to 64
# sequences.
BRANCHING_COMMITS = ("e0aaac6", "0fe2e3a", "d3dcdbf", "7e146f2")
# In steps before that day, and of these commits, products beside other kernels have smaller tiles.
WIDE_TILES, NARROW_COMMITS = "2026-11-29", ("9900fd3", "b7f6b0e", "c805ead")
# In steps of these commits products of one and two rows, and of all in 8 bits, have other cuts.
UNCUT_COMMITS = ("d031fa8", "c3c63d6", "6e22421", "af797f5", "823927c")
# Steps before that day, and of these commits, read a cache in fp8 byte by byte.
PAIRED_CACHE, BYTEWISE_COMMITS = "2026-11-30", ("12383da",)
# In steps of these commits with such weights and several sequences, threads convert weights.
CONVERTING_COMMITS = {
    "int8": ("8b1d42a", "aa2e20d"),
    "fp8-block": ("8b1d42a", "aa2e20d", "75e91d3", "45819bc"),
}
# Reduces in 8 bits before that day, and of these commits, are by other kernels or exchanges.
SUMS_IN_8_BITS, OLDER_SUMS_COMMITS = "2026-11-30", ("eac36f0", "94613e4")
Chosen = Callable[[Mapping[str, Any]], bool]


def every(about: Mapping[str, Any]) -> bool:
    """A filter that lets all records through."""
    return True


def era_of(about: Mapping[str, Any]) -> Era:
    """The era of a record, by the date and commit in what it says of its machine."""
    commit = str(about.get("commit"))
    if before(about, NEWER_KERNELS) or commit.startswith(OLDER_COMMITS):
        return "older"
    if earlier(about) or commit.startswith(BEHIND_COMMITS):
        return "behind"
    if commit.startswith(INSIDE_COMMITS):
        return "inside"
    if commit.startswith(BESIDE_COMMITS):
        return "beside"
    if before(about, TWO_STREAMS) or commit.startswith(RIDING_COMMITS):
        return "riding"
    if commit.startswith(BRANCHING_COMMITS):
        return "branching"
    if before(about, WIDE_TILES) or commit.startswith(NARROW_COMMITS):
        return "narrow"
    return "uncut" if commit.startswith(UNCUT_COMMITS) else "today"


def of_era(era: Era) -> Chosen:
    """A filter for the records of an era."""
    return lambda about: era_of(about) == era


def before(about: Mapping[str, Any], day: str) -> bool:
    """Whether a record says that it was made before that day."""
    return str(about.get("date", day)) < day


def earlier(about: Mapping[str, Any]) -> bool:
    """Whether a record was made before RIDES_INSIDE."""
    return before(about, RIDES_INSIDE)


def reads_bytewise(about: Mapping[str, Any]) -> bool:
    """Whether a record's kernels read a cache in fp8 byte by byte."""
    return before(about, PAIRED_CACHE) or str(about.get("commit")).startswith(BYTEWISE_COMMITS)


def converts(about: Mapping[str, Any], weights: str) -> bool:
    """Whether a record's kernels of today's era convert such weights in steps of several
    sequences."""
    return str(about.get("commit")).startswith(CONVERTING_COMMITS.get(weights, ()))


def sums_otherwise(about: Mapping[str, Any]) -> bool:
    """Whether a record's reduces in 8 bits are not today's."""
    return before(about, SUMS_IN_8_BITS) or str(about.get("commit")).startswith(OLDER_SUMS_COMMITS)


def as_then(machine: Machine, era: Era) -> tuple[Machine, Kernels]:
    """The machine with the decode kernels of an era, if they are kept; and how products and riders
    were cut then."""
    if era == "today":
        return machine, TODAY
    if era == "uncut":
        return with_uncut_kernels(machine), TODAY
    if era == "narrow":
        return with_uncut_kernels(machine), Kernels(wide=False)
    if era == "branching":
        return with_uncut_kernels(machine), Kernels(branches=MAX_ROWS, wide=False)
    if era == "riding":
        return with_uncut_kernels(machine), Kernels("beside")
    if era == "older":
        kept = with_older_kernels(machine)
        return kept or machine, Kernels("behind", even=kept is None, long=False)
    return with_former_kernels(machine), Kernels(era, long=False)
