"""The part of an SM's L1 cache that the kernels of a decode step prefer to have as shared memory.

Under dependent launch a kernel's programs start as soon as an SM has room for them. Left to itself,
the driver makes room for as many as an SM could hold: then SMs that are done with the previous
kernel first get several programs, others none, and the step waits for the fullest. So a kernel
prefers no more than its programs need if they are spread evenly.

Measured on an H200, steps on one stream of the shapes of an 8B at TP 4: 8 to 21 % less time than by
the driver's choice at 1, 4 and 16 sequences, 4 % at 33, the same at 64 (benchmarks/results).
On two streams see MOST_APART.
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
from ladder.kernels.decode_shapes import MAX_VECTOR_ROWS, SYSTEM_SHARED, fitting
from ladder.kernels.limits import MAX_ROWS

ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
DRIVERS = -1  # the driver's choice
# Percent of an H200's 228 KiB: 64 KiB. Where products use shared memory, kernels that need little
# of it prefer LEAST, too: steps of 16 sequences took up to 2 % longer with less, and up to 4 %
# longer with 44.
LEAST = 28
# The most rows for which kernels on two streams prefer the same as on one. With the driver's choice
# kernels of both streams fit an SM at once. A ladder's steps then take 0 to 4 % less from 8
# sequences on, up to 6 % more for 1, and for 4 between 4 % less (an 8B at TP 4 and 8) and 4 % more.
MOST_APART = 7

# The percentage set for each compiled kernel. The driver keeps it, for later captures, too.
_preferred: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def least(rows: int, beside: bool = False, eight_bits: bool = False) -> int:
    """The percentage that every kernel of a decode step of so many rows prefers at least.

    beside: on two streams. eight_bits: weights are stored in 8 bits. There LEAST takes 7 % off a
    ladder's steps of one sequence in fp8, 1 % off those of two or in int8, and 6 % off steps of one
    of `parallel`; to these it adds 8 % in bfloat16.
    """
    if rows > MAX_ROWS:  # its products run by other kernels, which were not measured
        return DRIVERS
    if beside and rows > MOST_APART:
        return DRIVERS
    little = rows <= MAX_VECTOR_ROWS and not (beside and eight_bits)
    return 0 if little else LEAST


def needed(shared: int, programs: int, device: torch.device) -> int:
    """The percentage that programs which use `shared` bytes each need if all run at once, spread
    evenly; DRIVERS if they cannot."""
    found = torch.cuda.get_device_properties(device)
    of_an_sm = -(-programs // found.multi_processor_count) * (shared + SYSTEM_SHARED)
    percent = -(-100 * of_an_sm // found.shared_memory_per_multiprocessor)
    return percent if percent <= 100 else DRIVERS


def stages_that_fit(stages: int, stage_bytes: int, device: torch.device) -> int:
    """The stages, of `stages`, for which a program has shared memory; all in the interpreter."""
    if device.type == "cpu":
        return stages
    found = torch.cuda.get_device_properties(device)
    return fitting(stages, stage_bytes, found.shared_memory_per_multiprocessor)


@contextlib.contextmanager
def carveout(at_least: int) -> Iterator[None]:
    """Within this context, launched kernels prefer what they need, and this percentage at least;
    with DRIVERS, the driver's choice.

    A kernel that is launched several times prefers the most that one of its launches needs. It is
    set after a launch, so a capture must follow a run of the same kernels. Kernels keep it
    afterwards.
    """
    most: dict[Any, int] = {}

    def prefer(compiled: Any, programs: int, device: torch.device) -> None:
        if not has_dependent_launch(device):
            return
        wanted = DRIVERS
        if at_least != DRIVERS:
            wanted = needed(compiled.metadata.shared, programs, device)
            before = most.get(compiled, at_least)
            wanted = DRIVERS if DRIVERS in (before, wanted) else max(before, wanted)
            most[compiled] = wanted
        if _preferred.get(compiled, DRIVERS) != wanted:
            handle = ctypes.c_void_p(compiled.function)
            if code := driver().cuFuncSetAttribute(handle, ATTRIBUTE, ctypes.c_int(wanted)):
                raise RuntimeError(f"cuFuncSetAttribute failed with CUDA driver error {code}")
            _preferred[compiled] = wanted

    with watched(prefer):
        yield
