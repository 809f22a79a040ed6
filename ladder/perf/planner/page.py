"""The answer as an HTML page."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from ladder.bench.figures import available
from ladder.bench.report import (
    NO_FIGURES,
    Aside,
    Code,
    Figure,
    Heading,
    PagePart,
    Table,
    Text,
    page,
)
from ladder.perf.planner import report
from ladder.perf.planner.candidates import ask, work
from ladder.perf.planner.drawing import pareto, timeline
from ladder.perf.planner.question import BATCHES, Question, Row
from ladder.plans import aligned


def as_page(
    question: Question, rows: Sequence[Row], left_out: Sequence[str], best: Row | None,
    words: Sequence[str],
) -> str:  # fmt: skip
    title = report.title(question)
    said = report.verdicts(question, rows, best)
    finding = " ".join(said) if said else report.nothing_fits(question, rows)
    parts: list[PagePart] = [] if available() else [NO_FIGURES]
    if available() and best is not None:
        parts.append(Figure(pareto(plotted(question), "Latency against throughput")))
    if best is not None:
        if available():
            drawn = timeline(best, question.phase, f"{best.candidate}, {best.us / 1e3:.3f} ms")
            parts.append(Figure(drawn, "What rides on a kernel is drawn as long as the kernel."))
        parts += [Heading("To run the recommendation"), Code(shlex.join(words))]
    parts += [Heading("What fits, GiB of a GPU"), _table(work(question).fit_table(question))]
    for batch in dict.fromkeys(row.candidate.batch for row in rows):
        some = [row for row in rows if row.candidate.batch == batch]
        shown = report.leading(some)
        parts.append(Heading(f"Batch {batch}, by {question.objective}"))
        parts.append(_table(report.ranked(question, shown)))
        if len(shown) < len(some):
            parts.append(Aside("All of them", aligned(report.ranked(question, some), left=1)))
    parts += [Heading("How to read it"), *map(Text, report.notes(question, rows, left_out))]
    return page(title, finding, parts)


def plotted(question: Question) -> list[Row]:
    """The rows of the plot: those of more batches, too."""
    batches = {*question.batches, *BATCHES[question.phase]}
    return ask(replace(question, batches=tuple(sorted(batches))))[0]


def _table(rows: Sequence[Sequence[str]]) -> Table:
    head, *rest = rows
    return Table(head, rest)
