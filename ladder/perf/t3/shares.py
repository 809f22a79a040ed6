"""Times of whole layers: the share of communication, and the cost of fewer compute units.

The breakdown of the paper's layers is not published. Here a layer is its products, attention's own
operations, and the all-reduces; `ATTENTION` is fitted to what 6.3 says about them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ladder.perf.t3 import system as closed
from ladder.perf.t3.system import FORWARD, Model, Sublayer, System, sublayer

Phase = Literal["training", "prompt"]
PHASES: tuple[Phase, ...] = ("training", "prompt")
CONTEXT = 1024  # tokens of a sequence, Table 2
# Seconds of attention's own operations, forward, for each token x token of context x width / TP.
# With this value they are 42.5 % of the time on average over MODELS and PHASES. Backward takes
# twice as long.
ATTENTION = 1.422e-12
PRODUCTS = 24  # floating-point operations of a layer's products, forward: x tokens x width^2 / TP
# Futuristic models (Figure 4) of a given number of parameters, TP 64. Their shapes are not given;
# these have 12 x layers x width^2 parameters.
FUTURE = (
    Model("1T", 25600, 128, 2048, (64,)),
    Model("10T", 64 * 1024, 194, 2048, (64,)),
)
# Bytes a second that one compute unit of a collective's kernel moves: fitted, see FITTED.
COPY = 17.47e9


@dataclass(frozen=True)
class Layer:
    """Seconds of one layer. sliced: by kind, the products that need an all-reduce. reduces: all
    all-reduces. other: all other operations, including `attention`."""

    sliced: Mapping[str, float]
    reduces: float
    other: float
    attention: float

    @property
    def total(self) -> float:
        return sum(self.sliced.values()) + self.reduces + self.other

    @property
    def communication(self) -> float:
        return self.reduces / self.total

    def sped_up(self, speedups: Mapping[str, float], reduce: float) -> float:
        """The layer's speedup by those of its sublayers. reduce: seconds of one all-reduce."""
        sliced = sum((time + reduce) / speedups[kind] for kind, time in self.sliced.items())
        return self.total / (self.other + sliced)


def kinds(phase: Phase) -> tuple[str, ...]:
    return FORWARD if phase == "prompt" else tuple(closed.SUBLAYERS)


def all_reduce(case: Sublayer, system: System) -> float:
    return closed.reduce_scatter(case, system) + closed.all_gather(case, system)


def layer(model: Model, degree: int, phase: Phase, system: System) -> Layer:
    cases = {kind: sublayer(model, kind, degree) for kind in kinds(phase)}
    sliced = {kind: closed.gemm(case, system) for kind, case in cases.items()}
    passes = 1 if phase == "prompt" else 3
    products = PRODUCTS * passes * model.tokens * model.width**2 / degree / system.flops
    rest = products - sum(closed.compute(case, system) for case in cases.values())
    attention = passes * ATTENTION * model.tokens * CONTEXT * model.width / degree
    reduces = sum(all_reduce(case, system) for case in cases.values())
    return Layer(sliced, reduces, rest + attention, attention)


def split_product(case: Sublayer, system: System, units: int) -> float:
    """Seconds of a product on some of the compute units."""
    return closed.gemm(case, replace(system, units=units))


def split_all_reduce(case: Sublayer, system: System, units: int) -> float:
    """Seconds of an all-reduce on some compute units, which move at most COPY bytes a second each.

    A step of the reduce-scatter reads two chunks and writes one; a step of the all-gather reads one
    and writes one.
    """
    moved = units * COPY
    steps = case.degree - 1
    scatter = max(case.chunk / system.link, 3 * case.chunk / moved) + system.latency
    gather = max(case.chunk / system.link, 2 * case.chunk / moved) + system.latency
    return steps * (scatter + gather) + 3 * case.chunk / min(system.reduce, moved)
