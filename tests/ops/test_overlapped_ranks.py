"""Overlapped products on ranks of a pool that share memory, bit for bit `staged`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladder.comm import driver
from ladder.kernels.collect import Collector
from ladder.ops import pushed, workspace
from ladder.ops.collectives import staged_all_gather
from ladder.ops.gradients import (
    GATHER_BACKWARD,
    SCATTER_BACKWARD,
    staged_gather_gradients,
    staged_scatter_gradients,
)
from ladder.ops.landings import staged_everywhere, staged_scatter
from ladder.ops.products import (
    staged_all_gather_matmul,
    staged_linear_all_reduce,
    staged_matmul_all_reduce,
    staged_matmul_reduce_scatter,
)
from tests.comm.mapped import shared_memory
from tests.comm.threads import FakeDriver
from tests.distributed import Pools
from tests.interpreter import interpreting
from tests.kernels.support import _poisoned_memory, on  # noqa: F401  (a fixture)
from tests.ops.everyone import random as numbers
from tests.ops.overlapped import (
    EVERY,
    FEW_ROWS,
    IMPLEMENTATIONS,
    IN_BLOCKS,
    OF_SHARDS,
    WHOLE,
    arguments,
    check_same,
    expected,
    flat,
    operands,
    options_of,
    run_of,
)


class SerialStreams:
    """The host runs the steps of all streams at once, in the order in which it enqueues them."""

    def __init__(self, device: torch.device) -> None:
        self.recorded: set[str] = set()

    def begin(self) -> None:
        self.recorded.clear()

    def enter(self, stream: str) -> None:
        pass

    def end(self) -> None:
        pass

    def record(self, event: str) -> None:
        self.recorded.add(event)

    def follow(self, event: str) -> None:
        assert event in self.recorded

    def enqueue(self, words: Any) -> None:
        driver.enqueue(words, 0)


STAGED = {
    "all_gather_matmul": staged_all_gather_matmul,
    "matmul_reduce_scatter": staged_matmul_reduce_scatter,
    "matmul_all_reduce": staged_matmul_all_reduce,
    "linear_all_reduce": staged_linear_all_reduce,
    "matmul_reduce_scatter_add_rms_norm": staged_scatter,
    "matmul_all_reduce_add_rms_norm": staged_everywhere,
    GATHER_BACKWARD: staged_gather_gradients,
    SCATTER_BACKWARD: staged_scatter_gradients,
}


def on_ranks(rank: int, world: int, folder: str, which: list[tuple[str, str]]) -> list[str]:
    """Real processes over memory that all of them map; ranks that come late; bit for bit `staged`.

    Shapes change from call to call, and several implementations share a workspace.
    """
    group = dist.group.WORLD
    fake = FakeDriver(random.Random(rank))
    with (
        interpreting() as ran,
        shared_memory(rank, world, folder),
        mock.patch.object(workspace, "CudaStreams", SerialStreams),
        mock.patch.object(workspace, "MIN_WORDS", 64),
        mock.patch.object(pushed, "LARGEST", 2**16),
        mock.patch.object(pushed, "SMALLEST", 2**10),
        mock.patch.object(pushed, "project", wraps=pushed.project) as project,
        mock.patch.object(Collector, "PROGRAMS", 3),
        mock.patch.object(Collector, "BLOCK", 128),
        mock.patch.object(workspace, "_workspaces", {}),
        mock.patch.object(driver, "driver", return_value=fake),
    ):
        results = []
        for call in range(4):
            for op, name in which:
                rows, n = [(20, 40), (1, 8), (7, 40), (3, 8)][call]
                pushes = (op, name) in FEW_ROWS
                if name == "pushed":  # also more rows than the kernel made for few takes
                    rows *= {0: 5, 3: 30}.get(call, 1)
                if op not in OF_SHARDS and ("scatter" in op or not pushes):
                    rows *= world
                if op in WHOLE and name != "summing":
                    rows += call % 3
                dtype = torch.bfloat16 if pushes and call % 2 == 0 else torch.float16
                A, B = operands(world, call, rows, n - pushes, dtype)[rank]
                if op == "linear_all_reduce" and call < 3:  # a weight as in nn.Linear
                    B = B.t().contiguous().t()
                average = call % 2 == 1
                given = arguments(op, A, B, average, world)
                every = options_of(op, name)
                options = every[call % len(every)]
                found = flat(run_of(op, name)(group, *given, **options))
                if name == "ring" or op == SCATTER_BACKWARD:  # sums in another order
                    inputs = operands(world, call, rows, n, dtype)
                    wanted = expected(op, name, options, inputs, rank, average)
                    check_same(op, f"{op} on rank {rank}", found, wanted, average)
                else:
                    results.append((op, given, found))
        for op, given, found in results:
            check_same(op, f"{op} on rank {rank}", found, flat(STAGED[op](group, *given)))
        # A call's weight may be what the kernel before it writes.
        assert {each.kwargs.get("fixed", True) for each in project.call_args_list} == {False}
        turned(group)
        ragged(group)
    return ran


def ragged(group: Any) -> None:
    """Sums that are pushed: ranks with fewer rows, of nearly as many bytes as slots are made for;
    rows that are no whole words. And a gather of rows that begin within a word."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for rows, n in ((9, 56), (2 * world + 1, 7)):
        A, B = operands(world, rows, rows, n, torch.bfloat16)[rank]
        found = run_of("matmul_all_reduce", "chunked")(group, A, B, push=True)
        check_same("matmul_all_reduce", (rows, n), [found], [staged_matmul_all_reduce(group, A, B)])
    A, B = operands(world, 8, 9, 8, torch.bfloat16, k=8)[rank]
    own = A.flatten()[1:65].view(8, 8)
    whole, _ = run_of("all_gather_matmul", "pushed")(group, own, [B], 0, True)
    check_same("all_gather_matmul", "within a word", [whole], [staged_all_gather(group, own, 0)])


def turned(group: Any) -> None:
    """Rows in another dimension than the first, operands that are views; against float64."""
    rank, world = dist.get_rank(), dist.get_world_size()
    As = [numbers(3, 2 * world, 9, seed=q, dtype=torch.bfloat16) for q in range(world)]
    Bs = [numbers(5, 9, seed=10 + q, dtype=torch.bfloat16).t() for q in range(world)]
    for name in IMPLEMENTATIONS["all_gather_matmul"]:
        A = As[rank].transpose(0, 1)
        whole, (out,) = run_of("all_gather_matmul", name)(
            group, A, [Bs[0]], 1, True, **options_of("all_gather_matmul", name)[-1]
        )
        joined = torch.cat([each.transpose(0, 1) for each in As], 1)
        assert torch.equal(whole, joined)
        assert torch.equal(whole, staged_all_gather(group, A, 1))
        torch.testing.assert_close(
            out.double(), joined.double() @ Bs[0].double(), rtol=2e-2, atol=2e-2
        )
    exact = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))
    for name in IMPLEMENTATIONS[GATHER_BACKWARD]:
        several_gradients(group, name)
    for name in IMPLEMENTATIONS[SCATTER_BACKWARD]:
        gradients_in_turn(group, name)
    for name in IMPLEMENTATIONS["matmul_reduce_scatter"]:
        out = run_of("matmul_reduce_scatter", name)(
            group, As[rank], Bs[rank], "sum", 1, **options_of("matmul_reduce_scatter", name)[-1]
        )
        assert out.is_contiguous()
        wanted = exact.chunk(world, 1)[rank]
        torch.testing.assert_close(out.double(), wanted, rtol=4e-2, atol=8e-2)


def several_gradients(group: Any, name: str) -> None:
    """Of matrices in either layout, one of them square, of rows in any dimension, and of gradients
    that are views: as `staged`, the matrices' bit for bit, in the layout of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    made = {"dtype": torch.float16}
    whole = numbers(4, 2 * world, 9, seed=1, **made)
    Bs = [numbers(9, 5, seed=2, **made), numbers(9, 9, seed=3, **made).t(),
          numbers(4, 9, seed=4, **made).t()]  # fmt: skip
    grads = [numbers(2 * world, 4, B.shape[1], seed=5 + rank, **made).transpose(0, 1) for B in Bs]
    for options in options_of(GATHER_BACKWARD, name):
        for dim in (0, 1):
            given = whole, Bs, grads, dim
            own, of_Bs = run_of(GATHER_BACKWARD, name)(group, *given, **options)
            exact, of_matrices = staged_gather_gradients(group, *given)
            torch.testing.assert_close(own, exact, rtol=2e-2, atol=2e-2)
            for found, wanted in zip(of_Bs, of_matrices, strict=True):
                assert found.stride() == wanted.stride()
                assert torch.equal(found, wanted)


def gradients_in_turn(group: Any, name: str) -> None:
    """Of matrices in either layout, of rows in any dimension, and of operands that are views: as
    `staged`, but for the rounding of parts, in its layout."""
    rank, world = dist.get_rank(), dist.get_world_size()
    made = {"dtype": torch.float16}
    for B in (numbers(9, 5, seed=2, **made), numbers(5, 9, seed=3, **made).t(),
              numbers(9, 9, seed=4, **made).t()):  # fmt: skip
        for dim, shape in enumerate([(4, 2 * world), (4 * world, 2)]):
            grad = numbers(2, 4, B.shape[1], seed=5 + rank, **made).transpose(0, 1)
            x = numbers(*shape[::-1], 9, seed=9 + rank, **made).transpose(0, 1)
            given = grad, x, B, 1 - dim
            wanted = staged_scatter_gradients(group, *given)
            for options in options_of(SCATTER_BACKWARD, name):
                found = run_of(SCATTER_BACKWARD, name)(group, *given, **options)
                for one, exact in zip(found, wanted, strict=True):
                    assert one.stride() == exact.stride()
                    torch.testing.assert_close(one, exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("device", "world"), [on("interpreter", 2), on("interpreter", 4, slow=True)]
)
def test_ranks_that_share_memory_agree_with_staged(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, world: int
) -> None:
    for ran in pools(world).run(on_ranks, str(tmp_path), EVERY + IN_BLOCKS + FEW_ROWS):
        assert {"_gemm_kernel", "_project_kernel", "_push_all_reduce", "_collect_kernel"} <= set(
            ran
        )
        interpreted += ran
