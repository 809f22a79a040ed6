"""Primitives for kernels that access peers: what a CPU can see of them, in Triton's interpreter.

What only a GPU can see, the ordering of its memory, tests.kernels.test_compiled reads in the code
that is made for one. The same kernels run on a GPU with `pytest -m gpu`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.ops.track_maps import rotated
from tests import primitives as kernels
from tests.comm.scripted import before
from tests.interpreter import addresses
from tests.kernels.support import on

DEVICES = [on("interpreter"), on("cuda")]
BLOCK = 64


def word(device: str, value: int = 0) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=device)


@contextlib.contextmanager
def polls(action: Any) -> Iterator[list[int]]:
    """Calls action(n) before the nth access of a flag; yields the number of accesses so far."""
    count = [0]

    def noted(*_: Any) -> None:
        count[0] += 1
        assert count[0] < 1000, "a wait without an end"
        action(count[0])

    with before("create_atomic_rmw", noted):
        yield count


@pytest.mark.parametrize("device", DEVICES)
def test_values_reach_the_peer_and_then_its_flag(device: str) -> None:
    """An address of another rank, or a flag that is not set, fails."""
    memories = [torch.zeros(BLOCK, device=device) for _ in range(3)]
    values, flag = torch.randn(BLOCK, device=device), word(device)
    kernels.send_kernel[(1,)](addresses(memories).to(device), values, flag, 2, BLOCK=BLOCK)
    assert [torch.equal(memory, values) for memory in memories] == [False, False, True]
    assert flag.item() == 1


@pytest.mark.parametrize("device", DEVICES[:1])
def test_a_wait_ends_when_the_flag_is_there_and_not_before(device: str) -> None:
    """The data comes with the value that is waited for: who reads earlier reads zeros."""
    flag, values, out = word(device), torch.zeros(BLOCK), torch.zeros(BLOCK)

    def arrive(n: int) -> None:
        flag.fill_(min(n, 3))
        values.fill_(5.0 if n >= 3 else 0.0)

    with polls(arrive) as count:
        kernels.receive_kernel[(1,)](flag, values, out, 60, BLOCK=BLOCK, LIMIT=100)
    assert count == [3]
    assert out.tolist() == [5.0] * 60 + [0.0] * 4
    flag.fill_(4)  # a later one's
    kernels.receive_kernel[(1,)](flag, values, out, 60, BLOCK=BLOCK, LIMIT=100)


@pytest.mark.parametrize("device", DEVICES[:1])
def test_a_wait_in_vain_ends(device: str) -> None:
    """The trap: the interpreter has no assembly, and says so."""
    from triton.runtime.errors import InterpreterError

    values = torch.zeros(BLOCK)
    with (
        polls(lambda n: None) as count,
        pytest.raises(InterpreterError, match="inline_asm not supported"),
    ):
        kernels.receive_kernel[(1,)](word(device, 2), values, values, 60, BLOCK=BLOCK, LIMIT=9)
    assert count == [10]


@pytest.mark.parametrize("device", DEVICES)
def test_the_last_to_arrive_sums(device: str) -> None:
    """None or several last ones, or a counter that is not set back, give another sum."""
    values = torch.randint(9, (5, BLOCK), device=device).float()
    parts, out, counter = torch.zeros_like(values), torch.ones(BLOCK, device=device), word(device)
    for scope in ("gpu", "sys"):
        kernels.sum_kernel[(5,)](values, parts, counter, out, BLOCK=BLOCK, SCOPE=scope)
    assert torch.equal(out, 1 + 2 * 2 * values.sum(0))
    assert counter.item() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("row", "column"), [(0, 0), (16, 32), (60, 96)])
def test_a_tile_is_put_where_it_belongs(row: int, column: int, device: str) -> None:
    """Within the matrix [70, 100], in memory with rows of 128, and nowhere else."""
    a, b = torch.randn(2, 16, 16, device=device)
    memory = torch.full((80, 128), 7.0, dtype=torch.bfloat16, device=device)
    kernels.tile_kernel[(1,)](a, b, memory, row, column, 70, 100, 128, BLOCK=16)
    expected = torch.full_like(memory, 7.0)
    part = expected[row : min(row + 16, 70), column : min(column + 16, 100)]
    part.copy_((a @ b)[: part.shape[0], : part.shape[1]])
    torch.testing.assert_close(memory, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_read_and_written_by_tma(device: str) -> None:
    if device == "cuda":
        import triton

        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device=device))
    values = torch.randn(BLOCK, BLOCK, device=device).bfloat16()
    out, done = torch.zeros_like(values), word(device)
    kernels.tma_kernel[(1,)](values, out, word(device, 1), done, BLOCK=BLOCK, LIMIT=9)
    assert torch.equal(out, values)
    assert done.item() == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("world", "per"), [(1, 3), (4, 1), (3, 5)])
def test_the_order_of_tiles_begins_at_the_rank(world: int, per: int, device: str) -> None:
    """Every tile once, the peers' first: the order of TrackMap's shards."""
    for rank in range(world):
        out = torch.zeros(world * per, dtype=torch.int32, device=device)
        kernels.order_kernel[(1,)](out, rank + 1, COUNT=world * per, WORLD=world, PER=per)
        assert out.tolist() == list(rotated(world, per, world, 1, rank))
