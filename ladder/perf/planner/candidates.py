"""What could be run: every plan, TP degree, reducer and batch, whether it fits, and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ladder.kernels.decode import MAX_ROWS
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.presets import MOST_RANKS
from ladder.perf import memory, phases
from ladder.perf.cost import WAY
from ladder.perf.machine import Machine
from ladder.perf.memory import Memory
from ladder.perf.phases import Prediction
from ladder.perf.planner.intervals import Interval, interval
from ladder.perf.planner.subject import CHECKPOINT, Subject, check_names, degrees
from ladder.plans import OVERVIEW

BATCHES = (1, 4, 16, 64)  # where throughput is asked for


@dataclass(frozen=True)
class Question:
    """What is asked. machines: by TP degree, see `subject.machines`. plans, tp: () for all."""

    subject: Subject
    machines: dict[int, Machine]
    phase: str
    batches: tuple[int, ...]
    context: int
    plans: tuple[str, ...] = ()
    tp: tuple[int, ...] = ()
    tp_degree: int | None = None
    reducers: tuple[str, ...] = ("push", "async")
    nodes: int = 1
    objective: str = "latency"

    @property
    def machine(self) -> Machine:
        """The whole of one node."""
        return self.machines[max(self.machines)]

    @property
    def gpus(self) -> int:
        return self.nodes * self.machine.gpus


@dataclass(frozen=True)
class Candidate:
    """One way to run the model. batch: sequences of each copy of it. reducer: of inference."""

    plan: str
    config: ModelConfig
    tp: int
    reducer: str
    batch: int

    @property
    def bound(self) -> bool:
        """Whether it computes no model, as `none`: what is left without communication."""
        return self.config.plan.no_comm

    def __str__(self) -> str:
        reducer = f", {self.reducer}" if self.reducer else ""
        return f"{self.plan}, TP {self.tp}{reducer}, batch {self.batch}"


@dataclass(frozen=True)
class Row:
    """A candidate with its memory and its time. tokens_s: of all GPUs, each copy alike."""

    candidate: Candidate
    memory: Memory
    fits: bool
    prediction: Prediction
    interval: Interval
    tokens_s: float

    @property
    def us(self) -> float:
        return self.prediction.us

    @property
    def limit(self) -> tuple[str, float]:
        """What most of the longest path is, and its share."""
        name, us = self.prediction.limits[0]
        return name, us / self.us


def ask(question: Question) -> tuple[list[Row], list[str]]:
    """All rows, the best first in each batch, and what is left out, with the reason.

    Raises UserError for what the user has named and cannot be.
    """
    check(question)
    rows, left_out = [], dict[str, None]()
    for each in candidates(question, left_out):
        rows.append(_row(question, each))
    if not rows:
        raise UserError(f"nothing is left to predict: {'; '.join(left_out)}")
    rows.sort(key=lambda row: (row.candidate.batch, not row.fits, *order(question.objective)(row)))
    return rows, list(left_out)


def check(question: Question) -> None:
    """Raise UserError for options that no candidate can have."""
    shape = question.subject.shape
    if question.phase not in phases.PHASES:
        raise UserError(f"--{question.phase} is not predicted yet; give --decode")
    for option, value in (("nodes", question.nodes), ("tp-degree", question.tp_degree or 1)):
        if not 1 <= value <= MOST_RANKS:
            raise UserError(f"--{option}={value} must be 1 to {MOST_RANKS:,}")
    most = MAX_ROWS if question.phase == "decode" else 2**20
    for batch in question.batches:
        if not 1 <= batch <= most:
            why = ", as fused decode steps have; split it into steps" if most == MAX_ROWS else ""
            raise UserError(f"--batch={batch} must be 1 to {most:,}{why}")
    if not 1 <= question.context <= shape.max_seq_len:
        raise UserError(
            f"--context={question.context} must be 1 to the model's context, {shape.max_seq_len}"
        )
    check_names("reducer of --reducers", question.reducers, tuple(WAY))


def candidates(question: Question, left_out: dict[str, None]) -> Iterator[Candidate]:
    """Everything to compare. What a default includes and cannot run goes to `left_out`."""
    subject = question.subject
    chosen = question.plans or ((CHECKPOINT, *OVERVIEW) if subject.own else OVERVIEW)
    for tp in degrees(subject, question.machines, question.tp):
        for plan in dict.fromkeys(chosen):
            config = subject.config(plan, tp, question.tp_degree)
            if config.tp_degree not in (None, tp):
                _refuse_degree(question, plan, config.tp_degree or 0, tp, left_out)
                continue
            own = subject.own if plan != CHECKPOINT and CHECKPOINT in chosen else None
            if own is not None and own.plan.sublayers == config.plan.sublayers:
                continue  # it is there already
            if tp == 1 and config.plan.depends_on_tp and plan != CHECKPOINT:
                continue  # with T = 1 it is another plan
            alone = tp == 1 or config.plan.no_comm
            for reducer in question.reducers[:1] if alone else question.reducers:
                for batch in dict.fromkeys(question.batches):
                    yield Candidate(plan, config, tp, reducer if tp > 1 else "", batch)


def _refuse_degree(
    question: Question, plan: str, degree: int, tp: int, left_out: dict[str, None]
) -> None:
    """A plan of another T than the TP degree: a line, or UserError if the user named both."""
    if question.tp and question.tp_degree:
        raise UserError(
            f"--tp-degree={degree} with --tp={tp}: fused decode steps have no virtual ranks; give "
            f"both alike"
        )
    left_out[
        f"{plan} at TP {tp}: its T is {degree}, and no virtual ranks are predicted; "
        f"--tp-degree {tp} predicts it with T = {tp}, another model"
        if plan != CHECKPOINT
        else f"{plan} at TP {tp}: its T is {degree}, and no virtual ranks are predicted"
    ] = None


def _row(question: Question, each: Candidate) -> Row:
    machine, context = question.machines[each.tp], question.context
    held = memory.inference(each.config, each.tp, each.batch, context, context)
    predict = phases.PHASES[question.phase]
    reducer = each.reducer or question.reducers[0]
    found = predict(each.config, machine, each.tp, reducer, each.batch, context)
    copies = question.gpus // each.tp
    tokens = each.batch * (context if question.phase == "prefill" else 1)
    return Row(
        each, held, memory.fits(held, machine), found,
        interval(question.phase, machine.gpu, each.tp, each.reducer, found.us),
        copies * tokens / found.us * 1e6,
    )  # fmt: skip


def order(objective: str) -> Callable[[Row], tuple[float, ...]]:
    """What is smaller for a better row."""
    return {
        "latency": lambda row: (row.us, row.memory.total),
        "throughput": lambda row: (-row.tokens_s, row.us),
        "memory": lambda row: (round(row.memory.total / memory.GIB, 2), row.us),
    }[objective]


def recommended(rows: Sequence[Row], objective: str) -> Row | None:
    """The best row that is a model and fits; None if there is none."""
    able = [row for row in rows if row.fits and not row.candidate.bound]
    return min(able, key=order(objective), default=None)


def most_sequences(config: ModelConfig, tp: int, machine: Machine, context: int) -> int:
    """How many prompts of `context` tokens fit."""

    def fits(batch: int) -> bool:
        return memory.fits(memory.inference(config, tp, batch, context, context), machine)

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
