"""Symmetric memory: what it holds when `allocate` returns, whatever stream asks for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as torch_memory
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.primitives import EMPTY
from ladder.comm.symmetric import INTEGERS, SymmetricTensor
from ladder.models.errors import UserError
from ladder.parallel import launch
from tests.gpu import WORLDS

DTYPES = [torch.bfloat16, torch.float32, torch.int32]


class BusyGPU:
    """A GPU whose default stream is behind: what is launched there runs when the host waits.

    The current stream is another one, whose work runs at once. It has torch's memory allocator of
    one rank, which zeroes memory and uploads addresses on the default stream, without waiting.
    """

    def __init__(self) -> None:
        self.behind: list[Callable[[], object]] = []
        self.flags = torch.ones(2, dtype=torch.int32)  # that peers set, of earlier memory
        self.uploaded = False

    def synchronize(self, device: torch.device) -> None:
        while self.behind:
            self.behind.pop(0)()

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.full(shape, 77, dtype=dtype)
        self.behind += [memory.zero_, self.flags.zero_]
        return memory

    def rendezvous(self, memory: Tensor, group: str) -> Any:
        assert not self.flags.any(), "a peer may set a flag from now on"
        self.behind.append(lambda: setattr(self, "uploaded", True))
        return SimpleNamespace(get_buffer=lambda rank, shape, dtype: memory)

    def barrier(self, group: Any) -> None:
        assert not self.behind, "a peer may write from now on"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("initialised", [True, False])
def test_late_zeros_do_not_overwrite_what_is_in_new_memory(
    dtype: torch.dtype, initialised: bool
) -> None:
    """Torch's zeros in a slot look like data that has arrived: a landing would not wait for it, and
    the data that comes later would be taken for that of the next step."""
    gpu, bits = BusyGPU(), EMPTY[dtype.itemsize] if initialised else None
    group: Any = SimpleNamespace(group_name="all")
    process = SimpleNamespace(
        get_rank=lambda group: 0, get_world_size=lambda group: 1, barrier=gpu.barrier
    )
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(torch.cuda, "synchronize", gpu.synchronize),
        mock.patch.object(torch_memory, "empty", gpu.empty),
        mock.patch.object(torch_memory, "rendezvous", gpu.rendezvous),
        mock.patch.object(symmetric, "dist", process),
    ):
        made = symmetric.allocate((2, 3), dtype, group, torch.device("meta"), bits)
    written = made.own.view(INTEGERS[dtype.itemsize])
    if bits is None:
        written.fill_(5)  # by whoever asked for the memory, at once
    gpu.synchronize(made.own.device)  # the GPU catches up
    assert gpu.uploaded
    assert torch.all(written == (5 if bits is None else bits)), written


def test_a_cpu_has_none() -> None:
    group: Any = SimpleNamespace(group_name="all")
    with pytest.raises(UserError, match="device=cpu has no symmetric memory; give a GPU"):
        symmetric.allocate((2,), torch.int32, group, torch.device("cpu"))


def allocate_while_busy() -> int:
    """Memory asked for by a stream that does not wait for the default one, which is behind."""
    import torch.distributed as dist

    device = launch.join("cuda")
    world, rank = launch.world_size(), launch.rank()
    group: Any = dist.group.WORLD
    stream = torch.cuda.Stream()
    made: list[SymmetricTensor] = []
    for turn in range(6):
        dtype = DTYPES[turn % len(DTYPES)]
        bits = EMPTY[dtype.itemsize]
        if turn % world == rank or turn >= 4:
            torch.cuda._sleep(100_000_000)
        with torch.cuda.stream(stream):
            made.append(symmetric.allocate((world, 4096), dtype, group, device, bits))
            whole = made[-1].own.view(INTEGERS[dtype.itemsize])
            assert torch.all(whole == bits), (turn, dtype, "slots are not empty")
            bare = symmetric.allocate((world, 4096), dtype, group, device)
            bare.by_rank[(rank + 1) % world][rank].fill_(5)
        torch.cuda.synchronize()
        dist.barrier()
        assert torch.all(bare.own[rank - 1] == 5), (turn, dtype, "zeroed after a peer's write")
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("world", WORLDS[1:])
def test_memory_is_as_asked_for_while_the_default_stream_is_behind(world: int) -> None:
    """Work of other processes on the same GPU has the same effect as the sleep here."""
    assert launch.run(allocate_while_busy, (), nproc=world) == 0
