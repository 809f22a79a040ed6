"""Moving rows between ranks by torch.distributed, and summing what arrived in a fixed order.

No backend reduces anything here. A reduction of NCCL or gloo adds in an order of its own, which
depends on the message's size, and rounds after every addition; `sum_in_order` adds the pieces in
the order of the ranks, in float32, and rounds once. So all ranks, all runs and both backends agree,
and kernels that sum in that order agree with them bit for bit. float64 is summed in float64.

gloo moves bytes: the dtypes that its collectives know differ between versions of torch, and moving
needs none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm import collectives
from ladder.jit import DTYPES
from ladder.kernels.slots import sum_slots


def _movable(x: Tensor) -> Tensor:
    """`x`, which is contiguous, as its backend moves it: as bytes on a CPU."""
    if x.is_cuda:
        return x
    # A single element may have any stride, and bytes need one of 1.
    whole = x if x.stride(-1) == 1 else x.clone(memory_format=torch.contiguous_format)
    return whole.view(torch.uint8)


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's `x`, which has the same shape on all: [T, *x.shape]."""
    ranks = dist.get_world_size(group)
    out = x.new_empty(ranks, x.numel())
    collectives.all_gather(_movable(out), _movable(x.reshape(1, -1)), group=group)
    return out.view(ranks, *x.shape)


def all_to_all(pieces: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Piece q of [T, ...] goes to rank q; piece q of the result came from rank q."""
    pieces = pieces.contiguous()
    out = torch.empty_like(pieces)
    flat = pieces.view(len(pieces), pieces[0].numel())
    dist.all_to_all_single(_movable(out.view_as(flat)), _movable(flat), group=group)
    return out


def all_to_all_uneven(
    pieces: list[Tensor], sizes: list[int], group: dist.ProcessGroup
) -> list[Tensor]:
    """Piece q goes to rank q, and a flat tensor of sizes[q] elements comes from rank q."""
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    out = flat.new_empty(sum(sizes))
    width = 1 if flat.is_cuda else flat.element_size()
    dist.all_to_all_single(
        _movable(out), _movable(flat), [size * width for size in sizes],
        [piece.numel() * width for piece in pieces], group=group,
    )  # fmt: skip
    return list(out.split(sizes))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def sum_in_order(pieces: Tensor | Sequence[Tensor]) -> Tensor:
    """The sum of [T, ...], or of T tensors, in their order, in `wide`, not rounded."""
    first = pieces[0]
    total = torch.zeros(first.shape, dtype=wide(first.dtype), device=first.device)
    for piece in pieces:
        total += piece
    return total


def rounded_sum(pieces: Tensor, average: bool = False) -> Tensor:
    """`sum_in_order`, divided by the number of pieces if `average`, rounded to their dtype."""
    if pieces.is_cuda and pieces.dtype in DTYPES and pieces.numel():
        return sum_slots(pieces, torch.empty_like(pieces[0]), average)
    total = sum_in_order(pieces)
    return (total / len(pieces) if average else total).to(pieces.dtype)


def scatter_pieces(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's piece of every rank's [T x rows, ...]: [T, rows, ...]."""
    ranks = dist.get_world_size(group)
    return all_to_all(partial.reshape(ranks, len(partial) // ranks, *partial.shape[1:]), group)


def sum_everywhere(partial: Tensor, group: dist.ProcessGroup, rounded: bool = True) -> Tensor:
    """The sum of all ranks' `partial`: each rank sums a part, and the parts are gathered.

    rounded: to the dtype of `partial`, before it is gathered; else the sum has dtype `wide`.
    """
    ranks, size = dist.get_world_size(group), partial.numel()
    flat, missing = partial.reshape(-1), -size % ranks
    # torch would copy a tensor that it pads by nothing.
    pieces = scatter_pieces(F.pad(flat, (0, missing)) if missing else flat, group)
    everything = gather(rounded_sum(pieces) if rounded else sum_in_order(pieces), group)
    return everything.view(-1)[:size].view(partial.shape)
