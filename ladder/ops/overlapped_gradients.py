"""Gradients of products of all ranks' rows that overlap with their exchange, by copy engines.

- `all_gather_matmul_backward`: the last parts of the sum over the ranks travel while the gradients
  of the matrices are computed.
- `matmul_reduce_scatter_backward`: both products of a rank's rows begin when these have arrived.

Both are as `chunked` in `ladder.ops.overlapped`: by cuBLAS, in the order of `ladder.ops.schedules`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.operator_names import GATHER, GATHER_BACKWARD, SCATTER, SCATTER_BACKWARD
from ladder.ops import workspace
from ladder.ops.blocks import STREAMS, check_streams
from ladder.ops.calls import rows_back, rows_first
from ladder.ops.finish import ALL_ROWS, adding
from ladder.ops.gradient_schedules import gathered_gradients
from ladder.ops.gradients import joined
from ladder.ops.overlapped import scatter_chunks
from ladder.ops.refusals import peer_refusal, rounding_refusal
from ladder.ops.registry import Call, implement
from ladder.ops.steps import ALL
from ladder.ops.waves import by_chunks


def _like(matrix: Tensor) -> Tensor:
    """Memory for a matrix's gradient, in the matrix's layout: see `transposed_product`."""
    if matrix.stride(0) < matrix.stride(1):
        return matrix.new_empty(matrix.t().shape).t()
    return matrix.new_empty(matrix.shape)


def _multiply_transposed(x: Tensor, grad: Tensor, out: Tensor, adds: bool = False) -> None:
    """Put x^T grad into `out`, in the layout of `_like`. adds: add it to what is there."""
    first, second, into = x.t(), grad, out
    if not out.is_contiguous():
        first, second, into = grad.t(), x, out.t()
    if adds:
        torch.addmm(into, first, second, out=into)
    else:
        torch.mm(first, second, out=into)


def _surplus(call: Call, options: Mapping[str, Any]) -> float:
    """The surplus of products one after the other on one stream: `streams` is for the sum alone."""
    return by_chunks(1)(call, {})


@implement(GATHER_BACKWARD, "chunked", peer_refusal, STREAMS, surplus=_surplus)
def chunked_gather_gradients(
    group: dist.ProcessGroup, whole: Tensor, Bs: list[Tensor], grads: list[Tensor], gather_dim: int,
    streams: int = 1,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The reduce-scatter as by `chunked`, and the matrices' gradients behind its products.

    streams: 1: the sum over the ranks waits until these have ended; 2: it may run among them.
    """
    check_streams(streams)
    rows = rows_first(joined(grads, -1), gather_dim)
    matrix = joined(Bs, 1).t()
    # As `transposed_product` computes them and lays them out: over rows in any order.
    x, of_rows = whole.flatten(0, -2), [grad.flatten(0, -2) for grad in grads]
    of_Bs = [_like(B) for B in Bs]

    def beside() -> None:
        for grad, out in zip(of_rows, of_Bs, strict=True):
            _multiply_transposed(x, grad, out)

    space = workspace.workspace(group, SCATTER, whole.device)
    memory = (x, *of_rows, *of_Bs)  # their layouts tell calls apart, too
    own, finish = adding(space.world, rows, matrix, False)
    scatter_chunks(space, rows, matrix, finish, (1, 1, streams), beside=(beside, memory))
    return rows_back(own, whole, gather_dim), of_Bs


def _one_or_chunks(call: Call, options: Mapping[str, Any]) -> float:
    """The surplus of the products for A's gradient, whatever the matrix's gradient takes."""
    return 0.0 if options.get("whole") else by_chunks(1)(call, options)


@implement(
    SCATTER_BACKWARD,
    "chunked",
    rounding_refusal,
    (*STREAMS, "pairs", "whole"),
    ordered=False,
    surplus=_one_or_chunks,
)
def chunked_scatter_gradients(
    group: dist.ProcessGroup, grad: Tensor, A: Tensor, B: Tensor, scatter_dim: int,
    streams: int = 1, pairs: bool = False, whole: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gather as by `chunked`. Behind each product for A's gradient comes one for the matrix's
    gradient, which is added to those before, in the matrix's dtype; the own rank's is the first.

    streams: 2: the matrix's gradient is on the second stream. pairs: as in the reduce-scatter, but
    for the rows of two ranks that have arrived. whole: the gradient of A is one product, behind the
    others.
    """
    check_streams(streams)
    own, x = rows_first(grad, scatter_dim).contiguous(), rows_first(A, scatter_dim)
    space = workspace.workspace(group, GATHER, A.device)
    rank, world, high = space.rank, space.world, len(own)
    chosen, slots = space.begin(own.shape, own.dtype, dense=pairs or whole)
    of_A, of_B, matrix = x.new_empty(x.shape), _like(B), B.t()

    def rows(q: int, several: int) -> tuple[Tensor, slice]:
        """The rows' gradients of ranks q, q + 1, ..., and the slice of these rows among all."""
        shards = own if q == rank else slots[rank][q : q + several].flatten(0, 1)
        return shards, slice(q * high, (q + several) * high)

    def product(several: int, q: int) -> None:
        shards, mine = rows(q, several) if q != ALL else (slots[rank].flatten(0, 1), ALL_ROWS)
        torch.mm(shards, matrix, out=of_A[mine])

    def add(several: int, q: int) -> None:
        shards, mine = rows(q, several)
        _multiply_transposed(x[mine], shards, of_B, adds=q != rank)

    space.run(
        gathered_gradients(rank, world, streams, pairs, whole), chosen,
        {
            "copy": lambda q: slots[q][rank].copy_(own, non_blocking=True),
            "own": lambda q: slots[q][q].copy_(own, non_blocking=True),
            "product": partial(product, 1), "both": partial(product, 2),
            "add": partial(add, 1), "add both": partial(add, 2),
        },
        memory=(own, x, B, of_A, of_B),
    )  # fmt: skip
    return rows_back(of_A, A, scatter_dim), of_B
