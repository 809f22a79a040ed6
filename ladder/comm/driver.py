"""Memory operations of the CUDA driver: a stream writes or waits for a word without a kernel."""

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
        """Write `value` to the word, a peer's too; what the stream did before is seen first."""
        return cls(cls.WRITE, address, value)

    @classmethod
    def wait(cls, address: int, value: int) -> MemoryOperation:
        """Hold the stream until the word is `value`. Nothing bounds the wait."""
        return cls(cls.WAIT, address, value, cls.EQUAL)


@functools.cache
def driver() -> Any:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")


def batch(operations: Sequence[MemoryOperation]) -> ctypes.Array[MemoryOperation]:
    """Operations as `enqueue` takes them; made once, they are enqueued as often as needed."""
    return (MemoryOperation * len(operations))(*operations)


def enqueue(operations: ctypes.Array[MemoryOperation]) -> None:
    """Enqueue a batch on the current stream, which runs it in order; also within a capture.

    Raises RuntimeError where the driver refuses it.
    """
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = driver().cuStreamBatchMemOp_v2(stream, len(operations), operations, 0)
    if code:
        raise RuntimeError(
            f"cuStreamBatchMemOp failed with CUDA driver error {code}; transport=copy-kernels does "
            f"without it"
        )
