"""Products whose sum over the ranks is added to the residual and normed: a landing in one operator.

As in `ladder.kernels.prefill.land_rows`, the partials are summed in rank order in float32, then the
residual is added; that sum is rounded once, to the new residual, and the norm is computed from it
before the rounding. Gradients: see ladder.ops.products; the backward pass norms the rounded
residual again instead of keeping the sum in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.jit import DTYPES
from ladder.kernels.limits import MAX_SIZE
from ladder.kernels.prefill import MAX_PIECES, land_rows
from ladder.operator_names import LANDING, REDUCE_LANDING
from ladder.ops import exchange
from ladder.ops.calls import execute, operator, rows_of, scattered, size_of, without_autocast
from ladder.ops.checks import (
    check_dim,
    check_divisible,
    check_like,
    check_matrix,
    check_product,
    check_shape,
)
from ladder.ops.collectives import all_reduce
from ladder.ops.gradients import scatter_gradients
from ladder.ops.products import check_scattered, transposed_product
from ladder.ops.registry import define, implement

SIZES = ("m", "n", "k")


def _measure(ranks: int, A: Any, B: Any, residual: Any = (), weight: Any = ()) -> tuple[int, ...]:
    return rows_of(A), B[1], A[-1]


def _check(A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, rows: list[int]) -> None:
    check_like("A", A, B=B, residual=residual, weight=weight)
    check_matrix("B", B, "A", A)
    shape = [*rows, B.shape[1]]
    check_shape("residual", residual, shape, "the shape of the sum's rows on this rank")
    check_shape("weight", weight, shape[-1:], "the columns of B")


def _check_pieces(
    ranks: int, A: Tensor, B: Tensor, residual: Tensor | None = None, weight: Tensor | None = None
) -> None:
    """Check by shapes alone, which do not say along which dimension the rows are scattered."""
    check_scattered(ranks, A, B)
    if residual is not None and weight is not None:
        dims = [dim for dim in range(A.dim() - 1) if A.shape[dim] % ranks == 0]
        rows = [list(scattered(A, dim, ranks).shape[:-1]) for dim in dims]
        own = list(residual.shape[:-1])
        _check(A, B, residual, weight, own if own in rows else rows[0])


def _check_whole(
    ranks: int, A: Tensor, B: Tensor, residual: Tensor | None = None, weight: Tensor | None = None
) -> None:
    check_product(A, B)
    if residual is not None and weight is not None:
        _check(A, B, residual, weight, list(A.shape[:-1]))


define(LANDING, SIZES, _measure, _check_pieces)
define(REDUCE_LANDING, SIZES, _measure, _check_whole)


def add_rms_norm(
    total: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(new residual, normed) from a sum that is not rounded."""
    total = total + residual
    scale = torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    normed = total * scale * weight.to(total.dtype)
    return total.to(residual.dtype), normed.to(residual.dtype)


def land(
    pieces: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(new residual, normed) from the pieces of a sum, each in the shape of the residual.

    On a GPU one kernel does this, if it takes as many pieces of these sizes and this dtype.
    """
    size, known = residual.shape[-1], residual.dtype in DTYPES and len(pieces) <= MAX_PIECES
    if not (residual.is_cuda and known and residual.numel() and size <= MAX_SIZE):
        return add_rms_norm(exchange.sum_in_order(pieces), residual, weight, eps)
    rows = [piece.reshape(-1, size).contiguous() for piece in (*pieces, residual)]
    landed, normed = land_rows(rows[:-1], rows[-1], weight.contiguous(), eps)
    return landed.view(residual.shape), normed.view(residual.shape)


def norm_backward(
    ctx: Any, landed: Tensor, weight: Tensor, grad_landed: Tensor, grad_normed: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the sum and of the norm's weight."""
    wide = exchange.wide(landed.dtype)
    x, grad = landed.to(wide), grad_normed.to(wide)
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
    unit, scaled = x * scale, grad * weight.to(wide)
    of_sum = scale * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    of_weight = (grad * unit).flatten(0, -2).sum(0)
    return (of_sum + grad_landed).to(landed.dtype), of_weight.to(weight.dtype)


@implement(LANDING, "staged")
def staged_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float,
    scatter_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pieces = exchange.scatter_pieces((A @ B).movedim(scatter_dim, 0), group)
    return land([piece.movedim(0, scatter_dim) for piece in pieces], residual, weight, eps)


@implement(REDUCE_LANDING, "staged")
def staged_everywhere(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    # The sums are gathered in float32, since each rank still adds its own copy of the residual.
    total = exchange.sum_everywhere(A @ B, group, rounded=False)
    return add_rms_norm(total, residual, weight, eps)


def _check_scatter(
    A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, scatter_dim: int, group_name: str
) -> int:
    check_matrix("B", B, "A", A)
    check_dim("scatter_dim", scatter_dim, "A", A)
    ranks = size_of(group_name)
    check_divisible("A", A.shape[scatter_dim], scatter_dim, ranks)
    rows = list(A.shape[:-1])
    rows[scatter_dim] //= ranks
    _check(A, B, residual, weight, rows)
    return ranks


@operator(LANDING)
def matmul_reduce_scatter_add_rms_norm(
    A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float, scatter_dim: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(residual + sum of the ranks' A @ B, its RMSNorm), this rank's rows of both.

    A, B, scatter_dim: as for matmul_reduce_scatter. residual: [..., m / T, ..., n], this rank's
    rows. weight: [n], of the norm. eps: added to the mean square.
    """
    _check_scatter(A, B, residual, weight, scatter_dim, group_name)
    return execute(
        LANDING, group_name, A, (A.shape, B.shape),
        A, B, residual, weight, eps, scatter_dim,
    )  # fmt: skip


@matmul_reduce_scatter_add_rms_norm.register_fake
def _(
    A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float, scatter_dim: int,
    group_name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    ranks = _check_scatter(A, B, residual, weight, scatter_dim, group_name)
    landed = scattered(A, scatter_dim, ranks, B.shape[1])
    return landed, torch.empty_like(landed)


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    A, B, _, weight, ctx.eps, ctx.dim, ctx.group = inputs
    ctx.save_for_backward(A, B, output[0], weight)


@without_autocast
def _scatter_backward(ctx: Any, grad_landed: Tensor, grad_normed: Tensor) -> tuple[Any, ...]:
    A, B, landed, weight = ctx.saved_tensors
    of_sum, of_weight = norm_backward(ctx, landed, weight, grad_landed, grad_normed)
    return *scatter_gradients(ctx, of_sum, A, B), of_sum, of_weight, None, None, None


matmul_reduce_scatter_add_rms_norm.register_autograd(
    _scatter_backward, setup_context=_scatter_setup
)


def _check_everywhere(
    A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, group_name: str
) -> None:
    _check(A, B, residual, weight, list(A.shape[:-1]))
    size_of(group_name)


@operator(REDUCE_LANDING)
def matmul_all_reduce_add_rms_norm(
    A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str
) -> tuple[Tensor, Tensor]:
    """(residual + sum of the ranks' A @ B, its RMSNorm), both whole on every rank.

    A: [..., k]. B: [k, n]. residual: [..., n], equal on all ranks; its gradient and that of weight
    [n] are those of this rank's copy.
    """
    _check_everywhere(A, B, residual, weight, group_name)
    return execute(
        REDUCE_LANDING, group_name, A, (A.shape, B.shape),
        A, B, residual, weight, eps,
    )  # fmt: skip


@matmul_all_reduce_add_rms_norm.register_fake
def _(
    A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float, group_name: str
) -> tuple[Tensor, Tensor]:
    _check_everywhere(A, B, residual, weight, group_name)
    landed = A.new_empty((*A.shape[:-1], B.shape[1]))
    return landed, torch.empty_like(landed)


def _everywhere_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    A, B, _, weight, ctx.eps, ctx.group = inputs
    ctx.save_for_backward(A, B, output[0], weight)


@without_autocast
def _everywhere_backward(ctx: Any, grad_landed: Tensor, grad_normed: Tensor) -> tuple[Any, ...]:
    A, B, landed, weight = ctx.saved_tensors
    of_sum, of_weight = norm_backward(ctx, landed, weight, grad_landed, grad_normed)
    needs_A, needs_B = ctx.needs_input_grad[:2]
    of_A: Tensor | None = None
    of_B: Tensor | None = None
    if needs_A or needs_B:
        total = all_reduce(of_sum, ctx.group)
        of_A = total @ B.t() if needs_A else None
        of_B = transposed_product(A, total, B) if needs_B else None
    return of_A, of_B, of_sum, of_weight, None, None


matmul_all_reduce_add_rms_norm.register_autograd(
    _everywhere_backward, setup_context=_everywhere_setup
)
