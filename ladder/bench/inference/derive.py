"""Figures derived from the benchmark's records: ratios, exposed communication, throughput."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ladder.bench.inference.points import InferencePoint, describe_case
from ladder.plans import aligned

Record = dict[str, Any]
PHASES = ("prefill", "decode", "total")
# Facts of the machine that compared records must share. tables: see `command.own_tables`.
SAME = ("gpu", "torch", "commit", "tables")
EXPLANATION = """\
prefill: from token ids on the host to the first token chosen. decode: one step of the whole batch,
median (and p99) over all steps. tokens/s: new tokens over the measured time of prefill and all
steps in one go; per user, and of the batch.
exposed: time over that of the same plan without communication (no_comm), with the same kernels,
of the same run if it was measured there, minus 1. x none: time over that of `none`, standard wiring
without communication; a plan that lags can beat it.
x std: standard's time with its best reducer over this time; x NCCL: with NCCL's all-reduces.
of floor: prefill, FLOPs over the rate of a large matmul in bf16 (- with fp8 activations, which have
another); decode, bytes of weights and cache over the bandwidth of a large copy; both measured in
the run.
ideal: x standard with the same reducer, as a share of (compute + comm) / max(compute, comm), where
compute is the time of `none`, and comm standard's additional time."""


def by_point(records: Iterable[Record]) -> dict[InferencePoint, Record]:
    """The newest record of each point."""
    return {InferencePoint(**record["point"]): record for record in records}


def derive_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row for each point that is no counterpart, with its times and derived figures.

    Ratios are to points of the same GPU, code and tables (SAME), and None without any.
    """
    found = by_point(records)
    ages = {InferencePoint(**record["point"]): age for age, record in enumerate(records)}
    alike: dict[tuple[InferencePoint, str], dict[InferencePoint, Record]] = {}
    for point, record in sorted(found.items(), key=lambda item: ages[item[0]]):
        alike.setdefault((point.case, _sitting(record)), {})[point] = record
    return [
        _row(point, record, alike[point.case, _sitting(record)])
        for point, record in found.items()
        if not point.no_comm
    ]


def _sitting(record: Mapping[str, Any]) -> str:
    """A record's SAME facts as one text, for comparisons."""
    return json.dumps([_facts(record).get(key) for key in SAME], sort_keys=True)


def _facts(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return record.get("machine") or {}


def by_sitting(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Records, or rows, in groups of equal SAME facts, with a text of the facts that differ."""
    found: dict[str, list[Any]] = {}
    for record in records:
        found.setdefault(_sitting(record), []).append(record)
    facts = [_facts(members[0]) for members in found.values()]
    differ = [key for key in SAME if any(each.get(key) != facts[0].get(key) for each in facts)]
    texts = ["".join(f", {key} {_fact(each.get(key))}" for key in differ) for each in facts]
    return list(zip(texts, found.values(), strict=True))


def _fact(value: Any) -> str:
    """A fact as text; for tables, the beginning of each one's checksum."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={checksum[:8]}" for name, checksum in value.items())
    return str(value)


def _row(
    point: InferencePoint, record: Record, same: dict[InferencePoint, Record]
) -> dict[str, Any]:
    """The row of a point. same: all records of its case and sitting, the newest last."""
    result = record["result"]
    row: dict[str, Any] = {"point": point, **{f"{p}_ms": result[f"{p}_ms"] for p in PHASES}}
    row["machine"] = {key: _facts(record).get(key) for key in SAME}
    seconds = result["total_ms"] / 1e3
    row |= {
        "decode_p99_ms": result["decode_p99_ms"],
        "prefill_of_floor": _of_floor(point, result),
        "decode_of_floor": result["floor_ms"] / result["decode_ms"],
        "tokens_s_user": point.new_tokens / seconds,
        "tokens_s": point.batch * point.new_tokens / seconds,
        "tokens_s_gpu": point.batch * point.new_tokens / seconds / point.tp,
        "memory_gib": result["memory_gib"],
        "picked": result["picked"],
        "chosen": result.get("chosen", {}),  # older records lack it
    }
    nearest = _nearest(same, record)
    for phase in PHASES:
        own = result[f"{phase}_ms"]
        standard = _times(same, phase, "standard")
        nccl = _times(same, phase, "standard", "async")
        none = _times(nearest, phase, "none")
        bare = record["no_comm"]
        compute: list[float] = []
        if bare:  # a counterpart of the plan has the point's T; `none` has none
            degree = point.degree if bare[1] else 0
            compute = _times(nearest, phase, bare[0], no_comm=bare[1], degree=degree)
        row |= {
            f"{phase}_x_standard": min(standard) / own if standard else None,
            f"{phase}_x_nccl": nccl[0] / own if nccl else None,
            f"{phase}_x_none": own / none[0] if none else None,
            f"{phase}_exposed": own / compute[0] - 1 if compute else None,
            f"{phase}_ideal": None,
        }
        alike = _times(same, phase, "standard", point.reducer)
        if alike and none and alike[0] > none[0] and point.plan not in ("standard", "none"):
            ideal = alike[0] / max(none[0], alike[0] - none[0])
            row[f"{phase}_ideal"] = alike[0] / own / ideal
    return row


def _of_floor(point: InferencePoint, result: dict[str, Any]) -> float | None:
    """The floor over a prefill's time; None for fp8, for which older records have bf16's floor."""
    if point.activations != "bf16" or result["prefill_floor_ms"] is None:
        return None
    return float(result["prefill_floor_ms"] / result["prefill_ms"])


def _nearest(same: dict[InferencePoint, Record], record: Record) -> dict[InferencePoint, Record]:
    """The records of `same`, the most suitable for a comparison with `record` first.

    Records of its own run come first: their machine's facts, with rates and command, are equal. Of
    equal ones, records with its reducer come first, then the newest.
    """

    def distance(item: tuple[int, InferencePoint]) -> tuple[bool, bool, int]:
        age, point = item
        other = _facts(same[point]) != _facts(record)
        return other, point.reducer != record["point"]["reducer"], -age

    return {point: same[point] for _, point in sorted(enumerate(same), key=distance)}


def _times(
    same: dict[InferencePoint, Record], phase: str, plan: str, reducer: str | None = None,
    no_comm: bool = False, degree: int = 0,
) -> list[float]:  # fmt: skip
    """Milliseconds of the case's points with that plan (and reducer)."""
    return [
        record["result"][f"{phase}_ms"]
        for point, record in same.items()
        if point.plan == plan
        and point.no_comm == no_comm
        and reducer in (None, point.reducer)
        and point.degree == degree
    ]


HEAD = ("plan", "reducer", "prefill ms", "exposed", "of floor", "decode ms", "p99", "exposed",
        "of floor", "x none", "x std", "x NCCL", "ideal", "tokens/s/user", "tokens/s",
        "GiB")  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row, in the order of HEAD."""
    point: InferencePoint = row["point"]
    return [
        point.plan_name,
        point.reducer,
        f"{row['prefill_ms']:.2f}",
        _percent(row["prefill_exposed"]),
        _percent(row["prefill_of_floor"]),
        f"{row['decode_ms']:.3f}",
        f"{row['decode_p99_ms']:.3f}",
        _percent(row["decode_exposed"]),
        _percent(row["decode_of_floor"]),
        *(_ratio(row[f"decode_{name}"]) for name in ("x_none", "x_standard", "x_nccl", "ideal")),
        f"{row['tokens_s_user']:,.1f}",
        f"{row['tokens_s']:,.0f}",
        f"{row['memory_gib']:.1f}",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def by_case(rows: Iterable[dict[str, Any]]) -> dict[InferencePoint, list[dict[str, Any]]]:
    found: dict[InferencePoint, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["point"].case, []).append(row)
    return found


def text_table(rows: Sequence[dict[str, Any]]) -> str:
    """A table of the rows of one case, as text."""
    lines = [HEAD, *(cells(row) for row in rows)]
    shown = [describe_case(rows[0]["point"]), aligned(lines, left=2)]
    picked = [
        f"{row['point'].plan_name}, {row['point'].reducer} picked: "
        + ", ".join(f"{size} bytes {name}" for size, name in row["picked"].items())
        for row in rows
        if row["picked"]
    ]
    chosen = [
        f"{row['point'].plan_name}, {row['point'].reducer} {phase}: {choice}"
        for row in rows
        for phase, choice in row["chosen"].items()
        if row["point"].tp > 1
    ]
    return "\n".join(shown + list(dict.fromkeys(picked + chosen)))


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row as plain data for JSON."""
    return {**row, "point": asdict(row["point"])}


def improvements(
    rows: Iterable[dict[str, Any]], reducer: str | None = None
) -> dict[tuple[InferencePoint, int], dict[str, dict[int, float]]]:
    """The gain in end-to-end tokens/s over standard: (shape, tp) -> plan -> batch -> percent.

    Each plan (with its T) and standard have their best reducer, or `reducer` (the paper uses NCCL).
    A shape is a case without its TP degree and batch (both 0).
    """
    best: dict[tuple[InferencePoint, int], dict[str, dict[int, float]]] = {}
    for row in rows:
        point: InferencePoint = row["point"]
        if reducer in (None, point.reducer) or point.plan == "none":
            times = best.setdefault((replace(point.case, tp=0, batch=0), point.tp), {})
            plan = times.setdefault(point.plan_name, {})
            plan[point.batch] = min(row["total_ms"], plan.get(point.batch, row["total_ms"]))
    found: dict[tuple[InferencePoint, int], dict[str, dict[int, float]]] = {}
    for key, plans in best.items():
        standard = plans.get("standard", {})
        for name, own in plans.items():
            values = {b: 100 * (standard[b] / t - 1) for b, t in own.items() if b in standard}
            if name != "standard" and values:
                found.setdefault(key, {})[name] = dict(sorted(values.items()))
    return found


def pareto(
    rows: Iterable[dict[str, Any]],
) -> dict[InferencePoint, dict[str, list[tuple[float, float]]]]:
    """The Pareto frontiers over batch sizes, TP degrees and reducers: shape -> plan -> points.

    A point is (completion latency in s, tokens/s per GPU).
    """
    clouds: dict[InferencePoint, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        point: InferencePoint = row["point"]
        shape = replace(point.case, tp=0, batch=0)
        pair = (row["total_ms"] / 1e3, row["tokens_s_gpu"])
        clouds.setdefault(shape, {}).setdefault(point.plan_name, []).append(pair)
    return {
        shape: {plan: _frontier(cloud) for plan, cloud in plans.items()}
        for shape, plans in clouds.items()
    }


def _frontier(cloud: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for latency, throughput in sorted(cloud, key=lambda pair: (pair[0], -pair[1])):
        if not found or throughput > found[-1][1]:
            found.append((latency, throughput))
    return found
