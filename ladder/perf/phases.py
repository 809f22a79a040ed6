"""The predicted time of a pass, one function for each phase: what `ladder predict` builds on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from ladder.costs import BF16
from ladder.kernels.limits import MAX_ROWS
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.plan import Plan
from ladder.models.ranks import Ranks
from ladder.parallel.choose import ROUNDING, choose_prefill
from ladder.parallel.dispatch import load_dispatch
from ladder.parallel.overlap import Overlap, prompt_mode
from ladder.parallel.refusals import fused_refusal, rounding_refusal
from ladder.perf.cost import DecodeCost, check_context, check_reducer
from ladder.perf.cost_prefill import PromptCost
from ladder.perf.cost_training import TrainingCost
from ladder.perf.fused import check_weights
from ladder.perf.graph import FUSED, REDUCES, ROUNDED, Graph, Operation, forward
from ladder.perf.lower_prefill import Way
from ladder.perf.lower_prefill import prefill as lower_prefill
from ladder.perf.machine import Basis, Estimate, Machine, worst
from ladder.perf.memory import held_ranks
from ladder.perf.nodes import for_degree
from ladder.perf.riders import TODAY, Kernels
from ladder.perf.simulate import Times, simulate, spent, waiting
from ladder.perf.virtual import VirtualCost

# The category of the longest path to which each kind of operation counts.
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
    "rotary": "landings",
    "swiglu": "landings",
    "peers": "communication",
    "copies": "communication",
    "barrier": "communication",
    **dict.fromkeys((*REDUCES, "all-gather"), "communication"),
}
# Reducers for prompts alone, each with the reducer that replaces it where nothing can be fused or
# rounded: in decode steps, and under plans without sums.
PLAIN = {FUSED: "push", **dict.fromkeys(ROUNDING, "async")}
WAITING = "waiting"  # for slower ranks, see `simulate.Skew`


@dataclass(frozen=True)
class Prediction:
    """The time of one pass, and where it comes from.

    bare: returns the plan's time without its reduces. limits: the longest path by category
    (products, attention, landings, communication, launches, waiting) in microseconds that add up
    to `us`, the largest first. path: the same by operation (`simulate.spent`), without waiting for
    ranks or the host. collectives, launches: their numbers. provenance: the sources of the
    machine's fitted values. graph, times: all operations and when they run on one of equal ranks,
    for pictures and traces. estimate: the time of one operation alone. waiting_us: the part of
    `us` that unequal ranks add (`simulate.Skew`). unmeasured: the slowdowns of concurrent
    operations that nobody measured, with their sources. earlier: the operations of one of a
    training step's micro-batches before the last one, which `graph` has, when they run, and the
    number of these micro-batches; the optimiser at their end does not run.
    """

    us: float
    basis: Basis
    limits: tuple[tuple[str, float], ...]
    collectives: int
    launches: int
    provenance: tuple[str, ...]
    graph: Graph
    times: Times
    bare: Callable[[], float]
    estimate: Callable[[Operation], Estimate]
    path: dict[int, float]
    waiting_us: float = 0.0
    unmeasured: tuple[str, ...] = ()
    earlier: tuple[Graph, Times, int] | None = None

    @cached_property
    def bases(self) -> dict[Basis, float]:
        """The shares of the longest path whose operations have each basis."""
        found: dict[Basis, float] = {}
        for index, us in self.path.items():
            basis = self.estimate(self.graph.operations[index]).basis
            found[basis] = found.get(basis, 0.0) + us / self.times.total
        return found

    @cached_property
    def exposed_us(self) -> float:
        """The time beyond that of the plan without its reduces."""
        return self.us - self.bare()


def decode(
    config: ModelConfig, machine: Machine, tp: int, reducer: str, batch: int, context: int,
    jitter: float = 0.0, weights: str = "bf16", cache: str = "bf16", kernels: Kernels = TODAY,
) -> Prediction:  # fmt: skip
    """A fused decode step of `batch` sequences after `context` tokens each.

    reducer: push, or async (NCCL). jitter: of the ranks' times (`simulate.Skew`). weights: how they
    are stored (`ladder.costs`). cache: bf16, or fp8. Raises UserError if the machine lacks a value
    or curve, and for a degree, batch or context that the step or the model cannot have.
    """
    machine = for_degree(machine, tp)
    if held_ranks(config, tp) > 1:
        if cache != "bf16":
            raise UserError(f"--cache={cache} is not predicted for virtual ranks; leave it out")
        return _virtual(config, machine, tp, reducer, (batch, 1), context, jitter, weights)
    if "launch_gap_us" not in machine.values:
        machine.value("step_stretch")
    cost = DecodeCost(config, machine, tp, reducer, batch, context, weights, kernels, cache)
    graph = cost.lowered(config.plan)
    times = simulate(graph, cost, cost.beside)
    added = waiting(graph, cost, cost.beside, times.total, tp, tp, jitter)

    def bare() -> float:
        if tp == 1:
            return times.total
        return simulate(cost.lowered(config.plan.as_no_comm()), cost, cost.beside).total

    return prediction_of(graph, times, bare, cost, machine, added)


def prediction_of(
    graph: Graph,
    times: Times,
    bare: Callable[[], float],
    cost: DecodeCost | PromptCost | TrainingCost,
    machine: Machine,
    added: float,
    host_us: float = 0.0,
) -> Prediction:
    """added: microseconds that unequal ranks add. host_us: the host's time to launch all kernels;
    if it is longer than the GPU's, the GPU waits for the host."""
    path = spent(graph, times, cost.beside)
    shares: dict[str, float] = {}
    for index, us in path.items():
        label = _label(graph.operations[index])
        shares[label] = shares.get(label, 0.0) + us
    if added:
        shares[WAITING] = added
    late = max(0.0, host_us - times.total - added)
    if late:
        shares["launches"] = shares.get("launches", 0.0) + late
    limits = tuple(sorted(shares.items(), key=lambda each: -each[1]))
    fitted = [each.provenance for each in machine.values.values() if "fitted" in each.provenance]
    return Prediction(
        us=times.total + added + late,
        basis=worst(cost.bases),
        limits=limits,
        collectives=len(graph.reduces),
        launches=sum(graph.launches.values()),
        provenance=tuple(dict.fromkeys(fitted)),
        graph=graph,
        times=times,
        bare=bare,
        estimate=cost.estimate,
        path=path,
        waiting_us=added,
        unmeasured=cost.slowdowns.unmeasured,
    )


def _label(operation: Operation) -> str:
    return LIMITS.get(operation.kind, "launches")


def prefill(
    config: ModelConfig, machine: Machine, tp: int, reducer: str, batch: int, prompt: int,
    jitter: float = 0.0, weights: str = "bf16", inside: bool = True,
) -> Prediction:  # fmt: skip
    """The prefill of `batch` prompts of `prompt` tokens each, as the fused engine runs it. The
    cache's type makes no difference: writing an fp8 cache takes as long.

    reducer: push, async (NCCL), fused, or one of ROUNDING. inside: with push, whether fused
    operators run where the operators' table names them, as in the engine; if not, copies run
    between products. Raises UserError as `decode` does, and for a plan that the reducer refuses.
    """
    config.check_divides(tp, "--tp")
    check_tokens(config, batch, prompt)
    if reducer == FUSED:
        check_weights(weights)
    elif reducer in ROUNDING:
        if refusal := rounding_refusal(config.plan):
            raise UserError(f"--reducers {reducer} with plan {config.plan.name!r}: {refusal}")
    else:
        check_reducer(reducer)
    machine = for_degree(machine, tp)
    if held_ranks(config, tp) > 1:
        return _virtual(config, machine, tp, reducer, (batch, prompt), 0, jitter, weights)
    cost = PromptCost(config, machine, tp, batch, prompt, weights)
    asked = machine.gpu, tp, reducer, (batch, prompt), weights
    graph = lower_prefill(config.plan, prompt_way(config, config.plan, *asked, inside=inside))
    times = limited(graph, cost)
    added = waiting(graph, cost, cost.beside, times.total, tp, tp, jitter)

    def bare() -> float:
        if tp == 1:
            return max(times.total, _launched(graph, cost))
        plan = config.plan.as_no_comm()
        base = PLAIN.get(reducer, reducer)
        way = prompt_way(config, plan, machine.gpu, tp, base, (batch, prompt), weights)
        alone = lower_prefill(plan, way)
        return max(limited(alone, cost).total, _launched(alone, cost))

    return prediction_of(graph, times, bare, cost, machine, added, _launched(graph, cost))


def _launched(graph: Graph, cost: PromptCost) -> float:
    """The least time (microseconds) in which the host launches a prompt's kernels one by one. 0 for
    a prompt in a CUDA graph, and if the machine's file has no `host_launch_us`."""
    known = cost.machine.values.get("host_launch_us")
    if known is None or cost.mode == "captured":
        return 0.0
    return sum(graph.launches.values()) * known.value


def _virtual(
    config: ModelConfig, machine: Machine, tp: int, reducer: str, shape: tuple[int, int],
    context: int, jitter: float, weights: str,
) -> Prediction:  # fmt: skip
    """A decode step after `context` tokens, or a prompt (`context` 0), where each process computes
    several of the plan's T ranks. shape: sequences, new tokens of each."""
    check_context(config, max(context, shape[1]))
    held = held_ranks(config, tp)
    refusal = fused_refusal(config.plan, Ranks(tp * held, 0, held)) if reducer == FUSED else None
    if weights != "bf16":
        refusal = f"--weights={weights} is not predicted there"
    if reducer in ROUNDING:
        refusal = f"--reducers {reducer} is not predicted there"
    if refusal:
        raise UserError(f"--tp={tp} with T {tp * held}, {held} virtual ranks each: {refusal}")
    table = load_dispatch(machine.gpu, tp) if reducer == "push" and tp > 1 else None
    cost = VirtualCost(config, machine, tp, held, *shape, context, table)
    style = "alone" if tp == 1 else "all-reduce"

    def timed(plan: Plan) -> tuple[Graph, Times]:
        graph = forward(plan, style)
        if not context:
            return graph, limited(graph, cost)
        return graph, simulate(graph, cost, cost.beside)

    graph, times = timed(config.plan)
    added = waiting(graph, cost, cost.beside, times.total, tp, tp, jitter)

    def bare() -> float:
        return timed(config.plan.as_no_comm())[1].total

    return prediction_of(graph, times, bare, cost, machine, added)


def check_tokens(config: ModelConfig, batch: int, tokens: int) -> None:
    """Raise UserError unless the model can take `batch` sequences of `tokens` tokens."""
    if batch < 1:
        raise UserError(f"--batch={batch} must be 1 or more")
    check_context(config, tokens)


def prompt_way(
    config: ModelConfig, plan: Plan, gpu: str, tp: int, reducer: str, shape: tuple[int, int],
    weights: str = "bf16", inside: bool = True,
) -> Way:  # fmt: skip
    """How the engine reduces in a prefill of tokens of `shape` [B, S], by the engine's own choice.

    plan: the model's plan, or that plan without its reduces. inside: see `prefill`.
    """
    if tp == 1:
        return Way(1)
    table = load_dispatch(gpu, tp) if reducer in ("push", FUSED) else None
    token = BF16 * config.hidden_size  # of a partial

    def overlaps(tokens: int) -> bool:
        if weights != "bf16" or not inside:
            return False
        import torch  # late: only prompts that may run by operators ask

        return Overlap(config, gpu, tp, torch.bfloat16)(tokens, prompt_mode(tokens))

    chosen = choose_prefill(plan, Ranks(tp), shape, token, table, reducer, overlaps=overlaps)
    if table is None:
        counts = shape[0] * shape[1], shape[0]  # of tokens, all and the last of each sequence
        rounds = [reducer in ROUNDING and count > MAX_ROWS for count in counts]
        large, small = (ROUNDED if each else "nccl" for each in rounds)
        return Way(tp, "", large, small)
    large = table.pick(token * shape[0] * shape[1])
    small = table.pick(token * shape[0])
    return Way(tp, chosen.transport, large, small, chosen.reducer == FUSED)


def limited(graph: Graph, cost: PromptCost) -> Times:
    """The times with products at the rate that the power limit leaves for this mix of kernels."""
    cost.unlimit()
    times = simulate(graph, cost, cost.beside)
    busy = sum(cost(each) for each in graph.operations if each.resource == "all")
    cost.limit(busy, times.total)
    return simulate(graph, cost, cost.beside)
