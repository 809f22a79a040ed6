"""Calls that come again with the same memory, as CUDA graphs.

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

# Of torch.backends.cuda.matmul; older versions of torch do not have all.
SETTINGS = (
    "allow_bf16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction_split_k",
    "allow_fp16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction_split_k",
    "allow_fp16_accumulation",
)  # fmt: skip
MOST = 512  # calls that are known, of a workspace

Enqueue = Callable[[CudaStreams], object]
Launch = Callable[[], object]


def memory_of(tensors: Iterable[Tensor | None]) -> Hashable:
    """What tells a call's memory from that of another.

    Of an allocation that was freed a graph's copies know no more than that, and the driver crashes,
    even where the next one has the same addresses. So an allocation is named by its number, too.
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
        self.first: torch.cuda.CUDAGraph | None = None  # kept, since its pool ends with all graphs
        self.lock = threading.Lock()

    def __call__(self, enqueue: Enqueue) -> Launch:
        """What launches a graph of all that `enqueue` does, which must not allocate."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_blas_handle()  # this thread's may be new, and no capture can make it
        # torch.cuda.graph would wait for the device and empty the allocator's cache.
        with self.lock, no_collection(), torch.cuda.stream(self.main):
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                enqueue(self.streams)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # what ends a broken capture says less
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
    """That of all workspaces of a device and stream, whose graphs run one after the other: they
    share cuBLAS's workspace.

    None: calls are always enqueued. So they are where the allocator changes the memory behind an
    address, of which the driver has no number (expandable_segments), or is not torch's own.
    """
    if not keeps_memory():
        return None
    segments = torch.cuda.memory_snapshot()
    return None if any(each["is_expandable"] for each in segments) else Recorder(device)


def settings() -> Hashable:
    """What of torch's settings cuBLAS's kernels depend on, but for those of float32."""
    chosen = torch.backends.cuda.preferred_blas_library()
    return chosen, *(getattr(torch.backends.cuda.matmul, each, None) for each in SETTINGS)


class Replays:
    """The calls of a workspace. record: see `Recorder`."""

    def __init__(self, record: Callable[[Enqueue], Launch]) -> None:
        self.record = record
        self.known: OrderedDict[Hashable, Launch | None] = OrderedDict()

    def run(self, key: Hashable, enqueue: Enqueue, streams: CudaStreams) -> None:
        """Do what `enqueue` does on `streams`, or launch the graph of it.

        key: all that it depends on, its memory among it.
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
