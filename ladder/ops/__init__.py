"""Fused computation and communication: products, lookups and landings that also exchange rows.

The operators are `torch.ops.ladder.*`, which importing this package defines: docs/operators.md.
`explain` says which implementation runs a call and why, `use` insists on one.
"""

from ladder.ops import bags, landings, overlapped, products, pushed, rows
from ladder.ops.registry import Choice, explain, use

__all__ = [
    "Choice", "bags", "explain", "landings", "overlapped", "products", "pushed", "rows", "use",
]  # fmt: skip
