"""A rank that dies while the others wait for it on GPUs: the job ends, and names it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ladder.parallel import launch

LIMIT = 60.0  # seconds until a job has ended whose rank died


def end_one_rank(call: Callable[[], object]) -> int:
    """Each rank makes calls; the last one is killed in between."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    if launch.rank() == launch.world_size() - 1:
        time.sleep(0.5)  # the others are waiting by now
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    return 0


def check_loss(
    job: Callable[..., int], arguments: tuple[str, ...], world: int,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The job, whose ranks go through `end_one_rank`, ends in time, with one error line."""
    begun = time.monotonic()
    assert launch.run(job, arguments, nproc=world) == 1
    assert time.monotonic() - begun < LIMIT
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [f"error: rank {world - 1} was killed by signal 9 (SIGKILL)"]
