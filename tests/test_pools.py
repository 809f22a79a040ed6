"""The tests' own pools of ranks: failures are reported, and nothing hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests import distributed
from tests.distributed import Pool, RankError, mesh


def fail_on(rank: int, world_size: int, failing: int, how: str) -> float:
    """One rank fails; the others wait for it in a collective."""
    if rank == failing:
        if how == "raise":
            raise ValueError(f"this is rank {rank}'s own mistake")
        if how == "die":
            os._exit(3)
        time.sleep(60)
    total = torch.tensor(1.0 + rank)
    dist.all_reduce(total)
    return total.item()


def mesh_ranks(rank: int, world_size: int) -> tuple[int, int, bool]:
    found = mesh(1, 2)
    return found["dp"].get_local_rank(), found["tp"].get_local_rank(), found is mesh(1, 2)


def test_a_failure_is_the_first_ranks_and_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that raises, dies or hangs; afterwards the pool works again. Catches a pool that waits
    for ranks that wait for the one that failed, and one left out of step for the next test."""
    monkeypatch.setattr(distributed, "GRACE", 0.2)
    pool = Pool(2)
    try:
        assert pool.run(fail_on, -1, "") == [3.0, 3.0]
        assert pool.run(mesh_ranks) == [(0, 0, True), (0, 1, True)]
        for failing, how, limit, words in (
            (1, "raise", 30.0, "rank 1 of 2.*rank 1's own mistake"),
            (0, "die", 30.0, "rank 0 of 2.*died with exit code 3"),
            (1, "hang", 1.0, "(?s)no answer from rank .*1 of 2 .*within 1 s.*fail_on"),
        ):
            began = time.monotonic()
            with pytest.raises(RankError, match=f"(?s){words}"):
                pool.run(fail_on, failing, how, limit=limit)
            assert time.monotonic() - began < 15
            assert pool.run(fail_on, -1, "") == [3.0, 3.0]
    finally:
        pool.close()
