"""The answer as an HTML page."""

from __future__ import annotations

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
from ladder.models.errors import UserError
from ladder.perf.planner import report
from ladder.perf.planner.candidates import ask
from ladder.perf.planner.drawing import pareto, timeline
from ladder.perf.planner.question import BATCHES, Question, Row, divided
from ladder.perf.planner.remedies import nothing_fits
from ladder.perf.planner.running import commands, lacking
from ladder.plans import aligned


def as_page(
    question: Question, rows: Sequence[Row], left_out: Sequence[str], best: Row | None
) -> str:
    title = report.title(question)
    said = report.verdicts(question, rows, best)
    finding = " ".join(said) if said else nothing_fits(question, rows)
    parts: list[PagePart] = [] if available() else [NO_FIGURES]
    undrawn: list[str] = []
    if available() and best is not None:
        drawn, undrawn = plotted(question, rows)
        parts.append(Figure(pareto(drawn, "Latency against throughput")))
    if best is not None:
        if available():
            kernels = timeline(best, question.phase, f"{best.candidate}, {best.us / 1e3:.3f} ms")
            parts.append(Figure(kernels, "What rides on a kernel is drawn as long as the kernel."))
        named = report.named(question, rows, best)
        parts.append(Heading("To run the recommendation"))
        parts += map(Text, lacking(question, named))
        parts += map(Code, commands(question, named))
    parts += [Heading("What fits, GiB of a GPU"), _table(report.fitting(question))]
    parts += map(Text, report.at_most(question))
    for batch in dict.fromkeys(row.candidate.batch for row in rows):
        some = [row for row in rows if row.candidate.batch == batch]
        shown = report.leading(some)
        parts.append(Heading(f"Batch {batch}, by {question.objective}"))
        parts.append(_table(report.ranked(question, shown)))
        if len(shown) < len(some):
            parts.append(Aside("All of them", aligned(report.ranked(question, some), left=1)))
    notes = [*undrawn, *report.notes(question, rows, left_out)]
    parts += [Heading("How to read it"), *map(Text, notes)]
    return page(title, finding, parts)


def plotted(question: Question, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows of the plot, which include further batches that nobody asked for; and a line for
    each of these batches that cannot be predicted, with the reason."""
    found, undrawn = list(rows), []
    for batch in divided(BATCHES[question.phase], question.micro_batch):
        if batch in question.batches:
            continue
        try:
            found += ask(replace(question, batches=(batch,)))[0]
        except UserError as error:
            undrawn.append(f"Batch {batch} is not in the plot: {error}")
    return found, undrawn


def _table(rows: Sequence[Sequence[str]]) -> Table:
    head, *rest = rows
    return Table(head, rest)
