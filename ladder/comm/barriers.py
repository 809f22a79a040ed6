"""Barriers of ranks on their CUDA streams."""

from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

from ladder.comm import symmetric
from ladder.comm.driver import MemoryOperation, driver


class StreamBarrier:
    """`count` places where ranks meet by memory operations of their streams: without a kernel.

    Matrix products may hold every SM until they end, and a kernel would wait for that. To meet, a
    rank writes 1 to its flag on every peer, waits until its own flags are 1, and clears them.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        # No flag is set before every rank's are 0.
        self.flags = symmetric.allocate((count, world), torch.int32, group, device, bits=0)
        flags = self.flags.by_rank
        self.operations = []
        make = MemoryOperation
        for place in range(count):
            peers = [q for q in range(world) if q != rank]
            theirs = [flags[q][place, rank].data_ptr() for q in peers]
            mine = [flags[rank][place, q].data_ptr() for q in peers]
            batch = [make(make.WRITE, address, 1) for address in theirs]
            batch += [make(make.WAIT, address, 1, make.EQUAL) for address in mine]
            batch += [make(make.WRITE, address, 0) for address in mine]
            self.operations.append((make * len(batch))(*batch))

    def meet(self, place: int) -> None:
        """Have the current stream go on when every rank's has come here and done what is before."""
        batch = self.operations[place]
        stream = torch.cuda.current_stream().cuda_stream
        code = driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream), len(batch), batch, 0)
        if code:
            raise RuntimeError(
                f"cuStreamBatchMemOp failed with CUDA driver error {code}; transport=copy-kernels "
                f"does without it"
            )


class KernelBarrier:
    """As StreamBarrier, by torch's barrier kernel: it needs one SM for a moment."""

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        # The barrier's own flags belong to any symmetric memory.
        self.memory = symmetric.allocate((count,), torch.int32, group, device)

    def meet(self, place: int) -> None:
        self.memory.handle.barrier(channel=place)
