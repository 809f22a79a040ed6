"""What the operations of a decode step cost on a machine, from its curves.

Products, attention and all-reduces take what the machine's file says. What its curves leave out is
one number for every launch, `launch_gap_us`, fitted to one recorded step of a model without
communication (`calibrate`); a kernel that only moves a few rows (the embedding, the choice of the
token, and a landing of which the file has no curve) takes no more than that. What rides on a
product is free, and a product that pushes ends when all ranks have its result.

Not known here: kernels that slow each other down, as NCCL beside products does.
"""

from __future__ import annotations

from ladder.costs import BF16
from ladder.kernels.decode import MAX_ROWS
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, unknown
from ladder.perf.graph import Operation
from ladder.perf.lower_decode import decode
from ladder.perf.machine import Basis, Estimate, Machine, worst
from ladder.perf.simulate import simulate

WAY = {"push": "push", "async": "nccl"}


class DecodeCost:
    """Microseconds of each operation of a step of `batch` sequences after `context` tokens."""

    def __init__(
        self, config: ModelConfig, machine: Machine, tp: int, reducer: str, batch: int, context: int
    ) -> None:
        config.check_divides(tp, "--tp")
        if reducer not in WAY:
            raise unknown("reducer of --reducers", reducer, WAY)
        if not 1 <= batch <= MAX_ROWS:
            raise UserError(f"--batch={batch} must be 1 to {MAX_ROWS}, as fused decode steps have")
        if not 1 <= context <= config.max_seq_len:
            raise UserError(
                f"--context={context} must be 1 to the model's context, {config.max_seq_len}"
            )
        self.config, self.machine, self.tp, self.reducer = config, machine, tp, reducer
        self.batch, self.context = batch, context
        self.gap = 0.0
        if "launch_gap_us" in machine.values:
            self.gap = machine.value("launch_gap_us")
        heads = max(1, config.num_kv_heads // tp)
        queries = config.num_heads // tp
        hidden, inner = config.hidden_size, config.intermediate_size // tp
        vocabulary = -(-config.vocab_size // tp)
        self.weights = {
            "qkv": BF16 * hidden * (queries + 2 * heads) * config.head_dim,
            "output": BF16 * hidden * queries * config.head_dim,
            "gate-up": BF16 * hidden * 2 * inner,
            "down": BF16 * hidden * inner,
            "head": BF16 * hidden * vocabulary,
        }
        self.heads = batch * heads
        self.message = BF16 * batch * hidden
        self.bases: list[Basis] = []
        self._known: dict[tuple[str, str, bool, bool], Estimate] = {}

    def __call__(self, operation: Operation) -> float:
        rides = operation.rides is not None
        key = (operation.kind, operation.part, operation.pushes, rides)
        if key not in self._known:
            self._known[key] = found = self.estimate(operation)
            self.bases.append(found.basis)
        return self._known[key].us + (0.0 if rides else self.gap)

    def estimate(self, operation: Operation) -> Estimate:
        """What it takes alone. Raises UserError if the machine lacks the curve."""
        kind = operation.kind
        if operation.rides is not None:
            # A send is there when it has reached the others; a landing runs under the product.
            return self._reduce() if kind == "send" else Estimate(0.0, "measured")
        if kind == "product":
            found = self._product(self.weights[operation.part])
            if not operation.pushes:
                return found
            sent = self._reduce()
            return Estimate(found.us + sent.us, worst([found.basis, sent.basis]))
        if kind == "attention":
            return self.machine.between("attention", "keys", self.context, self.heads)
        if kind == "all-reduce":
            return self._reduce()
        if kind in ("landing", "sum") and self.machine.family("landing"):
            return self.machine.between("landing", "hidden", self.config.hidden_size, self.batch)
        if kind == "send":
            return self._reduce()
        if operation.part == "gather" and self.tp > 1:
            return self._reduce(8 * self.batch)
        return Estimate(0.0, "interpolated")

    def _product(self, nbytes: float) -> Estimate:
        """By bytes as with one row, times what more rows cost at the sizes where both are known."""
        one = self.machine.curve("product", rows=1)
        found = one.at(nbytes)
        if self.batch == 1:
            return found
        places = [x for x, _ in self.machine.family("product")[-1].points]
        middle = places[len(places) // 2]
        more = self.machine.between("product", "rows", self.batch, middle)
        return Estimate(found.us * more.us / one.at(middle).us, "extrapolated")

    def _reduce(self, nbytes: float | None = None) -> Estimate:
        if self.tp == 1:
            return Estimate(0.0, "measured")
        curve = self.machine.curve("all-reduce", algorithm=WAY[self.reducer])
        return curve.at(self.message if nbytes is None else nbytes)


def calibrate(
    config: ModelConfig,
    machine: Machine,
    tp: int,
    reducer: str,
    batch: int,
    context: int,
    us: float,
) -> float:
    """The gap of a launch with which a step of this model takes `us` microseconds."""
    cost = DecodeCost(config, machine, tp, reducer, batch, context)
    graph = decode(config.plan, WAY[reducer] if tp > 1 else "alone")
    cost.gap = 0.0
    none = simulate(graph, cost).total
    cost.gap = 1.0
    return (us - none) / (simulate(graph, cost).total - none)
