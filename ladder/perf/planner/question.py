"""The question that a user asks, the candidates that answer it, and their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.perf.machine import Machine
from ladder.perf.memory import GIB, Memory
from ladder.perf.phases import Prediction
from ladder.perf.planner.intervals import Interval
from ladder.perf.planner.subject import Subject
from ladder.plans import CHECKPOINT, OVERVIEW

# The batches to compare for throughput.
BATCHES = {"decode": (1, 4, 16, 64), "prefill": (1, 4, 16, 64), "train": (1, 2, 4, 8)}
CLOSE = 0.03  # two predictions that are closer are not told apart
ALONE = "with T = 1 it is another plan"  # why a plan that depends on T is left out
WHOLE = "without TP there is no reduce to leave out"  # why a plan without communication is
T = TypeVar("T")


def divided(batches: Sequence[int], micro_batch: int) -> tuple[int, ...]:
    """The batches that a micro-batch divides (0: the batch itself, which always does)."""
    return tuple(each for each in batches if each % (micro_batch or each) == 0)


@dataclass(frozen=True)
class Question:
    """The user's question.

    machines: by TP degree, see `subject.machines`. plans, tp, reducers, layouts: (): all of them.
    tp, reducers, weights and cache (how these are stored) are for inference; layouts, micro_batch
    (0: the batch) and checkpointing for training. jitter: see `ladder.perf.simulate.Skew`.
    """

    subject: Subject
    machines: dict[int, Machine]
    phase: str
    batches: tuple[int, ...]
    context: int
    plans: tuple[str, ...] = ()
    tp: tuple[int, ...] = ()
    tp_degree: int | None = None
    reducers: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    micro_batch: int = 0
    checkpointing: str = "none"
    nodes: int = 1
    objective: str = "latency"
    jitter: float = 0.0
    weights: str = "bf16"
    cache: str = "bf16"

    @property
    def machine(self) -> Machine:
        """The machine with all GPUs of one node."""
        return self.machines[max(self.machines)]

    @property
    def gpus(self) -> int:
        return self.nodes * self.machine.gpus

    @property
    def chosen_plans(self) -> tuple[str, ...]:
        return self.plans or ((CHECKPOINT, *OVERVIEW) if self.subject.own else OVERVIEW)

    def config(self, plan: str, tp: int, where: str, left_out: LeftOut) -> ModelConfig | None:
        """The model with a plan at a TP degree. If the model cannot have a plan of the default, for
        example because of output biases: None, and the plan goes to `left_out`. Raises UserError
        for a plan that the user named."""
        try:
            return self.subject.config(plan, tp, self.tp_degree)
        except UserError as error:
            if self.plans or not self.subject.divides(self.tp_degree or tp):
                raise
            left_out.add(plan, where, str(error))
            return None

    def leave_out_degrees(self, left_out: LeftOut) -> None:
        """Add the machine's TP degrees that a default leaves out, since the shape refuses them."""
        for tp in self.machines:
            if refusal := self.subject.refusal(tp):
                left_out.add("all plans", f"TP {tp}", refusal)

    def is_own(self, plan: str, config: ModelConfig) -> bool:
        """Whether a plan is the folder's own, which is a candidate under the name CHECKPOINT."""
        own = self.subject.own
        if own is None or plan == CHECKPOINT or CHECKPOINT not in self.chosen_plans:
            return False
        return own.plan.sublayers == config.plan.sublayers


@dataclass(frozen=True)
class Candidate:
    """One way to run the model. way: the reducer of inference, the layout of training. batch:
    sequences of each copy of the model."""

    plan: str
    config: ModelConfig
    tp: int
    way: str
    batch: int

    @property
    def bound(self) -> bool:
        """Whether it is no model but a bound: a plan without communication, such as `none`."""
        return self.config.plan.no_comm

    def __str__(self) -> str:
        return f"{self.plan}, TP {self.tp}{self.way and f', {self.way}'}, batch {self.batch}"


@dataclass(frozen=True)
class Row:
    """A candidate that fits, with its memory and its time. tokens_s: tokens a second of all GPUs,
    with equal copies of the model."""

    candidate: Candidate
    memory: Memory
    prediction: Prediction
    interval: Interval
    tokens_s: float

    @property
    def us(self) -> float:
        return self.prediction.us

    @property
    def limit(self) -> tuple[str, float]:
        """The category that most of the longest path is, and its share of the time."""
        name, us = self.prediction.limits[0]
        return name, us / self.us


class LeftOut:
    """Plans or reducers that a default includes but that cannot run: where, and why."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, dict[str, None]]] = {}

    def add(self, what: str, where: str, why: str) -> None:
        self._found.setdefault(why, {}).setdefault(where, {})[what] = None

    def lines(self) -> list[str]:
        """A line for each reason and set of names, with all places where it applies to these."""
        found = []
        for why, places in self._found.items():
            groups: dict[tuple[str, ...], list[str]] = {}
            for where, names in places.items():
                groups.setdefault(tuple(names), []).append(where)
            found += [
                f"{', '.join(names)} at {', '.join(some)}: {why}" for names, some in groups.items()
            ]
        return found


def score(row: Row, objective: str) -> float:
    """The cost of a row, smaller for a better one. The ratio of two rows' costs says how many times
    longer or larger one is: 1 / tokens_s, microseconds or bytes, by the objective."""
    if objective == "throughput":
        return 1 / row.tokens_s
    return row.us if objective == "latency" else row.memory.total


def order(objective: str) -> Callable[[Row], tuple[float, ...]]:
    """The sort key of rows for an objective: smaller for a better row."""
    return {
        "latency": lambda row: (row.us, row.memory.total),
        "throughput": lambda row: (-row.tokens_s, row.us),
        "memory": lambda row: (round(row.memory.total / GIB, 1), row.us),
    }[objective]


def recommended(rows: Sequence[Row], objective: str) -> Row | None:
    """The row to recommend among those that are models; None if there are none."""
    able = [row for row in rows if not row.candidate.bound]
    size = partial(score, objective=objective)
    return choose(able, lambda row: row.candidate.plan, size, order(objective))


def choose(
    able: Sequence[T], plan: Callable[[T], str], size: Callable[[T], float],
    order: Callable[[T], Any],
) -> T | None:  # fmt: skip
    """The item of `able` with the smallest `order`; None if there are none.

    The model as it is (the folder's own plan, or else `standard`) is preferred if its `size` is
    within CLOSE of the best: another plan is another model, and has to be trained.
    """
    best = min(able, key=order, default=None)
    if best is None:
        return None
    for name in (CHECKPOINT, "standard"):
        same = [each for each in able if plan(each) == name]
        if same:
            kept = min(same, key=order)
            return kept if size(kept) / size(best) - 1 < CLOSE else best
    return best
