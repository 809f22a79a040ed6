"""The gradients of `all_gather_matmul` and `matmul_reduce_scatter`: two products, one exchange.

For a gather's product, the gradient of A is summed over the ranks, and that of a B needs nothing of
other ranks. For a scatter's product, both gradients read the gradient of all rows, and can begin
with each rank's rows. `ladder.ops.overlapped_gradients` overlaps both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models.errors import UserError
from ladder.operator_names import GATHER_BACKWARD, SCATTER_BACKWARD
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
    check_products,
    check_rows,
    check_scatters,
    check_shape,
)
from ladder.ops.collectives import all_gather, averaged, reduce_scatter
from ladder.ops.products import (
    all_gather_matmul,
    check_scattered,
    matmul_reduce_scatter,
    transposed_product,
)
from ladder.ops.registry import define, implement

BACKWARD = (GATHER_BACKWARD, SCATTER_BACKWARD)


# -- all_gather_matmul ------------------------------------------------------------------------


def _check_whole(ranks: int, whole: Tensor, Bs: list[Tensor]) -> None:
    check_products("whole", whole, Bs)
    check_scatters("whole", whole, ranks)


define(
    GATHER_BACKWARD,
    ("m", "n", "k"),
    lambda ranks, whole, Bs: (rows_of(whole), whole[-1], sum(B[1] for B in Bs)),
    _check_whole,
)


def joined(parts: list[Tensor], dim: int) -> Tensor:
    """As torch.cat, which would also copy a single tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@implement(GATHER_BACKWARD, "staged")
def staged_gather_gradients(
    group: dist.ProcessGroup, whole: Tensor, Bs: list[Tensor], grads: list[Tensor], gather_dim: int
) -> tuple[Tensor, list[Tensor]]:
    """One product after the other; the reduce-scatter runs by what is picked for it."""
    grad, matrix = joined(grads, -1), joined(Bs, 1).t()
    own: Tensor = matmul_reduce_scatter(grad, matrix, "sum", gather_dim, group.group_name)
    of_Bs = [transposed_product(whole, grad, B) for grad, B in zip(grads, Bs, strict=True)]
    return own, of_Bs


def _check_gather(
    whole: Tensor, Bs: list[Tensor], grads: list[Tensor], dim: int, group_name: str
) -> int:
    if not Bs or len(Bs) != len(grads):
        raise UserError(
            f"{len(Bs)} matrices Bs and {len(grads)} gradients; expected as many, one at least"
        )
    check_rows("whole", whole)
    check_dim("gather_dim", dim, "whole", whole)
    for n, (B, grad) in enumerate(zip(Bs, grads, strict=True)):
        check_like("whole", whole, **{f"Bs[{n}]": B, f"grads[{n}]": grad})
        check_matrix(f"Bs[{n}]", B, "whole", whole)
        check_shape(
            f"grads[{n}]", grad, [*whole.shape[:-1], B.shape[1]], f"a product of whole and Bs[{n}]"
        )
    ranks = size_of(group_name)
    check_divisible("whole", whole.shape[dim], dim, ranks)
    return ranks


@operator(
    GATHER_BACKWARD,
    schema="(Tensor whole, Tensor[] Bs, Tensor[] grads, int gather_dim, str group_name)"
    " -> (Tensor, Tensor[])",
)
def all_gather_matmul_backward(
    whole: Tensor, Bs: list[Tensor], grads: list[Tensor], gather_dim: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    """The gradients of A and of each B of `all_gather_matmul`, from those of its products.

    whole: [..., m at gather_dim, ..., k], the A of all ranks. Bs: [k, n_i]. grads: [..., m, ...,
    n_i] each. Returns ([..., m / T, ..., k], this rank's rows of the ranks' sum of grads @ B^T, and
    whole^T @ grad for each B). It has no gradient itself.
    """
    _check_gather(whole, Bs, grads, gather_dim, group_name)
    shapes = whole.shape, [B.shape for B in Bs]
    return execute(GATHER_BACKWARD, group_name, whole, shapes, whole, Bs, grads, gather_dim)


@all_gather_matmul_backward.register_fake
def _(
    whole: Tensor, Bs: list[Tensor], grads: list[Tensor], gather_dim: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    ranks = _check_gather(whole, Bs, grads, gather_dim, group_name)
    own = scattered(whole, gather_dim, ranks)
    return own, [transposed_product(whole, grad, B) for grad, B in zip(grads, Bs, strict=True)]


def _gather_setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    A, Bs, ctx.dim, ctx.group = inputs
    ctx.whole = keyword_only_inputs["return_A"]  # else it is gathered again, to save memory
    ctx.save_for_backward(output[0] if ctx.whole else A, *Bs)
    ctx.set_materialize_grads(False)


@without_autocast
def _gather_backward(ctx: Any, grad_A: Any, grads: list[Any]) -> tuple[Any, ...]:
    A, *Bs = ctx.saved_tensors
    needs_A, needs_Bs = ctx.needs_input_grad[:2]
    grads = [
        grad if grad is not None else _zeros(ctx, A, B) for grad, B in zip(grads, Bs, strict=True)
    ]
    # With grad mode on, the gradients are differentiated themselves; the operator cannot be.
    simple = ctx.whole and grad_A is None and not torch.is_grad_enabled()
    if simple and needs_A and all(needs_Bs):
        return *all_gather_matmul_backward(A, Bs, grads, ctx.dim, ctx.group), None, None
    own: Tensor | None = None
    if needs_A:
        grad, matrix = joined(grads, -1), joined(Bs, 1).t()
        if grad_A is None:
            own = matmul_reduce_scatter(grad, matrix, "sum", ctx.dim, ctx.group)
        else:
            own = reduce_scatter(grad @ matrix + grad_A, "sum", ctx.dim, ctx.group)
    of_Bs: list[Tensor | None] = [None for _ in Bs]
    if any(needs_Bs):
        whole = A if ctx.whole else all_gather(A, ctx.dim, ctx.group)
        of_Bs = [
            transposed_product(whole, grad, B) if needed else None
            for grad, B, needed in zip(grads, Bs, needs_Bs, strict=True)
        ]
    return own, of_Bs, None, None


def _zeros(ctx: Any, A: Tensor, B: Tensor) -> Tensor:
    shape = list(A.shape)
    shape[ctx.dim] *= 1 if ctx.whole else size_of(ctx.group)
    return A.new_zeros((*shape[:-1], B.shape[1]))


all_gather_matmul.register_autograd(_gather_backward, setup_context=_gather_setup)


# -- matmul_reduce_scatter --------------------------------------------------------------------

define(
    SCATTER_BACKWARD,
    ("m", "n", "k"),
    lambda ranks, A, B: (rows_of(A), A[-1], B[1]),
    check_scattered,
)


@implement(SCATTER_BACKWARD, "staged")
def staged_scatter_gradients(
    group: dist.ProcessGroup, grad: Tensor, A: Tensor, B: Tensor, scatter_dim: int
) -> tuple[Tensor, Tensor]:
    """One product after the other; the gather runs by what is picked for it."""
    whole, (of_A,) = all_gather_matmul(grad, [B.t()], scatter_dim, group.group_name)
    return of_A, transposed_product(A, whole, B)


def _check_scatter(grad: Tensor, A: Tensor, B: Tensor, dim: int, group_name: str) -> int:
    check_rows("A", A)
    check_like("A", A, grad=grad, B=B)
    check_matrix("B", B, "A", A)
    check_dim("scatter_dim", dim, "A", A)
    ranks = size_of(group_name)
    check_divisible("A", A.shape[dim], dim, ranks)
    shape = list(scattered(A, dim, ranks, B.shape[1]).shape)
    check_shape("grad", grad, shape, "this rank's rows of A @ B")
    return ranks


@operator(SCATTER_BACKWARD)
def matmul_reduce_scatter_backward(
    grad: Tensor, A: Tensor, B: Tensor, scatter_dim: int, group_name: str
) -> tuple[Tensor, Tensor]:
    """The gradients of A and B of `matmul_reduce_scatter`'s sum, from that of this rank's rows.

    grad: [..., m / T at scatter_dim, ..., n]. A: [..., m, ..., k]. B: [k, n]. Returns the ranks'
    grad @ B^T, [..., m, ..., k], and A^T @ the ranks' grad, [k, n]. It has no gradient itself.
    """
    _check_scatter(grad, A, B, scatter_dim, group_name)
    shapes = A.shape, B.shape
    return execute(SCATTER_BACKWARD, group_name, A, shapes, grad, A, B, scatter_dim)


@matmul_reduce_scatter_backward.register_fake
def _(
    grad: Tensor, A: Tensor, B: Tensor, scatter_dim: int, group_name: str
) -> tuple[Tensor, Tensor]:
    whole = gathered(grad, scatter_dim, _check_scatter(grad, A, B, scatter_dim, group_name))
    return A.new_empty(A.shape), transposed_product(A, whole, B)


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    A, B, ctx.reduce_op, ctx.dim, ctx.group = inputs
    ctx.save_for_backward(A, B)


@without_autocast
def _scatter_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *scatter_gradients(ctx, averaged(ctx, grad), *ctx.saved_tensors), None, None, None


def scatter_gradients(
    ctx: Any, grad: Tensor, A: Tensor, B: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of A and B, as far as they are needed, from that of this rank's rows."""
    needs_A, needs_B = ctx.needs_input_grad[:2]
    # With grad mode on, the gradients are differentiated themselves; the operator cannot be.
    if needs_A and needs_B and not torch.is_grad_enabled():
        of_both: tuple[Tensor, Tensor] = matmul_reduce_scatter_backward(
            grad, A, B, ctx.dim, ctx.group
        )
        return of_both
    whole: Tensor | None = None
    grad_A: Tensor | None = None
    if needs_A:
        whole, (grad_A,) = all_gather_matmul(grad, [B.t()], ctx.dim, ctx.group, return_A=needs_B)
    elif needs_B:
        whole = all_gather(grad, ctx.dim, ctx.group)
    return grad_A, None if whole is None or not needs_B else transposed_product(A, whole, B)


matmul_reduce_scatter.register_autograd(_scatter_backward, setup_context=_scatter_setup)
