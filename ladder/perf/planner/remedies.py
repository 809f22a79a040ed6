"""What to say if nothing fits: remedies that were tried, in memory and by one prediction each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from ladder.models.errors import UserError
from ladder.perf.planner.candidates import check, fitting, work
from ladder.perf.planner.question import Candidate, LeftOut, Question, Row
from ladder.perf.planner.report import room

FULL = "--activation-checkpointing full"
FIXED = ("weights", "optimiser", "gradients", "reserve")  # memory that no batch size changes
DOUBLED = 6  # how many times, at most, the nodes of a training step are doubled
TOKENS, FEWER = 1024, 64  # a shorter context is a multiple of TOKENS, or, up to TOKENS, of FEWER

Option = tuple[str, Question]  # options as words, and the question with them


def nothing_fits(question: Question, rows: Sequence[Row]) -> str:
    """A sentence that says why nothing is recommended, and what to do about it."""
    if all(each.bound for each in work(question).candidates(question, LeftOut())):
        return (
            "nothing is recommended: a plan without communication is a bound and no model; name "
            "another one in --plans"
        )
    head, *table = work(question).fit_table(question)
    fixed = [name for name in head if name in FIXED]
    least = min(sum(each[head.index(name)] for name in fixed) for each in table)
    said = f"{'no model' if rows else 'nothing'} fits {room(question):.1f} GiB of a GPU"
    if least >= room(question):
        said += f"; {', '.join(fixed[:-1])} and {fixed[-1]} alone take {least:.1f}"
    remedies = _of_training(question) if question.phase == "train" else _of_inference(question)
    return f"{said}: {', or '.join([*remedies, 'give --machine more GPUs'])}"


def fits(question: Question) -> bool:
    """Whether a question's options are possible, and a model that answers it fits."""
    return _first(question) is not None


def works(question: Question) -> bool:
    """Whether the first model that fits can be predicted, too."""
    if (each := _first(question)) is None:
        return False
    alike = replace(question, jitter=0.0)  # a jitter costs time, and needs nothing of the machine
    try:
        work(alike).predict(alike, each)
    except UserError:
        return False
    return True


def _first(question: Question) -> Candidate | None:
    """The first model that fits; None if there is none, or if the options are not possible."""
    try:
        check(question)
        able = (each for each, *_ in fitting(question, LeftOut()) if not each.bound)
        return next(able, None)
    except UserError:
        return None


def _of_inference(question: Question) -> list[str]:
    """Remedies with which a pass fits, each of as few options together as possible."""
    options: list[tuple[str, dict[str, Any]]] = []
    if question.tp:
        options.append(("leave out --tp", {"tp": ()}))
    for name in ("weights", "cache"):
        if getattr(question, name) == "bf16":
            options.append((f"take --{name} fp8", {name: "fp8"}))
    found: list[str] = []
    smaller = [f"take {said}" for said in _sizes(question)]
    for count in range(1, len(options) + 1):
        some = [_together(question, each) for each in combinations(options, count)]
        found = [said for said, each in some if works(each)] + smaller
        if found:
            return found
        smaller = [_and(said, size) for said, each in some for size in [*_sizes(each)][:1]]
    return smaller


def _together(question: Question, options: Sequence[tuple[str, dict[str, Any]]]) -> Option:
    """Several options as one: their words, and the question with all of them."""
    said = options[0][0]
    for other, _ in options[1:]:
        said = _and(said, other.removeprefix("take "))
    changed = {name: value for _, each in options for name, value in each.items()}
    return said, replace(question, **changed)


def _and(said: str, option: str) -> str:
    """The words of a remedy and of an option to take with it."""
    return f"{said} {option}" if "take " in said else f"{said} and take {option}"


def _sizes(question: Question) -> Iterator[str]:
    """The largest batch below the question's with which a pass fits, and the longest context below
    the question's; each only if there is one."""

    def of_batch(size: int) -> Question:
        return replace(question, batches=(size,))

    def of_context(tokens: int) -> Question:
        return replace(question, context=tokens)

    if (size := _most(min(question.batches), of_batch)) and works(of_batch(size)):
        yield f"--batch {size}"
    unit = TOKENS if question.context > TOKENS else FEWER
    tokens = unit * _most(-(-question.context // unit), lambda n: of_context(unit * n))
    if tokens and works(of_context(tokens)):
        yield f"--context {tokens}"


def _most(limit: int, of: Callable[[int], Question]) -> int:
    """The largest size below a limit whose question fits (then all smaller ones do); or 0."""
    if limit <= 1 or not fits(of(1)):
        return 0
    low, high = 1, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(of(middle)) else (low, middle)
    return low


def _of_training(question: Question) -> list[str]:
    """Remedies with which a training step fits: options with the same nodes, or more nodes. More
    nodes come with options only if nothing else is enough."""
    found = [f"take {said}" for said, _ in _options(question)]
    if not found and question.layouts and works(replace(question, layouts=())):
        found.append("leave out --layouts")
    several = [replace(question, nodes=question.nodes * 2**n) for n in range(1, DOUBLED + 1)]
    fitted = next((each for each in several if fits(each)), None)
    more = f"--nodes {fitted.nodes}" if fitted is not None and works(fitted) else ""
    if not more and not found:
        more = next((f"--nodes {n.nodes} {said}" for n in several for said, _ in _options(n)), "")
    if more:
        found.append(f"take {more}")
    if not found and question.layouts:
        other = _of_training(replace(question, layouts=()))
        found = [f"leave out --layouts and {each}" for each in other]
    return found


def _options(question: Question) -> Iterator[Option]:
    """Options with which a training step fits: full checkpointing or fewer sequences, or both if
    neither is enough."""
    checkpointed = replace(question, checkpointing="full")
    if not fits(_of_size(checkpointed, 1)):
        return  # even the least memory is too much
    full = question.checkpointing != "full" and fits(checkpointed)
    found = [(FULL, checkpointed)] if full else []
    if smaller := _smaller(question):
        found.append(smaller)
    elif not full and (smaller := _smaller(checkpointed)):
        found.append((f"{smaller[0]} {FULL}", smaller[1]))
    yield from (each for each in found if works(each[1]))


def _smaller(question: Question) -> Option | None:
    """The largest micro-batch that divides the batches and fits, or else the largest batch."""
    batch = min(question.batches)
    size = question.micro_batch or batch
    if not fits(_of_size(question, 1)):
        return None
    whole = math.gcd(*question.batches)
    for each in (n for n in range(min(size - 1, whole), 0, -1) if whole % n == 0):
        asked = replace(question, micro_batch=each)
        if fits(asked):
            return f"--micro-batch {each}", asked
    each = _most(min(size + 1, batch), lambda n: _of_size(question, n))
    said = f"--batch {each}{f' --micro-batch {each}' if question.micro_batch else ''}"
    return (said, _of_size(question, each)) if each else None


def _of_size(question: Question, size: int) -> Question:
    """The question with a batch of `size` sequences, in one pass."""
    return replace(question, batches=(size,), micro_batch=0)
