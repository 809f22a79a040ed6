"""The results of figures as text, as JSON and as a page."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from ladder.bench.figures import available
from ladder.bench.report import NO_FIGURES, Aside, Figure, Heading, PagePart, Table, Text, page
from ladder.perf.t3.drawing import draw
from ladder.perf.t3.scores import HEAD, Result
from ladder.perf.t3.system import DECLARED, FITTED
from ladder.plans import aligned

SOURCE = "T3: Transparent Tracking & Triggering (Pati et al., ASPLOS 2024), simulated"


def summary(results: Sequence[Result]) -> str:
    """How many of the scores are within their tolerance, and how many of those held out."""
    scores = [score for result in results for score in result.scores]
    blind = [score for score in scores if score.basis == "held out"]
    met, kept = (sum(score.within for score in some) for some in (scores, blind))
    return (
        f"{met} of {len(scores)} results are within their tolerance; of those to which nothing was "
        f"fitted, {kept} of {len(blind)}"
    )


def text(results: Sequence[Result]) -> str:
    parts = [SOURCE]
    for result in results:
        parts.append(result.heading)
        parts.append(aligned([HEAD, *(score.texts() for score in result.scores)], left=1))
        if details := result.details():
            parts.append(aligned(details, left=1))
        notes = (
            fill(note, 100, initial_indent="- ", subsequent_indent="  ") for note in result.notes
        )
        parts.append("\n".join(notes))
    parts.append(_fitted())
    parts.append(f"{summary(results)}.")
    return "\n\n".join(parts)


def _fitted() -> str:
    lines = ["Fitted:", *(f"  {name}, to {what}" for name, what in FITTED.items())]
    return "\n".join([*lines, "Declared, since the paper does not give it:"] + [
        f"  {line}" for line in DECLARED
    ])  # fmt: skip


def as_data(results: Sequence[Result]) -> dict[str, Any]:
    return {
        "source": SOURCE, "figures": [result.to_dict() for result in results],
        "fitted": FITTED, "declared": list(DECLARED),
    }  # fmt: skip


def as_page(results: Sequence[Result]) -> str:
    parts: list[PagePart] = [] if available() else [NO_FIGURES]
    for result in results:
        parts.append(Heading(result.heading))
        if available():
            parts += [Figure(svg) for svg in draw(result)]
        parts.append(Table(HEAD, [score.texts() for score in result.scores]))
        if details := result.details():
            parts.append(Aside("What is drawn, as a table", aligned(details, left=1)))
        parts += [Text(note) for note in result.notes]
    parts.append(Heading("Parameters"))
    parts.append(Table(["fitted", "to"], list(FITTED.items())))
    parts += [Text(f"Declared, since the paper does not give it: {line}.") for line in DECLARED]
    return page(SOURCE, f"{summary(results)}.", parts)
