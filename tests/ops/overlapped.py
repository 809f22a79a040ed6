"""Calls of overlapped products: the implementations, their arguments, and exact operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ladder.ops.registry import OPERATORS

IMPLEMENTATIONS = {
    "all_gather_matmul": ("chunked", "waiting"),
    "matmul_reduce_scatter": ("chunked", "tracked"),
    "matmul_all_reduce": ("chunked",),
}
EVERY = [(op, name) for op, names in IMPLEMENTATIONS.items() for name in names]
FEW_ROWS = [("linear_all_reduce", "pushed"), ("matmul_all_reduce", "pushed")]


def run_of(op: str, name: str) -> Callable[..., Any]:
    return OPERATORS[op].implementations[name].run


def operands(
    world: int, call: int, rows: int, n: int, dtype: torch.dtype, k: int = 24
) -> list[tuple[Tensor, Tensor]]:
    """(A, B) of each rank: rows of A have one element, a power of two, so products are exact.

    What ranks add to an element differs in size, so that sums depend on their order.
    """
    found = []
    for rank in range(world):
        source = torch.Generator().manual_seed(1000 * call + 10 * rank + rows)
        A = torch.zeros(rows, k)
        at = torch.randint(k, (rows, 1), generator=source)
        A.scatter_(1, at, 2.0 ** torch.randint(-3, 4, (rows, 1), generator=source))
        B = torch.randn(k, n, generator=source) * 3 ** torch.randn(k, n, generator=source)
        found.append((A.to(dtype), B.to(dtype)))
    return found


def arguments(op: str, A: Tensor, B: Tensor, average: bool) -> tuple[Any, ...]:
    if op == "all_gather_matmul":
        return A, [B, B[:, :5]], 0, True
    if op == "matmul_reduce_scatter":
        return A, B, "avg" if average else "sum", 0
    return A, B.t() if op == "linear_all_reduce" else B


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [result[0], *result[1]]
