"""Report pages: one self-contained HTML file, figures inline."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Mapping, Sequence

from ladder.models.errors import UserError

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
pre { background: #f6f6f4; padding: .8rem; overflow-x: auto; font-size: 13px; line-height: 1.35; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, parts: Sequence[str]) -> str:
    """A whole HTML page from a title and parts, which are HTML already."""
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}'
        f"</title><style>{STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n{body}\n"
        f"</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    ]
    return f"<table><tr>{cells}</tr>\n" + "\n".join(lines) + "</table>"


def text(content: str) -> str:
    return f"<p>{html.escape(content)}</p>"


def code(content: str) -> str:
    return f"<pre>{html.escape(content)}</pre>"


def heading(content: str) -> str:
    return f"<h2>{html.escape(content)}</h2>"


def require_matplotlib() -> None:
    """Raise UserError unless figures can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("report pages need matplotlib: pip install 'ladder[report]'")


def curves(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    y_label: str,
    ticks: Sequence[float] = (),
) -> str:
    """A line chart as inline SVG: name -> (x, y). Needs matplotlib (the `report` extra).

    ticks: the only ones of a logarithmic x axis; none: a linear one.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, (x, y) in lines.items():
        marker = "o" if len(x) < 20 else ""  # few points, or one, are to be seen as such
        axes.plot(x, y, label=name, linewidth=1.4, marker=marker)
    if ticks:
        axes.set_xscale("log")
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.3)
    axes.legend()
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    drawing = buffer.getvalue()
    return drawing[drawing.index("<svg") :]
