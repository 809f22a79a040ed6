"""Entries of the operators' table, from what was just measured or from records."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ladder.bench.ops.derive import Result, Timed, newest_runs, ranges
from ladder.bench.ops.points import (
    FLOATS,
    OPS,
    Variant,
    point_of,
    product_of,
    recorded,
    sizes_of,
)
from ladder.comm.capture import MODES, Mode
from ladder.files import write_text
from ladder.models.errors import UserError
from ladder.ops import between
from ladder.ops.choice import unmeasured
from ladder.ops.registry import OPERATORS, SERIAL, Call, Implementation, bucket
from ladder.ops.table import ORDERS, read_table

KEY = ("op", "device", "dtype", "ranks", "sizes")
# An eager call that takes more than this times its time in a graph has waited for the host.
WAITED = 1.1

Measured = tuple[Call, Sequence[tuple[Timed, Result]]]  # a point's call and results, in both modes
Times = dict[Mode, dict[Variant, float]]
Point = tuple[Call, dict[Variant, float]]  # a call in one mode, and its times by implementation


def entries(measured: Sequence[Measured], source: str) -> list[dict[str, Any]]:
    """The table's entries for each call in each mode: the fastest implementation.

    Each is compared with a base: `staged`, or for order "any" `collective` if the operator has it.
    Only an implementation that was measured at every point of the call's sizes in this mode, and
    was slower than the base at none, may be named. At points where the entry would not pick it
    (`ladder.ops.between`), the base runs, and its time counts. A base that no graph can hold counts
    with its eager time. Where the base was not measured, there is no entry.
    """
    timed = [(call, times_of(found)) for call, found in measured]
    waits = host_waits(measured)
    by_call: dict[Call, list[Point]] = {}
    for call, times in timed:
        plain = {each: us for each, us in times.get("eager", {}).items() if each.name in SERIAL}
        for mode, own in times.items():
            at = replace(call, mode=mode)
            by_call.setdefault(replace(at, exact=()), []).append((at, {**plain, **own}))
    made = []
    for call, points in by_call.items():
        for order in _orders(call):
            base = unmeasured(replace(call, any_order=order == "any"))
            found = _fastest(points, Variant(base), order, waits)
            if found is not None:
                made.append({
                    "op": call.op, "device": call.device,
                    "dtype": str(call.dtype).removeprefix("torch."), "ranks": call.ranks,
                    "sizes": list(call.sizes), "mode": call.mode, "order": order, **found,
                    "source": source,
                })  # fmt: skip
    return made


def _orders(call: Call) -> tuple[str, ...]:
    """The orders of sums for which the operator's calls have entries."""
    ordered = all(each.ordered for each in OPERATORS[call.op].implementations.values())
    return ORDERS[:1] if ordered else ORDERS


def times_of(found: Iterable[tuple[Timed, Result]]) -> Times:
    times: Times = {}
    for each, result in found:
        if each.variant is not None:
            times.setdefault(each.mode, {})[each.variant] = result.us
    return times


def host_waits(measured: Sequence[Measured]) -> dict[tuple[str, Variant], float]:
    """The most microseconds that the host may take to enqueue a call, by (operator, variant).

    It is the longest recorded time of the host, or of an eager call that waited for the host. If
    there are none, the shortest eager call, which took at least as long, is the bound.
    """
    found: dict[tuple[str, Variant], tuple[list[float], list[float]]] = {}
    for call, timed in measured:
        captured = times_of(timed).get("captured", {})
        for each, result in timed:
            if each.variant is None or each.mode != "eager":
                continue
            waited, others = found.setdefault((call.op, each.variant), ([], []))
            if result.host_us is not None:
                waited.append(result.host_us)
            most = WAITED * captured.get(each.variant, math.inf)
            (waited if result.us > most else others).append(result.us)
    return {key: max(waited or [min(others)]) for key, (waited, others) in found.items()}


def _fastest(
    points: Sequence[Point], base: Variant, order: str, waits: Mapping[tuple[str, Variant], float]
) -> dict[str, Any] | None:
    """An entry's fields for the fastest that is nowhere slower than `base`; None without `base`."""
    if not all(base in times for _, times in points):
        return None  # the base was wrong or is missing: no way is known to be as fast
    known = OPERATORS[points[0][0].op].implementations
    best: dict[str, Any] = {}
    least = math.inf
    for variant in sorted(points[0][1], key=lambda each: each != base):
        found = known.get(variant.name)
        listed = found is None or _listable(found, variant, order)
        if not listed or not all(variant in times for _, times in points):
            continue
        tried = timed_entry(points, variant, base, waits)
        us = 0.0
        for at, times in points:
            unfit = _unfit(at, tried)
            slower = times[variant] > times[base] and not unfit
            us += math.inf if slower else times[base if unfit else variant]
        if us < least:
            best, least = tried, us
    return best


def timed_entry(
    points: Sequence[Point], variant: Variant, base: Variant,
    waits: Mapping[tuple[str, Variant], float],
) -> dict[str, Any]:  # fmt: skip
    """An entry's fields for an implementation, with the sizes at which it is not slower."""
    call = points[0][0]
    waiting = call.mode == "eager" and variant.name not in SERIAL
    return {
        "implementation": variant.name, "options": dict(variant.options),
        "measured": [
            {"sizes": list(at.exact), "us": round(times[variant], 1),
             "instead_us": round(times[base], 1)}
            for at, times in points
            if times[variant] <= times[base]
        ],
        "host_us": round(waits[call.op, variant], 1) if waiting else 0,
    }  # fmt: skip


def _unfit(call: Call, entry: Mapping[str, Any]) -> bool:
    known = entry["implementation"] in OPERATORS[call.op].implementations
    return known and between.refusal(call, entry) is not None


def _listable(found: Implementation, variant: Variant, order: str) -> bool:
    """Whether a table may name the variant for calls whose sums are in this order."""
    options = dict(variant.options)
    return (order == "any" or found.ordered) and not any(name in options for name in found.insisted)


def picked_by(measured: Sequence[Measured], new: Sequence[Mapping[str, Any]]) -> list[str]:
    """The ranges of E, at these points, of the implementations that these entries pick."""
    known = {(*(str(entry[key]) for key in (*KEY, "mode")), entry["order"]): entry for entry in new}
    found: dict[str, list[float]] = {}
    for (call, timed), mode in ((each, mode) for each in measured for mode in MODES):
        call = replace(call, mode=mode)
        dtype = str(call.dtype).removeprefix("torch.")
        key = call.op, call.device, dtype, str(call.ranks), str([*call.sizes]), mode
        for order, said in zip(ORDERS, ("", " in any order"), strict=True):
            entry = known.get((*key, order)) or known.get((*key, "ranks"))
            if entry is None or order not in _orders(call):
                continue
            variant = Variant(entry["implementation"], tuple(entry["options"].items()))
            if _unfit(call, entry):
                variant = Variant(unmeasured(replace(call, any_order=order == "any")))
            found.setdefault(f"{call.op}{said}, {mode}", []).extend(
                result.efficiency
                for each, result in timed
                if (each.variant, each.mode) == (variant, mode) and result.efficiency is not None
            )
    return ranges(found)


def write_table(path: Path, new: Sequence[Mapping[str, Any]]) -> None:
    """Add entries to the table `path`; they replace those of the same calls, of both modes and
    orders."""
    keys = [[entry[key] for key in KEY] for entry in new]
    read_table.cache_clear()
    kept = read_table(path) if path.is_file() else []
    kept = [entry for entry in kept if [entry[key] for key in KEY] not in keys]
    lines = ",\n".join(f" {json.dumps(entry)}" for entry in (*kept, *new))
    write_text(path, f"[\n{lines}\n]\n")
    read_table.cache_clear()


# -- records ----------------------------------------------------------------------------------


def source_of(machine: Mapping[str, Any]) -> str:
    gpu = "CPU" if machine["gpu"] == "none" else machine["gpu"]
    return (
        f"`ladder bench ops`, {gpu} x{machine['ranks']}, torch {machine['torch']}, "
        f"{machine['date']}"
    )


def recorded_points(records: Sequence[Mapping[str, Any]]) -> dict[str, list[Measured]]:
    """The measured points in records, by source; of a point measured again, the newest run.

    Raises UserError for a record that lacks a field, or has an unknown one.
    """
    read = []
    for record in records:
        try:
            point, way = point_of(record["point"]), record["point"]["way"]
            role, mode = record["point"]["role"], record["point"]["mode"]
            for value, known in ((point.op, OPS), (point.dtype, FLOATS), (mode, MODES)):
                if value not in known:
                    raise KeyError(value)
            result, about = Result(**record["result"]), record["machine"]
            device = "cpu" if about["gpu"] == "none" else about["gpu"]
            key = source_of(about), product_of(point), device
        except (KeyError, TypeError) as error:
            raise UserError(
                f"--records: a record lacks a field, or has one that is unknown ({error}); name "
                f"files that `ladder bench ops` has written"
            ) from error
        variant = recorded(way, point.op) if role == "operator" else None
        timed = Timed(way, role, mode, (), result.error, variant=variant)
        read.append((key, (way, mode), about, (timed, result)))
    found: dict[str, list[Measured]] = {}
    for (source, point, device), run in newest_runs(read).items():
        exact, dtype = sizes_of(point), FLOATS[point.dtype]
        sizes = bucket(exact)
        call = Call(point.op, device, dtype, point.ranks, sizes, exact=exact)
        found.setdefault(source, []).append((call, run))
    return found


def derive_table(path: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write the entries of records to the table `path`; return the ranges of E of its picks.

    Raises UserError, and writes nothing, if there are no records or they are of another command.
    """
    found = recorded_points(records)
    if not found:
        raise UserError("--records: they are empty; name files that `ladder bench ops` has written")
    for source, measured in found.items():
        write_table(path, entries(measured, source))
    everything = [each for measured in found.values() for each in measured]
    return picked_by(everything, read_table(path))
