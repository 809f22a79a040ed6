"""Ranks of a pool that push rows into each other's memory, which is files that all of them map."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ladder import jit
from ladder.ops import workspace
from tests.comm.mapped import shared_memory
from tests.interpreter import interpreting

new_empty = torch.Tensor.new_empty


def poisoned(self: Tensor, *args: Any, **options: Any) -> Tensor:
    out = new_empty(self, *args, **options)
    return out.fill_(torch.nan if out.is_floating_point() else -7)


@contextlib.contextmanager
def pushing(rank: int, world: int, folder: str) -> Iterator[list[str]]:
    """Kernels run in the interpreter, over shared memory; yields the names of those that ran.

    Stores come late, any rank is slow at times (tests.comm.mapped), and new outputs are poisoned.
    """
    with (
        interpreting() as ran,
        shared_memory(rank, world, folder),
        mock.patch.object(workspace, "CudaStreams", mock.MagicMock()),
        mock.patch.object(workspace, "MIN_WORDS", 4096),
        mock.patch.object(workspace, "_workspaces", {}),
        mock.patch.object(torch.Tensor, "new_empty", poisoned),
    ):
        yield ran


def late(rank: int) -> Callable[..., None]:
    """`launch`, before which this rank is late at times, so that the others are ahead."""
    source = random.Random(rank)

    def launched(*args: Any, **options: Any) -> None:
        if source.random() < 0.4:
            time.sleep(0.03)
        jit.launch(*args, **options)

    return launched


def check_same(found: Tensor, wanted: Tensor, what: object) -> None:
    """Equal to the bit, but for the sign of 0, and no NaN."""
    assert found.is_contiguous(), what
    assert found.dtype == wanted.dtype, what
    assert found.shape == wanted.shape, what
    same = found == wanted
    assert same.all(), (what, int((~same).sum()), (~same).nonzero()[:3].tolist())
