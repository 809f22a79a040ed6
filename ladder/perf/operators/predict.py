"""The predicted time, ECT and E of an operator's call, by implementation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ladder.bench.ops.derive import ect_us, efficiency
from ladder.bench.ops.points import BY_COLUMNS, OpPoint, Variant, calls_of
from ladder.comm.capture import Mode
from ladder.costs import BF16
from ladder.models.errors import UserError
from ladder.operator_names import GATHER, LANDING, REDUCE
from ladder.ops.gradients import BACKWARD
from ladder.ops.pushed import LARGEST
from ladder.ops.registry import ANY_ORDER, DEFAULT
from ladder.perf.machine import Machine
from ladder.perf.nodes import for_degree, without_peers
from ladder.perf.operators.cost import PUSHED_HOST_US, TODAY, Host, OperatorCost
from ladder.perf.operators.lower import OPS, OVERLAPPED, Size, size_of, sum_bytes
from ladder.perf.operators.run import run

ALONE, PUSHED = "alone", "pushed"
KNOWN = (DEFAULT, ANY_ORDER, PUSHED, *OVERLAPPED)
TILED = ("waiting", "tracked", "summing")  # whose product is one of our kernels
SHOTS = {1: "push", 2: "two-shot"}  # the all-reduce behind a pushed product
TURNS = 3  # iterations; each finds the power limit's share for the times of the one before


@dataclass(frozen=True)
class Predicted:
    """Microseconds of a call; and ECT and E, which also need the times of the product alone and of
    the baseline (`ladder.bench.ops.derive`)."""

    us: float
    ect_us: float
    efficiency: float | None


def efficiency_text(e: float | None) -> str:
    return "-" if e is None else f"{e:.2f}"


class Predictor:
    """Predictions on a machine, or on as many of its GPUs as a point has ranks.

    host: see `OperatorCost`. unmeasured: the values behind the predictions that nobody measured,
    with their sources.
    """

    def __init__(self, machine: Machine, host: Host = TODAY) -> None:
        self.machine, self.host = machine, host
        self._costs: dict[int, OperatorCost] = {}
        self._times: dict[tuple[OpPoint, Variant, Mode], float] = {}

    def __call__(self, point: OpPoint, variant: Variant, mode: Mode = "captured") -> Predicted:
        """The prediction for calls that follow each other as in the turns of `ladder bench ops`."""
        us = self.us(point, variant, mode)
        alone, baseline = self.us(point, Variant(ALONE)), self.us(point, plain(point.op))
        e = None if variant.name == ALONE else efficiency(us, alone, baseline)
        return Predicted(us, ect_us(us, alone), e)

    def us(self, point: OpPoint, variant: Variant, mode: Mode = "captured") -> float:
        """Microseconds of a call. Raises UserError for one that is not predicted."""
        if not predicts(point, variant):
            raise UserError(
                f"{point.op} by {variant} is not predicted; known: {', '.join(OPS)} by "
                f"{', '.join(KNOWN)}, in 16 bits"
            )
        key = point, variant, mode
        if key not in self._times:
            self._times[key] = _time(self.cost(point.ranks), point, variant, mode)
        return self._times[key]

    def able(self, point: OpPoint, variant: Variant) -> bool:
        """Whether a call is predicted, and the machine has what it needs."""
        return predicts(point, variant) and self.lacks(point, variant) is None

    def lacks(self, point: OpPoint, variant: Variant) -> str | None:
        """What the machine lacks for an implementation, with the remedy; None if nothing."""
        machine = self.cost(point.ranks).machine
        try:
            if variant.name in OVERLAPPED:
                machine.curve("peer copy")
            if variant.name == PUSHED or dict(variant.options).get("push"):
                machine.curve("all-reduce", algorithm=_shots(variant))
        except UserError as error:
            if without_peers(self.machine):  # none of this can be measured there
                return f"the GPUs of {self.machine.name!r} have no access to peers' memory"
            return str(error)
        return None

    def cost(self, ranks: int) -> OperatorCost:
        if ranks not in self._costs:
            self._costs[ranks] = OperatorCost(for_degree(self.machine, ranks), self.host)
        return self._costs[ranks]

    @property
    def unmeasured(self) -> tuple[str, ...]:
        found = (each for cost in self._costs.values() for each in cost.slowdowns.unmeasured)
        return tuple(dict.fromkeys(found))


def plain(op: str) -> Variant:
    """The baseline: a product and the backend's collective."""
    return Variant(DEFAULT if op == GATHER else ANY_ORDER)


def predicts(point: OpPoint, variant: Variant) -> bool:
    if point.op not in OPS or point.dtype not in ("bfloat16", "float16"):
        return False
    if variant.name in OVERLAPPED:
        return point.op in OVERLAPPED[variant.name][1]
    if point.op in BACKWARD:  # `staged` is what the table picks for its exchange
        return variant.name in (ALONE, ANY_ORDER)
    if variant.name == PUSHED:
        columns = point.k if point.op == GATHER else point.n
        return BF16 * point.m * columns <= LARGEST
    return variant.name in (ALONE, DEFAULT) or (variant.name == ANY_ORDER and point.op != GATHER)


def _time(cost: OperatorCost, point: OpPoint, variant: Variant, mode: Mode) -> float:
    size, calls = size_of(point), calls_of(point)
    if variant.name not in OVERLAPPED:
        moved, sent = _serial(cost, point.op, size, variant)
        computed = cost.alone(size.rows, size.outputs, size.inputs)
        if point.op in BACKWARD:  # the matrix's, too
            computed += cost.gap + cost.alone(size.inputs, size.outputs, size.rows)

        def serial(share: float) -> tuple[float, float]:
            busy = computed / share + moved
            return busy + sent + cost.gap, busy

        us = _limited(cost, serial, calls)
        waits = mode == "eager" and variant.name == PUSHED
        return max(us, cost.hosted(PUSHED_HOST_US)) if waits else us
    lowered = OVERLAPPED[variant.name][0](cost, point.op, size, **dict(variant.options))

    def overlapped(share: float) -> tuple[float, float]:
        found = run(*lowered, cost.rates(share, mode))
        return found.us, found.busy_us

    us = _limited(cost, overlapped, calls)
    return us if mode == "captured" else max(us, cost.host(lowered[0][0], variant.name in TILED))


def _shots(variant: Variant) -> str:
    return SHOTS[dict(variant.options).get("shots", 1)]


def _serial(cost: OperatorCost, op: str, size: Size, variant: Variant) -> tuple[float, float]:
    """Microseconds beyond the product: of sums and landings; and of exchanges, with the gaps."""
    rows, partial, name = size.shard, size.line * size.rows, variant.name
    if name == ALONE:
        return 0.0, 0.0
    if name == PUSHED and op != REDUCE:
        landed = cost.moves(size.line * rows * sum_bytes(op, 0)).us if op == LANDING else 0.0
        whole = BF16 * size.rows * size.inputs if op == GATHER else partial
        return landed, cost.pushes(whole, size.ranks) + cost.gap
    if name == PUSHED:
        found = cost.machine.curve("all-reduce", algorithm=_shots(variant)).at(partial)
        return 0.0, found.us + cost.gap
    if op in BY_COLUMNS:
        return 0.0, cost.exchange("all-gather", 2 * size.rows * size.inputs)
    if name == ANY_ORDER and op != LANDING:
        return 0.0, cost.exchange("all-reduce" if op == REDUCE else "reduce-scatter", partial)
    if name == ANY_ORDER:
        landed = cost.moves(size.line * rows * sum_bytes(op, 1)).us
        return landed, cost.exchange("reduce-scatter", partial) + cost.gap
    summed = cost.moves(size.line * rows * sum_bytes(op, size.ranks)).us
    sent = cost.exchange("all-gather", partial) + cost.gap  # an all-to-all
    return summed, sent + (cost.exchange("all-gather", partial) if op == REDUCE else 0.0)


def _limited(
    cost: OperatorCost, timed: Callable[[float], tuple[float, float]], calls: int
) -> float:
    """The time of a call under the power limit, in turns of `calls` calls. timed: maps the share of
    their speed that products keep to a call's time and the part of it that the GPU computes."""
    share = 1.0
    for _ in range(TURNS):
        us, busy = timed(share)
        share = cost.share(busy, us, calls)
    return timed(share)[0]
