"""What ends a reduce-scatter when the ranks' parts are in slots: a sum, or a landing."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.kernels.slots import SlotArrivals, land_slots, sum_slots
from ladder.ops.calls import rows_first

ALL_ROWS = slice(None)


@dataclass(frozen=True)
class Finish:
    """What ends a reduce-scatter.

    run: called with this rank's slots of some of its rows [T, rows, n], which rows these are, and
    the slots' arrivals if it is to wait for them; then it is all rows. memory, numbers: what it
    uses beside them.
    """

    run: Callable[[Tensor, slice, SlotArrivals | None], object]
    memory: tuple[Tensor, ...]
    numbers: Hashable


def adding(world: int, rows: Tensor, B: Tensor, average: bool) -> tuple[Tensor, Finish]:
    """The memory of the sum of this rank's rows, and what puts it there."""
    out = rows.new_empty(len(rows) // world, B.shape[1])
    return out, Finish(lambda slots, mine, _: sum_slots(slots, out[mine], average), (out,), average)


def landing(
    residual: Tensor, weight: Tensor, eps: float, dim: int
) -> tuple[Tensor, Tensor, Finish]:
    """The memory of a landing of this rank's rows, and what puts it there."""
    before, gain = rows_first(residual, dim).contiguous(), weight.contiguous()
    landed, normed = torch.empty_like(before), torch.empty_like(before)
    finish = Finish(
        lambda slots, _, arrivals: land_slots(slots, before, gain, eps, (landed, normed), arrivals),
        (before, gain, landed, normed),
        eps,
    )
    return landed, normed, finish
