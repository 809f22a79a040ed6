"""Symmetric memory: a tensor on every rank that all ranks of a group can read and write."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.capture import capturing
from ladder.models.errors import UserError

INTEGERS = {2: torch.int16, 4: torch.int32}  # by size in bytes


@dataclass(frozen=True)
class SymmetricTensor:
    """A tensor on every rank of a group, of the same shape and dtype.

    by_rank: every rank's tensor, as mapped on this rank. addresses: int64 [world] on the device,
    their addresses, for kernels. handle: torch's handle of the same memory.
    """

    rank: int
    by_rank: list[Tensor]
    addresses: Tensor
    handle: Any = None

    @property
    def own(self) -> Tensor:
        return self.by_rank[self.rank]


def allocate(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    bits: int | None = None,
) -> SymmetricTensor:
    """Allocate a tensor on every rank; all ranks must call this, outside a graph capture.

    bits: the initial content of each element, as a signed integer of its size; it is set on every
    rank when this returns. None: the content is undefined.

    torch 2.11 zeroes the memory, and the flags of `handle` beside it, on the default stream without
    waiting. The current stream may be one that does not wait for that stream, as in the warm-up of
    a capture. On a busy GPU the zeros could then overwrite what this stream or a peer has written:
    a zero in a slot looks like data that has arrived.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    if device.type == "cpu":
        raise UserError(
            "device=cpu has no symmetric memory; give a GPU (docs/primitives.md says how kernels "
            "are checked without one)"
        )
    assert not capturing(), "run it once before a capture"
    rank = dist.get_rank(group)
    own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    torch.cuda.synchronize(device)  # until it is zeroed; peers learn of it only by the rendezvous
    if bits is not None:
        own.view(INTEGERS[dtype.itemsize]).fill_(bits)
    handle = symmetric_memory.rendezvous(own, group.group_name)
    by_rank = [handle.get_buffer(q, shape, dtype) for q in range(dist.get_world_size(group))]
    assert by_rank[rank].data_ptr() == own.data_ptr()
    by_rank[rank] = own  # it keeps the memory alive
    addresses = torch.tensor([each.data_ptr() for each in by_rank], device=device)
    torch.cuda.synchronize(device)  # until filled, and the handle's addresses are on the device
    if bits is not None:
        dist.barrier(group)
    return SymmetricTensor(rank, by_rank, addresses, handle)
