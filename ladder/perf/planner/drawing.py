"""The page's figures: latency against throughput, and the kernels of the recommended pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ladder.bench.figures import (
    COLOURS,
    FONT,
    GRID,
    INK,
    MUTED,
    PAPER,
    WIDTH,
    headed,
    style_axes,
    text_measure,
    to_svg,
)
from ladder.bench.labels import Rectangle, place
from ladder.bench.panels import LINE, MARK, colour
from ladder.perf.graph import Operation
from ladder.perf.phases import LIMITS
from ladder.perf.planner.question import Row
from ladder.perf.planner.trace import describe, resources, spans, tracks

HEIGHT = 420
ROW = 30  # points of a track
MOST_TICKS = 9
LAYERS = 2  # that a timeline shows
KINDS = {
    "products": COLOURS["standard"], "attention": COLOURS["parallel"],
    "communication": COLOURS["ladder"], "landings": COLOURS["desync-4x"],
    "launches": COLOURS["none"],
}  # fmt: skip


def front(rows: Sequence[Row]) -> list[Row]:
    """The rows that no other row beats in both latency and throughput, the fastest first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda each: (each.us, -each.tokens_s)):
        if not found or row.tokens_s > found[-1].tokens_s:
            found.append(row)
    return found


def pareto(rows: Sequence[Row], title: str) -> str:
    """Every row as a point; rows that no other row beats are full, joined and named."""
    drawn = [row for row in rows if not row.candidate.bound]
    best = front(drawn)
    figure, above = headed(HEIGHT, title, ("full: none is better in both", "tokens/s of all GPUs"))
    axes = figure.subplots()
    style_axes(axes)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("latency, ms", loc="left")
    said = {}
    steps = [row.us / 1e3 for row in best], [row.tokens_s for row in best]
    axes.plot(*steps, ":", color=MUTED, linewidth=1, drawstyle="steps-post")
    for n, row in enumerate(drawn):
        full = any(row is each for each in best)
        own, gid = colour(row.candidate.plan), f"row-{n}"
        axes.plot(
            row.us / 1e3, row.tokens_s, "o", color=own, gid=gid,
            ms=7 if full else 4, markerfacecolor=own if full else PAPER,
        )  # fmt: skip
        said[gid] = f"{row.candidate}: {row.us / 1e3:.3f} ms, {row.tokens_s:,.0f} tokens/s"
    axes.margins(0.08)
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_ticks(_ticks(*limits), labels=[f"{each:,g}" for each in _ticks(*limits)])
        axis.set_ticks([], minor=True)
    figure.draw_without_rendering()
    measure = text_measure(figure)
    left = 14 + max(measure(label) for label in axes.get_yticklabels())
    figure.subplots_adjust(
        left=left / WIDTH, right=1 - 12 / WIDTH, top=1 - above / HEIGHT, bottom=42 / HEIGHT
    )
    _name(axes, drawn, best, measure)
    return to_svg(figure, said, title)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, as coarse as possible with at least three of them."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in (
        (10, 20, 50),
        (10, 15, 20, 30, 50, 70),
        (10, 12, 14, 16, 18, *range(20, 100, 5)),
    ):
        found = sorted({m * 10.0 ** (n - 1) for n in powers for m in digits})
        found = [each for each in found if low <= each <= high]
        if len(found) > 2:
            return found[:: -(-len(found) // MOST_TICKS)]
    return [low, high]


def _name(axes: Any, drawn: Sequence[Row], best: Sequence[Row], measure: Any) -> None:
    """Write the name of each row of `best` beside its point, not over other points or texts."""

    def at(row: Row) -> tuple[float, float]:
        x, y = axes.transData.transform((row.us / 1e3, row.tokens_s))
        return float(x), float(y)

    marks: list[Rectangle] = [
        (x - MARK, y - MARK, x + MARK, y + MARK) for x, y in (at(row) for row in drawn)
    ]
    texts = [
        axes.annotate(
            f"{row.candidate.plan}, TP {row.candidate.tp}, batch {row.candidate.batch}",
            (row.us / 1e3, row.tokens_s), (0, 0), textcoords="offset points",
            va="center_baseline", color=colour(row.candidate.plan), fontsize=FONT - 1,
        )
        for row in best
    ]  # fmt: skip
    box = axes.get_window_extent()
    sizes = [(measure(text), LINE) for text in texts]
    points = [at(row) for row in best]
    places = place(points, sizes, marks, (box.x0, box.y0, box.x1, box.y1))
    for text, point, found in zip(texts, points, places, strict=True):
        middle = (found.box[1] + found.box[3]) / 2
        text.set_position((found.box[0] - point[0], middle - point[1]))
        if found.line:
            x, y = axes.transData.inverted().transform(found.line[:2])
            end = found.line[2] - point[0], found.line[3] - point[1]
            axes.annotate(
                "", (x, y), end, textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": text.get_color(), "linewidth": 0.8,
                            "shrinkA": 0, "shrinkB": 3},
            )  # fmt: skip


def timeline(row: Row, phase: str, title: str) -> str:
    """When the kernels of LAYERS layers in the middle run: on their streams, and on resources."""
    window = _middle(row)
    begin = min(start for _, start, _ in window)
    streams = list(dict.fromkeys(each.stream for each, _, _ in window if each.launched))
    shown = [*streams, *tracks(phase)]
    height = ROW * len(shown) + 110
    figure, above = headed(height, title, (f"{LAYERS} layers in the middle of the pass",))
    axes = figure.subplots()
    style_axes(axes)
    said = {}
    for n, (each, start, end) in enumerate(window):
        kind = LIMITS.get(each.kind, "launches")
        held = [each.stream] if each.launched else []
        for name in (*held, *resources(each, phase)):
            gid = f"span-{n}-{shown.index(name)}"
            axes.barh(
                shown.index(name), end - start, left=start - begin, height=0.62, gid=gid,
                color=KINDS[kind], edgecolor=PAPER, linewidth=0.8,
            )  # fmt: skip
            said[gid] = f"{describe(each)}: {end - start:.2f} us"
    names = [f"stream: {name}" for name in streams] + list(tracks(phase))
    axes.set_yticks(range(len(shown)), labels=names)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelsize=FONT - 1, labelcolor=INK)
    axes.set_xlabel("microseconds", loc="left")
    measure = text_measure(figure)
    left = at = max(measure(label) for label in axes.get_yticklabels()) + 16
    figure.subplots_adjust(
        left=left / WIDTH, right=1 - 12 / WIDTH, top=1 - (above + 20) / height, bottom=42 / height
    )
    kinds = {LIMITS.get(each.kind, "launches") for each, _, _ in window}
    for kind, own in KINDS.items():
        if kind in kinds:
            text = figure.text(
                at / WIDTH, 1 - (above + 8) / height, f"■ {kind}", color=own, size=FONT
            )
            at += measure(text) + 22
    return to_svg(figure, said, title)


def _middle(row: Row) -> list[tuple[Operation, float, float]]:
    """The forward operations of LAYERS layers in the middle, with their starts and ends."""
    plan = row.candidate.config.plan
    first = max(0, (plan.num_layers - LAYERS) // 2)
    inside = {n for n, layer in enumerate(plan.layers) if first <= layer < first + LAYERS}
    return [
        (each, start, end)
        for each, start, end in spans(row.prediction.graph, row.prediction.times)
        if each.sublayer in inside and not each.backward and end > start
    ]
