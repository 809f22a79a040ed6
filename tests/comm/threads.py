"""Ranks that are threads of one process, in place of GPUs that reach each other's memory."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.driver import MemoryOperation
from ladder.comm.symmetric import SymmetricTensor


@dataclass
class Machine:
    """Ranks that are threads of this process: every address is everyone's."""

    world: int
    made: list[dict[int, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world)
        self.lock = threading.Lock()


@dataclass
class Thread:
    """One rank's "process group"."""

    rank: int
    machine: Machine
    asked: int = 0


FAKE = SimpleNamespace(
    get_rank=lambda group: group.rank,
    get_world_size=lambda group: group.machine.world,
    barrier=lambda group: group.machine.barrier.wait(20),
    ProcessGroup=dist.ProcessGroup,
)


def shared(
    shape: tuple[int, int], dtype: torch.dtype, group: Any, device: Any, bits: int | None = None
) -> SymmetricTensor:
    """`symmetric.allocate` of ladder.comm; memory that nobody initialised is poisoned."""
    machine = group.machine
    with machine.lock:
        while len(machine.made) <= group.asked:
            machine.made.append({})
        poison = torch.nan if dtype.is_floating_point else 77
        value = poison if bits is None else bits
        machine.made[group.asked][group.rank] = torch.full(shape, value, dtype=dtype)
    machine.barrier.wait(20)
    mine = machine.made[group.asked]
    group.asked += 1
    return SymmetricTensor(
        group.rank, [mine[rank] for rank in range(machine.world)], torch.empty(0)
    )


class FakeDriver:
    """Runs a batch of memory operations at once, in order, on this process's memory."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def cuStreamBatchMemOp_v2(self, stream: Any, count: int, batch: Any, flags: int) -> int:
        assert count == len(batch)
        time.sleep(self.source.random() * 2e-3)  # ranks that come late
        for each in batch:
            word = ctypes.c_uint32.from_address(each.address)
            if each.operation == MemoryOperation.WRITE:
                assert word.value != each.value, "set twice: the other's flag was not yet cleared"
                word.value = each.value
                continue
            end = time.monotonic() + 20
            while word.value != each.value:
                assert time.monotonic() < end, "a rank waits for ever"
                time.sleep(1e-5)
        time.sleep(self.source.random() * 2e-3)  # ranks that go on late
        return 0
