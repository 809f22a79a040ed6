"""Exchanges of a prompt's rows, as `ladder bench machine` times them, on CPUs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.transports import TRANSPORTS, CollectiveTransport
from ladder.perf.calibration import exchanges
from tests.distributed import Pools, RankError


class Late(CollectiveTransport):
    """It gathers what was in the buffer before."""

    def gather_buffer(self, shard: int, like: Tensor) -> Tensor:
        # Memory that an earlier exchange freed may hold the right rows.
        return super().gather_buffer(shard, like).zero_()

    def gather(self, full: Tensor) -> None:
        before = full.clone()
        super().gather(full)
        other = 1 - self.rank
        full.chunk(2)[other].copy_(before.chunk(2)[other])


def checked(rank: int, world_size: int, late: bool) -> None:
    group = dist.group.WORLD
    assert group is not None
    transport = Late(group, 1) if late else TRANSPORTS["collective"](group, 1)
    torch.manual_seed(rank)
    mine = torch.randn(12, 16)
    exchanges.check(transport, mine, torch.full((16,), 0.5), group)


def test_an_exchange_sums_norms_and_gathers(pools: Pools) -> None:
    """And one that does not is not timed."""
    assert pools(2).run(checked, False) == [None, None]
    with pytest.raises(RankError, match="12 rows are exchanged wrongly"):
        pools(2).run(checked, True)
