"""Landings in one kernel, which pushes partials, waits, sums them, adds the residual and norms.

Each program takes rows. It stores a row's elements straight into slots of the ranks that land it,
and some rows later polls its own slots for what they have sent of a row, adds all in the order of
the ranks and the residual, in float32, and norms. The data is its own flag (see
`ladder.comm.primitives`), by elements of 16 or 32 bits.

Two sets of slots alternate, and the reader of a slot clears it: why none is written before it is
clear, and why nothing waits for ever, is in `ladder.comm.two_shot`.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.primitives import (
    EMPTY,
    SPIN_LIMIT,
    clear,
    peer,
    receive,
    rotate,
    sendable,
    store,
)
from ladder.jit import begin, kernel, launch, multiprocessors, tl, triton
from ladder.kernels.landing import bits_of
from ladder.kernels.norm import Pair
from ladder.kernels.prefill import norm_row

SETS = 2
AHEAD = 2  # rows that a program sends before it waits for the first


@kernel("landing")
@no_type_check
def _push_land_kernel(
    partial,  # as integers: [WORLD, rows, D], or [rows, D] of which every rank lands all
    residual, weight, landed, normed, eps,
    buffers,  # int64 [WORLD]: each rank's slots, [SETS, WORLD, stride] elements
    epochs,  # int32 [programs]: calls made so far, modulo SETS: it never overflows
    rank, rows, stride,
    WORLD: tl.constexpr, SCATTERS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BITS: tl.constexpr, EMPTY: tl.constexpr, SETS: tl.constexpr, AHEAD: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epochs + program)
    kind: tl.constexpr = landed.dtype.element_ty
    own = peer(buffers, rank, BITS) + (epoch % SETS) * WORLD * stride
    i = tl.arange(0, BLOCK)
    inside = i < D
    gain = tl.load(weight + i, mask=inside, other=0).to(tl.float32)
    count = (rows - program + programs - 1) // programs  # of this program's rows
    for step in range(count + AHEAD):
        if step < count:
            at = (program + step * programs) * D + i
            slot = ((epoch % SETS) * WORLD + rank) * stride + at
            for other in tl.static_range(1, WORLD):
                to = rotate(other, rank, WORLD)
                place = partial + at
                if SCATTERS:
                    place += to * rows * D
                value = sendable(tl.load(place, mask=inside, other=0), EMPTY)
                store(peer(buffers, to, BITS) + slot, value, inside)
        if step >= AHEAD:
            at = (program + (step - AHEAD) * programs) * D + i
            place = partial + at
            if SCATTERS:
                place += rank * rows * D
            mine = sendable(tl.load(place, mask=inside, other=0), EMPTY)
            arrived = receive(own, stride, at, inside, rank, mine, WORLD, EMPTY, SPIN_LIMIT)
            total = tl.zeros([BLOCK], tl.float32)
            for other in tl.static_range(WORLD):
                total += arrived[other].to(kind, bitcast=True).to(tl.float32)
            clear(own, stride, at, inside, rank, WORLD, EMPTY)
            total += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
            tl.store(landed + at, total.to(kind), mask=inside)
            tl.store(normed + at, norm_row(total, gain, eps, D).to(kind), mask=inside)
    tl.store(epochs + program, (epoch + 1) % SETS)


class PushedLanding:
    """Landings over `group`; every rank must make one, outside a capture.

    elements: the most that a rank lands. Calls of all sizes share the slots, which take 2 x world x
    `elements` elements of each rank's memory: all ranks must make the same calls in the same order,
    and calls must not overlap (one stream).
    """

    def __init__(self, elements: int, dtype: torch.dtype, group: Any, device: torch.device) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.stride, self.dtype = elements, dtype
        self.programs = multiprocessors(device, 2)
        assert elements * dtype.itemsize % 16 == 0, elements
        assert SETS * self.world * elements < 2**31, elements  # the kernel counts in 32 bits
        shape, bits = (SETS * self.world * elements,), EMPTY[dtype.itemsize]
        self.slots = symmetric.allocate(shape, dtype, group, device, bits=bits)
        self.epochs = torch.zeros(self.programs, dtype=torch.int32, device=device)

    def __call__(
        self, partial: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Pair
    ) -> None:
        """The sum of the ranks' partials and the residual [rows, D], and its norm, into `out`.

        partial: [T x rows, D], of which each rank lands its rows, or [rows, D], all of which every
        rank lands. All are contiguous and of the dtype of the slots; `out` is other memory.
        """
        rows, size = residual.shape
        scatters = len(partial) != rows
        assert 0 < rows * size <= self.stride, (rows, size, self.stride)
        assert len(partial) == (self.world * rows if scatters else rows), partial.shape
        for tensor in (partial, residual, weight, *out):
            assert tensor.is_contiguous(), tensor.stride()
            assert tensor.dtype == self.dtype, tensor.dtype
        block, width = triton.next_power_of_2(size), partial.element_size()
        bits = torch.int16 if width == 2 else torch.int32
        launch(
            _push_land_kernel, (self.programs,), partial.device,
            partial.view(bits), residual, weight, *out, eps, self.slots.addresses, self.epochs,
            self.rank, rows, self.stride,
            WORLD=self.world, SCATTERS=scatters, D=size, BLOCK=block, BITS=bits_of(partial),
            EMPTY=EMPTY[width], SETS=SETS, AHEAD=AHEAD, SPIN_LIMIT=SPIN_LIMIT,
            num_warps=min(16, max(1, block // 512)), dependent=False,
        )  # fmt: skip
