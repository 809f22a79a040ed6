"""The end of a reduce-scatter, when the ranks' parts are in slots: a sum, or a landing."""

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
    """The end of a reduce-scatter.

    run: called with this rank's slots of some rows [T, rows, n], the slice of these rows among its
    own, and the slots' arrivals if it must wait for them (then it gets all rows). memory, numbers:
    the tensors and the values that it uses beside the slots.
    """

    run: Callable[[Tensor, slice, SlotArrivals | None], object]
    memory: tuple[Tensor, ...]
    numbers: Hashable


def adding(world: int, rows: Tensor, B: Tensor, average: bool) -> tuple[Tensor, Finish]:
    """Memory for the sum of this rank's rows, and the Finish that fills it."""
    out = rows.new_empty(len(rows) // world, B.shape[1])
    return out, Finish(lambda slots, mine, _: sum_slots(slots, out[mine], average), (out,), average)


def landing(
    residual: Tensor, weight: Tensor, eps: float, dim: int
) -> tuple[Tensor, Tensor, Finish]:
    """Memory for this rank's landed rows and for their norm, and the Finish that fills both."""
    before, gain = rows_first(residual, dim).contiguous(), weight.contiguous()
    landed, normed = torch.empty_like(before), torch.empty_like(before)
    finish = Finish(
        lambda slots, _, arrivals: land_slots(slots, before, gain, eps, (landed, normed), arrivals),
        (before, gain, landed, normed),
        eps,
    )
    return landed, normed, finish
