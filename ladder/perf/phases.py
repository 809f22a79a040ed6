"""The predicted time of a pass, one function for each phase: what `ladder predict` builds on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.perf.cost import WAY, DecodeCost
from ladder.perf.graph import REDUCES, Graph, Operation
from ladder.perf.lower_decode import decode as lower_decode
from ladder.perf.machine import Basis, Machine, worst
from ladder.perf.simulate import Times, simulate

# What the longest path of a pass is made of, by the kind of operation.
LIMITS = {
    "product": "products",
    "attention": "attention",
    "landing": "landings",
    "head": "products",
    "embed": "landings",
    "sum": "landings",
    "copy": "landings",
    "norm": "landings",
    "choice": "launches",
    **dict.fromkeys((*REDUCES, "all-gather"), "communication"),
}


@dataclass(frozen=True)
class Prediction:
    """The time of one pass, and where it comes from.

    exposed_us: beyond the time of the plan without its reduces. limits: the longest path through
    the operations by what they are (products, attention, landings, communication, launches),
    microseconds that add up to `us`, the most first. collectives, launches: how many. provenance:
    where the curves and values come from. graph, times: all operations and when they run, for
    pictures and traces.
    """

    us: float
    exposed_us: float
    basis: Basis
    limits: tuple[tuple[str, float], ...]
    collectives: int
    launches: int
    provenance: tuple[str, ...]
    graph: Graph
    times: Times


def decode(
    config: ModelConfig, machine: Machine, tp: int, reducer: str, batch: int, context: int
) -> Prediction:
    """A fused decode step of `batch` sequences after `context` tokens each.

    reducer: push, or async (NCCL). Raises UserError if the machine lacks what it needs, and for a
    degree, batch or context that the step or the model cannot have.
    """
    machine.value("launch_gap_us")
    cost = DecodeCost(config, machine, tp, reducer, batch, context)
    way = WAY[reducer] if tp > 1 else "alone"
    graph = lower_decode(config.plan, way)
    times = simulate(graph, cost)
    bases = tuple(cost.bases)
    bare = simulate(lower_decode(config.plan.as_no_comm(), way), cost).total
    return _prediction(graph, times, bare, bases, machine, ())


def _prediction(
    graph: Graph,
    times: Times,
    bare: float,
    bases: tuple[Basis, ...],
    machine: Machine,
    more: tuple[str, ...],
) -> Prediction:
    spent: dict[str, float] = {}
    for index, us in times.longest_path():
        label = _label(graph.operations[index])
        spent[label] = spent.get(label, 0.0) + us
    limits = tuple(sorted(spent.items(), key=lambda each: -each[1]))
    fitted = [each.provenance for each in machine.values.values() if "fitted" in each.provenance]
    return Prediction(
        us=times.total,
        exposed_us=times.total - bare,
        basis=worst(bases),
        limits=limits,
        collectives=len(graph.reduces),
        launches=sum(graph.launches.values()),
        provenance=tuple(dict.fromkeys((*fitted, *more))),
        graph=graph,
        times=times,
    )


def _label(operation: Operation) -> str:
    return LIMITS.get(operation.kind, "launches")


def prefill(
    config: ModelConfig, machine: Machine, tp: int, reducer: str, batch: int, prompt: int
) -> Prediction:
    """The prefill of `batch` prompts of `prompt` tokens each, as the fused engine runs it."""
    raise UserError("prompts are not predicted yet; leave out --prefill")


def train(
    config: ModelConfig, machine: Machine, layout: str, seq_len: int, batch: int,
    micro_batch: int = 0, activation_checkpointing: str = "none",
) -> Prediction:  # fmt: skip
    """A compiled training step in bfloat16 with AdamW. layout: a name such as tp4+sp+fsdp, over
    the GPUs of the machine. batch: sequences of each data-parallel rank."""
    raise UserError("training is not predicted yet; leave out --train")


Phase = Callable[[ModelConfig, Machine, int, str, int, int], Prediction]
# (config, machine, tp, reducer, batch, context or prompt) -> Prediction
PHASES: dict[str, Phase] = {"decode": decode, "prefill": prefill}
