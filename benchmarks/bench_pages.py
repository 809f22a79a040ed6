"""Pages of `ladder bench train` and `ladder bench comm`: the main result, and the HTML."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ladder.bench import figures
from ladder.bench.communication import OURS, THEIRS
from ladder.bench.figures import COLOURS, MUTED, Bar
from ladder.bench.report import Aside, Figure, PagePart, Table, page
from ladder.bench.training.points import TrainingPoint
from ladder.bench.training.table import HEAD, cells, label
from ladder.parallel.dispatch import size_text

Records = Sequence[dict[str, Any]]
NAMES = {"nccl": "NCCL", "push": "push (ours)", "two-shot": "two-shot (ours)"}
SHADES = {"push (ours)": "ladder", "two-shot (ours)": "dtp-1", "NCCL": "standard",
          "torch one-shot": "none", "torch two-shot": "hybrid"}  # fmt: skip
TRAIN_COLUMNS = """\
range: of the step's times. exposed: step time over that of the same plan without TP's reduces, less
1. x standard: standard's step time over this one. Of a traced micro-batch, forward / backward:
hidden, the share of the communication's time under computation; bare ms, the rest. no_comm: a plan
without its reduces, as `none` is standard."""


def train_page(records: Records) -> tuple[str, str]:
    """A table for each shape of each run, and a figure of the one with the most points."""
    tables = grouped(records, lambda record: [sitting(record), shape(record["point"])])
    leading = grouped(max(tables, key=len), lambda record: record["point"]["layout"])[0]
    steps = {label(TrainingPoint(**record["point"])): record["result"] for record in leading}
    drawn = [
        Bar(
            name, result["step_ms"], f"{result['step_ms']:.1f} ms", COLOURS.get(name, MUTED),
            bound=name == "none" or name.endswith("no_comm"),
        )
        for name, result in sorted(steps.items(), key=lambda each: -each[1]["step_ms"])
    ]  # fmt: skip
    first = leading[0]["point"]
    what = f"{shape(first)}, {first['layout']}"
    said = ", ".join(
        f"{name} {result['step_ms']:.1f} ms" for name, result in steps.items()
        if name in ("standard", "ladder")
    )  # fmt: skip
    finding = f"A step of {what}: {said}."
    caption = f"Time a step, {what}; hatched: bounds without communication."
    parts: list[PagePart] = [Figure(figures.bars(drawn, "ms"), caption)]
    for members in tables:
        facts = members[0]["machine"]
        about = f"{shape(members[0]['point'])}; {facts['ranks']} GPUs, commit {facts['commit']}"
        parts.append(Table(HEAD, cells(members), about))
    parts.append(Aside("Columns", TRAIN_COLUMNS))
    machines = [record["machine"] for record in records]
    return finding, page("Training: step time by plan and layout", finding, parts, machines)


def shape(point: dict[str, Any]) -> str:
    layers = f", {point['layers']} layers" if point["layers"] else ""
    return (
        f"{point['model']}{layers}, batch {point['batch']}, micro-batch {point['micro_batch']}, "
        f"sequence {point['seq_len']}, {point['dtype']}"
        f"{', compiled' if point['compile'] else ''}"
    )


def comm_page(records: Records) -> tuple[str, str]:
    """A figure and a table for each run, the newest first."""
    runs = grouped(records, sitting)[::-1]
    names = [*THEIRS, *OURS]
    parts: list[PagePart] = []
    for members in runs:
        point, facts = members[0]["point"], members[0]["machine"]
        times: dict[str, dict[int, float]] = {name: {} for name in names}
        for record in members:
            times[record["point"]["algorithm"]][record["point"]["size"]] = record["result"]["us"]
        sizes = sorted(times[names[0]])
        series = {
            NAMES.get(name, name): ([size / 1024 for size in own], [*own.values()])
            for name, own in times.items()
            if own
        }
        drawn = figures.lines(
            series, "message, KiB", "microseconds an all-reduce",
            ticks=[size / 1024 for size in sizes[::3]], y_ticks=(2, 5, 10, 20, 50, 100, 200),
            colours={name: COLOURS[shade] for name, shade in SHADES.items()},
        )  # fmt: skip
        what = f"{point['dtype']}, {point['world']} ranks, commit {facts['commit']}"
        parts += [Figure(drawn, what), Table(*comm_table(times, sizes), f"Microseconds: {what}")]
        if members is runs[0]:
            finding = comm_finding(times, sizes, f"{point['world']}x {facts['gpu']}")
    machines = [record["machine"] for record in records]
    return finding, page("All-reduces by message size", finding, parts, machines)


def comm_finding(times: dict[str, dict[int, float]], sizes: Sequence[int], where: str) -> str:
    """The message size up to which ours is the fastest at every measured size."""
    won = 0
    for size in sizes:
        if _best(times, size, OURS) >= _best(times, size, THEIRS):
            break
        won = size
    smallest = sizes[0]
    ratio = _best(times, smallest, THEIRS) / _best(times, smallest, OURS)
    return (
        f"On {where} the fastest of ours takes {_best(times, smallest, OURS):.1f} us for "
        f"{size_text(smallest)}, {ratio:.1f} x as fast as the better of NCCL and torch, and is "
        f"ahead up to {size_text(won) if won else 'no size'}."
    )


def comm_table(
    times: dict[str, dict[int, float]], sizes: Sequence[int]
) -> tuple[list[str], list[list[str]]]:
    rows = []
    for size in sizes:
        cells = [f"{own[size]:.1f}" if size in own else "-" for own in times.values()]
        ratio = _best(times, size, OURS) / _best(times, size, THEIRS)
        rows.append([size_text(size), *cells, f"{ratio:.2f}"])
    head = ["size", *(NAMES.get(name, name) for name in times), "ours / best of theirs"]
    return head, rows


def _best(times: dict[str, dict[int, float]], size: int, names: Sequence[str]) -> float:
    return min(times[name][size] for name in names if size in times[name])


def sitting(record: dict[str, Any]) -> str:
    """The key that records of one run share."""
    facts = record["machine"]
    return json.dumps([facts["commit"], facts["command"]])


def grouped(records: Records, key: Callable[[dict[str, Any]], Any]) -> list[list[dict[str, Any]]]:
    """Records of the same key together, in the order of the first of each."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        found.setdefault(json.dumps(key(record)), []).append(record)
    return [*found.values()]
