"""Sums of partials that products push by themselves: their slots, and the kernel that adds them.

A product that pushes its result (`ladder.kernels.project`) reads the address of each rank's slots
from a table in its GPU's memory. The kernel that sums a call then points this table to the other
one of two sets, so that no host counts calls, and a CUDA graph may hold any number of them.

Call e writes set e % 2 of every rank. Each rank sums what has come to its own, and clears it. A
peer writes this set again in its call e + 2, after its sum of call e + 1. That has waited for this
rank's push of call e + 1, and a product pushes nothing before the kernel ahead of it has ended: the
sum of call e, or one behind it. So no set is written before it is clear, as long as every rank
makes the same calls in the same order on one stream. All this is true of whole kernels, so messages
of all sizes may share the slots.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.primitives import EMPTY, SPIN_LIMIT, clear, receive_sum
from ladder.jit import begin, kernel, launch, tl
from ladder.kernels.landing import PushTarget, bits_of

SETS = 2


@kernel("landing")
@no_type_check
def _collect_kernel(
    slots,  # this rank's, [SETS, stride], of which a call uses [WORLD, count]
    out,
    table,  # int64 [WORLD]: where on each rank the call's slots begin
    homes,  # int64 [WORLD]: where the first set begins
    sets,  # int32 [programs]: the set of the next call
    stride,
    size,  # bytes of a set
    count,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    SETS: tl.constexpr,
    BITS: tl.constexpr,
    EMPTY: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0)
    chosen = tl.load(sets + program)
    own = slots.to(tl.pointer_type(BITS)) + chosen.to(tl.int64) * stride
    kind: tl.constexpr = out.dtype.element_ty
    for first in tl.range(program * BLOCK, count, tl.num_programs(0) * BLOCK, num_stages=1):
        i = first + tl.arange(0, BLOCK)
        inside = i < count
        total = tl.zeros([BLOCK], tl.float32)
        total = receive_sum(own + i, count, inside, total, kind, WORLD, EMPTY, SPIN_LIMIT)
        clear(own + i, count, 0, inside, -1, WORLD, EMPTY)
        tl.store(out + i, total.to(kind), mask=inside)
    following = (chosen + 1) % SETS
    tl.store(sets + program, following)
    if program == 0:
        for other in tl.static_range(WORLD):
            tl.store(table + other, tl.load(homes + other) + following.to(tl.int64) * size)


class Collector:
    """Sums, over `group`, of what products push; every rank must make one, outside a capture.

    elements: of the largest partial. The slots take 2 x world x `elements` elements of each rank's
    memory. Every push to `target` must be followed by a call, before the next push.
    """

    BLOCK, WARPS = 1024, 4  # one 16-byte access per thread and rank
    # The same number in every call: each program counts the calls for itself. They all run at once,
    # beside a product's last ones.
    PROGRAMS = 128

    def __init__(self, elements: int, dtype: torch.dtype, group: Any, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.stride = self.world * elements
        assert self.stride * dtype.itemsize % 16 == 0, (elements, dtype)
        shape, bits = (SETS, self.stride), EMPTY[dtype.itemsize]
        self.slots = symmetric.allocate(shape, dtype, group, device, bits=bits)
        self.sets = torch.zeros(self.PROGRAMS, dtype=torch.int32, device=device)
        table = self.slots.addresses.clone()
        self.target = PushTarget(table, 0, self.rank, self.world)

    def __call__(self, rows: int, columns: int) -> Tensor:
        """The sum of what all ranks have pushed to `target`, [rows, columns], a new tensor.

        In float32 and in rank order, rounded once.
        """
        own, count = self.slots.own, rows * columns
        assert 0 < self.world * count <= self.stride, (rows, columns, self.stride)
        out = torch.empty(rows, columns, dtype=own.dtype, device=own.device)
        launch(
            _collect_kernel, (self.PROGRAMS,), own.device,
            own, out, self.target.buffers, self.slots.addresses, self.sets, self.stride,
            self.stride * own.element_size(), count,
            WORLD=self.world, BLOCK=self.BLOCK, SETS=SETS, BITS=bits_of(own),
            EMPTY=EMPTY[own.element_size()], SPIN_LIMIT=SPIN_LIMIT, num_warps=self.WARPS,
        )  # fmt: skip
        return out
