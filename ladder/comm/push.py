"""A push all-reduce for small messages over symmetric memory: the data is its own flag.

Each rank writes its partial directly into a slot on every other rank and then polls its own slots
until none is empty: no barrier, no flags (see `ladder.comm.primitives`). Sums are in float32 and in
rank order, so all ranks and all runs agree bit for bit.

Three sets of slots rotate. Call e writes set e % 3 on the peers and, while their data is in flight,
clears set (e - 1) % 3 on its own rank, which call e - 1 has read. A peer writes that set again in
its call e + 2. For that it needs this rank's push of call e + 1, which follows the clearing. So a
set is never written before it is clear, also under graph replay, as long as every rank makes the
same calls in the same order on one stream. All that holds for each program and its own piece of the
slots, so messages of all sizes may share them. A program clears its whole piece, whatever part of
it the previous call has filled, and counts only the calls that it took part in.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.primitives import (
    EMPTY,
    SPIN_LIMIT,
    add_up,
    clear,
    peers,
    receive,
    sendable,
    store,
)
from ladder.jit import begin, kernel, launch, tl, triton

SETS = 3
# The dtypes of our all-reduces, and how a word packs them (`ladder.comm.primitives.add_up`).
PACKED = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DTYPES = tuple(PACKED)


def reference_all_reduce(partials: list[Tensor]) -> Tensor:
    """The result of an all-reduce: the sum in float32, in rank order, rounded once."""
    total = torch.zeros(partials[0].shape, dtype=torch.float32, device=partials[0].device)
    for partial in partials:
        total += partial.float()
    return total.to(partials[0].dtype)


@kernel("communication")
@no_type_check
def _push_all_reduce(
    partial,
    out,
    buffers,  # int64 [world]: each rank's slots, [SETS, WORLD, stride] of int32
    epochs,  # int32 [programs]: calls made so far, modulo SETS: it never overflows
    rank,
    words,
    stride,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    SETS: tl.constexpr,
    EMPTY: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0)
    epoch = tl.load(epochs + program)
    bases = peers(buffers, rank, WORLD, tl.int32)
    own = bases[0]
    current = (epoch % SETS) * WORLD * stride
    previous = ((epoch + SETS - 1) % SETS) * WORLD * stride
    offsets = program * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < words
    value = sendable(tl.load(partial + offsets, mask=inside, other=0), EMPTY)
    for i in tl.static_range(1, WORLD):
        store(bases[i] + current + rank * stride + offsets, value, inside)
    clear(own + previous, stride, offsets, offsets < stride, rank, WORLD, EMPTY)
    arrived = receive(own + current, stride, offsets, inside, rank, value, WORLD, EMPTY, SPIN_LIMIT)
    tl.store(out + offsets, add_up(arrived, WORLD, PACKED), mask=inside)
    tl.store(epochs + program, (epoch + 1) % SETS)


class PushAllReduce:
    """All-reduces of one dtype over `group`; every rank must make one, outside a capture.

    elements: of the largest message. All ranks must make the same calls in the same order, and
    calls must not overlap (one stream): they share their slots, which take 3 x world x the largest
    message of each rank's memory.
    """

    BLOCK, WARPS = 512, 4  # one 16-byte access per thread and peer

    def __init__(self, elements: int, dtype: torch.dtype, group: Any, device: torch.device) -> None:
        import torch.distributed as dist

        assert triton is not None
        assert dtype in DTYPES, dtype
        size = elements * dtype.itemsize
        assert size % 16 == 0, size
        self.stride, self.dtype = size // 4, dtype
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        words = SETS * self.world * self.stride
        self.slots = symmetric.allocate((words,), torch.int32, group, device, bits=EMPTY[4])
        programs = triton.cdiv(self.stride, self.BLOCK)
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(self, partial: Tensor, blocking: bool) -> Tensor:
        """The sum over the ranks, a new tensor; `partial` is contiguous and is not changed.

        Its bytes are a multiple of 16, and at most those of the largest message. blocking: the next
        kernel waits for the sum. A dependent launch, which lets the next kernel start early, is
        used only if `blocking` is False: before a kernel that waits it costs more than it gains
        (benchmarks/results/README.md).
        """
        assert partial.is_contiguous(), partial.stride()
        assert partial.dtype == self.dtype, partial.dtype
        size = partial.numel() * partial.element_size()
        assert 0 < size <= 4 * self.stride, (size, self.stride)
        assert size % 16 == 0, size
        out = torch.empty_like(partial)
        launch(
            _push_all_reduce,
            (triton.cdiv(size // 4, self.BLOCK),),
            partial.device,
            partial.view(torch.int32),
            out.view(torch.int32),
            self.slots.addresses,
            self.epochs,
            self.rank,
            size // 4,
            self.stride,
            WORLD=self.world,
            BLOCK=self.BLOCK,
            PACKED=PACKED[self.dtype],
            SETS=SETS,
            EMPTY=EMPTY[4],
            SPIN_LIMIT=SPIN_LIMIT,
            num_warps=self.WARPS,
            dependent=not blocking,
        )
        return out
