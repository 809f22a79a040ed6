"""Barriers: the CUDA streams of all ranks wait for each other."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ladder.comm import driver, symmetric
from ladder.comm.driver import MemoryOperation


class StreamBarrier:
    """`channels` barriers by memory operations of CUDA streams, without a kernel.

    A kernel would have to wait while matrix products occupy every SM. In a barrier, a rank writes 1
    to its flag on every peer, waits until its own flags are 1, and clears them.
    """

    def __init__(self, group: dist.ProcessGroup, channels: int, device: torch.device) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        # No flag is set before every rank's are 0.
        self.flags = symmetric.allocate((channels, world), torch.int32, group, device, bits=0)
        flags = self.flags.by_rank
        self.batches = []
        for channel in range(channels):
            peers = [q for q in range(world) if q != rank]
            theirs = [flags[q][channel, rank].data_ptr() for q in peers]
            mine = [flags[rank][channel, q].data_ptr() for q in peers]
            operations = [MemoryOperation.write(address, 1) for address in theirs]
            operations += [MemoryOperation.wait(address, 1) for address in mine]
            operations += [MemoryOperation.write(address, 0) for address in mine]
            self.batches.append(driver.batch(operations))

    def wait(self, channel: int) -> None:
        """Make the current stream wait until every rank's stream has reached this barrier."""
        driver.enqueue(self.batches[channel])


class KernelBarrier:
    """A StreamBarrier by torch's barrier kernel, which briefly needs one SM."""

    def __init__(self, group: dist.ProcessGroup, channels: int, device: torch.device) -> None:
        # torch stores the flags of its barriers with every symmetric tensor.
        self.memory = symmetric.allocate((channels,), torch.int32, group, device)

    def wait(self, channel: int) -> None:
        self.memory.handle.barrier(channel=channel)
