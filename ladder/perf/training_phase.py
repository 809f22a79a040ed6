"""The time of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ladder.bench.training.points import parse_layout
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.ranks import Ranks
from ladder.parallel.refusals import sharded_refusal
from ladder.perf.cost_training import TrainingCost, TrainingShape
from ladder.perf.graph import FUSED, Graph, training
from ladder.perf.machine import Machine
from ladder.perf.memory import held_ranks
from ladder.perf.nodes import LIKELY, Doubt, with_training_bytes
from ladder.perf.phases import WAITING, Prediction, check_tokens, limited, prediction_of
from ladder.perf.simulate import Times, simulate, waiting


def train(
    config: ModelConfig, machine: Machine, layout: str, seq_len: int, batch: int,
    micro_batch: int = 0, activation_checkpointing: str = "none", no_comm: bool = False,
    gpus: int = 0, jitter: float = 0.0, nodes: int = 1, doubt: Doubt = LIKELY,
    machines: Mapping[int, Machine] | None = None,
) -> Prediction:  # fmt: skip
    """A compiled training step in bfloat16 with AdamW.

    layout: a name such as tp4+sp+fsdp. gpus: how many GPUs it covers; 0: those of `nodes` nodes,
    each of which is such a machine. batch: sequences of each data-parallel rank, `micro_batch` at
    a time (0: all). no_comm: without the sublayers' reduces, as `ladder bench train` measures it.
    jitter: of the ranks' times (`simulate.Skew`). doubt: about the links between nodes. machines:
    see `TrainingCost`.

    Raises UserError for a layout that the GPUs, the plan or the model cannot have.
    """
    timed = _timed(config, machine, layout, seq_len, batch, micro_batch, activation_checkpointing,
                   gpus, nodes, doubt, machines)  # fmt: skip
    step = timed(no_comm, jitter)

    def bare() -> float:
        return timed(True, 0.0, reduced=False).us

    found = prediction_of(step.graph, step.times, bare, step.cost, step.cost.machine, step.added)
    earlier = step.earlier
    return found if not earlier else replace(
        found, us=found.us + earlier, earlier=step.before,
        limits=tuple(
            (name, us if name == WAITING else us * (1 + earlier / step.times.total))
            for name, us in found.limits
        ),
    )  # fmt: skip


def train_us(
    config: ModelConfig, machine: Machine, layout: str, seq_len: int, batch: int,
    micro_batch: int = 0, activation_checkpointing: str = "none", nodes: int = 1,
    doubt: Doubt = LIKELY, machines: Mapping[int, Machine] | None = None,
) -> float:  # fmt: skip
    """The microseconds of `train` alone, which take less time to predict."""
    timed = _timed(config, machine, layout, seq_len, batch, micro_batch, activation_checkpointing,
                   0, nodes, doubt, machines)  # fmt: skip
    return timed(False, 0.0).us


@dataclass(frozen=True)
class Step:
    """A simulated training step. added: microseconds that unequal ranks add. earlier: those of all
    micro-batches but the last one, which `times` has. before: see `Prediction.earlier`."""

    graph: Graph
    times: Times
    cost: TrainingCost
    earlier: float
    added: float
    before: tuple[Graph, Times, int] | None

    @property
    def us(self) -> float:
        return self.times.total + self.added + self.earlier


def _timed(
    config: ModelConfig, machine: Machine, layout: str, seq_len: int, batch: int, micro_batch: int,
    activation_checkpointing: str, gpus: int, nodes: int, doubt: Doubt,
    machines: Mapping[int, Machine] | None,
) -> Callable[..., Step]:  # fmt: skip
    """What simulates the steps of `train`, with reduces (`no_comm` and `reduced`) and without."""
    check_tokens(config, batch, seq_len)
    machine = with_training_bytes(machine)
    micro = micro_batch or batch
    if micro < 1 or batch % micro:
        raise UserError(f"--micro-batch={micro} does not divide --batch={batch}")
    shape = training_shape(
        config,
        gpus or nodes * machine.gpus,
        layout,
        micro,
        seq_len,
        activation_checkpointing,
        nodes,
    )
    style = "sharded" if shape.sequence_parallel else "all-reduce" if shape.tp > 1 else "alone"
    fused = parse_layout(layout).reducer == FUSED
    data = "none" if shape.replicas == 1 else "ddp" if shape.shards == 1 else "fsdp"
    if shape.nodes > 1 and 1 < shape.shards < shape.replicas:
        data = "hsdp"  # on a single node all ranks count as one group

    def timed(no_comm: bool, jitter: float, reduced: bool = True) -> Step:
        """reduced: whether gradients are."""
        plan, ranks, how = config.plan, shape.tp * shape.replicas, data if reduced else "none"
        cost = TrainingCost(config, machine, shape, batch > micro, no_comm, doubt, machines)
        graph = training(plan, style, how, fused)
        times = limited(graph, cost)
        added = waiting(graph, cost, cost.beside, times.total, ranks, shape.tp, jitter)
        earlier, passes = 0.0, None
        if batch > micro:
            # DDP leaves earlier micro-batches' gradients where they are. FSDP does, too, and adds
            # them whole; their scatter stands for that here, which the records of FSDP bear out.
            kept = {"ddp": "none", "hsdp": "fsdp"}.get(how, how)
            before = training(plan, style, kept, fused)
            found = simulate(before, cost, cost.beside)
            more = waiting(before, cost, cost.beside, found.total, ranks, shape.tp, jitter)
            added += (batch // micro - 1) * more
            earlier = (batch // micro - 1) * (found.total - cost(before.operations[-1]))
            passes = before, found, batch // micro - 1
        return Step(graph, times, cost, earlier, added, passes)

    return timed


def training_shape(
    config: ModelConfig, gpus: int, layout: str, sequences: int, seq_len: int, kept: str,
    nodes: int = 1,
) -> TrainingShape:  # fmt: skip
    """The shape of a layout on `gpus` GPUs. Raises UserError if they cannot have the layout."""
    found = parse_layout(layout)
    if nodes > 1 and gpus // nodes % found.tp:
        raise UserError(
            f"--layouts {layout} on nodes of {gpus // nodes} GPUs: a group of TP lies within a "
            f"node; give a TP degree that divides it"
        )
    config.check_divides(found.tp, "--layouts tp")
    replicas, shards = found.data_parallel(gpus)
    here = replicas // nodes  # of a node
    if nodes > 1 and shards % here and here % shards:
        raise UserError(
            f"--layouts {layout} on nodes of {gpus // nodes} GPUs: {shards} shards neither fill "
            f"nodes nor divide one; give a divisor or a multiple of {here}"
        )
    held = held_ranks(config, found.tp)
    if found.sequence_parallel:
        refusal = sharded_refusal(config.plan, Ranks(found.tp * held, 0, held))
        if refusal:
            raise UserError(f"--layouts {layout} with plan {config.plan.name!r}: {refusal}")
    return TrainingShape(found.tp, replicas, shards, held, found.sequence_parallel, sequences,
                         seq_len, kept == "full", nodes)  # fmt: skip
