"""Sums that the backend makes: torch's product, then one collective of NCCL or gloo.

This is the strongest simple way: `ladder bench ops` compares all others with it. The order in which
a backend adds is its own, so these implementations, all called `collective`, are picked only where
a group allows it (`ladder.ops.allow_any_order`). `all_gather_matmul` has none, since nothing is
added in it: its `staged` is the backend's all-gather, then torch's product.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm import collectives
from ladder.operator_names import LANDING, REDUCE, REDUCE_LANDING, REDUCE_LINEAR, SCATTER
from ladder.ops.calls import rows_back, rows_first
from ladder.ops.landings import land
from ladder.ops.products import product
from ladder.ops.registry import ANY_ORDER, Call, implement


def empty_refusal(call: Call) -> str | None:
    """Why the rows cannot be cut from one matrix: one without elements does not say how many."""
    return "a size is 0; there is nothing to add" if 0 in call.sizes else None


def scattered_sum(group: dist.ProcessGroup, rows: Tensor, average: bool = False) -> Tensor:
    """This rank's rows [m / T, n] of the backend's sum of `rows` [m, n], or of its average."""
    ranks = group.size()
    out = rows.new_empty(len(rows) // ranks, rows.shape[1])
    op = dist.ReduceOp.AVG if average and rows.is_cuda else dist.ReduceOp.SUM
    collectives.reduce_scatter(out, rows, op=op, group=group)
    return out.div_(ranks) if average and not rows.is_cuda else out


def summed(group: dist.ProcessGroup, partial: Tensor) -> Tensor:
    """The backend's sum, in the memory of `partial`."""
    partial = partial.contiguous()
    dist.all_reduce(partial, group=group)
    return partial


@implement("reduce_scatter", ANY_ORDER, empty_refusal, ordered=False)
def collective_reduce_scatter(
    group: dist.ProcessGroup, x: Tensor, reduce_op: str, scatter_dim: int
) -> Tensor:
    own = scattered_sum(group, rows_first(x, scatter_dim).contiguous(), reduce_op == "avg")
    return rows_back(own, x, scatter_dim)


@implement("all_reduce", ANY_ORDER, ordered=False)
def collective_all_reduce(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return summed(group, x.clone(memory_format=torch.contiguous_format))


@implement(SCATTER, ANY_ORDER, empty_refusal, ordered=False)
def collective_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int
) -> Tensor:
    own = scattered_sum(group, rows_first(A, scatter_dim) @ B, reduce_op == "avg")
    return rows_back(own, A, scatter_dim)


@implement(REDUCE, ANY_ORDER, ordered=False)
def collective_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None
) -> Tensor:
    return summed(group, product(A, B, addend))


@implement(REDUCE_LINEAR, ANY_ORDER, ordered=False)
def collective_linear_all_reduce(group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
    return summed(group, F.linear(x, weight))


@implement(LANDING, ANY_ORDER, empty_refusal, ordered=False)
def collective_scatter_landing(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float,
    scatter_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    own = scattered_sum(group, rows_first(A, scatter_dim) @ B)
    return land([rows_back(own, A, scatter_dim)], residual, weight, eps)


@implement(REDUCE_LANDING, ANY_ORDER, ordered=False)
def collective_landing(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return land([summed(group, A @ B)], residual, weight, eps)
