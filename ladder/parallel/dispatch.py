"""Dispatch tables: the fastest all-reduce for each message size, measured by `ladder bench comm`.

A table is a JSON list of entries, one for a kind of GPU and a number of ranks:

    [{"gpu": "NVIDIA H200", "world": 4, "until": [[524288, "push"]], "source": "...",
      "prefill": {"direct": 8388608, "direct_blocking": 16777216, "kernel_barrier": 16384}}]

`until` has, in ascending order, the largest message in bytes for which an algorithm is used; NCCL
reduces larger ones. `prefill` (see Prefill) is measured by benchmarks/prefill.py, its key `fused`
by `ladder bench inference --reducers fused push`. dispatch.json, beside this file, has the
measurements so far. A file of the user (`ladder bench comm --write-table FILE`), named by the
environment variable LADDER_DISPATCH, takes precedence. If neither has an entry for the GPU and the
number of ranks, DEFAULT is used: push for small messages, where latency dominates on any GPU, and
NCCL for others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ladder.config import read_entries
from ladder.files import write_text
from ladder.models.errors import UserError, check_keys, unknown

VARIABLE = "LADDER_DISPATCH"
PACKAGED = Path(__file__).with_name("dispatch.json")
ALGORITHMS = ("nccl", "push", "two-shot")
PREFILL_TRANSPORTS = ("direct", "copy-kernels", "copy")


@dataclass(frozen=True)
class Prefill:
    """The transport of `ladder.comm.transports` for a prefill with a sharded residual.

    direct: the largest partial in bytes that the landing's kernel copies itself, on SMs that
    concurrent kernels then lack; direct_blocking: the same for a plan whose reduces all block, with
    no concurrent kernels. kernel_barrier: the most tokens for which a kernel synchronises the
    ranks; for more tokens, memory operations of the CUDA streams do. fused: the smallest partial in
    bytes for which a plan whose reduces all block is prefilled by fused operators
    (ladder.parallel.prefill); 0: never.
    """

    direct: int = 8 * 2**20
    direct_blocking: int = 16 * 2**20
    kernel_barrier: int = 16384
    fused: int = 0

    def transport(self, tokens: int, size: int, blocking: bool) -> str:
        """The transport for `tokens` tokens with a partial of `size` bytes. blocking: all reduces
        block."""
        if size <= (self.direct_blocking if blocking else self.direct):
            return "direct"
        return "copy-kernels" if tokens <= self.kernel_barrier else "copy"


@dataclass(frozen=True)
class Dispatch:
    """A dispatch table for one kind of GPU and number of ranks.

    until: (largest message in bytes, algorithm), ascending; NCCL for larger messages. source: the
    origin of the measurement. prefill: the transports of prompts.
    """

    until: tuple[tuple[int, str], ...]
    source: str
    prefill: Prefill = Prefill()

    def pick(self, size: int) -> str:
        """The algorithm for a message of `size` bytes, of a type that our kernels add
        (`ladder.comm.push.DTYPES`); they also need multiples of 16."""
        if size % 16:
            return "nccl"
        return next((name for largest, name in self.until if size <= largest), "nccl")

    def largest(self, algorithm: str) -> int:
        """The largest message in bytes for which `algorithm` is used; 0: it is not used."""
        return max((size for size, name in self.until if name == algorithm), default=0)

    @property
    def hand_over(self) -> int:
        """The message size in bytes above which only NCCL is used."""
        return max((size for size, name in self.until if name != "nccl"), default=0)

    def describe(self) -> str:
        """The ranges as lines of text."""
        lines, after = [], ""
        for largest, name in self.until:
            lines.append(f"{name:9}{after}up to {size_text(largest)}")
            after = f"beyond {size_text(largest)}, "
        return "\n".join([*lines, f"{'nccl':9}{after.rstrip(', ') or 'all sizes'}"])


DEFAULT = Dispatch(((64 * 1024, "push"),), "default for GPUs that have not been measured")


def size_text(size: int) -> str:
    """A size as text: 8192 is `8 KiB`; sizes that are no multiples of 1024 stay in bytes."""
    if size % 1024:
        return f"{size} bytes"
    return f"{size // 1024} KiB" if size % 2**20 else f"{size // 2**20} MiB"


def derive(times: Mapping[int, Mapping[str, float]]) -> tuple[tuple[int, str], ...]:
    """`until` from measured times: message bytes -> algorithm -> microseconds.

    Each size has the fastest measured one of ALGORITHMS, NCCL on a tie. Messages between two sizes
    use the algorithm of the larger size; messages above the largest use NCCL. Other candidates,
    such as torch's kernels, are ignored.
    """
    until: list[tuple[int, str]] = []
    for size in sorted(times):
        found = [name for name in ALGORITHMS if name in times[size]]
        best = min(found, key=lambda name: times[size][name])
        if until and until[-1][1] == best:
            until.pop()
        until.append((size, best))
    while until and until[-1][1] == "nccl":
        until.pop()
    return tuple(until)


def load_dispatch(gpu: str, world: int, file: str | Path | None = None) -> Dispatch:
    """The table for `world` ranks on GPUs of this name.

    file: a table that takes precedence over the packaged one; None: the one that LADDER_DISPATCH
    names, if any. Raises UserError for a file that cannot be read or is invalid.
    """
    file = file or os.environ.get(VARIABLE) or None
    for path in [PACKAGED] if file is None else [Path(file), PACKAGED]:
        for entry in read_table(path):
            if (entry["gpu"], entry["world"]) == (gpu, world):
                until = tuple((size, name) for size, name in entry["until"])
                prefill = Prefill(**entry.get("prefill", {}))
                return Dispatch(until, f"{path.name}: {entry['source']}", prefill)
    return DEFAULT


def read_table(path: Path) -> list[dict[str, Any]]:
    """The entries of a table. Raises UserError if the file is not a valid table."""
    remedy = f"unset {VARIABLE}, or write a table with `ladder bench comm --write-table {path}`"
    entries = read_entries(path, "the dispatch table", remedy)
    for entry in entries:
        _check_entry(path, entry)
    return entries


def _check_entry(path: Path, entry: dict[str, Any]) -> None:
    keys = {"gpu": str, "world": int, "until": list, "source": str}
    check_keys(f"the dispatch table {path}", entry, [*keys, "prefill"])
    prefill = entry.get("prefill", {})
    if not isinstance(prefill, dict):
        raise UserError(f"the dispatch table {path}: prefill={prefill!r} must have keys")
    check_keys(f"prefill of the dispatch table {path}", prefill, list(asdict(Prefill())))
    for key, value in prefill.items():
        if type(value) is not int or value < 0:
            raise UserError(
                f"the dispatch table {path}: prefill.{key}={value!r} must be a whole number, 0 or "
                f"more"
            )
    for key, kind in keys.items():
        if not isinstance(entry.get(key), kind):
            raise UserError(f"the dispatch table {path}: {key}={entry.get(key)!r} is no {kind}")
    until = entry["until"]
    shaped = all(isinstance(pair, list) and len(pair) == 2 for pair in until)
    if not shaped or not all(type(pair[0]) is int and pair[0] > 0 for pair in until):
        raise UserError(f"the dispatch table {path}: until={until!r} must be pairs [bytes, name]")
    for _, name in until:
        if name not in ALGORITHMS:
            raise unknown(f"algorithm in the dispatch table {path}", name, ALGORITHMS)
    if any(first[0] >= second[0] for first, second in pairwise(until)):
        raise UserError(f"the dispatch table {path}: the bytes of until={until!r} must ascend")


def write_table(path: Path, gpu: str, world: int, dispatch: Dispatch) -> None:
    """Add an entry to the table `path`; it replaces one for the same GPU and number of ranks."""
    kept = read_table(path) if path.is_file() else []
    kept = [entry for entry in kept if (entry["gpu"], entry["world"]) != (gpu, world)]
    until = [list(pair) for pair in dispatch.until]
    entry = {"gpu": gpu, "world": world, "until": until, "source": dispatch.source}
    kept.append({**entry, "prefill": asdict(dispatch.prefill)})
    lines = ",\n".join(f" {json.dumps(entry)}" for entry in kept)
    write_text(path, f"[\n{lines}\n]\n")
