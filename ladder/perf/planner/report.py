"""The answer as text and as data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import fill
from typing import Any

from ladder.costs import HEADROOM
from ladder.perf.memory import GIB, Memory
from ladder.perf.nodes import borrowed, declaration
from ladder.perf.planner.candidates import work
from ladder.perf.planner.inference import most_batch
from ladder.perf.planner.question import CLOSE, Question, Row, order, recommended, score
from ladder.perf.planner.running import running
from ladder.plans import CHECKPOINT, aligned

NAMED = 4  # how many of the rows close to the best are named
PHASES = {"decode": "decode steps after", "prefill": "prompts of", "train": "training steps of"}
HEAD = ["plan", "TP", "way", "ms", "80 % interval", "tokens/s", "limited by", "exposed ms",
        "GiB", "basis"]  # fmt: skip
CAVEAT = (
    "Predicted, not measured: `ladder predict validate RECORDS` prints the errors. Plans are other "
    "models: what each costs in quality is measured elsewhere (docs/results/quality.md)."
)


def title(question: Question) -> str:
    machine, nodes = question.machine, question.nodes
    where = f"{nodes} x {machine.name}" if nodes > 1 else machine.name
    stored = "" if question.weights == "bf16" else f" with {question.weights} weights"
    if question.cache != "bf16":
        stored += f"{' and' if stored else ' with'} a cache in {question.cache}"
    return (
        f"{question.subject.name}{stored}, {PHASES[question.phase]} {question.context} tokens, on "
        f"{where} ({question.gpus} x {machine.gpu})"
    )


def room(question: Question) -> float:
    """GiB of a GPU that can be used."""
    return HEADROOM * question.machine.value("memory_gib")


def ranked(question: Question, rows: Sequence[Row]) -> list[list[str]]:
    head, found = list(HEAD), [_cells(row) for row in rows]
    if question.jitter:
        at = head.index("exposed ms")
        head.insert(at, "waiting ms")
        for cells, row in zip(found, rows, strict=True):
            cells.insert(at, f"{row.prediction.waiting_us / 1e3:.3f}")
    return [head, *found]


def leading(rows: Sequence[Row]) -> list[Row]:
    """The best row of each plan, of each TP degree and of each reducer."""
    seen: set[object] = set()
    found = []
    for row in rows:
        each = row.candidate
        own = {each.plan} if each.bound else {each.plan, each.tp, each.way}
        if own - seen:
            found.append(row)
        seen |= own
    return found


def _cells(row: Row) -> list[str]:
    each, found = row.candidate, row.prediction
    name, share = row.limit
    said = "-"
    if ends := row.interval.of(row.us):
        said = f"{ends[0] / 1e3:.3f} to {ends[1] / 1e3:.3f}{' ?' if row.interval.far else ''}"
    return [
        f"{each.plan} (no model)" if each.bound else each.plan, str(each.tp), each.way or "-",
        f"{row.us / 1e3:.3f}", said, f"{row.tokens_s:,.0f}", f"{name} {share:.0%}",
        f"{found.exposed_us / 1e3:.3f}", f"{_gib(row.memory)}",
        f"{found.basis} {found.bases.get(found.basis, 0.0):.0%}",
    ]  # fmt: skip


def _gib(held: Memory) -> str:
    return f"{held.total / GIB:.1f}"


def text(question: Question, rows: Sequence[Row], left_out: Sequence[str], best: Row | None) -> str:
    parts = [
        title(question),
        f"What fits, GiB of a GPU, of which {room(question):.1f} can be used ({HEADROOM:.0%} of "
        f"{question.machine.value('memory_gib'):g}):",
        aligned(fitting(question), left=1),
    ]
    parts += at_most(question)
    for batch in dict.fromkeys(row.candidate.batch for row in rows):
        some = [row for row in rows if row.candidate.batch == batch]
        shown = some if question.plans else leading(some)
        parts.append(f"Batch {batch}, by {question.objective}:")
        parts.append(aligned(ranked(question, shown), left=1))
        if len(shown) < len(some):
            more = len(some) - len(shown)
            parts.append(
                f"and {more} more: these are the best of each plan, TP degree and way. All: "
                f"--json, or --plans NAMES"
            )
    parts += notes(question, rows, left_out)
    parts += verdicts(question, rows, best)
    return "\n\n".join(fill(part, 100) if "\n" not in part else part for part in parts)


def fitting(question: Question) -> list[list[str]]:
    """What fits, as a table of texts."""
    head, *rows = work(question).fit_table(question)
    return [head, *([_told(cell) for cell in row] for row in rows)]


def _told(cell: str | float | bool) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "NO"
    if isinstance(cell, float):
        return f"{cell:.1f}"
    return cell if isinstance(cell, str) else f"{cell:,}"


def at_most(question: Question) -> list[str]:
    """What the column `at most` counts."""
    if question.phase == "train":
        return []
    said = f"at most: sequences of {question.context} tokens, by memory"
    if question.phase == "decode":
        said += f"; a step takes up to {most_batch(question)} of them"
    return [said]


def notes(question: Question, rows: Sequence[Row], left_out: Sequence[str]) -> list[str]:
    """Where intervals and times come from, and what is left out."""
    known = [row.interval for row in rows if row.interval.low is not None]
    sources = dict.fromkeys(f"{each.source}{'*' * each.wider}" for each in known)
    other = f" *: wider, since {question.subject.name} is not among them."
    doubt = (
        " ?: from few records, other GPUs, kernels, weights or caches, another TP degree or "
        "layout, times unlike the row's, or much shorter sequences."
    )
    found = [
        f"80 % interval: the factor within which 80 % of the predictions nearest in time were, of "
        f"{'; '.join(sources)}.{other if any(each.wider for each in known) else ''}"
        f"{doubt if any(row.interval.far for row in rows) else ''}"
        if sources
        else "No interval: no such pass was recorded."
    ] * bool(rows)
    if question.phase == "train":
        found.append(
            "activations: at the start of the backward pass, beyond the room that gradients take "
            "later."
        )
    copies = {row.candidate.tp: question.gpus // row.candidate.tp for row in rows}
    if max(copies.values(), default=1) > 1:
        said = ", ".join(f"TP {tp}: {n}" for tp, n in sorted(copies.items()))
        found.append(
            f"tokens/s: of all {question.gpus} GPUs, which hold copies of the model ({said}), a "
            f"batch each. All columns: docs/predict.md"
        )
    if question.jitter and rows:
        found.append(
            f"waiting: for the slowest of ranks whose operations vary by {100 * question.jitter:g} "
            f"% of their time (standard deviation), each by itself; the other columns include it. "
            f"The interval knows nothing of it."
        )
    trains = question.phase == "train" and bool(rows)
    declared = declaration(question.machine, trains)
    found += [declared] if declared else []
    fitted = {each for row in rows for each in row.prediction.provenance if not borrowed(each)}
    if fitted:
        found.append(
            f"{len(fitted)} values of machine {question.machine.name!r} are fitted to records, "
            f"which --json names."
        )
    unmeasured = sorted({each for row in rows for each in row.prediction.unmeasured})
    if unmeasured:
        found.append(
            f"Not measured by `ladder bench machine`, as shares of the speed alone: "
            f"{', '.join(unmeasured)}."
        )
    if question.nodes > 1 and question.phase != "train":
        found.append(f"No link between the {question.nodes} machines is used.")
    elif question.nodes > 1:
        found.append(
            "Traffic between nodes is that of rings over declared links, which nobody has "
            "measured; hosts and congestion are not in it."
        )
    return [*found, *(f"left out: {each}" for each in left_out), CAVEAT]


def verdicts(question: Question, rows: Sequence[Row], best: Row | None) -> list[str]:
    """The recommendations in words."""
    return [verdict(question, rows, each) for each in named(question, rows, best)]


def named(question: Question, rows: Sequence[Row], best: Row | None) -> list[Row]:
    """The rows that are recommended in words: one for each batch, since the user chooses it; for
    throughput a single one."""
    if best is None or question.objective == "throughput":
        return [best] if best else []
    return list(by_batch(question, rows).values())


def by_batch(question: Question, rows: Sequence[Row]) -> dict[int, Row]:
    """The recommended row of each batch with which a model fits."""
    found = {}
    for batch in dict.fromkeys(row.candidate.batch for row in rows):
        some = [row for row in rows if row.candidate.batch == batch]
        if best := recommended(some, question.objective):
            found[batch] = best
    return found


def verdict(question: Question, rows: Sequence[Row], best: Row) -> str:
    """A recommendation in words, with the candidates that are too close to tell apart."""
    said = [f"Recommended for {question.objective}: {best.candidate}, {best.us / 1e3:.3f} ms"]
    batch = None if question.objective == "throughput" else best.candidate.batch
    alike = [
        row for row in rows
        if not row.candidate.bound and batch in (None, row.candidate.batch)
    ]  # fmt: skip
    there = {row.candidate.plan for row in alike}
    as_it_is = CHECKPOINT if CHECKPOINT in there else "standard"
    plain = min(
        (row for row in alike if row.candidate.plan == as_it_is),
        key=order(question.objective), default=None,
    )  # fmt: skip
    own = score(best, question.objective)
    by = {"latency": "as fast as", "throughput": "the tokens/s of", "memory": "as small as"}
    gain = score(plain, question.objective) / own if plain is not None else 1.0
    if plain is not None and plain is not best and gain - 1 >= CLOSE:
        said.append(f"{gain:.2f} times {by[question.objective]} the best of {as_it_is}")
    elif best.candidate.plan in ("standard", CHECKPOINT) and there - {best.candidate.plan}:
        gains = (
            f"takes {CLOSE:.0%} less" if question.objective == "memory" else f"gains {CLOSE:.0%}"
        )
        said.append(f"no other plan {gains}, so that none pays here")
    close = [
        str(row.candidate)
        for row in alike
        if row is not best and score(row, question.objective) / own - 1 < CLOSE
    ]
    if len(close) > NAMED:
        close[NAMED:] = [f"and {len(close) - NAMED} more"]
    if close and question.objective != "memory":
        said.append(f"within {CLOSE:.0%} of it, so measure them too: {'; '.join(close)}")
    return f"{'; '.join(said)}."


def as_data(
    question: Question, rows: Sequence[Row], left_out: Sequence[str], best: Row | None
) -> dict[str, Any]:
    head, *table = work(question).fit_table(question)
    return {
        "model": question.subject.name, "weights": question.weights, "cache": question.cache,
        "machine": question.machine.name, "gpus": question.gpus,
        "phase": question.phase, "context": question.context, "objective": question.objective,
        "room_gib": room(question),
        "fits": [dict(zip(head, each, strict=True)) for each in table],
        "rows": [row_data(row) for row in rows],
        "left_out": list(left_out),
        "recommended": None if best is None else row_data(best),
        "recommended_by_batch": {
            str(batch): {**row_data(row), "command": shlex.join(running(question, row))}
            for batch, row in by_batch(question, rows).items()
        },
        "command": "" if best is None else shlex.join(running(question, best)),
    }  # fmt: skip


def row_data(row: Row) -> dict[str, Any]:
    each, found = row.candidate, row.prediction
    ends = row.interval.of(row.us) or (None, None)
    return {
        "plan": each.plan, "tp": each.tp, "way": each.way, "batch": each.batch,
        "bound": each.bound, "us": found.us, "low_us": ends[0],
        "high_us": ends[1], "interval": row.interval.source, "far":
        row.interval.far, "wider": row.interval.wider, "tokens_s": row.tokens_s,
        "limits": dict(found.limits),
        "exposed_us": found.exposed_us, "waiting_us": found.waiting_us,
        "collectives": found.collectives, "launches": found.launches,
        "basis": found.basis, "bases": found.bases, "provenance": list(found.provenance),
        "unmeasured": list(found.unmeasured),
        "memory_gib": row.memory.total / GIB,
        "memory": {name: size / GIB for name, size in asdict(row.memory).items() if size},
    }  # fmt: skip
