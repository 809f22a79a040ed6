"""CUDA graphs: work recorded once and replayed without launching it again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

WARM_UP_STEPS = 2  # before a capture: kernels are loaded and NCCL's buffers made
Result = TypeVar("Result")


def record(work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """`work` in a CUDA graph, after its warm-up runs, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP_STEPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread may touch the driver meanwhile: only this thread is recorded.
    mode = "thread_local"
    with no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        result = work()
    return graph, result


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's garbage collector from running here.

    An engine that was dropped lies in reference cycles, and with it symmetric memory, whose
    destructor waits for the device. No capture allows that: torch ends the process there.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
