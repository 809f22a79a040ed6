"""What the operations of a decode step cost on a machine, from its curves.

Products, attention, landings and all-reduces take what the machine's file says. All but the last
take another time in a step than in a chain of their own: `step_stretch` times as long, fitted to
one recorded step of a model without communication, `more rows` to the same of more sequences, and
`converted` of weights in 8 bits (`ladder.perf.prediction.fitting`). A kernel that only moves a few
rows (the embedding, the choice of the token, and a landing of which the file has no curve) takes
`launch_us` and its rows' bytes. What a product pushes is there after what an all-reduce by push
takes beyond `push_kernel_us`, and, if the plan blocks there, when the slowest rank is done
(`_waits`). What waits for the step's other stream takes half of `launch_us` more; with NCCL each
change of stream takes all of it, or what was measured (`_turn`). What runs at once shares the GPU
(`_shared`); products slow collectives as in prompts.
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
from ladder.kernels.limits import MAX_ROWS
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
    STREAMS_TOGETHER,
    Basis,
    Estimate,
    Machine,
    worst,
)
from ladder.perf.riders import TODAY, Kernels, added
from ladder.perf.rows import between, more_rows, rows_measured
from ladder.perf.slowdowns import Slowdowns, resource

WAY = {"push": "push", "async": "nccl"}
FULL_MESSAGE = 2**19  # bytes for which NCCL takes as many multiprocessors as for prompts
# What a multiprocessor reads at most beside idle ones, of its share of the memory's bandwidth: by
# least squares over chains of products of 4, 16 and 64 rows, 1.4, 1.4 and 1.2
# (benchmarks/results/2026-11-23-products-h200.jsonl).
MOST_OF_SHARE = 1.3
# `converted` where a machine says nothing of it, by rows: an H200's of weights in fp8, by former
# kernels.
CONVERTED = ((1.0, 1.22), (2.0, 1.25), (4.0, 1.36), (16.0, 1.49), (64.0, 1.76))
SLOWEST = 0.001  # of a kernel's speed, beside one that leaves it nothing


def check_reducer(name: str) -> None:
    """Raise UserError unless it is one of inference."""
    if name not in WAY:
        raise unknown("reducer of --reducers", name, WAY)


def check_context(config: ModelConfig, tokens: int) -> None:
    """Raise UserError unless the model takes so many tokens."""
    if not 1 <= tokens <= config.max_seq_len:
        raise UserError(
            f"--context={tokens} must be 1 to the model's context, {config.max_seq_len}"
        )


class DecodeCost:
    """Microseconds of each operation of a step of `batch` sequences after `context` tokens.

    weights: as stored, see `ladder.costs`. Kernels read the bytes as they are; converting those in
    8 bits takes what was fitted to steps in e4m3, if any was.
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
        self.kernels = kernels
        # Whose curve prices products. That of 32 is of other tiles than today's (`decode_shapes`):
        # products of 17 to 63 take what is between 16 and 64.
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
        self.tiles = batch > MAX_VECTOR_ROWS  # whether products run on tensor cores
        self.lands_pieces = weights == "fp8" and by_pieces(batch)
        self.both = self._both()
        self.memory = 1e6 * machine.value("copy_tb_s")  # bytes a microsecond
        self.landings = bool(machine.family("landing"))

    def _both(self) -> float:
        """What two streams get out of the GPU, of what one does."""
        curves = self.machine.family("streams together")
        known = {str(each.where["weights"]): each.points for each in curves} or STREAMS_TOGETHER
        if self.stored in known and self.kernels.wide:
            return between(known[self.stored], self.batch)
        return self.machine.value("streams_together")

    def lowered(self, plan: Plan) -> Graph:
        """The step of a plan, whose costs this then knows."""
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
            # What does not block is launched behind the one before it, which takes longer.
            if blocks or each not in reduces:
                self.crossing[each.index] = self._turn(blocks)
        self.waits = self._waits(graph)
        self.riding = added(self, graph)
        self._known_shares = {}
        return graph

    def _waits(self, graph: Graph) -> dict[int, float]:
        """How long each sum that blocks waits for the slowest rank: the expected maximum of as many
        normal times as there are ranks, since the sum before that was landed. What does not block
        has a sublayer's time to arrive."""
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
        """Microseconds of the rows that a landing, a sum or a send reads and writes: a push has a
        row of each rank to read, and to store for each."""
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
        """What a sum that blocks takes beyond its own time: it waits for the slowest rank, while
        which the next product is launched. Of few rows, that is before the wait in any case; tiles
        fill a multiprocessor's shared memory, and begin when the product before them has ended."""
        wait = self.waits[operation.index]
        pushed = operation.pushes or operation.stream == LINKS
        if not (pushed and self.tiles):
            return wait
        return wait - min(self._sent().us + wait, self.small)

    def beside(self, operation: Operation, other: Operation) -> float:
        """The speed of an operation beside one of another stream. NCCL waits for memory beside
        products; these lose multiprocessors to it: those of one or two rows, whose many thread
        blocks fill all of them, a share that was sketched, those of tiles, which leave some free,
        the fewer the smaller the message. Or what was measured."""
        one, two = resource(operation), resource(other)
        if one == two == "all":
            return self._shared(operation, other)
        return self._together(one, two)

    def _shared(self, operation: Operation, other: Operation) -> float:
        """The speed beside a kernel that computes, too. The one that was launched first has all
        that it takes, since its thread blocks stay where they are; the other one has what is left
        of what two get out of the multiprocessors, and of the memory's bandwidth."""
        if operation.index < other.index:
            return 1.0
        speed = 1.0
        taken = zip(self._shares(operation), self._shares(other), (self.both, 1.0), strict=True)
        for mine, others, whole in taken:
            if mine:
                speed = min(speed, max(SLOWEST, (whole - others) / mine))
        return speed

    def _shares(self, operation: Operation) -> tuple[float, float]:
        """How much of the multiprocessors and of the memory's bandwidth an operation takes: of the
        former all, but while it is launched (of a chain's kernels half of that is beneath the one
        before) or waits for another stream."""
        found = self._known_shares.get(operation.index)
        if found is None:
            us = self(operation)
            idle = self.small / 2 + self.crossing.get(operation.index, 0.0)
            found = max(0.0, 1.0 - idle / us), self._bytes(operation) / (self.memory * us)
            self._known_shares[operation.index] = found
        return found

    def _bytes(self, operation: Operation) -> float:
        """What it reads of weights and of the cache."""
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
        """Microseconds of a change of stream: a launch, or what was measured. What an all-reduce
        adds to a step besides its own time belongs in equal parts to it and to what lands it. If it
        does not block, what it adds beyond what products lose beside it belongs to the landing."""
        measured = self.machine.family(AWAITED if blocks else HIDDEN)
        if not measured:
            return self.small
        added, alone = measured[0].at(self.message).us, self._reduce().us
        if blocks:
            return max(0.0, added - alone) / 2
        lost = (1 - self._together("all", "nccl")) * alone / self._together("nccl", "all")
        return max(0.0, added - lost)

    def estimate(self, operation: Operation) -> Estimate:
        """What it takes alone. Raises UserError if the machine lacks the curve."""
        kind = operation.kind
        if not operation.launched:
            # A send is there when it has reached the others; a landing runs under the product.
            return self._sent() if kind == "send" else Estimate(0.0, "measured")
        if kind in ("product", "attention"):
            found = self.alone(operation)
            if operation.output is None:  # what it pushes, if anything, is an operation of its own
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
        """A product or attention without what it pushes."""
        part = operation.part
        if part not in self._alone:
            product = operation.kind == "product"
            if product:
                nbytes = self.weights[part] * self._unevenness(part)
                found = self._product(nbytes, self.rows)
                if self.rows < self.batch:
                    points = [(self.rows, found.us), (64, self._product(nbytes, 64).us)]
                    found = Estimate(between(points, self.batch), "interpolated")
            else:
                found = self._attention()
            if product and self.stored != "bf16":
                found = Estimate(self._converting() * found.us, "extrapolated")
            self._alone[part] = Estimate(self.stretch * found.us, found.basis)
        return self._alone[part]

    def _attention(self) -> Estimate:
        """By bytes: a head of another size, and a context beyond those of the curves, count as so
        many heads."""
        curve = ATTENTION[self.cache]
        keys = [float(each.where["keys"]) for each in self.machine.family(curve)]
        heads = self.heads * self.config.head_dim / HEAD_DIM
        if keys and not min(keys) <= self.context <= max(keys):
            nearest = min(keys) if self.context < min(keys) else max(keys)
            more = max(1.0, self.context / nearest)
            return Estimate(
                self.machine.between(curve, "keys", nearest, heads * more).us, "extrapolated"
            )
        return self.machine.between(curve, "keys", self.context, heads)

    def _product(self, nbytes: float, rows: int) -> Estimate:
        """Of more rows than one, as measured; or, at one size alone, as with one row, and what more
        rows cost there: they are other kernels, which take as much longer to begin and to end. What
        was fitted to steps of more sequences corrects either."""
        one = self.machine.curve("product", rows=1)
        found = one.at(nbytes)
        least, us = one.points[0]
        if nbytes < least:  # down to a kernel without bytes
            small = self.small + max(0.0, us - self.small) * nbytes / least
            found = Estimate(min(small, us), "extrapolated")
        if rows == 1:
            return found
        off = 0.0
        for fitted in self.machine.family("more rows"):
            points = [(at, us - more_rows(self.machine, at)) for at, us in fitted.points]
            off = between([(1.0, 0.0), *points], rows)
        if rows_measured(self.machine):
            more = self.machine.between("product", "rows", rows, nbytes)
            return Estimate(max(0.0, more.us + off), more.basis)
        more_us = max(0.0, more_rows(self.machine, rows) + off)
        return Estimate(found.us + more_us, "extrapolated")

    def _unevenness(self, part: str) -> float:
        """As how many times its bytes a product of tiles counts: the multiprocessors with the most
        thread blocks take longest, faster by up to MOST_OF_SHARE while others are idle. Cuts for
        few outputs were chosen to use the whole bandwidth. Curves of one size say nothing of it."""
        outputs, inputs, gated = self.matrix(part)
        if not self.tiles or outputs < FEW or not rows_measured(self.machine):
            return 1.0
        block = blocks(self.rows, outputs, inputs, gated, BF16).block
        even = -(-outputs // rows_each(outputs, block, gated)) / MULTIPROCESSORS
        return max(1.0, math.ceil(even) / even / MOST_OF_SHARE)

    def matrix(self, part: str) -> tuple[int, int, bool]:
        """Outputs and inputs of a product's matrix, and whether it has two."""
        outputs, inputs = self.shapes[part]
        gated = part == "gate-up"
        return outputs // (2 if gated else 1), inputs, gated

    def _converting(self) -> float:
        """How many times as long a product takes whose weights are converted: as of fp8 where that
        is not known of their type, and as of an H200 where neither is."""
        family = {curve.where["weights"]: curve for curve in self.machine.family("converted")}
        found = family.get(self.stored) or family.get("fp8")
        return between(found.points if found else CONVERTED, self.batch)

    def _sent(self) -> Estimate:
        """A push that is no kernel of its own: another kernel reads, sums and lands."""
        found = self._reduce()
        taken = self.machine.value("push_kernel_us")
        return Estimate(max(0.0, found.us - taken), found.basis)

    def _reduce(self, nbytes: float | None = None) -> Estimate:
        if self.tp == 1:
            return Estimate(0.0, "measured")
        curve = self.machine.curve("all-reduce", algorithm=WAY[self.reducer])
        return curve.at(self.message if nbytes is None else nbytes)


def most_of(ranks: int) -> float:
    """The expected maximum of so many standard normal values (Blom's approximation)."""
    return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
