"""Matrix products that gather what they read, or sum what they write, over the ranks of a group.

T is the number of ranks. Every rank calls with the same shapes and dtypes. bfloat16, float16 and
float32; float64 for gradcheck. A product is accumulated in float32 (on CUDA as torch's settings for
products say) and rounded to its dtype; partials are summed in rank order in float32 and rounded
once. docs/operators.md says what each operator computes.

Gradients follow the project's one rule (ladder.models.reducer): a rank's gradient is that of its
own copy, and the loss is counted once over all ranks. So a gather's adjoint is a reduce-scatter, a
reduce-scatter's a gather, and an all-reduce is its own adjoint: backward, it sums the gradients of
the copies. All ranks must need the same gradients, since the backward pass communicates, too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.operator_names import GATHER, REDUCE, REDUCE_LINEAR, SCATTER
from ladder.ops import exchange
from ladder.ops.calls import (
    execute,
    gathered,
    operator,
    rows_of,
    scattered,
    size_of,
    without_autocast,
)
from ladder.ops.checks import (
    check_dim,
    check_divisible,
    check_like,
    check_matrix,
    check_product,
    check_products,
    check_reduce_op,
    check_scatters,
    check_shape,
)
from ladder.ops.collectives import all_reduce, staged_all_gather, staged_reduce_scatter
from ladder.ops.registry import define, implement

FEW_BYTES = 2**21  # of the largest partial that every rank gathers from all


def transposed_product(x: Tensor, grad: Tensor, matrix: Tensor) -> Tensor:
    """x^T grad over all rows: the gradient of the matrix in x @ matrix, in its layout.

    Weights are transposed views. In another layout autograd would copy their gradients.
    """
    x, grad = x.flatten(0, -2), grad.flatten(0, -2)
    if matrix.stride(0) < matrix.stride(1):
        return (grad.t() @ x).t()
    return x.t() @ grad


# -- all_gather_matmul ------------------------------------------------------------------------

define(
    GATHER,
    ("m", "n", "k"),
    lambda ranks, A, Bs: (ranks * rows_of(A), sum(B[1] for B in Bs), A[-1]),
    lambda ranks, A, Bs: check_products("A", A, Bs),
)


@implement(GATHER, "staged")
def staged_all_gather_matmul(
    group: dist.ProcessGroup, A: Tensor, Bs: list[Tensor], gather_dim: int, return_A: bool
) -> tuple[Tensor | None, list[Tensor]]:
    whole = staged_all_gather(group, A, gather_dim)
    return whole if return_A else None, [whole @ B for B in Bs]


def _check_all_gather_matmul(A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str) -> int:
    check_products("A", A, Bs)
    check_dim("gather_dim", gather_dim, "A", A)
    return size_of(group_name)


@operator(
    GATHER,
    schema="(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True)"
    " -> (Tensor?, Tensor[])",
)
def all_gather_matmul(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    """(A of all ranks, its product with each B).

    A: [..., m / T at gather_dim, ..., k], this rank's rows; gather_dim is any dimension but the
    last. Bs: [k, n_i]. Returns ([..., m, ..., k] or None, [..., m, ..., n_i] for each B). return_A:
    also return the gathered A; it is then kept for the backward pass, which otherwise gathers it
    again. Adjoint: matmul_reduce_scatter for A; for a B, the gathered A transposed times the
    gradient.
    """
    _check_all_gather_matmul(A, Bs, gather_dim, group_name)
    shapes = A.shape, [B.shape for B in Bs]
    return execute(GATHER, group_name, A, shapes, A, Bs, gather_dim, return_A)


@all_gather_matmul.register_fake
def _(
    A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool = True
) -> tuple[Tensor | None, list[Tensor]]:
    ranks = _check_all_gather_matmul(A, Bs, gather_dim, group_name)
    whole = gathered(A, gather_dim, ranks)
    outs = [whole.new_empty((*whole.shape[:-1], B.shape[1])) for B in Bs]
    return whole if return_A else None, outs


# -- matmul_reduce_scatter --------------------------------------------------------------------


def check_scattered(ranks: int, A: Tensor, B: Tensor) -> None:
    """Raise UserError unless A @ B is a product whose rows can be scattered."""
    check_product(A, B)
    check_scatters("A", A, ranks)


define(
    SCATTER,
    ("m", "n", "k"),
    lambda ranks, A, B: (rows_of(A), B[1], A[-1]),
    check_scattered,
)


@implement(SCATTER, "staged")
def staged_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int
) -> Tensor:
    return staged_reduce_scatter(group, A @ B, reduce_op, scatter_dim)


def _check_matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> int:
    check_product(A, B)
    check_dim("scatter_dim", scatter_dim, "A", A)
    check_reduce_op(reduce_op)
    ranks = size_of(group_name)
    check_divisible("A", A.shape[scatter_dim], scatter_dim, ranks)
    return ranks


@operator(SCATTER)
def matmul_reduce_scatter(
    A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Tensor:
    """This rank's rows of the sum of the ranks' A @ B.

    A: [..., m at scatter_dim, ..., k], this rank's columns; T divides m; scatter_dim is any
    dimension but the last. B: [k, n]. Returns [..., m / T, ..., n]. reduce_op: "sum" or "avg".
    Adjoint: all_gather_matmul of the gradient with B transposed.
    """
    _check_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    shapes = A.shape, B.shape
    return execute(SCATTER, group_name, A, shapes, A, B, reduce_op, scatter_dim)


@matmul_reduce_scatter.register_fake
def _(A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    ranks = _check_matmul_reduce_scatter(A, B, reduce_op, scatter_dim, group_name)
    return scattered(A, scatter_dim, ranks, B.shape[1])


# -- matmul_all_reduce, linear_all_reduce -----------------------------------------------------


def _check_addends(ranks: int, A: Tensor, B: Tensor, addend: Tensor | None = None) -> None:
    check_product(A, B)
    if addend is not None:
        check_like("A", A, addend=addend)
        check_shape("addend", addend, [*A.shape[:-1], B.shape[1]], "the shape of A @ B")


def _check_linear(ranks: int, x: Tensor, weight: Tensor) -> None:
    check_like("x", x, weight=weight)
    check_matrix("weight", weight, "x", x, dim=1)


define(
    REDUCE,
    ("m", "n", "k"),
    lambda ranks, A, B, addend=None: (rows_of(A), B[1], A[-1]),
    _check_addends,
)
define(
    REDUCE_LINEAR,
    ("m", "n", "k"),
    lambda ranks, x, weight: (rows_of(x), *weight),
    _check_linear,
)


@implement(REDUCE, "staged")
def staged_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None
) -> Tensor:
    return exchange.sum_everywhere(product(A, B, addend), group)


@implement(REDUCE_LINEAR, "staged")
def staged_linear_all_reduce(group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
    partial = F.linear(x, weight)
    if partial.nbytes > FEW_BYTES:
        return exchange.sum_everywhere(partial, group)
    # One gather and a sum on each rank: for a few rows, latency matters and not the traffic.
    return exchange.rounded_sum(exchange.gather(partial, group))


def product(A: Tensor, B: Tensor, addend: Tensor | None) -> Tensor:
    """A @ B + addend, rounded once."""
    if addend is None:
        return A @ B
    rows = torch.addmm(addend.flatten(0, -2), A.flatten(0, -2), B)
    return rows.unflatten(0, A.shape[:-1])


@operator(REDUCE)
def matmul_all_reduce(
    A: Tensor, B: Tensor, group_name: str, addend: Tensor | None = None
) -> Tensor:
    """The sum of the ranks' A @ B, [..., n], on every rank. A: [..., k], any rows. B: [k, n].

    addend: [..., n], added to this rank's product, and so a part of the sum.

    Adjoint: the ranks' gradients are summed, then multiplied. A rank's gradient is that of its own
    copy of the result, and the loss is counted once over all ranks (ladder.models.reducer): where
    every rank computes the whole loss from its copy, each divides it by T.
    """
    _check_addends(size_of(group_name), A, B, addend)
    return execute(REDUCE, group_name, A, (A.shape, B.shape), A, B, addend)


@matmul_all_reduce.register_fake
def _(A: Tensor, B: Tensor, group_name: str, addend: Tensor | None = None) -> Tensor:
    _check_addends(size_of(group_name), A, B, addend)
    return A.new_empty((*A.shape[:-1], B.shape[1]))


def _save_both(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    A, B, ctx.group, *_ = inputs
    ctx.save_for_backward(A, B)


@without_autocast
def _matmul_all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    A, B = ctx.saved_tensors
    total = all_reduce(grad, ctx.group)
    needs_A, needs_B, _, *needs_addend = ctx.needs_input_grad  # empty if the addend was left out
    grad_B = transposed_product(A, total, B) if needs_B else None
    of_addend = total if any(needs_addend) else None
    return total @ B.t() if needs_A else None, grad_B, None, of_addend


matmul_all_reduce.register_autograd(_matmul_all_reduce_backward, setup_context=_save_both)


@operator(REDUCE_LINEAR)
def linear_all_reduce(x: Tensor, weight: Tensor, group_name: str) -> Tensor:
    """matmul_all_reduce for few rows, as in decoding: x [..., k] times weight [n, k] transposed.

    Any number of rows is right; implementations are made for few. Adjoint: as matmul_all_reduce.
    """
    _check_linear(size_of(group_name), x, weight)
    return execute(REDUCE_LINEAR, group_name, x, (x.shape, weight.shape), x, weight)


@linear_all_reduce.register_fake
def _(x: Tensor, weight: Tensor, group_name: str) -> Tensor:
    _check_linear(size_of(group_name), x, weight)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@without_autocast
def _linear_all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    total = all_reduce(grad, ctx.group)
    needs_x, needs_weight, _ = ctx.needs_input_grad
    grad_weight = transposed_product(total, x, weight) if needs_weight else None
    return total @ weight if needs_x else None, grad_weight, None


linear_all_reduce.register_autograd(_linear_all_reduce_backward, setup_context=_save_both)
