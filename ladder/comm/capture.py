"""Whether a call is captured in a CUDA graph or runs eagerly: the fastest implementation differs.

Without a graph the host enqueues each kernel, copy and wait; in a graph they follow each other at
once. So tables have entries for each mode. A call is `captured` while its stream is being captured,
and within `as_captured`. The run before a capture needs `as_captured`: it prepares the memory,
kernels and tables of the implementations that the capture will pick, and a capture can make none of
these. The backward pass of a captured forward pass is another call, in the mode of the time when it
runs.

All ranks of a group must be in the same mode, as they must make the same calls.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Literal

import torch

Mode = Literal["captured", "eager"]
MODES: tuple[Mode, ...] = ("captured", "eager")
# How many `as_captured` are open. Not for each thread: autograd runs backward passes in others.
_as_captured = 0


def capturing() -> bool:
    """Whether the current stream is being captured."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def mode() -> Mode:
    """The mode of a call now."""
    return "captured" if _as_captured or capturing() else "eager"


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Within this context, calls run what a CUDA graph of them would: for the runs before a
    capture. All ranks must enter it.

        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), ladder.ops.as_captured():
            step()
        with torch.cuda.graph(graph, stream=stream):
            step()
    """
    global _as_captured
    _as_captured += 1
    try:
        yield
    finally:
        _as_captured -= 1


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disable Python's garbage collector inside a `with`.

    Unused engines are in reference cycles with symmetric memory, whose destructor waits for the
    device. That is not allowed during a capture: torch would end the process.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The second stream of all decode steps (`ladder.parallel.chains`)."""
    return torch.cuda.Stream(device)


def rejoin(stream: torch.cuda.Stream) -> None:
    """After an error in the middle of a captured step, let the capture of `stream` end: make
    `stream` current again, and let it wait for the side stream if that is being captured, too."""
    torch.cuda.set_stream(side_stream(stream.device_index))
    captured = torch.cuda.is_current_stream_capturing()
    torch.cuda.set_stream(stream)
    if captured:
        stream.wait_event(side_stream(stream.device_index).record_event())
