"""The tables by which implementations are chosen: their format, files and entries.

A table is a JSON list of entries:

    [{"op": "matmul_reduce_scatter", "device": "NVIDIA H200", "dtype": "bfloat16", "ranks": 4,
      "sizes": [4096, 16384, 16384], "mode": "captured", "order": "ranks",
      "implementation": "staged", "options": {}, "source": "..."}]

device: the name of a GPU, or "cpu". sizes: those of the operator, in the order of `define`, each
rounded up to a power of two: an entry is for the calls in that bucket, see below. mode: "captured"
for calls in a CUDA graph, where none waits for the host, or "eager" (`ladder.comm.capture`). order:
"ranks" (the default of an entry), or "any" for calls that allow any order; these take such an entry
first. options: keyword arguments of the implementation (tile shapes, chunks). table.json, beside
this file, has the measurements so far. A file of the user, named by the environment variable
LADDER_OPS_TABLE, takes precedence.

An entry may also have the sizes at which it was measured, and the time in microseconds that the
host may take to enqueue a call; `ladder.ops.between` says for which other calls of the bucket it
then holds:

    "measured": [{"sizes": [4000, 12288, 16384], "us": 3665.5, "instead_us": 3847.6}],
    "host_us": 420.5
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from ladder.comm.capture import MODES
from ladder.config import read_entries
from ladder.models.errors import UserError, check_keys, unknown
from ladder.ops import between
from ladder.ops.registry import (
    ANOTHER,
    DTYPE_NAMES,
    OPERATORS,
    Call,
    bucket,
    check_values,
    find_implementation,
)

VARIABLE = "LADDER_OPS_TABLE"
UNSET = f"unset {VARIABLE}, or correct it"
PACKAGED = Path(__file__).with_name("table.json")
ORDERS = ("ranks", "any")
KEYS = {
    "op": str, "device": str, "dtype": str, "ranks": int, "sizes": list, "mode": str, "order": str,
    "implementation": str, "options": dict, "source": str, "measured": list, "host_us": int | float,
}  # fmt: skip


def entry_of(call: Call, file: str | None) -> tuple[Path, dict[str, Any] | None]:
    """The entry for a call, and the file that has it."""
    wanted = (call.op, call.device, call.dtype, call.ranks, list(call.sizes), call.mode)
    for path in [PACKAGED] if file is None else [Path(file), PACKAGED]:
        by_order: dict[str, dict[str, Any]] = {}
        for entry in read_table(path):
            dtype = DTYPE_NAMES[entry["dtype"]]
            found = (entry["op"], entry["device"], dtype, entry["ranks"], entry["sizes"])
            if (*found, entry["mode"]) == wanted:
                by_order.setdefault(entry["order"], entry)
        for order in ("any", "ranks") if call.any_order else ("ranks",):
            if order in by_order:
                return path, by_order[order]
    return PACKAGED, None


def devices(file: str | None) -> set[str]:
    """The devices that the tables have entries for."""
    paths = [PACKAGED] if file is None else [Path(file), PACKAGED]
    return {entry["device"] for path in paths for entry in read_table(path)}


@functools.cache
def read_table(path: Path, remedy: str = UNSET) -> list[dict[str, Any]]:
    """The entries of a table. Raises UserError, with `remedy`, if the file is not a valid table."""
    entries = read_entries(path, "the table of operators", remedy)
    for entry in entries:
        for key, value in (("order", "ranks"), ("measured", []), ("host_us", 0)):
            entry.setdefault(key, value)
        _check_entry(f"the table of operators {path}", entry)
    return entries


def _check_entry(where: str, entry: dict[str, Any]) -> None:
    check_keys(where, entry, KEYS)
    if entry.get("mode") not in MODES:
        raise UserError(
            f"{where}: mode={entry.get('mode')!r}; give {' or '.join(MODES)}, or remove the file "
            f"and write it again with `ladder bench ops --write-table`"
        )
    for key, kind in KEYS.items():
        if not isinstance(entry.get(key), kind):
            said = getattr(kind, "__name__", "number")
            raise UserError(f"{where}: {key}={entry.get(key)!r} is no {said}")
    implementation = find_implementation(entry["op"], entry["implementation"], f" in {where}")
    known = [name for name in implementation.options if name not in implementation.insisted]
    check_keys(f"options in {where}", entry["options"], known)
    check_values(f"options in {where}", implementation, entry["options"])
    if entry["order"] not in ORDERS:
        raise unknown(f"order in {where}", entry["order"], ORDERS)
    if entry["order"] == "ranks" and not implementation.ordered:
        raise UserError(
            f'{where}: {entry["op"]} by {entry["implementation"]!r} has order="ranks", and '
            f'{ANOTHER}; set order="any"'
        )
    if entry["dtype"] not in DTYPE_NAMES:
        raise unknown(f"dtype in {where}", entry["dtype"], DTYPE_NAMES)
    if isinstance(entry["ranks"], bool) or entry["ranks"] < 1:
        raise UserError(f"{where}: ranks={entry['ranks']!r} must be a whole number, 1 or more")
    sizes, names = entry["sizes"], OPERATORS[entry["op"]].sizes
    whole = all(type(size) is int and size >= 0 for size in sizes)
    if len(sizes) != len(names) or not whole or bucket(sizes) != tuple(sizes):
        text = json.dumps(sizes)
        raise UserError(f"{where}: sizes={text} must be powers of two, [{', '.join(names)}]")
    between.check(where, entry)
