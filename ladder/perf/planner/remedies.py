"""What to say where nothing fits: remedies that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ladder.models.errors import UserError
from ladder.perf.planner.candidates import check, fitting, work
from ladder.perf.planner.question import LeftOut, Question, Row
from ladder.perf.planner.report import room

FULL = "--activation-checkpointing full"
FIXED = ("weights", "optimiser", "gradients", "reserve")  # of GPU memory, whatever the batch
DOUBLED = 6  # times, at most, that the nodes of a training step are


def nothing_fits(question: Question, rows: Sequence[Row]) -> str:
    """Why nothing is recommended, and what to do about it."""
    if rows:
        return "nothing is recommended: a plan without communication is a bound and no model"
    head, *table = work(question).fit_table(question)
    fixed = [name for name in head if name in FIXED]
    least = min(sum(float(each[head.index(name)]) for name in fixed) for each in table)
    said = f"nothing fits {room(question):.1f} GiB of a GPU"
    if least >= room(question):
        said += f"; {', '.join(fixed[:-1])} and {fixed[-1]} alone take {least:.1f}"
    if question.phase == "train":
        remedies = _of_training(question)
    else:
        remedies = ["lower --batch or --context"] if least < room(question) else []
        if question.weights == "bf16" and fits(replace(question, weights="fp8")):
            remedies.insert(0, "take --weights fp8")
        if question.tp and fits(replace(question, tp=())):
            remedies.insert(0, "leave out --tp")
    return f"{said}: {', or '.join([*remedies, 'give --machine more GPUs'])}"


def fits(question: Question) -> bool:
    """Whether a question can be asked, and a model that answers it fits."""
    try:
        check(question)
        return any(not each.bound for each, *_ in fitting(question, LeftOut()))
    except UserError:
        return False


def _of_training(question: Question) -> list[str]:
    """What makes a training step fit: options with as many nodes, and more nodes, which take
    options only where nothing else is enough."""
    found = [f"take {each}" for each in _options(question)]
    if not found and question.layouts and fits(replace(question, layouts=())):
        found.append("leave out --layouts")
    several = [replace(question, nodes=question.nodes * 2**n) for n in range(1, DOUBLED + 1)]
    more = next((f"--nodes {each.nodes}" for each in several if fits(each)), "")
    if not more and not found:
        more = next((f"--nodes {n.nodes} {each}" for n in several for each in _options(n)), "")
    if more:
        found.append(f"take {more}")
    if not found and question.layouts:
        other = _of_training(replace(question, layouts=()))
        found = [f"leave out --layouts and {each}" for each in other]
    return found


def _options(question: Question) -> Iterator[str]:
    """Options of one kind with which a training step fits, or of both where neither is enough."""
    checkpointed = replace(question, checkpointing="full")
    if not fits(_of_size(checkpointed, 1)):
        return  # the least that there is
    full = question.checkpointing != "full" and fits(checkpointed)
    if full:
        yield FULL
    if smaller := _smaller(question):
        yield smaller
    elif not full and (smaller := _smaller(checkpointed)):
        yield f"{smaller} {FULL}"


def _smaller(question: Question) -> str:
    """The largest micro-batch of halves that fits, or else the largest batch; empty if none."""
    size = question.micro_batch or min(question.batches)
    halves = [size >> n for n in range(1, size.bit_length())]
    if not halves or not fits(_of_size(question, 1)):
        return ""
    for each in halves:
        if fits(replace(question, micro_batch=each)):
            return f"--micro-batch {each}"
    each = next(each for each in halves if fits(_of_size(question, each)))
    return f"--batch {each}{f' --micro-batch {each}' if question.micro_batch else ''}"


def _of_size(question: Question, size: int) -> Question:
    """A question about so many sequences, in one pass."""
    return replace(question, batches=(size,), micro_batch=0)
