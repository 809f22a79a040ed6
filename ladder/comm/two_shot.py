"""A two-shot all-reduce for larger messages over symmetric memory: the data is its own flag.

Each rank owns one shard of the message. It writes its part of every peer's shard into a slot on
that peer (scatter), sums its own shard's parts in float32 and rank order, rounds once, and writes
the result into a slot on every peer (gather), which copies it into its output. A slot holds -0.0
until it has been written, as in `ladder.comm.push`: no barrier, no flags, and all ranks
and all runs agree bit for bit. 2 (world - 1) / world of the message leave a rank, where a push
all-reduce sends world - 1 messages.

A fixed, small number of programs walks over the shards chunk by chunk, so that the rest of the GPU
is free for other work; each lets the peers' data travel while it handles other chunks.

Two sets of slots alternate, and who has read a slot clears it at once: call e uses set e % 2. A
peer writes set e % 2 again in its call e + 2, so after its call e + 1 has ended. That call can end
only when something of this rank's call e + 1 has arrived, and this rank's call e + 1 starts when
its call e has ended, clearing included. So a slot is never written before it is clear, whatever
the sizes of the calls, also under graph replay, as long as every rank makes the same calls in the
same order on one stream.

No deadlock: a program waits only for peers' programs of its own number, in a step of its walk only
for what they send in this or an earlier step of theirs, and each sends before it waits.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from ladder.comm.push import (
    SENTINELS,
    SPIN_LIMIT,
    add_up,
    addresses,
    receive,
    symmetric_slots,
)
from ladder.jit import begin, jit, launch, tl, triton

SETS = 2
# "Not yet written" for both types: one float32 -0.0, or the bfloat16 pair (0.0, -0.0).
EMPTY = -2147483648
AHEAD = 2  # chunks that a program sends on before it waits for the first
ALIGNMENT = 16  # words: shards begin at multiples of it


def shard_words(words: int, world: int) -> int:
    """Words in each rank's shard of a message; the last ones may be cut short, or empty."""
    return -(-words // (world * ALIGNMENT)) * ALIGNMENT


@jit
@no_type_check
def _two_shot_all_reduce(
    partial,
    out,
    buffers,  # int64 [world]: each rank's slots, [SETS, 2 (scatter, gather), world, stride] words
    epochs,  # int32 [programs]: calls made so far, modulo sets: it never overflows
    rank,
    words,
    shard,
    stride,
    world: tl.constexpr,
    block: tl.constexpr,
    sentinel: tl.constexpr,
    packed: tl.constexpr,
    sets: tl.constexpr,
    ahead: tl.constexpr,
    spin_limit: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    scatter = (epoch % sets) * (2 * world) * stride
    gather = scatter + world * stride
    bases = addresses(buffers, rank, world)
    own = bases[0]
    chunks = (tl.cdiv(shard, block) - program + programs - 1) // programs  # of this program
    for step in range(chunks + 2 * ahead):
        if step < chunks:  # scatter: all loads first, so that they overlap
            offsets = (program + step * programs) * block + tl.arange(0, block)
            inside = offsets < shard
            parts = ()
            for i in tl.static_range(1, world):
                index = ((rank + i) % world) * shard + offsets
                value = tl.load(partial + index, mask=inside & (index < words), other=0)
                parts += (tl.where(value == sentinel, 0, value),)
            for i in tl.static_range(1, world):
                slot = bases[i] + scatter + rank * stride + offsets
                tl.store(slot, parts[i - 1], mask=inside)
        if (step >= ahead) & (step < chunks + ahead):  # sum this rank's shard, and gather
            offsets = (program + (step - ahead) * programs) * block + tl.arange(0, block)
            inside = offsets < shard
            index = rank * shard + offsets
            value = tl.load(partial + index, mask=inside & (index < words), other=0)
            value = tl.where(value == sentinel, 0, value)
            arrived = receive(
                own + scatter, stride, offsets, inside, rank, value, world, sentinel, spin_limit
            )
            total = add_up(arrived, world, packed)
            total = tl.where(total == sentinel, 0, total)
            for i in tl.static_range(1, world):
                tl.store(bases[i] + gather + rank * stride + offsets, total, mask=inside)
            tl.store(out + index, total, mask=inside & (index < words))
            for peer in tl.static_range(world):
                slot = own + scatter + peer * stride + offsets
                tl.store(slot, sentinel, mask=inside & (rank != peer))
        if step >= 2 * ahead:  # the peers' shards
            offsets = (program + (step - 2 * ahead) * programs) * block + tl.arange(0, block)
            inside = offsets < shard
            nothing = tl.zeros_like(offsets)
            arrived = receive(
                own + gather, stride, offsets, inside, rank, nothing, world, sentinel, spin_limit
            )
            for peer in tl.static_range(world):
                index = peer * shard + offsets
                theirs = inside & (rank != peer)
                tl.store(out + index, arrived[peer], mask=theirs & (index < words))
                tl.store(own + gather + peer * stride + offsets, sentinel, mask=theirs)
    tl.store(epochs + program, (epoch + 1) % sets)


class TwoShotAllReduce:
    """All-reduces of up to `limit` bytes over `group`; made on every rank alike, outside a capture.

    Messages of all sizes and types share the slots, which take 4 x `limit` of each rank's memory:
    all calls must be in one order on all ranks and never overlap one another (one stream).
    programs: thread blocks, and about as many SMs, that a call keeps busy.
    """

    SMALL, LARGE = (1024, 4), (4096, 16)  # words of a chunk, warps
    PROGRAMS = 32

    def __init__(
        self, limit: int, group: Any, device: torch.device, programs: int = PROGRAMS
    ) -> None:
        import torch.distributed as dist

        assert triton is not None
        assert programs > 0, programs
        self.limit, self.programs = limit, programs
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.stride = shard_words(-(-limit // 4), self.world)
        self.slots, self.buffers = symmetric_slots(
            SETS * 2 * self.world * self.stride, EMPTY, group, device
        )
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(self, partial: Tensor, blocking: bool) -> Tensor:
        """The sum over the ranks, a new tensor; `partial` is contiguous and stays as it is.

        Its bytes are a multiple of 16 and at most `limit`. blocking: see `PushAllReduce`.
        """
        size = partial.numel() * partial.element_size()
        assert partial.is_contiguous(), partial.stride()
        assert partial.dtype in SENTINELS, partial.dtype
        assert 0 < size <= self.limit, (size, self.limit)
        assert size % 16 == 0, size
        out = torch.empty_like(partial)
        shard = shard_words(size // 4, self.world)
        block, warps = self.LARGE if shard >= self.programs * self.LARGE[0] else self.SMALL
        launch(
            _two_shot_all_reduce,
            (self.programs,),
            partial.device,
            partial.view(torch.int32),
            out.view(torch.int32),
            self.buffers,
            self.epochs,
            self.rank,
            size // 4,
            shard,
            self.stride,
            world=self.world,
            block=block,
            sentinel=EMPTY,
            packed=partial.dtype == torch.bfloat16,
            sets=SETS,
            ahead=AHEAD,
            spin_limit=SPIN_LIMIT,
            num_warps=warps,
            dependent=not blocking,
        )
        return out
