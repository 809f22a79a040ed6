"""Exchanges inside of products (`ladder.ops`): what is left of them beside the product.

The operators' table picks the implementation of each call. One that does not overlap takes the
backend's exchange after or before the product, whole. Of one that does, a share is left: what the
benchmark calls overlap efficiency, of two H200s, and of the shapes that the table names.
"""

from __future__ import annotations

import functools

import torch

from ladder.models.errors import UserError

OPERATORS = {
    "all-gather": "all_gather_matmul",
    "reduce-scatter": "matmul_reduce_scatter",
    "all-reduce": "matmul_all_reduce",
}
FUSED = "fused"  # the algorithm of such an exchange
# Medians of benchmarks/results/2026-11-22-ops-h200x2.jsonl: of what the table picks that overlaps,
# and of all-reduces that add in the order of the ranks.
LEFT = 0.47
STAGED = {"matmul_all_reduce": 1.47}
SERIAL = ("staged", "collective")  # implementations that do not overlap


@functools.lru_cache(maxsize=256)
def share_left(
    kind: str, gpu: str, ranks: int, sizes: tuple[int, int, int], any_order: bool
) -> tuple[float, str]:
    """Of the backend's exchange, what one inside of a product takes; and the implementation.

    kind: a key of OPERATORS. sizes: of the product, as the table has them: m, n, k.
    """
    from ladder.ops import registry  # slow to import, and needed by few

    op = OPERATORS[kind]
    call = registry.Call(op, gpu, torch.bfloat16, ranks, registry.bucket(sizes), any_order, sizes)
    picked = registry.listed(call)
    if picked not in SERIAL:
        return LEFT, picked
    return (STAGED.get(op, 1.0) if picked == "staged" else 1.0), picked


def check_weights(weights: str) -> None:
    """Raise UserError for matrices that fused operators do not multiply by."""
    if weights != "bf16":
        raise UserError(
            f"--reducers fused with --weights={weights}: fused operators multiply by matrices of "
            f"16 bits; leave one of them out"
        )
