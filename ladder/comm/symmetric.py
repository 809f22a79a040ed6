"""Symmetric memory: a tensor on every rank that all ranks of a group can read and write."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def symmetric(
    shape: tuple[int, int], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """A new tensor on every rank, which all ranks of `group` must ask for alike: all, by rank."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    handle = symmetric_memory.rendezvous(own, group.group_name)
    everywhere = [handle.get_buffer(q, shape, dtype) for q in range(dist.get_world_size(group))]
    assert everywhere[dist.get_rank(group)].data_ptr() == own.data_ptr()
    everywhere[dist.get_rank(group)] = own  # it keeps the memory alive
    return everywhere
