"""Times of one piece of work: on a GPU in a CUDA graph of many calls, elsewhere by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist

from ladder.infer.graphs import capture_graph, time_turns
from ladder.parallel import launch

Work = Callable[[], Any]
REST = 0.02  # seconds
REPEATS = 15  # timed turns, of which the median counts; one more warms up


def samples(
    works: Sequence[Work], calls: int, device: torch.device, cool: bool = False,
    captured: bool = True,
) -> list[float]:  # fmt: skip
    """Microseconds of one call, one figure for each turn of `calls` calls on this rank.

    works: the same work on different memory, taken in turns, so that no cache holds its data. cool:
    whether the device rests before each turn, which keeps short work below the power limit.
    captured: see `turn_of`.
    """
    turn = turn_of(works, calls, device, captured)
    if device.type != "cuda":
        times = []
        for _ in range(REPEATS + 1):
            align()
            start = time.perf_counter()
            turn()
            times.append((time.perf_counter() - start) * 1e6 / calls)
        return times[1:]
    if cool:
        return [us / calls for us in (cooled(turn, device) for _ in range(REPEATS + 1))][1:]
    align()
    turn()
    return [ms * 1e3 / calls for ms in time_turns(turn, REPEATS)]


def cooled(turn: Work, device: torch.device) -> float:
    """Microseconds of a turn after a rest and another turn, which hides the host's launch."""
    align()
    if device.type == "cuda":
        time.sleep(REST)
        turn()
        return time_turns(turn, 1)[0] * 1e3
    turn()
    start = time.perf_counter()
    turn()
    return (time.perf_counter() - start) * 1e6


def turn_of(works: Sequence[Work], calls: int, device: torch.device, captured: bool = True) -> Work:
    """A turn of `calls` calls. On a GPU it replays a CUDA graph or, if not `captured`, launches one
    by one.

    All ranks must call this: it runs the work, which compiles kernels and makes buffers.
    """
    turn = list(islice(cycle(works), calls))

    def run() -> None:
        for work in turn:
            work()

    if device.type != "cuda":
        return run
    for work in dict.fromkeys(turn):
        work()
    return partial(_replay, capture_graph(run)[0], turn) if captured else run


def _replay(graph: torch.cuda.CUDAGraph, _: Sequence[Work]) -> None:
    """The second argument keeps the work's memory, which the graph uses, alive."""
    graph.replay()


def slowest_median(found: Sequence[Sequence[float]]) -> float:
    """The median over turns of each turn's slowest rank; found: the samples of each rank."""
    return statistics.median(max(turn) for turn in zip(*found, strict=True))


def microseconds(
    works: Sequence[Work], calls: int, device: torch.device, cool: bool = False,
    captured: bool = True,
) -> float:  # fmt: skip
    """Microseconds of one call: the same on every rank, which all must call this."""
    return slowest_median(launch.gathered(samples(works, calls, device, cool, captured)))


def host_microseconds(work: Work, calls: int, device: torch.device) -> float:
    """The host's time to launch `work`, whether or not the device has caught up."""
    times = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return slowest_median(launch.gathered(times[1:]))


def align() -> None:
    """Let all ranks begin together."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if launch.world_size() > 1 and dist.is_initialized():
        dist.barrier()
