"""What the kernels of a prefill cost on a machine.

Products take their arithmetic at the rate of the `matrix` curves, or else `matrix_tflop_s`, less
what the power limit takes. Kernels between products take their bytes at `copy_tb_s`, collectives
and copies the times of their curves. Each of them takes a gap, too. A barrier's time includes its
launch: it takes a gap only if it changes streams.
"""

from __future__ import annotations

import functools
import math

from ladder.costs import (
    BF16,
    MULTIPROCESSORS,
    product_shapes,
    stored_bytes,
)
from ladder.kernels.limits import MAX_ROWS, PIECE, message_bytes
from ladder.models.config import ModelConfig
from ladder.parallel.overlap import prompt_mode
from ladder.perf.fused import Inside
from ladder.perf.graph import COMM, FUSED, MAIN, ROUNDED, Operation
from ladder.perf.grid import FILL, SQUARE, matrix_rate
from ladder.perf.machine import Basis, Estimate, Machine
from ladder.perf.power import power_share
from ladder.perf.slowdowns import Slowdowns

ATTENTION_ROWS = 128  # queries of one thread block


class PromptCost:
    """Microseconds of each operation of a prefill of `batch` prompts of `prompt` tokens.

    weights: how they are stored (`ladder.costs`). Weights in 8 bits are converted for each product.
    """

    def __init__(
        self, config: ModelConfig, machine: Machine, tp: int, batch: int, prompt: int,
        weights: str = "bf16",
    ) -> None:  # fmt: skip
        self.config, self.machine, self.tp = config, machine, tp
        self.batch, self.prompt, self.rows = batch, prompt, batch * prompt
        # The mode for which the operators' table is asked, as by the engine (`ladder.infer`).
        self.mode = prompt_mode(self.rows)
        self.heads = config.num_heads // tp
        self.shapes = product_shapes(config, tp)
        self.packed, self.inner = self.shapes["qkv"][0], self.shapes["down"][1]
        self.stored = weights
        self.share = 1.0  # of their rate, that products keep under the power limit
        self.gap = machine.value("prompt_gap_us")
        self.least = machine.value("launch_us")  # the least time of any kernel
        self.rate = 1e6 * machine.value("matrix_tflop_s")  # FLOPs a microsecond
        self.memory = 1e6 * machine.value("copy_tb_s")  # bytes a microsecond
        self.barrier = machine.value("barrier_us")
        self.slowdowns = Slowdowns(machine)
        self.bases: list[Basis] = []
        self._known: dict[tuple[object, ...], float] = {}
        self._speeds: dict[tuple[object, ...], float] = {}

    def __call__(self, operation: Operation) -> float:
        key = self.key(operation)
        if key not in self._known:
            found = self.estimate(operation)
            self.bases.append(found.basis)
            # `prompt_gap_us` may be fitted to less than a launch. What takes 0 us is no launch.
            self._known[key] = max(found.us, self.least) if found.us else 0.0
        return self._known[key]

    def key(self, each: Operation) -> tuple[object, ...]:
        """Operations with equal keys take equally long."""
        return each.kind, each.part, each.few, each.algorithm, each.tensors, each.stream

    def estimate(self, operation: Operation) -> Estimate:
        """The time of an operation alone. Raises UserError if the machine lacks the curve."""
        kind, few = operation.kind, operation.few
        rows = self.batch if few else self.rows
        if kind == "product":
            return Estimate(self.product(operation.part, rows), "extrapolated")
        if kind == "attention":
            return Estimate(self.attention(1 if few else self.prompt) + self.gap, "extrapolated")
        if kind == "choice":
            return Estimate(self.gap, "interpolated")
        if operation.algorithm == FUSED:
            return self.fused(kind, operation.part, any_order=False, lands=True)
        if operation.algorithm == ROUNDED:
            return self.rounded(rows)
        if kind == "all-reduce":
            nbytes = BF16 * self.config.hidden_size * rows
            found = self.machine.curve("all-reduce", algorithm=operation.algorithm).at(nbytes)
            crossings = 2 if operation.stream == COMM else 1  # to a stream and back
            return Estimate(found.us + crossings * self.gap, found.basis)
        if kind == "copies":
            whole = self.exchange("copy-kernels", self.tp + 3)
            if whole is not None:
                return Estimate(whole.us / 2, whole.basis)
            found = self.peer_copy(self.tensor(rows) / self.tp)
            turn = self.machine.value("copy_turn_us")
            return Estimate((self.tp - 1) * (found.us + self.gap) + turn, found.basis)
        if kind == "barrier":
            crossing = 0.0 if operation.stream == MAIN else self.gap
            return Estimate(self.barrier + crossing, "extrapolated")
        if kind == "rotary":
            return self.moved(2 * BF16 * self.packed * rows)
        if kind == "swiglu":
            return self.moved(3 * BF16 * self.inner * rows)
        if kind == "embed":
            return self.moved(self.tensor(rows))
        if kind == "peers":
            whole = self.exchange("direct", 0)
            if whole is not None:
                share = operation.tensors / (2 * (self.tp - 1) / self.tp)
                return Estimate(share * whole.us, whole.basis)
            # As an all-reduce by push, which sends a message to each peer.
            sent = operation.tensors * self.tensor(rows) / (self.tp - 1)
            return self.machine.curve("all-reduce", algorithm="push").at(sent)
        return self.moved(operation.tensors * self.tensor(rows))

    def rounded(self, rows: int) -> Estimate:
        """An all-reduce in 8 bits (`ladder.parallel.eight_bits`). Two ranks gather their messages
        once. More ranks do an all-to-all, which moves as much as a gather, and then a gather."""
        row = BF16 * self.config.hidden_size
        message = message_bytes(self.config.hidden_size)
        if self.tp == 2:
            link = self.machine.nccl("all-gather", 2.0 * rows * message).us
            moved, gaps = 2.0 * row + 3 * message, 4  # rounded; added and restored
        else:
            link = 2 * self.machine.nccl("all-gather", 1.0 * rows * message).us
            added = (row + self.tp * message) / self.tp  # a rank's share, and rounded
            moved, gaps = 2 * row + 2 * message + added, 6
        return Estimate(link + rows * moved / self.memory + gaps * self.gap, "extrapolated")

    def exchange(self, transport: str, landed: int) -> Estimate | None:
        """The time in which a measured exchange moves rows there and back: less its two barriers
        and its landing, which moves `landed` tensors of a rank's rows. None if not measured."""
        measured = self.machine.family("exchange", transport=transport)
        if not measured:
            return None
        nbytes = self.tensor(self.rows)
        found = measured[0].at(nbytes)
        rest = found.us - 2 * self.barrier - self.moved(landed * nbytes / self.tp).us
        return Estimate(max(0.0, rest), found.basis)

    def fused(
        self, kind: str, part: str, any_order: bool, lands: bool = False, back: bool = False
    ) -> Estimate:
        """What an exchange of all rows inside of a product takes beyond the product.

        back: the exchange is inside of the products of the gradients. lands: a scatter's landing is
        inside, too. It counts a second time, as the operation after the product: in a model such
        operators take about that much longer than by themselves (docs/predict-model.md).
        """
        outputs, inputs = self.shapes[part]
        if back:
            outputs, inputs = inputs, outputs
        us = self.machine.nccl(kind, self.tensor(self.rows)).us + self.gap
        kind = "landing" if lands and kind == "reduce-scatter" else kind
        us = self.inside(kind, (self.rows, outputs, inputs), any_order, us, self.mode, back)
        return Estimate(us, "extrapolated")

    @functools.cached_property
    def inside(self) -> Inside:
        return Inside(self.machine, self.tp)

    def tensor(self, rows: float) -> float:
        return BF16 * self.config.hidden_size * rows

    def moved(self, nbytes: float) -> Estimate:
        return Estimate(nbytes / self.memory + self.gap, "extrapolated")

    def peer_copy(self, nbytes: float) -> Estimate:
        (curve,) = self.machine.family("peer copy") or [self.machine.curve("peer copy")]
        return curve.at(nbytes)

    def product(self, part: str, rows: int) -> float:
        outputs, inputs = self.shapes[part]
        read = BF16 * (outputs * inputs + rows * (outputs + inputs)) / self.memory
        more = 0.0
        if self.stored != "bf16":
            stored = stored_bytes(outputs * inputs, outputs, self.stored)
            if rows == self.batch <= MAX_ROWS:  # the kernel of decode steps
                return (stored + BF16 * rows * (outputs + inputs)) / self.memory + self.gap
            more = (stored + BF16 * outputs * inputs) / self.memory
            more += 2 * self.gap * math.ceil(outputs * inputs / PIECE) - self.gap
        if rows <= MAX_ROWS:
            return read + self.gap + more
        return max(self.arithmetic(rows, outputs, inputs) / self.share, read) + self.gap + more

    def arithmetic(self, rows: int, outputs: int, inputs: int) -> float:
        """Microseconds of arithmetic, by the `matrix` curves or else at a large square's rate."""
        flops = 2.0 * rows * outputs * inputs
        rate = matrix_rate(self.machine, rows, outputs, inputs)
        if rate is not None:
            return flops / rate
        return flops * (1 + FILL / inputs) / (1 + FILL / SQUARE) / self.rate

    def attention(self, prompt: int) -> float:
        """Microseconds of causal attention of whole prompts; too few blocks leave multiprocessors
        idle. prompt 1: of the last position of each prompt."""
        if prompt == 1:
            nbytes = 2 * BF16 * self.batch * self.prompt * self.config.head_dim
            return nbytes * max(1, self.config.num_kv_heads // self.tp) / self.memory
        flops = 2.0 * self.batch * self.heads * self.config.head_dim * prompt**2
        rate = 1e6 * self.machine.value("prompt_attention_tflop_s")
        rate /= 1 + self.machine.value("prompt_attention_half") / prompt
        blocks = self.batch * self.heads * math.ceil(prompt / ATTENTION_ROWS)
        return flops / (rate * min(1.0, blocks / MULTIPROCESSORS))

    def unlimit(self) -> None:
        """Give products their whole speed."""
        self.share = 1.0
        self._known.clear()

    def limit(self, busy_us: float, total_us: float) -> None:
        """Slow products to what the power limit leaves in a pass that computes for `busy_us`."""
        self.unlimit()
        boost, fp8 = self.machine.value("boost_ms"), self.stored.startswith("fp8")
        self.share = power_share(self.machine, boost, busy_us, total_us, fp8)

    def beside(self, operation: Operation, other: Operation) -> float:
        """The speed of an operation beside another one, of its speed alone."""
        key = operation.resource, operation.kind, other.resource, other.kind
        found = self._speeds.get(key)
        if found is None:
            found = self._speeds[key] = self._beside(operation, other)
        return found

    def _beside(self, operation: Operation, other: Operation) -> float:
        one, two = operation.resource, other.resource
        if two == "link" and one == "all":
            if operation.kind == "product":
                return self.slowdowns.value("product_beside_copies")
            return 1 - self.copied / self.memory
        if one == "link" and other.kind == "product":
            return self.slowdowns.value("copies_beside_product")
        return self.slowdowns.together(one, two)

    @property
    def copied(self) -> float:
        """Bytes a microsecond of this GPU's memory that copies read and write."""
        large = 2.0**28
        return 2 * large / self.peer_copy(large).us
