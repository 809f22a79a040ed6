"""Slots that lie in files, which all ranks of a pool map in place of symmetric memory."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from ladder.comm import primitives, symmetric
from ladder.comm.symmetric import INTEGERS, SymmetricTensor
from tests.interpreter import addresses

SLOW = 100  # accesses to memory by a rank that is slow for a while


def mapped(folder: str, rank: int, world: int) -> Callable[..., SymmetricTensor]:
    """`symmetric.allocate` for a rank of a pool; `folder` is the same on all ranks."""
    numbers = itertools.count()

    def allocate(
        shape: tuple[int, ...], dtype: torch.dtype, group: Any, device: torch.device,
        bits: int | None = None,
    ) -> SymmetricTensor:  # fmt: skip
        number = next(numbers)
        files = [str(Path(folder) / f"slots{number}-{each}") for each in range(world)]
        whole = [torch.from_file(files[rank], True, math.prod(shape), dtype=dtype)]
        if bits is None:  # what nobody initialises
            whole[0].fill_(torch.nan)
        else:
            whole[0].view(INTEGERS[dtype.itemsize]).fill_(bits)
        dist.barrier()
        slots = [torch.from_file(file, True, math.prod(shape), dtype=dtype) for file in files]
        return SymmetricTensor(rank, [each.view(shape) for each in slots], addresses(slots))

    return allocate


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """A rank that polls sleeps in between: there are fewer cores than ranks."""
    count = primitives.count_spin.rewrite()

    def counted(*args: Any) -> Any:
        time.sleep(0.001)
        return count(*args)

    with mock.patch.object(primitives.count_spin, "rewrite", return_value=counted):
        yield


def whole(access: Any) -> Any:
    """The interpreter's store, or its volatile load, of int16, with each in one access: slots of 16
    bits are so. It copies two bytes by both and once more by one, and a peer may come between.
    """

    def load(builder: Any, places: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        found = access(builder, places, mask, *rest, **options)
        if found.data.dtype == np.int16 and options.get("is_volatile", rest[-1]):
            for at in zip(*np.nonzero(mask.data), strict=True):
                found.data[at] = ctypes.c_int16.from_address(int(places.data[at])).value
        return found

    def store(builder: Any, places: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> None:
        if value.data.dtype != np.int16:
            access(builder, places, value, mask, *rest, **options)
            return
        for at in zip(*np.nonzero(mask.data), strict=True):
            ctypes.c_int16.from_address(int(places.data[at])).value = int(value.data[at])

    return load if access.__name__ == "create_masked_load" else store


@contextlib.contextmanager
def shared_memory(rank: int, world: int, folder: str) -> Iterator[None]:
    """Symmetric memory is files in `folder`; every rank of the pool calls this.

    Any store may come late, at random, and any rank is slow for a while, so that the others get
    ahead of it as far as they can.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder

    def changed(access: Any, late: float) -> Any:
        def delayed(*args: Any, **options: Any) -> Any:
            nonlocal slow
            slow = slow - 1 if slow else SLOW * (source.random() < 0.002)
            if slow:
                time.sleep(0.002)
            elif source.random() < late:
                time.sleep(0.01)
            return access(*args, **options)

        return delayed

    source, slow = random.Random(rank), 0
    with contextlib.ExitStack() as patched:
        allocate = mapped(folder, rank, world)
        patched.enter_context(mock.patch.object(symmetric, "allocate", allocate))
        for name, late in (
            ("create_masked_load", 0.0),
            ("create_masked_store", 0.05),
            ("create_atomic_rmw", 0.0),
        ):
            access = getattr(builder, name)
            access = changed(whole(access) if "masked" in name else access, late)
            patched.enter_context(mock.patch.object(builder, name, access))
        patched.enter_context(resting())
        yield
        dist.barrier()  # every rank's memory stays mapped until all have read theirs
