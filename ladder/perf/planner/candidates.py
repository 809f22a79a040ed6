"""All candidates of a question with their memory and times, the best first."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from ladder.models.errors import UserError
from ladder.models.presets import MOST_RANKS
from ladder.perf import memory
from ladder.perf.cost import check_context
from ladder.perf.nodes import without_peers
from ladder.perf.planner import inference, training
from ladder.perf.planner.intervals import Interval, interval
from ladder.perf.planner.question import LeftOut, Question, Row, order
from ladder.perf.simulate import check_jitter

WORK = {"decode": inference, "prefill": inference, "train": training}
NO_ROOM = "does not fit"


def work(question: Question) -> ModuleType:
    """What is of a phase: check, candidates, held, predict, tokens, fit_table, command."""
    return WORK[question.phase]


def ask(question: Question) -> tuple[list[Row], list[str]]:
    """What fits as rows, the best first in each batch; and what is left out, with the reason.

    Raises UserError for what the user has named and cannot be.
    """
    check(question)
    of, left_out = work(question), LeftOut()
    rows = []
    for each in of.candidates(question, left_out):
        held = of.held(question, each)
        machine = question.machines.get(each.tp, question.machine)
        if not memory.fits(held, machine):
            place = each.way if question.phase == "train" else f"TP {each.tp}"
            left_out.add(each.plan, f"{place} with batch {each.batch}", NO_ROOM)
            continue
        found = of.predict(question, each)
        trains = question.phase == "train"
        like, way = (question.machine, "") if trains else (machine, each.way)
        model = question.subject.name
        gpus = 0 if without_peers(like) else like.gpus  # of which no record is
        near = interval(question.phase, like.gpu, gpus, way, model, found.us)
        virtual = not trains and memory.held_ranks(each.config, each.tp) > 1
        if virtual:  # whose records are too few
            near = Interval(None, None, "no record")
        if trains and question.nodes > 1:
            near = training.doubted(question, each, found, near)
        if question.weights != "bf16":  # of which no record is
            near = replace(near, far=True)
        tokens_s = of.tokens(question, each) / found.us * 1e6
        rows.append(Row(each, held, found, near, tokens_s))
    if not rows and not any(line.endswith(NO_ROOM) for line in left_out.lines()):
        raise UserError(f"nothing is left to predict: {'; '.join(left_out.lines())}")
    rows.sort(key=lambda row: (row.candidate.batch, *order(question.objective)(row)))
    return rows, left_out.lines()


def check(question: Question) -> None:
    """Raise UserError for options that no candidate can have."""
    question.machine.value("memory_gib")  # without it nothing could be recommended
    for option, value in (("nodes", question.nodes), ("tp-degree", question.tp_degree or 1)):
        if not 1 <= value <= MOST_RANKS:
            raise UserError(f"--{option}={value} must be 1 to {MOST_RANKS:,}")
    check_context(question.subject.shape, question.context)
    check_jitter(question.jitter)
    work(question).check(question)
