"""All candidates of a question with their memory and times, the best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

from ladder.models.errors import UserError
from ladder.models.presets import MOST_RANKS
from ladder.perf import memory
from ladder.perf.cost import check_context
from ladder.perf.machine import Machine
from ladder.perf.memory import Memory
from ladder.perf.nodes import without_peers
from ladder.perf.phases import Prediction
from ladder.perf.planner import inference, training
from ladder.perf.planner.intervals import Interval, interval, training_way
from ladder.perf.planner.question import Candidate, LeftOut, Question, Row, order
from ladder.perf.simulate import check_jitter

WORK = {"decode": inference, "prefill": inference, "train": training}
NO_ROOM = "does not fit"


def work(question: Question) -> ModuleType:
    """The phase's module: check, candidates, held, predict, tokens, fit_table, command."""
    return WORK[question.phase]


def ask(question: Question) -> tuple[list[Row], list[str]]:
    """The candidates that fit as rows, the best first in each batch; and what is left out, with the
    reason.

    Raises UserError for options that the user gave and that cannot be.
    """
    check(question)
    of, left_out = work(question), LeftOut()
    rows = []
    for each, held, machine in fitting(question, left_out):
        found = of.predict(question, each)
        near = _interval(question, each, machine, found)
        tokens_s = of.tokens(question, each) / found.us * 1e6
        rows.append(Row(each, held, found, near, tokens_s))
    if not rows and not any(line.endswith(NO_ROOM) for line in left_out.lines()):
        raise UserError(f"nothing is left to predict: {'; '.join(left_out.lines())}")
    rows.sort(key=lambda row: (row.candidate.batch, *order(question.objective)(row)))
    return rows, left_out.lines()


def fitting(question: Question, left_out: LeftOut) -> Iterator[tuple[Candidate, Memory, Machine]]:
    """The candidates that fit a GPU, with their memory and the machine that runs them. The others
    go to `left_out`."""
    of, trains = work(question), question.phase == "train"
    for each in of.candidates(question, left_out):
        held = of.held(question, each)
        machine = question.machine if trains else question.machines[each.tp]
        if memory.fits(held, machine):
            yield each, held, machine
        else:
            place = each.way if trains else f"TP {each.tp}"
            left_out.add(each.plan, f"{place} with batch {each.batch}", NO_ROOM)


def _interval(question: Question, each: Candidate, machine: Machine, found: Prediction) -> Interval:
    """How far the measured time may be from the prediction; `far` if no record is like it."""
    trains = question.phase == "train"
    virtual = memory.held_ranks(each.config, each.tp) > 1
    if virtual and not trains:  # there are too few records of virtual ranks
        return Interval(None, None, "no record")
    way = training_way(each.way, virtual) if trains else each.way
    gpus = 0 if without_peers(machine) else machine.gpus  # 0: no record has GPUs without access
    key = question.phase, machine.gpu, gpus, way, question.subject.name
    near = interval(*key, found.us, question.context)
    if trains and question.nodes > 1:
        near = training.doubted(question, each, found, near)
    unlike = trains and 1 < each.tp < question.gpus  # several TP groups beside each other
    return replace(near, far=near.far or unlike or {question.weights, question.cache} != {"bf16"})


def check(question: Question) -> None:
    """Raise UserError for options that no candidate can have."""
    question.machine.value("memory_gib")  # without it nothing could be recommended
    for option, value in (("nodes", question.nodes), ("tp-degree", question.tp_degree or 1)):
        if not 1 <= value <= MOST_RANKS:
            raise UserError(f"--{option}={value} must be 1 to {MOST_RANKS:,}")
    check_context(question.subject.shape, question.context)
    check_jitter(question.jitter)
    work(question).check(question)
