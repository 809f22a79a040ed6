"""What an all-reduce by the backend adds to a decode step that waits for it at once or later.

It runs on a stream of its own. Where streams meet, kernels must wait; elsewhere a kernel begins
before the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.kernels.carveout import DRIVERS, carveout
from ladder.perf.calibration.sizes import Part, Point, Sizes, pairs
from ladder.perf.calibration.timing import Work, microseconds
from ladder.perf.machine import AWAITED, HIDDEN


def parts(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> Iterator[Part]:
    for name, late in ((AWAITED, 0), (HIDDEN, 1)):
        yield Part(name, {}, partial(_added, sizes, late, group, device))


def _added(sizes: Sizes, late: int, group: dist.ProcessGroup, device: torch.device) -> list[Point]:
    """Microseconds that each all-reduce adds to a chain of pairs of products, by its bytes. late:
    how many pairs later its result is waited for. A pair takes longer than an all-reduce."""
    found: list[Point] = []
    for rows in sizes.together.steps:
        works = pairs(sizes, rows, sizes.together.hides, device)
        turn = list(islice(cycle(works), sizes.calls))
        with carveout(DRIVERS):  # as in steps with NCCL
            bare, reduced = (
                microseconds([partial(_chain, turn, late, each)], 1, device) / len(turn)
                for each in (None, group)
            )
        nbytes = rows * sizes.hidden * sizes.dtype.itemsize
        found.append((nbytes, max(reduced - bare, 1e-3)))  # a file has positive numbers alone
    return found


def _chain(works: Sequence[Work], late: int, group: dist.ProcessGroup | None) -> None:
    """Pairs of products; if there is a group, each with an all-reduce of its result."""
    flying: list[tuple[Tensor, Any]] = []  # partials are kept until their sums have arrived
    for work in works:
        partial = work()
        if group is not None:
            flying.append((partial, dist.all_reduce(partial, group=group, async_op=True)))
        while len(flying) > late:
            flying.pop(0)[1].wait()
    for _, each in flying:
        each.wait()
