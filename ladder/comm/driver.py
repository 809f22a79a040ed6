"""Memory operations of the CUDA driver: a CUDA stream writes or awaits a word without a kernel."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of the CUDA driver: wait for a 32-bit word, or write it."""

    WAIT, WRITE = 1, 2
    EQUAL = 1
    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )

    @classmethod
    def write(cls, address: int, value: int) -> MemoryOperation:
        """Write `value` to a word, also a peer's; the stream's earlier writes are seen first."""
        return cls(cls.WRITE, address, value)

    @classmethod
    def wait(cls, address: int, value: int) -> MemoryOperation:
        """Make the stream wait until the word is `value`, without a time limit."""
        return cls(cls.WAIT, address, value, cls.EQUAL)


@functools.cache
def driver() -> Any:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def batch(operations: Sequence[MemoryOperation]) -> ctypes.Array[MemoryOperation]:
    """The operations as an array for `enqueue`, which may be enqueued many times."""
    return (MemoryOperation * len(operations))(*operations)


BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


def buffer_id(address: int) -> int:
    """The driver's ID of the allocation that contains `address`. No two allocations share an ID,
    even if the second has the addresses of a first that was freed."""
    found = ctypes.c_ulonglong()
    code = driver().cuPointerGetAttribute(
        ctypes.byref(found), BUFFER_ID, ctypes.c_ulonglong(address)
    )
    if code:
        raise RuntimeError(f"cuPointerGetAttribute failed with CUDA driver error {code}")
    return found.value


def current_stream(device: torch.device) -> int:
    """The handle of the device's current stream, in a tenth of the time of torch's own function."""
    found: int = torch._C._cuda_getCurrentRawStream(device.index)
    return found


def enqueue(operations: ctypes.Array[MemoryOperation], stream: int | None = None) -> None:
    """Enqueue a batch on a stream, which runs it in order; works in a capture, too.

    stream: a handle; None: the current one's. Raises RuntimeError if the driver returns an error.
    """
    if stream is None:
        stream = torch.cuda.current_stream().cuda_stream
    code = driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream), len(operations), operations, 0)
    if code:
        raise RuntimeError(
            f"cuStreamBatchMemOp failed with CUDA driver error {code}; transport=copy-kernels does "
            f"without it, and so do operators by 'staged'"
        )
