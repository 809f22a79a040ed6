"""Why a plan and its ranks cannot have some form of the residual. These functions need only the
plan, and no torch, since predictions call them, too."""

from __future__ import annotations

from ladder.models.plan import Plan
from ladder.models.ranks import Ranks


def sharded_refusal(plan: Plan, ranks: Ranks) -> str | None:
    """The reason why this plan's residual cannot be sharded by tokens over these ranks, or None."""
    if ranks.held > 1:
        return f"{ranks.held} virtual ranks in one process keep their residuals whole"
    if ranks.processes == 1:
        return "there is one process, and nothing to shard over"
    for n, record in enumerate(plan.sublayers):
        if record.reduce != "output":
            return f"sublayer {n} has reduce={record.reduce!r} and would need 'output'"
        if record.own_lag != record.peer_lag or record.own_scale != 1:
            return (
                f"sublayer {n} has own_lag={record.own_lag}, peer_lag={record.peer_lag}, "
                f"own_scale={record.own_scale}: the ranks' residuals differ"
            )
    return None


def rows_refusal(sequences: int, length: int, tp: int) -> str | None:
    """The reason why sequence parallelism cannot split a pass over tp ranks, or None."""
    rows = sequences * length
    if rows % tp == 0:
        return None
    return f"cannot divide {rows} tokens ({sequences} x {length}) among tp={tp} ranks"


def sums_in_products(plan: Plan, n: int) -> bool:
    """Whether `FusedSumsPass` sums the output of sublayer n inside its product."""
    record = plan.sublayers[n]
    single = record.kind != "attention+mlp" and not plan.own_needed[n]
    return plan.blocking[n] and record.reduce != "none" and single


def fused_refusal(plan: Plan, ranks: Ranks) -> str | None:
    """The reason why no prompt of this plan and these ranks runs by fused operators, or None."""
    refusal = sharded_refusal(plan, ranks)
    if refusal is None or ranks.held > 1 or ranks.processes == 1:
        return refusal
    if any(sums_in_products(plan, n) for n in range(len(plan.sublayers))):
        return None
    return f"the plan has no blocking reduce that a fused matmul could hide ({refusal})"


def rounding_refusal(plan: Plan) -> str | None:
    """The reason why this plan's reduces cannot be in 8 bits, or None."""
    if all(record.reduce != "residual" for record in plan.sublayers):
        return None
    return "some sublayers have reduce='residual', and 8 bits would round the whole residual there"
