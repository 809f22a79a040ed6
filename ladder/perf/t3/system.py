"""The system and the sublayers of T3 (Tables 1 and 2), and closed forms of one operation's time.

Times are in seconds. A value that the paper does not give is declared if there is a usual one, or
else fitted to a number of the paper; FITTED says which and to what. Nothing else is fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, exp, log, prod
from typing import Literal

Collective = Literal["ring", "direct", "all-to-all"]  # direct, all-to-all: 7.1


@dataclass(frozen=True)
class System:
    """One GPU of a ring.

    link: bytes a second in each direction, half of the bidirectional 150 GB/s. shared: whether one
    link to a switch carries the traffic to all peers; if not, there is a link to each peer. burst:
    bytes a second of a product's writes, and of all traffic in the queue of the DRAM. reduce: bytes
    a second of the last reduction of a reduce-scatter. update: the cost of a near-memory
    op-and-store, in stores. switch: seconds that the DRAM loses when its queue turns from one
    stream to the other. tile, inner, per_cu: a workgroup computes tile x tile elements in steps of
    `inner`, and each compute unit holds `per_cu` workgroups. queue: of the DRAM, in entries of
    `entry` bytes (32 channels x 256 B). thresholds: (least share of the DRAM's time that the
    product takes, occupancy below which MCA lets communication in).
    """

    units: int = 80
    clock: float = 1.4e9
    flops_per_clock: int = 1024
    efficiency: float = 0.80
    link: float = 75e9
    latency: float = 500e-9
    shared: bool = False
    burst: float = 2 / 3.5e-12
    reduce: float = 0.5e12
    update: float = 2
    switch: float = 32e-9
    cache: int = 16 * 2**20
    tile: int = 128
    inner: int = 32
    per_cu: int = 2
    queue: int = 64
    entry: int = 8192
    thresholds: tuple[tuple[float, int], ...] = ((0.3, 5), (0.2, 10), (0.1, 30), (0.0, 64))
    blocks: int = 4  # in which a chunk of the ring is moved

    @property
    def flops(self) -> float:
        """Floating-point operations of products a second."""
        return self.efficiency * self.units * self.clock * self.flops_per_clock


SOURCE = "T3: Transparent Tracking & Triggering (Pati et al., ASPLOS 2024), simulated"
FITTED = {
    "efficiency = 0.80": "Figure 16's ideal overlap: 35 % geomean, 50 % and 15 %",
    "burst = 571 GB/s (3.5 ps an element)": "the same three numbers",
    "reduce = 0.5 TB/s": "RS + NMC: 7 % at TP 8, 3 % at TP 16",
    "switch = 32 ns": "Figure 16's T3: 20 % geomean",
    "copy = 17.5 GB/s a compute unit": "Figure 6: an all-reduce on 8 compute units is 41 % slower",
    "attention = 1.42 ps": "6.3: attention that is not cut is 40 to 45 % of the time",
}
DECLARED = (
    "tiles of 128 x 128 x 32, two workgroups a compute unit (160 workgroups a stage)",
    "a DRAM queue of 64 entries of 8 KiB, and which product has which occupancy threshold",
    "inputs are read a step ahead; a ring's chunk is moved in 4 blocks",
    "a cache that holds what was read last: inputs that fit are not read again",
)


@dataclass(frozen=True)
class Model:
    name: str
    width: int
    layers: int
    tokens: int
    degrees: tuple[int, ...]


MODELS = (
    Model("Mega-GPT-2", 3072, 74, 16 * 1024, (8, 16)),
    Model("T-NLG", 4256, 78, 8 * 1024, (8, 16)),
)
LARGE = (
    Model("GPT-3", 12 * 1024, 96, 2048, (32,)),
    Model("PALM", 18 * 1024, 118, 2048, (32,)),
    Model("MT-NLG", 20 * 1024, 105, 2048, (32,)),
)
# The rows of the weight before the tensor-parallel cut, in widths; two forward, two backward.
SUBLAYERS = {"OP": 1, "FC-2": 4, "FC-1": 4, "IP": 3}
FORWARD = ("OP", "FC-2")


@dataclass(frozen=True)
class Sublayer:
    """A product [tokens, inner] x [inner, width] in half precision, and its all-reduce."""

    model: str
    kind: str
    degree: int
    tokens: int
    width: int
    inner: float

    @property
    def name(self) -> str:
        return f"{self.model} TP {self.degree} {self.kind}"

    @property
    def output(self) -> int:
        """Bytes of the result."""
        return 2 * self.tokens * self.width

    @property
    def chunk(self) -> float:
        """Bytes of one of the chunks that travel around the ring."""
        return self.output / self.degree

    @property
    def inputs(self) -> tuple[float, float]:
        """Bytes of the activations and of the weight."""
        return 2 * self.tokens * self.inner, 2 * self.inner * self.width


def sublayer(model: Model, kind: str, degree: int) -> Sublayer:
    inner = SUBLAYERS[kind] * model.width / degree
    return Sublayer(model.name, kind, degree, model.tokens, model.width, inner)


def sublayers(models: tuple[Model, ...] = MODELS) -> list[Sublayer]:
    return [
        sublayer(model, kind, degree)
        for model in models
        for degree in model.degrees
        for kind in SUBLAYERS
    ]


def each_degree(models: tuple[Model, ...]) -> list[tuple[Model, int]]:
    return [(model, degree) for model in models for degree in model.degrees]


def compute(case: Sublayer, system: System) -> float:
    return 2 * case.tokens * case.width * case.inner / system.flops


def gemm(case: Sublayer, system: System) -> float:
    """The product alone: its arithmetic, and the writes at the end of each stage."""
    return compute(case, system) + case.output / system.burst


def all_gather(case: Sublayer, system: System) -> float:
    return (case.degree - 1) * (case.chunk / system.link + system.latency)


def reduce_scatter(case: Sublayer, system: System, near_memory: bool = False) -> float:
    """A ring takes as long as an all-gather, plus the last chunk's reduction, which nothing hides.

    near_memory: whether reductions happen in the memory.
    """
    last = 0.0 if near_memory else 3 * case.chunk / system.reduce
    return all_gather(case, system) + last


def collective(case: Sublayer, system: System, kind: Collective) -> float:
    """The collective that follows the product and can overlap with it."""
    if kind == "ring":
        return reduce_scatter(case, system)
    received = _direct(case, system)
    reduced = 0.0 if kind == "all-to-all" else (case.degree + 1) * case.chunk / system.reduce
    return received + reduced


def gather(case: Sublayer, system: System, kind: Collective) -> float:
    """The gather that follows the collective and does not overlap."""
    if kind == "ring":
        return all_gather(case, system)
    return 0.0 if kind == "all-to-all" else _direct(case, system)


def _direct(case: Sublayer, system: System) -> float:
    """Sending a chunk to each peer."""
    links = case.degree - 1 if system.shared else 1
    return links * case.chunk / system.link + system.latency


def sequential(case: Sublayer, system: System, kind: Collective = "ring") -> float:
    return gemm(case, system) + collective(case, system, kind) + gather(case, system, kind)


def ideal(
    case: Sublayer, system: System, near_memory: bool = False, kind: Collective = "ring"
) -> float:
    """The longer one of product and collective, then the gather. near_memory: a ring's reductions
    happen in the memory."""
    second = reduce_scatter(case, system, True) if near_memory else collective(case, system, kind)
    return max(gemm(case, system), second) + gather(case, system, kind)


def stages(case: Sublayer, system: System) -> int:
    """How often the compute units fill with workgroups."""
    tiles = ceil(case.tokens / system.tile) * ceil(case.width / system.tile)
    return ceil(tiles / (system.units * system.per_cu))


def stage_reads(case: Sublayer, system: System, bypass: bool) -> float:
    """Bytes that one stage reads from the DRAM.

    bypass: whether outputs bypass the cache, which leaves more room for inputs. If all inputs fit,
    they stay in the cache. Else, if the weight fits beside the rows of a stage, each input is read
    once. Else each stage reads the rows and columns of its tiles, which are eight tiles high.
    """
    count = stages(case, system)
    rows, weight = case.inputs
    if rows + weight <= system.cache:
        return 0.0
    written = 0.0 if bypass else case.output / count
    if weight + rows / count + written <= system.cache:
        return (rows + weight) / count
    across = 8 + system.units * system.per_cu / 8
    return min(rows / count + weight, across * system.tile * case.inner * 2)


def geomean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values)) if prod(values) else 0.0
