"""Sums of what products push, in real processes, through Triton's interpreter on a CPU.

Symmetric memory is files that all ranks map: see tests.comm.mapped.
tests/ops/test_overlapped_gpu.py provokes the compiled kernels.
"""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladder.comm.primitives import EMPTY
from ladder.kernels import SendJob, project, send
from ladder.kernels.collect import Collector
from tests.comm.mapped import shared_memory
from tests.distributed import Pools
from tests.interpreter import interpreting
from tests.kernels.support import on
from tests.ops.everyone import in_order
from tests.ops.overlapped import operands

SHAPES = [(1, 8), (3, 39), (16, 5), (2, 64)]
MOST = 128  # elements: (3, 39) and (2, 64) fill it, and (1, 8) leaves most of it


def provoke(rank: int, world: int, folder: str, dtype: torch.dtype, turns: int) -> tuple[int, list]:
    """Calls of changing sizes by ranks that come late; how many totals are wrong, what ran."""
    device, group, wrong = torch.device("cpu"), dist.group.WORLD, 0
    with (
        interpreting() as ran,
        shared_memory(rank, world, folder),
        mock.patch.object(Collector, "PROGRAMS", 3),
        mock.patch.object(Collector, "BLOCK", 32),
    ):
        collect = Collector(MOST, dtype, group, device)
        schedule = random.Random(7).choices(SHAPES, k=turns)
        inputs = [operands(world, turn, *each, dtype) for turn, each in enumerate(schedule)]
        totals = []
        for turn, (rows, columns) in enumerate(schedule):  # one call right after another
            A, B = inputs[turn][rank]
            if turn % 3:
                project(A, B.t().contiguous(), push=collect.target, keep=False)
            else:
                send(SendJob(A @ B, collect.target))
            totals.append(collect(rows, columns))
        for total, given in zip(totals, inputs, strict=True):
            wanted = in_order([A @ B for A, B in given]).to(dtype)
            wrong += not torch.equal(total, wanted)
        dist.barrier()  # no rank pushes any more
        kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        wrong += int((collect.slots.own.view(kind) != EMPTY[dtype.itemsize]).sum())
    return wrong, ran


@pytest.mark.parametrize(
    ("device", "dtype", "world", "turns"),
    [
        on("interpreter", torch.bfloat16, 2, 24, slow=True),
        on("interpreter", torch.float32, 2, 12),
        on("interpreter", torch.float16, 4, 12),
    ],
)
def test_totals_are_the_sum_in_rank_order(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, dtype: torch.dtype,
    world: int, turns: int,
) -> None:  # fmt: skip
    """A slot read too early, cleared too late or not at all gives another sum, or no end."""
    for wrong, ran in pools(world).run(provoke, str(tmp_path), dtype, turns):
        assert wrong == 0
        assert "_collect_kernel" in ran
        interpreted += ran
