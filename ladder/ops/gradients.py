"""The gradients of `all_gather_matmul`: those of the matrices hide the sum over the ranks.

The gradient of A is a product and a reduce-scatter, that of a matrix a product alone, which needs
nothing of other ranks. So the last of the ranks' parts travel while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models.errors import UserError
from ladder.ops import workspace
from ladder.ops.blocks import STREAMS, check_streams
from ladder.ops.calls import execute, operator, rows_back, rows_first, rows_of, scattered, size_of
from ladder.ops.checks import (
    check_dim,
    check_divisible,
    check_like,
    check_matrix,
    check_rows,
    check_shape,
)
from ladder.ops.collectives import all_gather, reduce_scatter
from ladder.ops.finish import adding
from ladder.ops.overlapped import SCATTER, scatter_chunks
from ladder.ops.products import all_gather_matmul, matmul_reduce_scatter, transposed_product
from ladder.ops.refusals import peer_refusal
from ladder.ops.registry import Call, define, implement
from ladder.ops.waves import by_chunks

GRADIENTS = "all_gather_matmul_backward"

define(
    GRADIENTS,
    ("m", "n", "k"),
    lambda ranks, whole, Bs: (rows_of(whole), whole[-1], sum(B[1] for B in Bs)),
)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """As torch.cat, which copies one tensor, too."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@implement(GRADIENTS, "staged")
def staged_gradients(
    group: dist.ProcessGroup, whole: Tensor, Bs: list[Tensor], grads: list[Tensor], gather_dim: int
) -> tuple[Tensor, list[Tensor]]:
    """One after the other; the reduce-scatter by what is picked for it."""
    joined, matrix = _joined(grads, -1), _joined(Bs, 1).t()
    own: Tensor = matmul_reduce_scatter(joined, matrix, "sum", gather_dim, group.group_name)
    of_Bs = [transposed_product(whole, grad, B) for grad, B in zip(grads, Bs, strict=True)]
    return own, of_Bs


def _surplus(call: Call, options: Mapping[str, Any]) -> float:
    """Of products one after the other, on one stream, whatever the streams of the sum."""
    return by_chunks(1)(call, {})


@implement(GRADIENTS, "chunked", peer_refusal, STREAMS, surplus=_surplus)
def chunked_gradients(
    group: dist.ProcessGroup, whole: Tensor, Bs: list[Tensor], grads: list[Tensor], gather_dim: int,
    streams: int = 1,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The reduce-scatter as by `chunked`, and the matrices' gradients behind its products.

    streams: 1: the sum waits for their end; 2: it may run in their midst.
    """
    check_streams(streams)
    rows = rows_first(_joined(grads, -1), gather_dim)
    matrix = _joined(Bs, 1).t()
    # As `transposed_product` computes them and lays them out: over rows in any order.
    x, of_rows = whole.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
    of_Bs = [
        B.new_empty(B.t().shape).t() if B.stride(0) < B.stride(1) else B.new_empty(B.shape)
        for B in Bs
    ]

    def beside() -> None:
        for grad, out in zip(of_rows, of_Bs, strict=True):
            if out.is_contiguous():
                torch.mm(x.t(), grad, out=out)
            else:
                torch.mm(grad.t(), x, out=out.t())

    space = workspace.workspace(group, SCATTER, whole.device)
    memory = (x, *of_rows, *of_Bs)  # their layouts tell calls apart, too
    own, finish = adding(space.world, rows, matrix, False)
    scatter_chunks(space, rows, matrix, finish, (1, 1, streams), beside=(beside, memory))
    return rows_back(own, whole, gather_dim), of_Bs


def _check(whole: Tensor, Bs: list[Tensor], grads: list[Tensor], dim: int, group_name: str) -> int:
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
    GRADIENTS,
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
    _check(whole, Bs, grads, gather_dim, group_name)
    shapes = whole.shape, [B.shape for B in Bs]
    return execute(GRADIENTS, group_name, whole, shapes, whole, Bs, grads, gather_dim)


@all_gather_matmul_backward.register_fake
def _(
    whole: Tensor, Bs: list[Tensor], grads: list[Tensor], gather_dim: int, group_name: str
) -> tuple[Tensor, list[Tensor]]:
    ranks = _check(whole, Bs, grads, gather_dim, group_name)
    own = scattered(whole, gather_dim, ranks)
    return own, [transposed_product(whole, grad, B) for grad, B in zip(grads, Bs, strict=True)]


def _setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    A, Bs, ctx.dim, ctx.group = inputs
    ctx.whole = keyword_only_inputs["return_A"]  # else it is gathered again, to save memory
    ctx.save_for_backward(output[0] if ctx.whole else A, *Bs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_A: Any, grads: list[Any]) -> tuple[Any, ...]:
    A, *Bs = ctx.saved_tensors
    needs_A, needs_Bs = ctx.needs_input_grad[:2]
    grads = [
        grad if grad is not None else _zeros(ctx, A, B) for grad, B in zip(grads, Bs, strict=True)
    ]
    # With gradients on, these are to be differentiated themselves, as the operator is not.
    simple = ctx.whole and grad_A is None and not torch.is_grad_enabled()
    if simple and needs_A and all(needs_Bs):
        return *all_gather_matmul_backward(A, Bs, grads, ctx.dim, ctx.group), None, None
    own: Tensor | None = None
    if needs_A:
        joined, matrix = _joined(grads, -1), _joined(Bs, 1).t()
        if grad_A is None:
            own = matmul_reduce_scatter(joined, matrix, "sum", ctx.dim, ctx.group)
        else:
            own = reduce_scatter(joined @ matrix + grad_A, "sum", ctx.dim, ctx.group)
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


all_gather_matmul.register_autograd(_backward, setup_context=_setup)
