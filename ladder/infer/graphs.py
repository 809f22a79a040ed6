"""CUDA graphs, which record work once and replay it without new kernel launches; timing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch

from ladder.comm.capture import as_captured, no_collection, rejoin

WARM_UP_STEPS = 2  # runs before a capture, which load kernels and make NCCL's buffers
Result = TypeVar("Result")


@functools.cache
def capture_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures on a device.

    With a new stream for each graph, operators would make their buffers for each stream
    (ladder.ops.workspace) anew each time, and torch's pool would hand out the same streams again.
    """
    return torch.cuda.Stream(device)


def capture_graph(work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of `work`, captured after warm-up runs, and the result of `work`.

    The warm-up runs the implementations of `ladder.ops` that the graph will hold; eager calls may
    run others. All ranks of a group must call this together.
    """
    stream = capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), as_captured():
        for _ in range(WARM_UP_STEPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Only this thread is recorded, since NCCL's watchdog thread may call the driver meanwhile.
    mode = "thread_local"
    with no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        try:
            result = work()
        except BaseException:  # else the capture could not end, and its error would hide this one
            rejoin(stream)
            raise
    return graph, result


def time_turns(work: Callable[[], object], turns: int) -> list[float]:
    """Milliseconds on the GPU of each of `turns` runs of `work`, one right after another."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(turns + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]
