"""The part of an SM's L1 cache that the kernels of a decode step prefer to have as shared memory.

Left to itself, the driver takes as much as an SM's programs of a kernel could use. Measured on an
H200, chains of a layer's products at TP 4: with 64 KiB, or what one program needs, 4 rows took 6 %
less time for an 8B and 20 % less for a 2B class, 16 rows 6 and 19 %; 64 rows the same, one row 4 to
10 % more. A 70B, whose products have more programs than there are SMs, took 0.5 % more: a kernel
whose programs would no longer run all at once keeps the driver's choice.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ladder.comm.driver import driver
from ladder.jit import has_dependent_launch, watched
from ladder.kernels.decode_shapes import MAX_VECTOR_ROWS, SYSTEM_SHARED

ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
DRIVERS = -1  # the driver's choice
SHARE = 28  # percent of an H200's 228 KiB: 64 KiB
MAX_ROWS = 16

# What was set for a compiled kernel. The driver keeps it, for what is captured later, too.
_preferred: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def share(rows: int) -> int:
    """The percentage that kernels of a decode step of so many rows prefer."""
    return SHARE if MAX_VECTOR_ROWS < rows <= MAX_ROWS else DRIVERS


def fits(percent: int, shared: int, programs: int, device: torch.device) -> bool:
    """Whether a kernel loses nothing by so little shared memory, of which a program needs `shared`
    bytes: all programs run at once, or no more of them would with all shared memory."""
    found = torch.cuda.get_device_properties(device)
    whole, needed = found.shared_memory_per_multiprocessor, shared + SYSTEM_SHARED
    held = max(1, whole * percent // 100 // needed)  # programs of an SM
    return programs <= held * found.multi_processor_count or whole // needed <= held


@contextlib.contextmanager
def carveout(percent: int) -> Iterator[None]:
    """Within, kernels that are launched prefer this share, but for those that do not fit in it.

    It is set after a kernel's launch, so a capture must follow a run of the same kernels. Kernels
    keep it afterwards.
    """
    crowded: list[Any] = []

    def prefer(compiled: Any, programs: int, device: torch.device) -> None:
        if not has_dependent_launch(device):
            return
        if percent != DRIVERS and not fits(percent, compiled.metadata.shared, programs, device):
            crowded.append(compiled)
        wanted = DRIVERS if compiled in crowded else percent
        if _preferred.get(compiled, DRIVERS) != wanted:
            handle = ctypes.c_void_p(compiled.function)
            if code := driver().cuFuncSetAttribute(handle, ATTRIBUTE, ctypes.c_int(wanted)):
                raise RuntimeError(f"cuFuncSetAttribute failed with CUDA driver error {code}")
            _preferred[compiled] = wanted

    with watched(prefer):
        yield
