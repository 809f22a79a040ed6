"""Memory operations of the CUDA driver: a stream writes or awaits a word without a kernel."""

from __future__ import annotations

import ctypes
import functools
from typing import Any


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


@functools.cache
def driver() -> Any:
    """The CUDA driver's library."""
    return ctypes.CDLL("libcuda.so.1")
