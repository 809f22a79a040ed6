"""Peer access: whether the GPUs of these ranks can read and write each other's memory."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ladder.comm.capture import capturing
from ladder.comm.switch import P2P_SWITCH, p2p_disabled
from ladder.jit import triton
from ladder.models.errors import UserError


def push_refusal(processes: int) -> str | None:
    """The reason why kernels cannot write to the memory of this rank's TP ranks, or None.

    processes: the number of TP ranks, which are neighbours (see `ladder.parallel.mesh`).
    """
    if not torch.cuda.is_available():
        return "it needs GPUs"
    if triton is None:
        return "it needs the package triton"
    if p2p_disabled():
        return f"{P2P_SWITCH}={os.environ[P2P_SWITCH]} keeps peer memory out of use"
    visible = torch.cuda.device_count()
    if processes > visible:
        return f"{processes} ranks are on more than this machine's {visible} GPUs"
    mine = torch.cuda.current_device()
    first = mine // processes * processes
    if first + processes > visible:
        return f"the {visible} GPUs are no whole groups of {processes}, and GPU {mine} is in none"
    return _unreachable(mine, list(range(first, first + processes)))


def _unreachable(mine: int, peers: list[int]) -> str | None:
    for peer in peers:
        if peer != mine and not torch.cuda.can_device_access_peer(mine, peer):
            return f"GPU {mine} has no peer access to GPU {peer}"
    return None


_groups: WeakKeyDictionary[dist.ProcessGroup, str | None] = WeakKeyDictionary()


def group_refusal(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """The reason why kernels of this group's ranks cannot write to each other's memory, or None.

    All ranks get the same reason, from the first rank that has one. device: this rank's GPU. The
    ranks ask each other at the first call with a group; all must make it together, outside of a
    CUDA graph capture. The GPUs may be any; `push_refusal` is for neighbours.
    """
    if group not in _groups:
        if capturing():
            raise UserError(
                "the first call with a process group asks its ranks for their GPUs, which a CUDA "
                "graph capture cannot do; run the call once before"
            )
        with torch.cuda.device(device):  # NCCL takes the current GPU for the objects
            _groups[group] = _asked(group, device.index)
    return _groups[group]


def _asked(group: dist.ProcessGroup, mine: int) -> str | None:
    """The refusal that the ranks of a group agree on, or None. mine: this rank's GPU."""
    about = push_refusal(1), _gpu(mine)
    everyone: list[tuple[str | None, str]] = [about] * group.size()
    dist.all_gather_object(everyone, about, group=group)
    refusals, gpus = [why for why, _ in everyone], [gpu for _, gpu in everyone]
    if len({*gpus}) < len(gpus):
        return "ranks share a GPU"
    if not any(refusals):
        dist.all_gather_object(refusals, _unseen(group.rank(), mine, gpus), group=group)
    return next((why for why in refusals if why), None)


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _unseen(rank: int, mine: int, gpus: list[str]) -> str | None:
    """Why this rank, with GPU `mine`, cannot reach `gpus`, the ranks' GPUs by UUID, or None."""
    visible = [_gpu(index) for index in range(torch.cuda.device_count())]
    for peer, gpu in enumerate(gpus):
        if gpu not in visible:
            return (
                f"rank {rank} does not see the GPU of rank {peer} of its group; peer memory needs "
                f"ranks of one host that see each other's GPUs"
            )
    return _unreachable(mine, [visible.index(gpu) for gpu in gpus])


def common_push_refusal(processes: int) -> str | None:
    """On every rank, the first rank's `push_refusal` that is not None. All ranks must call this."""
    mine = push_refusal(processes)
    if not dist.is_initialized():
        return mine
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((why for why in everyone if why), None)
