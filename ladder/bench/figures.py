"""Figures as SVG: lines with their names at their ends, and labelled bars. Panels: panels.py.

Figures have a light background and real text. `inline` makes them follow the theme of a page. The
same data and version of matplotlib (the `report` extra) give the same bytes.
"""

from __future__ import annotations

import html
import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ladder.models.errors import UserError

INK, MUTED, GRID, PAPER = "#1f2329", "#5f6975", "#d8dde3", "#fffffe"
# Legible on light and dark pages. A plan has the same colour in every figure.
COLOURS = {
    "ladder": "#d4580b", "standard": "#2f78c4", "parallel": "#2a8a57", "none": "#78808a",
    "desync-4x": "#9a5bc0", "desync-2x": "#c2508f", "accumulate-4x": "#4f8a10",
    "dtp-1": "#94780f", "hybrid": "#168a94",
}  # fmt: skip
WIDTH, FONT = 640, 11  # points
GAP = 15  # between the baselines of two labels
FEW = 20  # a line of fewer points marks each point, with its value as a tooltip
NEEDED = "they need matplotlib: pip install -e '.[report]' in the project's folder"


@dataclass(frozen=True)
class Bar:
    """One bar of `bars`. text: the label at its end. bound: a theoretical limit, drawn hatched."""

    name: str
    value: float
    text: str
    colour: str = MUTED
    bound: bool = False


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def require_matplotlib() -> None:
    """Raise UserError if matplotlib, which draws figures, is not installed."""
    if not available():
        raise UserError(f"the report has figures, and {NEEDED}")


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    *,
    ticks: Sequence[float] = (),
    y_ticks: Sequence[float] = (),
    title: str = "",
    subtitle: str = "",
    zero: str = "",
    colours: Mapping[str, str] | None = None,
    bands: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    height: int = 340,
) -> str:
    """Lines as SVG: name -> (x, y); a name is drawn to the right of its line's last point.

    ticks, y_ticks: the ticks of a logarithmic axis; (): a linear axis. zero: the meaning of the
    line y = 0, which is then drawn. colours: the colours of lines whose names are no plans. bands:
    the least and the greatest y of each point of a line, drawn as an area around it.
    """
    figure, axes, above = _canvas(height, title, (subtitle, y_label))
    if zero:
        axes.axhline(0, color=COLOURS["none"], linewidth=1.2, dashes=(4, 3))
    known = {**COLOURS, **(colours or {})}
    spare = iter(colour for name, colour in COLOURS.items() if name not in series)
    drawn, said = {}, {}
    for number, (name, (x, y)) in enumerate(series.items()):
        drawn[name] = known.get(name) or next(spare, INK)
        axes.plot(x, y, color=drawn[name], linewidth=2.2 if name == "ladder" else 1.6)
        if bands and name in bands:
            area = {"color": drawn[name], "alpha": 0.13, "linewidth": 0, "gid": f"band-{number}"}
            axes.fill_between(x, *bands[name], **area)
        for i, point in enumerate(zip(x, y, strict=True) if len(x) < FEW else ()):
            axes.plot(*point, "o", color=drawn[name], markersize=6, gid=f"point-{number}-{i}")
            said[f"point-{number}-{i}"] = (
                f"{name}: {x_label} {point[0]:.6g}, {y_label} {point[1]:.6g}"
            )
    axes.autoscale_view()
    for scale, axis, only in (
        (axes.set_xscale, axes.xaxis, ticks),
        (axes.set_yscale, axes.yaxis, y_ticks),
    ):
        if only:
            scale("log")
            axis.set_ticks(only, labels=[f"{tick:,.10g}" for tick in only])
            axis.set_ticks([], minor=True)
        elif max(map(abs, axis.get_view_interval())) >= 10_000:
            axis.set_major_formatter("{x:,.0f}")
        else:
            axis.get_major_formatter().set_useOffset(False)
    grid(axes)
    axes.set_xlabel(x_label, loc="left")
    ends = {name: (float(x[-1]), float(y[-1])) for name, (x, y) in series.items() if len(x)}
    if zero:
        axes.set_xlim(axes.get_xlim())
        ends[zero], drawn[zero] = (float(axes.get_xlim()[1]), 0.0), COLOURS["none"]
    _name_ends(figure, axes, ends, drawn, above)
    return to_svg(figure, said, title)


def bars(
    values: Sequence[Bar], unit: str, *, title: str = "", subtitle: str = "", row: int = 27
) -> str:
    """Horizontal bars as SVG, in the given order from the top; bounds are hatched outlines."""
    height = row * len(values) + 24 + (22 if title else 0) + (18 if subtitle else 0)
    figure, axes, above = _canvas(height, title, (subtitle,))
    said = {}
    for row, bar in enumerate(values):
        style = {"fill": False, "edgecolor": bar.colour, "hatch": "////", "linewidth": 1.2}
        solid = {"color": bar.colour}
        shape = style if bar.bound else solid
        axes.barh(row, bar.value, height=0.66, gid=f"bar-{row}", **shape)
        said[f"bar-{row}"] = f"{bar.name}: {bar.value:.6g} {unit}"
        axes.annotate(
            bar.text, (bar.value, row), (6, 0), textcoords="offset points", va="center_baseline",
            color=INK, fontsize=FONT, weight="normal" if bar.bound else "bold",
        )  # fmt: skip
    axes.set_yticks(range(len(values)), labels=[bar.name for bar in values])
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(length=0, labelsize=FONT, labelcolor=INK)
    measure = text_measure(figure)
    left = max(measure(label) for label in axes.get_yticklabels()) + 16
    room = WIDTH - left
    # The largest scale at which every bar and its label fit.
    scale = min(
        (room - measure(text) - 16) / bar.value
        for bar, text in zip(values, axes.texts, strict=True)
    )
    axes.set_xlim(0, room / scale)
    _set_margins(figure, left, 0, above, 8)
    return to_svg(figure, said, title)


def inline(svg: str) -> str:
    """The figure for a page, with the page's colours for text, grid and background."""
    names = {INK: "--ink", MUTED: "--muted", GRID: "--line", PAPER: "--paper"}
    for colour, name in names.items():
        svg = svg.replace(colour, f"var({name})")
    return svg


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Positions at least `gap` apart in [low, high], in the order of `wanted` and closest to it.

    Closest by least squares. Positions that do not fit extend below `low`. After subtraction of
    i gaps from the ith position, this is an isotonic regression.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []
    for i, index in enumerate(order):
        blocks.append([wanted[index] - gap * i])
        while len(blocks) > 1 and _mean(blocks[-2]) > _mean(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    top = high - gap * (len(wanted) - 1)
    level = [min(max(_mean(block), low), top) for block in blocks for _ in block]
    found = [0.0] * len(wanted)
    for i, index in enumerate(order):
        found[index] = level[i] + gap * i
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _canvas(height: int, title: str, below: Sequence[str]) -> tuple[Any, Any, float]:
    """A figure, its axes, and the height of its headings in points."""
    figure, above = headed(height, title, below)
    axes = figure.subplots()
    style_axes(axes)
    return figure, axes, above


def headed(height: int, title: str, below: Sequence[str]) -> tuple[Any, float]:
    """A figure without axes, and the height of its headings in points."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, facecolor=PAPER)
    above = 10.0
    for text, size, weight, colour in (
        (title, 13.5, "bold", INK),
        *((text, FONT - 0.5, "normal", MUTED) for text in below),
    ):
        if text:
            above += size
            figure.text(
                10 / WIDTH, 1 - above / height, text, size=size, weight=weight, color=colour
            )
            above += 6
    return figure, above + 4


def style_axes(axes: Any) -> None:
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=FONT - 1, length=3)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="y", nbins=6)
    axes.xaxis.label.set(color=MUTED, size=FONT - 0.5)


def grid(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def text_measure(figure: Any) -> Any:
    """A function that returns a text's width in points."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    renderer = FigureCanvasAgg(figure).get_renderer()
    return lambda text: text.get_window_extent(renderer).width


def _set_margins(figure: Any, left: float, right: float, above: float, below: float) -> None:
    """Set the margins around the axes, in points."""
    height = figure.get_figheight() * 72
    figure.subplots_adjust(
        left=left / WIDTH, right=1 - right / WIDTH, top=1 - above / height, bottom=below / height
    )


def _name_ends(
    figure: Any, axes: Any, ends: Mapping[str, tuple[float, float]], colours: Mapping[str, str],
    above: float,
) -> None:  # fmt: skip
    """Write each name beside its line's end, moved up or down where names would overlap.

    A thin line connects a moved name with its line's end.
    """
    measure = text_measure(figure)
    texts = {name: _name(axes, name, ends[name], colours[name], name) for name in ends}
    width = {name: measure(text) for name, text in texts.items()}
    low, high = axes.get_ylim()
    axes.set_ylim(low, high)  # fixed, so that later drawing does not change it
    figure.draw_without_rendering()
    left = 12 + max((measure(label) for label in axes.get_yticklabels()), default=0)
    _set_margins(figure, left, max(width.values(), default=0) + 14, above, 40)
    _spread_names(axes, texts, ends, width, colours)


def _name(axes: Any, text: str, end: tuple[float, float], colour: str, plan: str) -> Any:
    """A name beside a point."""
    return axes.annotate(
        text, end, (9, 0), textcoords="offset points", va="center_baseline",
        color=colour, fontsize=FONT, weight="bold" if plan == "ladder" else "normal",
        bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1, "alpha": 0.7},
    )  # fmt: skip


def _spread_names(
    axes: Any, texts: Mapping[str, Any], ends: Mapping[str, tuple[float, float]],
    width: Mapping[str, float], colours: Mapping[str, str],
) -> None:  # fmt: skip
    """Move names up or down where they would overlap."""
    positions = {name: axes.transData.transform(end) for name, end in ends.items()}
    box = axes.get_window_extent()
    for group in _beside(positions, width):
        wanted = [positions[name][1] for name in group]
        for name, y in zip(group, spread(wanted, GAP, box.y0, box.y1), strict=True):
            moved = float(y - positions[name][1])
            texts[name].set_position((9, moved))
            if abs(moved) > GAP / 3:
                axes.annotate(
                    "", ends[name], (8, moved), textcoords="offset points",
                    arrowprops={"arrowstyle": "-", "color": colours[name], "linewidth": 0.8,
                                "shrinkA": 0, "shrinkB": 3},
                )  # fmt: skip


def _beside(
    positions: Mapping[str, tuple[float, float]], width: Mapping[str, float]
) -> list[list[str]]:
    """The names in groups whose texts overlap horizontally."""
    groups: list[list[str]] = []
    edge = float("-inf")
    for name in sorted(positions, key=lambda each: float(positions[each][0])):
        if float(positions[name][0]) >= edge:
            groups.append([])
        groups[-1].append(name)
        edge = max(edge, float(positions[name][0]) + width[name] + 12)
    return groups


def to_svg(figure: Any, said: Mapping[str, str], title: str) -> str:
    """The figure's SVG without an XML head. said: tooltips, by the id of their element."""
    import matplotlib

    settings = {"svg.fonttype": "none", "svg.hashsalt": "ladder", "font.size": FONT}
    buffer = io.StringIO()
    with matplotlib.rc_context(settings):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", metadata=nothing)
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    for name, text in said.items():
        group = f'<g id="{name}">'
        assert group in drawing, f"matplotlib drew no {name}"
        drawing = drawing.replace(group, f"<g><title>{html.escape(text)}</title>")
    drawing = re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", drawing)
    if title:
        head = drawing.index(">") + 1
        drawing = f"{drawing[:head]}<title>{html.escape(title)}</title>{drawing[head:]}"
    return "".join(f"{line.rstrip()}\n" for line in drawing.splitlines())
