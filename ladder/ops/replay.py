"""Calls that repeat with the same memory run as CUDA graphs.

Eager calls keep the host busy: one that overlaps is a dozen kernels, copies and waits. But a
training step asks the allocator for the same memory in the same order as the step before, so its
calls come again, with the same addresses. The first time, a call is enqueued; the second time, it
is captured in a graph of its own, and launched from then on. What it computes is the same to the
bit. Where addresses change all the time, calls are enqueued as before.

Each rank decides for itself. One may launch what another enqueues: the words that ranks write and
await are the same (`ladder.ops.schedules`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from ladder.comm import driver
from ladder.comm.capture import no_collection
from ladder.ops.streams import CudaStreams

# Attributes of torch.backends.cuda.matmul; older versions of torch lack some of them.
SETTINGS = (
    "allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k",
    "allow_fp16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction_split_k",
    "allow_fp16_accumulation",
)  # fmt: skip
MOST = 512  # calls that a workspace remembers

Enqueue = Callable[[CudaStreams], object]
Launch = Callable[[], object]


def memory_of(tensors: Iterable[Tensor | None]) -> Hashable:
    """A key that tells the memory of one call from that of another.

    A graph's copies belong to their allocations. Once one is freed the driver crashes, even if the
    next allocation has the same addresses. So the key also has the allocations' IDs.
    """
    found: list[Hashable] = []
    for each in tensors:
        if each is not None:
            at = each.data_ptr()
            where = driver.buffer_id(at) if each.is_cuda and at else 0
            found.append((at, where, each.shape, each.stride(), each.dtype))
        else:
            found.append(None)
    return tuple(found)


class Recorder:
    """Captures graphs on a device, on streams of its own."""

    def __init__(self, device: torch.device) -> None:
        self.main = torch.cuda.Stream(device)
        self.streams = CudaStreams(device, self.main)
        self.pool = torch.cuda.graph_pool_handle()
        self.first: torch.cuda.CUDAGraph | None = None  # kept: the pool ends with its last graph
        self.lock = threading.Lock()

    def __call__(self, enqueue: Enqueue) -> Launch:
        """Capture all that `enqueue` does, which must not allocate; returns the graph's launch."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_blas_handle()  # this thread may have none, and a capture cannot make it
        # torch.cuda.graph would wait for the device and empty the allocator's cache.
        with self.lock, no_collection(), torch.cuda.stream(self.main):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                enqueue(self.streams)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        self.first = self.first or graph
        replay: Launch = graph.replay
        return replay


def keeps_memory() -> bool:
    """Whether the allocator is torch's own, and was not told to change the memory behind an
    address (expandable_segments)."""
    told = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    own = torch.cuda.get_allocator_backend() == "native"
    return own and not any("expandable_segments:true" in each.lower() for each in told)


@functools.cache
def recorder(device: torch.device, stream: int) -> Recorder | None:
    """The recorder of all workspaces of a device and stream. Their graphs run one after the other,
    so they share cuBLAS's workspace.

    None: calls are always enqueued, since the allocator can change the memory behind an address
    (expandable_segments), for which the driver has no ID, or is not torch's own.
    """
    if not keeps_memory():
        return None
    segments = torch.cuda.memory_snapshot()
    return None if any(each["is_expandable"] for each in segments) else Recorder(device)


def settings() -> Hashable:
    """The settings of torch on which cuBLAS's kernels depend, but for those of float32."""
    chosen = torch.backends.cuda.preferred_blas_library()
    return chosen, *(getattr(torch.backends.cuda.matmul, each, None) for each in SETTINGS)


class Replays:
    """The calls of a workspace, and the graphs of those that repeat. record: see `Recorder`."""

    def __init__(self, record: Callable[[Enqueue], Launch]) -> None:
        self.record = record
        self.known: OrderedDict[Hashable, Launch | None] = OrderedDict()

    def run(self, key: Hashable, enqueue: Enqueue, streams: CudaStreams) -> None:
        """Do what `enqueue` does on `streams`, or launch the graph of it.

        key: all that the call depends on, including its memory.
        """
        if key not in self.known:
            enqueue(streams)
            self.known[key] = None
            if len(self.known) > MOST:
                self.known.popitem(last=False)
            return
        self.known.move_to_end(key)
        launch = self.known[key]
        if launch is None:
            launch = self.known[key] = self.record(enqueue)
        launch()
