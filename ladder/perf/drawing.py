"""A result as SVG: rows of points, the paper's numbers hollow and ours full, or lines."""

from __future__ import annotations

from ladder.bench import figures
from ladder.bench.figures import COLOURS, FONT, INK, MUTED, PAPER, WIDTH
from ladder.perf.scores import Curves, Dots, Result

PALETTE = tuple(COLOURS[name] for name in ("none", "parallel", "standard", "ladder", "desync-4x"))
ROW = 19  # points of height


def draw(result: Result) -> list[str]:
    name = result.title if result.number is None else f"Figure {result.number}"
    return [_draw(chart, name) for chart in result.charts]


def _draw(chart: Dots | Curves, title: str) -> str:
    if isinstance(chart, Dots):
        return _dots(chart, title)
    title += f": {chart.title}" if chart.title else ""
    return figures.lines(
        chart.series,
        chart.x_label,
        chart.y_label,
        ticks=chart.ticks,
        bands=chart.spans,
        title=title,
        colours=_colours(list(chart.series)),
    )


def _colours(names: list[str]) -> dict[str, str]:
    spare = [*PALETTE, *(c for c in COLOURS.values() if c not in PALETTE)]
    return dict(zip(names, spare, strict=False))


def _dots(chart: Dots, title: str) -> str:
    names = list(dict.fromkeys(name for row in chart.rows for name in (*row.ours, *row.paper)))
    colours = _colours(names)
    paper = any(row.paper for row in chart.rows)
    below = "full: simulated; hollow: the paper's number" if paper else ""
    height = ROW * len(chart.rows) + 110
    figure, above = figures.headed(height, title, (below,))
    axes = figure.subplots()
    figures.style_axes(axes)
    said = {}
    for y, row in enumerate(chart.rows):
        for kind, values in (("paper", row.paper), ("ours", row.ours)):
            for name, value in values.items():
                gid = f"dot-{kind}-{y}-{names.index(name)}"
                full, size = (colours[name], 6) if kind == "ours" else (PAPER, 10)
                axes.plot(
                    value, y, "o", color=colours[name], markerfacecolor=full, ms=size, gid=gid
                )
                who = "ours" if kind == "ours" else "paper"
                said[gid] = f"{row.name}, {name}, {who}: {value:.6g}"
    axes.set_yticks(range(len(chart.rows)), labels=[row.name for row in chart.rows])
    axes.set_ylim(len(chart.rows) - 0.4, -0.6)
    axes.grid(axis="y", color=figures.GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, labelsize=FONT - 1, labelcolor=INK)
    axes.set_xlabel(chart.x_label, loc="left", color=MUTED)
    measure = figures.text_measure(figure)
    left = max(measure(label) for label in axes.get_yticklabels()) + 16
    figure.subplots_adjust(
        left=left / WIDTH, right=1 - 12 / WIDTH, top=1 - (above + 20) / height, bottom=42 / height
    )
    at = left
    for name in names:  # the legend, above the points
        text = figure.text(
            (at + 12) / WIDTH, 1 - (above + 8) / height, name, color=colours[name], size=FONT
        )
        figure.text(at / WIDTH, 1 - (above + 8) / height, "●", color=colours[name], size=FONT)
        at += measure(text) + 30
    return figures.to_svg(figure, said, title)
