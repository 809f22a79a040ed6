"""Fused computation and communication: products, lookups and landings that also exchange rows.

The operators are `torch.ops.ladder.*`, which importing this package defines: docs/operators.md.
`explain` says which implementation runs a call and why, `use` insists on one, `allow_any_order`
lets the calls of a group add in other orders than that of the ranks, and `as_captured` prepares the
capture of a CUDA graph.
"""

from ladder.comm.capture import as_captured
from ladder.ops import (
    backend,
    bags,
    blocked,
    gradients,
    landings,
    overlapped,
    overlapped_gradients,
    products,
    pushed,
    pushed_bags,
    pushed_experts,
    pushed_rows,
    ring,
    rows,
    spread,
    summing,
)
from ladder.ops.calls import allow_any_order
from ladder.ops.choice import Choice, explain, use

__all__ = [
    "Choice", "allow_any_order", "as_captured", "backend", "bags", "blocked", "explain",
    "gradients", "landings", "overlapped", "overlapped_gradients", "products", "pushed",
    "pushed_bags", "pushed_experts", "pushed_rows", "ring", "rows", "spread", "summing", "use",
]  # fmt: skip
