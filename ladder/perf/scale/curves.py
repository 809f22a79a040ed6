"""Our own predictions for 8 to 1,024 GPUs: training by layout, and decoding over a node or two.

Nobody has measured these. Products run at the rate of one recorded step, links are those of the
declared machine h200x8, and what products lose beside communication comes from three records. Every
figure has an interval: one end has all uncertain values at their best, the other at their worst.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

from ladder.bench.training.points import Layout, parse_layout
from ladder.config import model_config
from ladder.costs import BF16, FP32, layer_parameters, vocabulary_parameters
from ladder.models.config import ModelConfig
from ladder.models.plan import Plan
from ladder.models.presets import resolve_plan
from ladder.perf import graph
from ladder.perf.graph import Operation
from ladder.perf.machine import COLLECTIVES, Curve, Machine
from ladder.perf.machine_files import load, read
from ladder.perf.memory import MOMENTS, local_parameters
from ladder.perf.nodes import DECLARED as DECLARED_MACHINES
from ladder.perf.nodes import ENDS, LIKELY, Doubt, Group
from ladder.perf.nodes import group as nodes_group
from ladder.perf.phases import decode
from ladder.perf.scale.tables import BESIDE
from ladder.perf.scores import OUT, Curves, Dots, Result, Row, points
from ladder.perf.simulate import simulate

MODEL, SEQUENCE = "llama-3-8b", 8192
NODE = 8  # GPUs
SIMULATED = (4, 8)  # layers
GPUS = (8, 16, 64, 256, 1024)
TICKS = (8.0, 16.0, 64.0, 256.0, 1024.0)
TRAINED = {  # layout and plan
    "fsdp": ("fsdp", "standard"),
    "hsdp8": ("hsdp8", "standard"),
    "tp8+sp+fsdp, standard": ("tp8+sp+fsdp", "standard"),
    "tp8+sp+fsdp, ladder": ("tp8+sp+fsdp", "ladder"),
}
# The share of a large product's rate that products and attention reach: 12 layers of an 8B, `none`,
# TP 4 with sequence parallelism, 8192 tokens take 99.1 ms on four H200 (docs/results/training.md).
EFFICIENCY = 0.63
NORM_TENSORS = 5  # read and written by a landing: residual, sum, result; residual and norm again


@cache
def machine() -> Machine:
    return read(DECLARED_MACHINES / "h200x8.json")


def group(per_node: int, nodes: int, doubt: Doubt) -> Group:
    return nodes_group(machine().links, per_node, nodes, doubt)


@dataclass(frozen=True)
class Step:
    """A training step in bfloat16 with AdamW on `gpus` GPUs. sequences: of each TP group; 0: one
    for each of its GPUs."""

    config: ModelConfig
    layout: Layout
    gpus: int
    doubt: Doubt
    sequences: int = 0

    @property
    def tokens(self) -> int:
        """The tokens of a TP group."""
        return SEQUENCE * (self.sequences or self.layout.tp)

    @property
    def replicas(self) -> int:
        return self.layout.data_parallel(self.gpus)[0]

    @property
    def shards(self) -> int:
        return self.layout.data_parallel(self.gpus)[1]

    def data_parallel(self, ranks: int) -> Group:
        """The group of `ranks` data-parallel ranks, one in each TP group: `NODE / tp` of a node."""
        per_node = min(ranks, NODE // self.layout.tp)
        return group(per_node, ranks // per_node, self.doubt)


class Cost:
    """Microseconds of each operation alone."""

    def __init__(self, step: Step) -> None:
        self.step, self.config, self.tp = step, step.config, step.layout.tp
        found = machine()
        self.rate = EFFICIENCY * 1e12 * found.value("matrix_tflop_s")
        self.memory = 1e12 * found.value("copy_tb_s")
        self.layer = layer_parameters(step.config) / self.tp
        self.inside = group(self.tp, 1, step.doubt)
        self.residual = float(BF16 * step.tokens * step.config.hidden_size)  # bytes
        heads = (step.config.num_heads + 2 * step.config.num_kv_heads) * step.config.head_dim
        self.outputs = {
            "qkv": heads, "output": step.config.num_heads * step.config.head_dim,
            "gate-up": 2 * step.config.intermediate_size, "down": step.config.intermediate_size,
        }  # fmt: skip

    def __call__(self, operation: Operation) -> float:
        return 1e6 * self.seconds(operation)

    def seconds(self, operation: Operation) -> float:
        kind, step, config = operation.kind, self.step, self.config
        passes = 2 if operation.backward else 1
        if operation.part == "weights":
            return self._weights()
        if operation.part == "gradients":
            return self._gradients()
        if kind in COLLECTIVES:
            return self.inside.gather(self.residual)
        if kind == "product":
            size = config.hidden_size * self.outputs[operation.part]
            return passes * 2 * step.tokens * size / self.tp / self.rate
        if kind == "attention":
            width = config.num_heads * config.head_dim / self.tp
            flops = 2 * step.tokens * SEQUENCE * width  # two products, the lower half of each
            return (2.5 if operation.backward else 1) * flops / self.rate
        if kind == "landing":
            return passes * NORM_TENSORS * self.residual / self.tp / self.memory
        if kind == "head":
            return passes * 2 * step.tokens * vocabulary_parameters(config) / self.tp / self.rate
        if kind == "loss":
            return 4 * FP32 * step.tokens * config.vocab_size / self.tp / self.memory
        if kind == "optimiser":
            held = local_parameters(config, self.tp) / step.shards
            return FP32 * (3 + 2 * MOMENTS) * held / self.memory
        assert kind == "embed", kind
        return 2 * self.residual / self.memory

    def _weights(self) -> float:
        return self.step.data_parallel(self.step.shards).gather(BF16 * self.layer)

    def _gradients(self) -> float:
        """A reduce-scatter over the shards, and an all-reduce of the result over the copies."""
        step, size = self.step, FP32 * self.layer
        found = step.data_parallel(step.shards).gather(size)
        copies = step.replicas // step.shards
        if copies > 1:
            found += group(1, copies, step.doubt).all_reduce(size / step.shards)
        return found


def step_time(
    name: str, layout: str, gpus: int, doubt: Doubt = LIKELY, model: str = MODEL
) -> float:
    """Seconds of a training step of a plan, with 8192 tokens for each GPU.

    A pass repeats itself after a few layers: two depths are simulated and extrapolated linearly.
    """
    config = model_config(model)
    few, more = SIMULATED
    start, end = (
        layers_time(
            replace(config, num_layers=n, plan=plan_of("standard", n)), name, layout, gpus, doubt
        )
        for n in SIMULATED
    )
    return end + (end - start) * (config.num_layers - more) / (more - few)


def layers_time(config: ModelConfig, name: str, layout: str, gpus: int, doubt: Doubt) -> float:
    """Seconds of a training step of a model with all its layers simulated."""
    step = Step(config, parse_layout(layout), gpus, doubt)
    plan = plan_of(name, config.num_layers)
    if step.layout.tp == 1:
        plan = plan.as_no_comm()
    style = "sharded" if step.layout.sequence_parallel else "all-reduce"
    gradients = "fsdp" if step.replicas > 1 else "none"

    def beside(first: Operation, second: Operation) -> float:
        communicates = second.kind in COLLECTIVES and first.kind not in COLLECTIVES
        return 1 - doubt.beside if communicates else 1.0

    return 1e-6 * simulate(_graph(plan, style, gradients), Cost(step), beside).total


_graph = cache(graph.training)  # the same for all numbers of GPUs


def plan_of(name: str, layers: int) -> Plan:
    return resolve_plan(name, layers, NODE)


@cache
def tokens(name: str, layout: str, gpus: int, doubt: Doubt) -> float:
    """Tokens for each second and GPU."""
    return SEQUENCE / step_time(name, layout, gpus, doubt)


def _spans(value: Callable[[int, Doubt], float]) -> tuple[list[float], list[float], list[float]]:
    """The likely value for each number of GPUs, and the ends of its interval."""
    found = [[value(gpus, doubt) for doubt in (LIKELY, *ENDS)] for gpus in GPUS]
    likely = [each[0] for each in found]
    return likely, [min(each) for each in found], [max(each) for each in found]


def training() -> Result:
    series, spans = {}, {}
    for label, (layout, name) in TRAINED.items():
        likely, low, high = _spans(partial(tokens, name, layout))
        series[label] = ([float(gpus) for gpus in GPUS], likely)
        spans[label] = (low, high)
    return Result(
        None, "Training an 8B on 8 to 1,024 H200: tokens/s of a GPU, predicted", (),
        Curves(
            series, "GPUs", "tokens/s of a GPU", ticks=TICKS, tabled=True, digits=0, spans=spans
        ),
        (
            "Nobody has measured these. 8192 tokens for each GPU and step; weights of all layers "
            "are gathered as early as links allow, and the host is always ahead, which it is not "
            "in every record. Products of all layouts run at one rate, though those of TP 8 are "
            "smaller: layouts whose intervals overlap are not told apart.",
            "The interval: links at 60 % of their rate with twice the latency, and products that "
            "lose 55 % beside communication; or half the latency, and 20 %.",
        ),
    )  # fmt: skip


def gain() -> Result:
    x = [float(gpus) for gpus in GPUS]
    series, spans, scores = {}, {}, []
    for tp in (2, 4, 8):

        def value(gpus: int, doubt: Doubt, layout: str = f"tp{tp}+sp+fsdp") -> float:
            ladder, standard = (tokens(n, layout, gpus, doubt) for n in ("ladder", "standard"))
            return 100 * (ladder / standard - 1)

        likely, low, high = _spans(value)
        series[f"TP {tp}"], spans[f"TP {tp}"] = (x, likely), (low, high)
        scores.append(points(f"64 GPUs, TP {tp}", PAPER_GAIN, likely[GPUS.index(64)], 3, OUT))
    return Result(
        None, "Training an 8B with TP, SP and FSDP: ladder over standard, predicted", tuple(scores),
        Curves(series, "GPUs", "ladder faster by, %", ticks=TICKS, tabled=True, spans=spans),
        (
            "Ladder Residual (section 1) has 5 to 7 % for an 8B on 64 H100 with 8192 tokens, and "
            "says neither its TP degree nor its batch, so that each degree is scored. An H200 has "
            "an H100's multiprocessors.",
            "On four H200 at TP 4 we measured 9.3, 6.7 and -1.3 % (docs/results/training.md), in "
            "the last because of the host, which is not part of this.",
        ),
    )  # fmt: skip


PAPER_GAIN = 6.0  # %, the middle of 5 to 7
# Microseconds that a small all-reduce takes beyond one of four GPUs of a node. In a ring of 8 these
# are NCCL's own 0.6 us for each of 8 more steps; for two nodes, what Ladder Residual's 405B shows.
MORE_STEPS_US, TWO_NODES_US = 4.8, 26.0
# The share of hidden time that a ladder still pays: tables.BESIDE, and the ends of its records.
STILL_PAID = (BESIDE["decode", 1], 0.177, 0.505)
DECODED = (("llama-3-8b", 8), ("llama-3-70b", 8), ("llama-3-70b", 16), ("llama-3.1-405b", 16))


def served(gpus: int, doubt: Doubt) -> Machine:
    """H200s as measured on four of a node, with a declared all-reduce over `gpus` GPUs."""
    four = load("h200x4")
    more = MORE_STEPS_US + (TWO_NODES_US if gpus > NODE else 0.0)
    measured = four.curve("all-reduce", algorithm="nccl")
    curve = Curve(
        "all-reduce", {"algorithm": "nccl"},
        tuple((x, us + doubt.latency * more) for x, us in measured.points), "declared",
    )  # fmt: skip
    rest = tuple(each for each in four.curves if each.name != "all-reduce")
    return replace(four, name=f"{gpus} H200, declared", gpus=gpus, curves=(*rest, curve))


def decoding() -> Result:
    rows = []
    for model, tp in DECODED:
        config = model_config(model)
        ratios, steps = [], []
        for doubt, paid in zip((LIKELY, *ENDS), STILL_PAID, strict=True):
            standard, ladder = (
                decode(
                    replace(config, plan=resolve_plan(name, config.num_layers, tp)),
                    served(tp, doubt), tp, "async", 1, 1024,
                )
                for name in ("standard", "ladder")
            )  # fmt: skip
            hidden = max(0.0, standard.exposed_us - ladder.exposed_us)
            ratios.append(standard.us / (ladder.us + paid * hidden))
            steps.append(standard.us)
        nodes = "a node" if tp <= NODE else "two nodes"
        rows.append(
            Row(
                f"{model}, TP {tp} ({nodes}): {steps[0] / 1e3:.2f} ms",
                {"likely": ratios[0], "least": min(ratios), "most": max(ratios)},
            )
        )
    return Result(
        None, "Decoding one sequence with NCCL: ladder over standard, predicted", (),
        Dots(tuple(rows), "standard's time over ladder's"),
        (
            "Nobody has measured these. ms: a step of standard, its kernels as measured on H200s. "
            "On four, 8B, standard with NCCL took 1.42 to 1.50 times as long as the ladder.",
        ),
    )  # fmt: skip


FITTED = {
    f"efficiency = {EFFICIENCY:g} of a large product's rate": (
        "one recorded training step, 99.1 ms on four H200"
    ),
}
DECLARED = (
    "links: NVLink at 369 GB/s, as peer copies by all of four H200; a 400 Gb/s InfiniBand card "
    "for each GPU at 46 GB/s and NCCL's own 14 us for each crossing; rings",
    "products lose 28 % beside communication, the middle of three records of training; of decode's "
    "all-reduces a ladder still pays 28 %, as in our records",
    "GPUs of two nodes: what an all-reduce of one takes, and 26 us",
)
