"""What the operations of a decode step cost on a machine, from its curves.

Products, attention, landings and all-reduces take the times of the machine's file. All but
all-reduces take another time in a step than in a chain of their own: `step_stretch` times as long,
fitted to one recorded step of a model without communication. `more rows` is fitted to such steps of
more sequences, `converted` to those with weights in 8 bits (`ladder.perf.prediction.fitting`). A
kernel that only moves a few rows (the embedding, the choice of the token, a landing without a curve
in the file) takes `launch_us` and the time of its bytes. A pushed result arrives after the time of
an all-reduce by push less `push_kernel_us`, and, if the plan blocks there, not before the slowest
rank's (`_waits`). An operation that waits for the step's other stream takes half of `launch_us`
more; with NCCL each change of stream takes all of it, or what was measured (`_turn`). Concurrent
operations share the GPU (`_shared`); products slow collectives as in prompts.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from ladder.costs import (
    BF16,
    MULTIPROCESSORS,
    head_bytes_of_token,
    product_shapes,
    stored_bytes,
)
from ladder.kernels.decode_shapes import FEW, MAX_VECTOR_ROWS, blocks, by_pieces, rows_each
from ladder.kernels.limits import FEW_BLOCKS, FEW_HEADS, FEW_PROGRAMS, MAX_ROWS
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, unknown
from ladder.models.plan import Plan
from ladder.perf.graph import COMM, LINKS, Graph, Operation
from ladder.perf.lower_decode import decode
from ladder.perf.lower_riders import riding
from ladder.perf.machine import (
    ATTENTION,
    AWAITED,
    HEAD_DIM,
    HIDDEN,
    IN_8_BITS,
    STREAMS_TOGETHER,
    Basis,
    Estimate,
    Machine,
    worst,
)
from ladder.perf.riders import TODAY, Kernels, added
from ladder.perf.rows import between, converting, product, read_rate, rows_measured
from ladder.perf.slowdowns import Slowdowns

WAY = {"push": "push", "async": "nccl"}
FULL_MESSAGE = 2**19  # bytes from which on NCCL takes as many multiprocessors as in prompts
# How much more than its share of the memory bandwidth a multiprocessor can read while others are
# idle. Least squares over chains of products of 4, 16 and 64 rows gave 1.4, 1.4 and 1.2
# (benchmarks/results/2026-11-23-products-h200.jsonl).
MOST_OF_SHARE = 1.3
SLOWEST = 0.001  # the share of its speed that a kernel keeps beside one that leaves it nothing


def check_reducer(name: str) -> None:
    """Raise UserError unless `name` is a reducer of inference."""
    if name not in WAY:
        raise unknown("reducer of --reducers", name, WAY)


def check_context(config: ModelConfig, tokens: int) -> None:
    """Raise UserError unless the model takes `tokens` tokens."""
    if not 1 <= tokens <= config.max_seq_len:
        raise UserError(
            f"--context={tokens} must be 1 to the model's context, {config.max_seq_len}"
        )


class DecodeCost:
    """Microseconds of each operation of a step of `batch` sequences after `context` tokens.

    weights, cache: how they are stored (`ladder.costs`). Kernels read the stored bytes; products
    with weights in 8 bits take longer, by the curve `converted`.
    """

    def __init__(
        self, config: ModelConfig, machine: Machine, tp: int, reducer: str, batch: int,
        context: int, weights: str = "bf16", kernels: Kernels = TODAY, cache: str = "bf16",
    ) -> None:  # fmt: skip
        config.check_divides(tp, "--tp")
        check_reducer(reducer)
        if not 1 <= batch <= MAX_ROWS:
            raise UserError(f"--batch={batch} must be 1 to {MAX_ROWS}, as fused decode steps have")
        check_context(config, context)
        self.config, self.machine, self.tp, self.reducer = config, machine, tp, reducer
        self.batch, self.context = batch, context
        self.gap = machine.value("launch_gap_us")
        self.small = machine.value("launch_us")
        self.stretch = 1.0
        if "step_stretch" in machine.values:
            self.stretch = machine.value("step_stretch")
        self.shapes = product_shapes(config, tp)
        self.weights = {
            part: stored_bytes(outputs * inputs, outputs, weights)
            for part, (outputs, inputs) in self.shapes.items()
        }
        self.stored, self.cache = weights, cache
        self.in_8_bits = bool(machine.family(IN_8_BITS, weights=weights))
        self.kernels = kernels
        # The number of rows whose curve prices products. The curve of 32 rows is of other tiles
        # than today's (`decode_shapes`), so 17 to 63 rows are interpolated between 16 and 64.
        alike = kernels.rides == "nothing" and weights == "bf16" and 16 < batch < 64
        self.rows = 16 if alike else batch
        self.heads = batch * max(1, config.num_kv_heads // tp)
        self.message = BF16 * batch * config.hidden_size
        self.slowdowns = Slowdowns(machine)
        self.bases: list[Basis] = []
        self._alone: dict[str, Estimate] = {}  # by part; attention has none
        self._known: dict[tuple[str, str, bool, bool], Estimate] = {}
        self.crossing: dict[int, float] = {}  # microseconds of what waits for another stream
        self.riding: dict[int, float] = {}  # microseconds that what rides on a launch adds to it
        self._known_shares: dict[int, tuple[float, float]] = {}
        self.waits: dict[int, float] = {}  # microseconds for which a blocking sum waits for ranks
        # Whether products run on tensor cores. In 8 bits most of two rows do, too.
        self.tiles = batch > (1 if self.in_8_bits else MAX_VECTOR_ROWS)
        self.lands_pieces = weights != "bf16" and by_pieces(batch)
        self.both = self._both()
        self.few = kernels.wide and self.heads <= FEW_HEADS and context <= 64 * FEW_BLOCKS
        self.memory = 1e6 * machine.value("copy_tb_s")  # bytes a microsecond
        self.reads = max(self.memory, read_rate(machine) if kernels.wide else 0.0)
        self.landings = bool(machine.family("landing"))

    def _both(self) -> float:
        """The throughput of two streams together, as a multiple of one stream's."""
        curves = self.machine.family("streams together")
        known = {str(each.where["weights"]): each.points for each in curves} or STREAMS_TOGETHER
        if self.stored in known and self.kernels.wide:
            return between(known[self.stored], self.batch)
        return self.machine.value("streams_together")

    def lowered(self, plan: Plan) -> Graph:
        """The operations of a plan's step; this object then prices these operations."""
        way = WAY[self.reducer] if self.tp > 1 else "alone"
        two_streams = self.kernels.rides == "nothing"
        branches = self.batch <= self.kernels.branches
        graph = decode(plan, way, branches) if two_streams else riding(plan, way)
        self._alone, self._known, self.crossing = {}, {}, {}
        for each in graph.operations:
            others = [graph.operations[need] for need in each.needs]
            streams = {one.stream for one in (each, *others)} - {LINKS}
            if COMM not in streams:
                if len(streams) > 1 and each.launched:
                    self.crossing[each.index] = self.small / 2
                continue
            reduces = [one for one in (each, *others) if one.kind == "all-reduce"]
            blocks = any(one.output is None or plan.blocking[one.output] for one in reduces)
            # A longer kernel before it hides the launch of a reduce that does not block.
            if blocks or each not in reduces:
                self.crossing[each.index] = self._turn(blocks)
        self.waits = self._waits(graph)
        self.riding = added(self, graph)
        self._known_shares = {}
        return graph

    def _waits(self, graph: Graph) -> dict[int, float]:
        """Microseconds for which each blocking sum waits for the slowest rank: the expected maximum
        of normal times, one for each rank, whose deviation grows with the time since the last sum
        was landed. A sum that does not block has a sublayer's time to arrive."""
        if self.tp == 1:
            return {}
        spread = self.machine.value("rank_spread") * most_of(self.tp)
        found, passed = {}, 0.0
        for each in graph.operations:
            if any(landing.summed for landing in each.landings):
                passed = 0.0
            elif each.kind in ("product", "attention"):
                passed += self.alone(each).us
            if each.reduces and graph.plan.blocking[each.output or 0]:
                found[each.index] = spread * passed
        return found

    def moved(self, operation: Operation) -> float:
        """Microseconds in which a landing, a sum or a send reads and writes its rows. A landing by
        push reads each row once for each rank, and a send stores it once for each rank."""
        tensors = float(self.tp if operation.kind == "send" else 3)
        for each in operation.landings:
            pieces = self.tp if self.reducer == "push" else 1
            tensors += (pieces if each.summed else 0) + (each.own != 0)
        return tensors * self.message / self.memory

    def __call__(self, operation: Operation) -> float:
        launched = operation.launched
        key = (operation.kind, operation.part, operation.pushes, launched)
        if key not in self._known:
            self._known[key] = found = self.estimate(operation)
            self.bases.append(found.basis)
        more = self.gap + self.riding.get(operation.index, 0.0) if launched else 0.0
        more += self.crossing.get(operation.index, 0.0)
        if operation.index in self.waits:
            more += self._waited(operation)
        if launched and operation.kind in ("landing", "sum") and not self.landings:
            more += self.moved(operation)
        slots = self.tp if self.reducer == "push" and self.tp > 1 else 0
        if launched and self.lands_pieces and any(each.summed for each in operation.landings):
            # One program makes the pieces of a row, and reads its slots one after the other.
            more += slots * self.machine.value("whole_row_us")
        return self._known[key].us + more

    def _waited(self, operation: Operation) -> float:
        """Microseconds that a blocking sum takes beyond its own time: it waits for the slowest
        rank. Products of few rows are launched before the wait in any case. Tiles fill a
        multiprocessor's shared memory: their launch begins when the product before them has ended,
        so the time of the push and the wait hides it."""
        wait = self.waits[operation.index]
        pushed = operation.pushes or operation.stream == LINKS
        if not (pushed and self.tiles):
            return wait
        return wait - min(self._sent().us + wait, self.small)

    def beside(self, operation: Operation, other: Operation) -> float:
        """The speed of an operation beside one of another stream: what was measured, or else this.
        NCCL waits for memory beside products, and takes multiprocessors from them. Products of one
        or two rows, whose thread blocks fill all multiprocessors, lose a sketched share. Tiles
        leave some multiprocessors free, and lose less for smaller messages."""
        one, two = operation.resource, other.resource
        if one == two == "all":
            return self._shared(operation, other)
        return self._together(one, two)

    def _shared(self, operation: Operation, other: Operation) -> float:
        """The speed of a kernel that computes beside another one. The first to be launched keeps
        its speed, since its thread blocks stay where they are. The other one gets what is left of
        the throughput of two streams (`both`), and of the memory bandwidth."""
        if operation.index < other.index:
            return 1.0
        speed = 1.0
        taken = zip(self._shares(operation), self._shares(other), (self.both, 1.0), strict=True)
        for mine, others, whole in taken:
            if mine:
                speed = min(speed, max(SLOWEST, (whole - others) / mine))
        return speed

    def _shares(self, operation: Operation) -> tuple[float, float]:
        """The shares of the multiprocessors and of the memory bandwidth that an operation takes. It
        takes all multiprocessors, except while it waits for another stream. Attention of few
        sequences has fewer programs. Kernels with smaller tiles, of older records, leave them for
        half of a launch, too."""
        found = self._known_shares.get(operation.index)
        if found is None:
            us = self(operation)
            idle = self.crossing.get(operation.index, 0.0)
            idle += 0.0 if self.kernels.wide else self.small / 2
            # Products read faster than copies do; attention does not, in steps of long contexts.
            rate = self.reads if operation.kind == "product" else self.memory
            found = max(0.0, 1.0 - idle / us), self._bytes(operation) / (rate * us)
            if operation.kind == "attention" and self.few:
                found = found[0] * FEW_PROGRAMS / MULTIPROCESSORS, found[1]
            self._known_shares[operation.index] = found
        return found

    def _bytes(self, operation: Operation) -> float:
        """Bytes of weights or of the cache that an operation reads."""
        if operation.kind == "attention":
            return self.heads * head_bytes_of_token(self.config, self.cache) * self.context
        return self.weights[operation.part] if operation.kind == "product" else 0.0

    def _together(self, one: str, two: str) -> float:
        measured = None
        if "nccl" in (one, two) and one != two:
            name = "nccl beside decode" if one == "nccl" else "decode beside nccl"
            measured = self.slowdowns.curve(name, self.message)
        if measured is not None:
            return measured
        if one != "nccl" == two and not self.tiles:
            return self.slowdowns.value("row_beside_nccl")
        if one != "nccl" == two:
            loss = 1 - self.slowdowns.value("product_beside_nccl")
            return 1 - loss * min(1.0, self.message / FULL_MESSAGE)
        return self.slowdowns.together(one, two)

    def _turn(self, blocks: bool) -> float:
        """Microseconds of a change of stream: a launch, or what was measured. A blocking all-reduce
        adds more to a step than its own time; half of the rest counts for it, half for its landing.
        One that does not block slows products; what it adds beyond that counts for its landing."""
        measured = self.machine.family(AWAITED if blocks else HIDDEN)
        if not measured:
            return self.small
        added, alone = measured[0].at(self.message).us, self._reduce().us
        if blocks:
            return max(0.0, added - alone) / 2
        lost = (1 - self._together("all", "nccl")) * alone / self._together("nccl", "all")
        return max(0.0, added - lost)

    def estimate(self, operation: Operation) -> Estimate:
        """The time of an operation alone. Raises UserError if the machine lacks the curve."""
        kind = operation.kind
        if not operation.launched:
            # A send ends when it has reached the peers; a landing that rides runs in its product.
            return self._sent() if kind == "send" else Estimate(0.0, "measured")
        if kind in ("product", "attention"):
            found = self.alone(operation)
            if operation.output is None:  # its push, if there is one, is an operation of its own
                return found
            sent = self._sent()
            return Estimate(found.us + sent.us, worst([found.basis, sent.basis]))
        if kind == "all-reduce":
            return self._reduce()
        if kind in ("landing", "sum") and self.landings:
            size = self.config.hidden_size
            found = self.machine.between("landing", "hidden", size, self.batch)
            return Estimate(self.stretch * found.us, found.basis)
        if kind == "send":
            return self._reduce()
        if operation.part == "gather" and self.tp > 1:
            return self._reduce(8 * self.batch)
        return Estimate(self.small, "interpolated")

    def alone(self, operation: Operation) -> Estimate:
        """The time of a product or of attention without its push."""
        part = operation.part
        if part not in self._alone:
            if operation.kind == "product":
                nbytes = self.weights[part] * self._unevenness(part)
                found = product(self.machine, nbytes, self.rows, self.stored)
                if self.rows < self.batch:
                    more = product(self.machine, nbytes, 64, self.stored)
                    points = [(self.rows, found.us), (64, more.us)]
                    found = Estimate(between(points, self.batch), "interpolated")
                if self.stored != "bf16":
                    factor = converting(self.machine, self.stored, self.batch)
                    basis = found.basis if self.in_8_bits else "extrapolated"
                    found = Estimate(factor * found.us, basis)
            else:
                found = self._attention()
            self._alone[part] = Estimate(self.stretch * found.us, found.basis)
        return self._alone[part]

    def _attention(self) -> Estimate:
        """By bytes: heads of another size than the curves' count as proportionally more or fewer
        heads, and so does a longer context than theirs. Without a curve of a cache in fp8: that of
        bfloat16, at the heads that are as many bytes."""
        curve = ATTENTION[self.cache]
        heads = self.heads * self.config.head_dim / HEAD_DIM
        measured = bool(self.machine.family(curve))
        if not measured:
            sizes = [head_bytes_of_token(self.config, each) for each in (self.cache, "bf16")]
            heads, curve = heads * sizes[0] / sizes[1], ATTENTION["bf16"]
        keys = [float(each.where["keys"]) for each in self.machine.family(curve)]
        if keys and not min(keys) <= self.context <= max(keys):
            nearest = min(keys) if self.context < min(keys) else max(keys)
            more = max(1.0, self.context / nearest)
            return Estimate(
                self.machine.between(curve, "keys", nearest, heads * more).us, "extrapolated"
            )
        found = self.machine.between(curve, "keys", self.context, heads)
        return found if measured else Estimate(found.us, "extrapolated")

    def _unevenness(self, part: str) -> float:
        """The factor on the bytes of a product of tiles: the multiprocessors with the most thread
        blocks take longest, but read up to MOST_OF_SHARE times faster while others are idle. 1 for
        few outputs, whose cuts use the whole bandwidth, and for curves of only one size."""
        outputs, inputs, gated = self.matrix(part)
        if not self.tiles or outputs < FEW or not rows_measured(self.machine):
            return 1.0
        half = part in ("output", "down")
        block = blocks(self.rows, outputs, inputs, gated, BF16, self.in_8_bits,
                       self.in_8_bits and not half, self.in_8_bits and half).block  # fmt: skip
        even = -(-outputs // rows_each(outputs, block, gated)) / MULTIPROCESSORS
        return max(1.0, math.ceil(even) / even / MOST_OF_SHARE)

    def matrix(self, part: str) -> tuple[int, int, bool]:
        """Outputs and inputs of a product's matrix, and whether it has two."""
        outputs, inputs = self.shapes[part]
        gated = part == "gate-up"
        return outputs // (2 if gated else 1), inputs, gated

    def _sent(self) -> Estimate:
        """The time of a push without a kernel of its own: another kernel reads, sums and lands."""
        found = self._reduce()
        taken = self.machine.value("push_kernel_us")
        return Estimate(max(0.0, found.us - taken), found.basis)

    def _reduce(self, nbytes: float | None = None) -> Estimate:
        if self.tp == 1:
            return Estimate(0.0, "measured")
        curve = self.machine.curve("all-reduce", algorithm=WAY[self.reducer])
        return curve.at(self.message if nbytes is None else nbytes)


def most_of(ranks: int) -> float:
    """The expected maximum of `ranks` standard normal values (Blom's approximation)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
