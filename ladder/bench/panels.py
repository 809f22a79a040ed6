"""Panels of labelled points, as one SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ladder.bench.figures import (
    COLOURS,
    FONT,
    INK,
    MUTED,
    PAPER,
    WIDTH,
    grid,
    headed,
    style_axes,
    text_measure,
    to_svg,
)
from ladder.bench.labels import Rectangle, Segment, place

MARK = 5.0  # half the size of a mark, in points
LINE = 13.0  # the height of a label
MORE = 9  # points of height for each label beyond MANY
MANY = 8


@dataclass(frozen=True)
class Spot:
    """A point of `panels`: a mean, drawn with the range from low to high. full: not hollow."""

    name: str
    text: str  # the label beside it
    x: float
    mean: float
    low: float
    high: float
    full: bool = True


@dataclass(frozen=True)
class Panel:
    """One panel of `panels`. bound: a value of x and its name, drawn as a line."""

    title: str
    x_label: str
    spots: Sequence[Spot]
    bound: tuple[float, str] | None = None


def colour(name: str) -> str:
    """A plan's colour: its own, or a related plan's, as accumulate-4x's for accumulate-8x."""
    kind = name.partition("-")[0].partition("@")[0]
    alike = (each for each in COLOURS if each.partition("-")[0] == kind)
    return COLOURS.get(name) or COLOURS.get(next(alike, ""), INK)


def panels(
    drawn: Sequence[Panel], y_label: str, *, title: str = "", subtitle: str = "",
    top: float | None = None, row: int = 270,
) -> str:  # fmt: skip
    """Panels of points below each other, which share the y axis; full points are joined by steps.

    A point whose mean is above `top` is a triangle at the upper edge, with its mean beside it.
    Panels are higher than `row` where they have many points.
    """
    row += MORE * max(0, max(len(panel.spots) for panel in drawn) - MANY)
    figure, above = headed(row * len(drawn) + 60, title, (subtitle, y_label))
    height, measure = figure.get_figheight() * 72, text_measure(figure)
    spots = [spot for panel in drawn for spot in panel.spots]
    inside = [spot for spot in spots if top is None or spot.mean <= top] or spots
    low, high = min(s.low for s in inside), max(s.high for s in inside)
    pad = 0.08 * (high - low) or 0.01
    each, said = (height - above) / len(drawn), {}
    for number, panel in enumerate(drawn):
        axes = figure.add_subplot(len(drawn), 1, number + 1)
        style_axes(axes)
        axes.set_ylim(low - pad, high + 2 * pad)
        axes.set_title(panel.title, loc="left", color=INK, size=FONT, weight="bold")
        axes.set_xlabel(panel.x_label, loc="left")
        grid(axes)
        if panel.bound:
            grey = COLOURS["none"]
            axes.axvline(panel.bound[0], color=grey, linewidth=1.2, dashes=(4, 3))
            axes.set_title(f"dashed: {panel.bound[1]}", loc="right", color=grey, size=FONT - 1)
        best = sorted((s.x, s.mean) for s in panel.spots if s.full and s in inside)
        steps = [x for x, _ in best], [mean for _, mean in best]
        axes.plot(*steps, ":", color=MUTED, linewidth=1, drawstyle="steps-post")
        lines = [(panel.bound[0], low, panel.bound[0], high + 2 * pad)] if panel.bound else []
        for (x, y), (to, below) in pairwise(best):
            lines += [(x, y, to, y), (to, y, to, below)]
        ends, texts = [], []
        for i, spot in enumerate(panel.spots):
            text, y, marker, own = spot.text, spot.mean, "o", colour(spot.name)
            if spot not in inside:
                text, y, marker = f"{spot.text}: {spot.mean:.3f}", high + 1.5 * pad, "^"
            elif spot.low < spot.high:
                axes.plot([spot.x] * 2, [spot.low, spot.high], "_-", color=own, ms=9)
            gid, inner = f"spot-{number}-{i}", own if spot.full else PAPER
            axes.plot(spot.x, y, marker, color=own, ms=7, gid=gid, markerfacecolor=inner)
            said[gid] = (
                f"{spot.text}: {panel.x_label} {spot.x:.6g}, {y_label} {spot.mean:.6g} "
                f"({spot.low:.6g} to {spot.high:.6g})"
            )
            ends.append((spot.x, y))
            texts.append(text)
        axes.margins(x=0.06)
        axes.set_xlim(axes.get_xlim())
        axes.yaxis.get_major_formatter().set_useOffset(False)
        figure.draw_without_rendering()
        left = 12 + max(measure(label) for label in axes.get_yticklabels())
        bottom = height - above - each * (number + 1) + 40
        room = WIDTH - left - 10
        axes.set_position((left / WIDTH, bottom / height, room / WIDTH, (each - 64) / height))
        _label(axes, panel.spots, ends, texts, lines, measure)
    return to_svg(figure, said, title)


def _label(
    axes: Any, spots: Sequence[Spot], ends: Sequence[tuple[float, float]], texts: Sequence[str],
    lines: Sequence[Segment], measure: Any,
) -> None:  # fmt: skip
    """Write a text beside each point, where it covers no other text or mark and, if possible, none
    of `lines`, segments in data coordinates."""

    def drawn(x: float, y: float) -> tuple[float, float]:
        """Data coordinates in points."""
        across, up = axes.transData.transform((x, y))
        return float(across), float(up)

    at = [drawn(*end) for end in ends]
    marks: list[Rectangle] = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in at]
    for spot, (x, _) in zip(spots, at, strict=True):
        low, high = drawn(0, spot.low)[1], drawn(0, spot.high)[1]
        if low < high:
            marks.append((x - MARK, low, x + MARK, high))
    written = [
        axes.annotate(
            text, end, (0, 0), textcoords="offset points", va="center_baseline",
            color=colour(spot.name), fontsize=FONT,
            weight="bold" if spot.name == "ladder" else "normal",
        )
        for text, end, spot in zip(texts, ends, spots, strict=True)
    ]  # fmt: skip
    box = axes.get_window_extent()
    sizes = [(measure(each), LINE) for each in written]
    thin = [(*drawn(*line[:2]), *drawn(*line[2:])) for line in lines]
    found = place(at, sizes, marks, (box.x0, box.y0, box.x1, box.y1), thin)
    for each, note, point, end in zip(found, written, at, ends, strict=True):
        middle = (each.box[1] + each.box[3]) / 2
        note.set_position((each.box[0] - point[0], middle - point[1]))
        if each.box[2] < point[0]:  # ends at the point, also in a browser's narrower or wider font
            note.set_position((each.box[2] - point[0], middle - point[1]))
            note.set_horizontalalignment("right")
        elif each.box[0] < point[0]:
            note.set_position(((each.box[0] + each.box[2]) / 2 - point[0], middle - point[1]))
            note.set_horizontalalignment("center")
        if each.line:
            to = each.line[2] - point[0], each.line[3] - point[1]
            axes.annotate(
                "", end, to, textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": note.get_color(), "linewidth": 0.8,
                            "shrinkA": 0, "shrinkB": 3},
            )  # fmt: skip
