"""The page of `ladder bench ops`: figures like those of FLUX and of the fused operators' paper."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ladder.bench import figures
from ladder.bench.figures import COLOURS, MUTED, Bar
from ladder.bench.ops import derive
from ladder.bench.ops.best import BEST, best_rows, of_role
from ladder.bench.ops.cases import plain
from ladder.bench.ops.derive import EXPLANATION, by_case, case_of, newest_runs, rows, shared, sizes
from ladder.bench.ops.points import BACK, BAGS, EXPERTS, FEW, SEND
from ladder.bench.report import NO_FIGURES, Aside, Figure, Heading, PagePart, Table, page
from ladder.ops.registry import ANY_ORDER

Records = Sequence[Mapping[str, Any]]
ROLE_COLOURS = {"collective": COLOURS["standard"], "torch": COLOURS["hybrid"]}


def write_page(records: Records) -> str:
    """The page of the records of each point's newest run."""
    records = newest(records)
    parts: list[PagePart] = []
    for case, points in by_case(records).items():
        parts.append(Heading(f"{case.op}, {case.mode}, {case.setting}"))
        if figures.available():
            parts += _figures(case.op, points)
        head, *cells = rows(points)
        parts.append(Table(head, cells, f"Microseconds (E), {case.setting}"))
    parts.append(Aside("Columns", EXPLANATION))
    head, *cells = best_rows(records)
    parts += [Heading("The fastest implementation of each point"), Table(head, cells)]
    parts.append(Aside("Columns of this table", BEST))
    if not figures.available():
        parts = [NO_FIGURES, *parts]
    machines = [record["machine"] for record in records]
    return page("Fused computation and communication", finding(records), parts, machines)


def latest(records: Records) -> Records:
    """The newest record of each way, whatever run it is of: for figures that join runs."""
    return [*{json.dumps(record["point"]): record for record in records}.values()]


def newest(records: Records) -> Records:
    """The records of the newest run of each point on each kind of GPU."""
    runs = newest_runs(
        ((shared(each), case_of(each).gpu), (each["point"]["way"], each["point"]["mode"]),
         each["machine"], each)
        for each in records
    )  # fmt: skip
    return [record for run in runs.values() for record in run]


def finding(records: Records) -> str:
    """The main result in a sentence."""
    ranges = picked_ranges(newest(records))
    if not ranges:
        return "No overlap efficiency of what is picked has been measured."
    return f"Overlap efficiency of what is picked: {'; '.join(ranges)}."


def picked_ranges(records: Records) -> list[str]:
    """For each operator, the range of the picked way's E, and how often it is below 0. An operator
    with several dtypes, numbers of ranks or GPUs has a range for each of them."""
    settings: dict[str, set[str]] = {}
    for record in records:
        settings.setdefault(record["point"]["op"], set()).add(case_of(record).setting)
    found: dict[str, list[float]] = {}
    for record in records:
        op, result = record["point"]["op"], record["result"]
        where = f", {case_of(record).setting}," if len(settings[op]) > 1 else ""
        if result["efficiency"] is None:
            continue
        if result["picked"]:
            found.setdefault(f"{op}{where}", []).append(result["efficiency"])
        if result["picked_any"] and plain(op) == ANY_ORDER:
            found.setdefault(f"{op} in any order{where}", []).append(result["efficiency"])
    return derive.ranges(found)


def _figures(op: str, points: Mapping[str, Records]) -> list[PagePart]:
    """E by m for each shape with several m; bars of the largest m, or over the baseline of all."""
    if op == BAGS:
        bars = [bar for text, members in points.items() for bar in normalised(text, members)]
        what = "Time over that of lookup, then collective; hatched: the floor."
        return [Figure(figures.bars(bars, "x"), what)]
    parts: list[PagePart] = []
    if op in (FEW, EXPERTS):
        bars = [bar for each in points.items() for bar in normalised(*each, fastest=True)]
        what = "The fastest, over product, then collective; hatched: the floor."
        parts.append(Figure(figures.bars(bars, "x"), what))
    by_shape: dict[str, dict[int, Records]] = {}
    for text, members in points.items():
        point = json.loads(text)
        by_shape.setdefault(sizes(point), {})[point["m"]] = members
    for shape, by_m in by_shape.items():
        lines = _lines(by_m)
        if len(by_m) > 1 and lines:
            drawn = figures.lines(
                lines, "m", "E, % of the communication's cost that is hidden", ticks=sorted(by_m),
                zero="product, then collective",
            )  # fmt: skip
            parts.append(Figure(drawn, f"{shape}: overlap efficiency"))
        if len(by_m) > 1:
            what = f"{shape}: time a call by m; hatched: the product alone"
            parts.append(Figure(figures.bars(_bars_by_m(by_m), "us"), what))
        largest = max(by_m)
        what = f"{shape}, m {largest}: time a call; hatched: bounds"
        parts.append(Figure(figures.bars(_bars(by_m[largest]), "us"), what))
    return parts


def _lines(by_m: Mapping[int, Records]) -> dict[str, tuple[list[float], list[float]]]:
    """E by m of each way but the baseline."""
    found: dict[str, dict[int, float]] = {}
    for m in sorted(by_m):
        for record in by_m[m]:
            e, role = record["result"]["efficiency"], record["point"]["role"]
            if e is not None and role in ("operator", "torch"):
                found.setdefault(record["point"]["way"], {})[m] = 100 * e
    return {way: ([*each], [*each.values()]) for way, each in found.items()}


def _bars_by_m(by_m: Mapping[int, Records]) -> list[Bar]:
    """For each m: product then collective, torch's fastest, ours, as in FLUX's Figures 11 to 14.

    The label has ECT, the time beyond the hatched product, and E.
    """
    found = []
    for m in sorted(by_m):
        for role in ("collective", "torch", "operator"):
            record = of_role(by_m[m], role)
            if record is None:
                continue
            result, e = record["result"], record["result"]["efficiency"]
            said = f"{result['us']:.0f} us, ECT {result['ect_us']:.0f}"
            said += "" if e is None else f", E {e:.2f}"
            found.append(Bar(f"m {m}: {_name(record)}", result["us"], said, _colour(record)))
        alone = of_role(by_m[m], "alone")
        assert alone is not None
        us = alone["result"]["us"]
        found.append(Bar(f"m {m}: product alone", us, f"{us:.0f} us", MUTED, bound=True))
    return found


def _bars(records: Records) -> list[Bar]:
    """The ways of a point, the slowest first, then its product and its link."""
    found = []
    for record in sorted(records, key=lambda record: -record["result"]["us"]):
        point, result = record["point"], record["result"]
        if point["role"] == "alone":
            continue
        e = result["efficiency"]
        said = f"{result['us']:.0f} us" + ("" if e is None else f", E {e:.2f}")
        found.append(Bar(_name(record), result["us"], said, _colour(record)))
    alone = min(r["result"]["us"] for r in records if r["point"]["role"] == "alone")
    link = records[0]["result"]["link_us"]
    bounds = [Bar("alone", alone, f"{alone:.0f} us", MUTED, bound=True)]
    return [*found, *bounds, Bar("link", link, f"{link:.0f} us", MUTED, bound=True)]


def normalised(text: str, records: Records, fastest: bool = False) -> list[Bar]:
    """Times of the operator's ways over the baseline's, then the floor, as in the fused operators'
    paper.

    fastest: only the fastest way. Bags are labelled {batch | tables} as in the paper.
    """
    point = json.loads(text)
    label = f"{sizes(point)}, m {point['m']}"
    if point["op"] == BAGS:
        label = f"{{{point['m']} | {point['tables']}}}, pooling {point['pooling']}"
    base = min(r["result"]["us"] for r in records if r["point"]["role"] == "collective")
    found = [record for record in records if record["point"]["role"] in ("operator", "torch")]
    if fastest:
        found = sorted(found, key=lambda record: record["result"]["us"])[:1]
    bars = []
    for record in found:
        ratio = record["result"]["us"] / base
        bars.append(Bar(f"{label}: {_name(record)}", ratio, f"{ratio:.2f} x", _colour(record)))
    floor = records[0]["result"]["floor_us"] / base
    return [*bars, Bar(f"{label}: floor", floor, f"{floor:.2f} x", MUTED, bound=True)]


def _name(record: Mapping[str, Any]) -> str:
    name = record["point"]["way"]
    if record["point"]["role"] == "collective":
        before = {BAGS: "lookup, then ", SEND: "sort, then ", BACK: ""}
        name = f"{before.get(record['point']['op'], 'product, then ')}{name}"
    picked = record["result"]["picked"] or record["result"]["picked_any"]
    return f"{name} (picked)" if picked else name


def _colour(record: Mapping[str, Any]) -> str:
    return ROLE_COLOURS.get(record["point"]["role"], COLOURS["ladder"])
