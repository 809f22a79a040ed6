"""All-gather, reduce-scatter and all-reduce as operators: adjoints of products that communicate.

Sums are in rank order, in float32, rounded once. Gradients: see ladder.ops.products.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ladder.ops import exchange
from ladder.ops.calls import execute, gathered, operator, rows_of, scattered, size_of
from ladder.ops.checks import (
    check_dim,
    check_divisible,
    check_like,
    check_reduce_op,
    check_rows,
    check_scatters,
)
from ladder.ops.registry import define, implement


def _check_rows(ranks: int, x: Tensor) -> None:
    check_like("x", x)
    check_rows("x", x)


def _check_scattered(ranks: int, x: Tensor) -> None:
    check_like("x", x)
    check_scatters("x", x, ranks)


ROWS = ("rows", "columns")
define("all_gather", ROWS, lambda ranks, x: (ranks * rows_of(x), x[-1]), _check_rows)
define("reduce_scatter", ROWS, lambda ranks, x: (rows_of(x), x[-1]), _check_scattered)
define(
    "all_reduce",
    ("elements",),
    lambda ranks, x: (rows_of((*x, 1)),),
    lambda ranks, x: check_like("x", x),
)


@implement("all_gather", "staged")
def staged_all_gather(group: dist.ProcessGroup, x: Tensor, gather_dim: int) -> Tensor:
    rows = exchange.gather(x.movedim(gather_dim, 0), group)
    return rows.flatten(0, 1).movedim(0, gather_dim).contiguous()


@implement("reduce_scatter", "staged")
def staged_reduce_scatter(
    group: dist.ProcessGroup, x: Tensor, reduce_op: str, scatter_dim: int
) -> Tensor:
    pieces = exchange.scatter_pieces(x.movedim(scatter_dim, 0), group)
    total = exchange.rounded_sum(pieces, reduce_op == "avg")
    return total.movedim(0, scatter_dim).contiguous()


@implement("all_reduce", "staged")
def staged_all_reduce(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return exchange.sum_everywhere(x, group)


def _check_all_gather(x: Tensor, gather_dim: int, group_name: str) -> int:
    check_like("x", x)
    check_rows("x", x)
    check_dim("gather_dim", gather_dim, "x", x)
    return size_of(group_name)


@operator("all_gather")
def all_gather(x: Tensor, gather_dim: int, group_name: str) -> Tensor:
    """Every rank's x, joined along gather_dim (not the last one). Adjoint: reduce_scatter."""
    _check_all_gather(x, gather_dim, group_name)
    return execute("all_gather", group_name, x, (x.shape,), x, gather_dim)


@all_gather.register_fake
def _(x: Tensor, gather_dim: int, group_name: str) -> Tensor:
    return gathered(x, gather_dim, _check_all_gather(x, gather_dim, group_name))


def _all_gather_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.dim, ctx.group = inputs


def _all_gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return reduce_scatter(grad, "sum", ctx.dim, ctx.group), None, None


all_gather.register_autograd(_all_gather_backward, setup_context=_all_gather_setup)


def _check_reduce_scatter(x: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> int:
    check_like("x", x)
    check_rows("x", x)
    check_dim("scatter_dim", scatter_dim, "x", x)
    check_reduce_op(reduce_op)
    ranks = size_of(group_name)
    check_divisible("x", x.shape[scatter_dim], scatter_dim, ranks)
    return ranks


@operator("reduce_scatter")
def reduce_scatter(x: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    """This rank's piece, along scatter_dim, of the ranks' sum or average of x. Adjoint: all_gather.

    reduce_op: "sum" or "avg", which divides the sum before it is rounded.
    """
    _check_reduce_scatter(x, reduce_op, scatter_dim, group_name)
    return execute("reduce_scatter", group_name, x, (x.shape,), x, reduce_op, scatter_dim)


@reduce_scatter.register_fake
def _(x: Tensor, reduce_op: str, scatter_dim: int, group_name: str) -> Tensor:
    ranks = _check_reduce_scatter(x, reduce_op, scatter_dim, group_name)
    return scattered(x, scatter_dim, ranks)


def _reduce_scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, ctx.reduce_op, ctx.dim, ctx.group = inputs


def _reduce_scatter_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return all_gather(averaged(ctx, grad), ctx.dim, ctx.group), None, None, None


def averaged(ctx: Any, grad: Tensor) -> Tensor:
    """The gradient of each summand."""
    return grad / size_of(ctx.group) if ctx.reduce_op == "avg" else grad


reduce_scatter.register_autograd(_reduce_scatter_backward, setup_context=_reduce_scatter_setup)


@operator("all_reduce")
def all_reduce(x: Tensor, group_name: str) -> Tensor:
    """The sum of the ranks' x, on every rank. Adjoint: itself (see ladder.ops.products)."""
    check_like("x", x)
    return execute("all_reduce", group_name, x, (x.shape,), x)


@all_reduce.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    check_like("x", x)
    size_of(group_name)
    return x.new_empty(x.shape)


def _all_reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.group = inputs[1]


def _all_reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return all_reduce(grad, ctx.group), None


all_reduce.register_autograd(_all_reduce_backward, setup_context=_all_reduce_setup)
