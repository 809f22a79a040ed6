"""Peer access: whether the GPUs of these ranks can read and write each other's memory."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ladder.comm.switch import P2P_SWITCH, p2p_disabled
from ladder.jit import triton


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
    if processes > torch.cuda.device_count():
        return f"{processes} ranks are on more than this machine's {torch.cuda.device_count()} GPUs"
    mine = torch.cuda.current_device()
    first = mine // processes * processes
    for peer in range(first, first + processes):
        if peer != mine and not torch.cuda.can_device_access_peer(mine, peer):
            return f"GPU {mine} has no peer access to GPU {peer}"
    return None


def common_push_refusal(processes: int) -> str | None:
    """`push_refusal` of the first rank that has one, on every rank; all ranks must call it."""
    mine = push_refusal(processes)
    if not dist.is_initialized():
        return mine
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next((why for why in everyone if why), None)
