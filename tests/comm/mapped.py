"""Slots that lie in files, which all ranks of a pool map in place of symmetric memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ladder.comm.symmetric import INTEGERS, SymmetricTensor
from tests.interpreter import addresses


def mapped(folder: str, rank: int, world: int) -> Callable[..., SymmetricTensor]:
    """`symmetric.allocate` for a rank of a pool; `folder` is the same on all ranks."""
    numbers = itertools.count()

    def allocate(
        shape: tuple[int, ...], dtype: torch.dtype, group: Any, device: torch.device, bits: int
    ) -> SymmetricTensor:
        number = next(numbers)
        files = [str(Path(folder) / f"slots{number}-{each}") for each in range(world)]
        whole = [torch.from_file(files[rank], True, math.prod(shape), dtype=dtype)]
        whole[0].view(INTEGERS[dtype.itemsize]).fill_(bits)
        dist.barrier()
        slots = [torch.from_file(file, True, math.prod(shape), dtype=dtype) for file in files]
        return SymmetricTensor(rank, [each.view(shape) for each in slots], addresses(slots))

    return allocate
