"""CUDA graphs of calls that share memory between the ranks, replayed many times."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models.errors import UserError
from ladder.parallel import launch

REPLAYS = int(os.environ.get("LADDER_TEST_REPLAYS", "300"))  # 100000 takes some minutes


def replay(
    run: Callable[..., list[Tensor]], given: Sequence[tuple[Any, ...]], values: Sequence[Tensor],
    check: Callable[[object, list[Tensor], tuple[Any, ...]], None],
) -> None:  # fmt: skip
    """Graphs of one call and of three, which share memory, in turn, and calls between.

    given: the arguments of four calls. values: what is changed among them, between replays, by
    powers of two. check: called with the turn and the call, the results, and the arguments.
    """
    rank = launch.rank()
    same, own = random.Random(1), random.Random(100 + rank)
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with (
        pytest.raises(UserError, match="needs new memory"),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        run(*given[0])
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for each in given:
            run(*each)
    torch.cuda.synchronize()
    dist.barrier()
    graphs, outs = [], []
    for numbers in ([0], [1, 2, 3]):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            outs += [(n, run(*given[n])) for n in numbers]
        graphs.append(graph)
    with torch.cuda.stream(stream):
        for turn in range(REPLAYS):
            checked = turn % 50 in (0, 1, 49)
            if checked:
                for value in values:
                    value.mul_(2.0 if turn % 100 < 50 else 0.5)  # exact, and other than before
                for out in [out for _, found in outs for out in found]:
                    out.fill_(torch.nan if out.is_floating_point() else -7)
            if own.random() < 0.2:
                torch.cuda._sleep(own.randrange(2_000_000) * (rank + 1))
            which = same.randrange(3)
            if which == 2:
                run(*given[1])  # not captured
            for n in (0, 1) if checked or which == 2 else (which,):
                graphs[n].replay()
            if checked:
                for n, found in outs:
                    check((turn, n), found, given[n])
    torch.cuda.synchronize()
