"""Simulated figures and tables of a paper as text, as JSON and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

from ladder.bench.figures import available
from ladder.bench.report import NO_FIGURES, Aside, Figure, Heading, PagePart, Table, Text, page
from ladder.files import write_text
from ladder.perf.drawing import draw
from ladder.perf.scores import HEAD, Result
from ladder.plans import aligned


@dataclass(frozen=True)
class Study:
    """Simulated results, and what they rest on.

    fitted: a parameter with its value -> what it was set to reach. declared: the assumptions that
    the source does not give.
    """

    source: str
    results: Sequence[Result]
    fitted: Mapping[str, str]
    declared: Sequence[str]

    def summary(self) -> str:
        """How many of all scores, and of those held out, are within their tolerance."""
        scores = [score for result in self.results for score in result.scores]
        blind = [score for score in scores if score.basis == "held out"]
        met, kept = (sum(score.within for score in some) for some in (scores, blind))
        return (
            f"{met} of {len(scores)} results are within their tolerance; of those to which nothing "
            f"was fitted, {kept} of {len(blind)}"
        )

    def text(self) -> str:
        parts = [self.source]
        for result in self.results:
            parts.append(result.heading)
            if result.scores:
                parts.append(aligned([HEAD, *(score.texts() for score in result.scores)], left=1))
            if details := result.details():
                parts.append(aligned(details, left=1))
            notes = (
                fill(note, 100, initial_indent="- ", subsequent_indent="  ")
                for note in result.notes
            )
            parts.append("\n".join(notes))
        parts.append(self._parameters())
        parts.append(f"{self.summary()}.")
        return "\n\n".join(parts)

    def _parameters(self) -> str:
        lines = ["Fitted:", *(f"  {name}, to {what}" for name, what in self.fitted.items())]
        lines = lines if self.fitted else ["Fitted: nothing."]
        return "\n".join([*lines, "Declared, since the paper does not give it:"] + [
            f"  {line}" for line in self.declared
        ])  # fmt: skip

    def as_data(self) -> dict[str, Any]:
        return {
            "source": self.source, "figures": [result.to_dict() for result in self.results],
            "fitted": dict(self.fitted), "declared": list(self.declared),
        }  # fmt: skip

    def as_page(self) -> str:
        parts: list[PagePart] = [] if available() else [NO_FIGURES]
        for result in self.results:
            parts.append(Heading(result.heading))
            if available():
                parts += [Figure(svg) for svg in draw(result)]
            if result.scores:
                parts.append(Table(HEAD, [score.texts() for score in result.scores]))
            if details := result.details():
                parts.append(Aside("What is drawn, as a table", aligned(details, left=1)))
            parts += [Text(note) for note in result.notes]
        parts.append(Heading("Parameters"))
        if self.fitted:
            parts.append(Table(["fitted", "to"], list(self.fitted.items())))
        parts += [Text(f"Declared, since the paper does not give it: {x}.") for x in self.declared]
        return page(self.source, f"{self.summary()}.", parts)


def show(study: Study, as_json: bool, page: Path | None) -> None:
    """Print a study, as a table or as JSON, and write its page."""
    if page is not None:
        write_text(page, study.as_page())
    print(json.dumps(study.as_data(), indent=1) if as_json else study.text())
