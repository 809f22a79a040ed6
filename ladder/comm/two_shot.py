"""A two-shot all-reduce for larger messages over symmetric memory: the data is its own flag.

Each rank owns one shard of the message. It writes its part of every peer's shard into a slot on
that peer (scatter), sums its own shard's parts in float32 and rank order, rounds once, and writes
the result into a slot on every peer (gather), which copies it into its output. There are no
barriers and no flags (see `ladder.comm.primitives`), and all ranks and all runs agree bit for bit.
A rank sends 2 (world - 1) / world messages; a push all-reduce sends world - 1.

Each of the two steps is a collective of its own: `scatter`, whose result is this rank's shard, and
`gather`, whose input it is.

A fixed number of programs processes the shards chunk by chunk; a small number leaves the rest of
the GPU to other work. Each processes other chunks while the peers' data is in flight.

Two sets of slots alternate, and the reader of a slot clears it at once: call e uses set e % 2. A
peer writes set e % 2 again in its call e + 2, so after its call e + 1 has ended. That call ends
only after data of this rank's call e + 1 has arrived, and this rank's call e + 1 starts after its
call e has ended, including the clearing. So a slot is never written before it is clear, for any
sizes of the calls, also under graph replay, as long as every rank makes the same calls in the same
order on one stream.

That holds for any sequence of the three collectives, since each call needs data of every peer.

There is no deadlock: a program waits only for the peers' programs of the same number, in each step
only for data that they send in the same or an earlier step, and each sends before it waits.
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
    load,
    peers,
    receive,
    rotate,
    sendable,
    store,
)
from ladder.comm.push import DTYPES, PACKED
from ladder.jit import begin, kernel, launch, tl, triton

SETS = 2
KINDS = 2  # kinds of slots, one for each of the two steps
AHEAD = 2  # chunks that a program sends before it waits for the first
ALIGNMENT = 16  # words: shards begin at multiples of it


def shard_words(words: int, world: int) -> int:
    """The words of each rank's shard of a message; the last shards may be shorter, or empty."""
    return -(-words // (world * ALIGNMENT)) * ALIGNMENT


@kernel("communication")
@no_type_check
def _two_shot_all_reduce(
    partial,
    out,
    buffers,  # int64 [world]: each rank's slots, [SETS, KINDS, WORLD, stride] words
    epochs,  # int32 [programs]: calls made so far, modulo SETS: it never overflows
    rank,
    words,
    shard,
    stride,
    source_stride,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
    EMPTY: tl.constexpr,
    PACKED: tl.constexpr,
    SETS: tl.constexpr,
    AHEAD: tl.constexpr,
    KINDS: tl.constexpr,
    SCATTERS: tl.constexpr,
    GATHERS: tl.constexpr,
    SUMS: tl.constexpr,
    AVERAGE: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """SCATTERS, GATHERS: do both steps, or one; without the other, partial or out is a shard.

    SUMS: gather the sum of WORLD shards in own memory, source_stride words apart. KINDS: the kinds
    of slots, 2, or 1 if all calls do only the scatter, or only the gather.
    """
    begin(PDL)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    epoch = tl.load(epochs + program)
    scatter = (epoch % SETS) * (KINDS * WORLD) * stride
    gather = scatter + (KINDS - 1) * WORLD * stride
    bases = peers(buffers, rank, WORLD, tl.int32)
    own = bases[0]
    chunks = (tl.cdiv(shard, BLOCK) - program + programs - 1) // programs  # of this program
    sums: tl.constexpr = AHEAD if SCATTERS else 0  # the step in which the first chunk is summed
    for step in range(chunks + sums + (AHEAD if GATHERS else 0)):
        if SCATTERS:  # noqa: SIM102  (known when this is compiled; `step` is not)
            if step < chunks:  # all loads first, so that they overlap
                offsets = (program + step * programs) * BLOCK + tl.arange(0, BLOCK)
                inside = offsets < shard
                parts = ()
                for i in tl.static_range(1, WORLD):
                    index = rotate(i, rank, WORLD) * shard + offsets
                    value = tl.load(partial + index, mask=inside & (index < words), other=0)
                    parts += (sendable(value, EMPTY),)
                for i in tl.static_range(1, WORLD):
                    slot = bases[i] + scatter + rank * stride + offsets
                    store(slot, parts[i - 1], inside)
        if (step >= sums) & (step < chunks + sums):  # sum this rank's shard, and gather
            offsets = (program + (step - sums) * programs) * BLOCK + tl.arange(0, BLOCK)
            inside = offsets < shard
            index = rank * shard + offsets
            mine = inside & (index < words)
            if SUMS:
                place, parts = partial + offsets, ()
                for _ in tl.static_range(WORLD):
                    parts += (load(place, mine, 0),)
                    place += source_stride  # not a multiple of it, which could exceed 32 bits
                value = add_up(parts, WORLD, PACKED, AVERAGE)
            else:
                value = tl.load(partial + (index if SCATTERS else offsets), mask=mine, other=0)
            total = sendable(value, EMPTY)
            if SCATTERS:
                arrived = receive(
                    own + scatter, stride, offsets, inside, rank, total, WORLD, EMPTY, SPIN_LIMIT
                )
                total = sendable(add_up(arrived, WORLD, PACKED, AVERAGE), EMPTY)
            if GATHERS:
                for i in tl.static_range(1, WORLD):
                    store(bases[i] + gather + rank * stride + offsets, total, inside)
            tl.store(out + (index if GATHERS else offsets), total, mask=mine)
            if SCATTERS:
                clear(own + scatter, stride, offsets, inside, rank, WORLD, EMPTY)
        if GATHERS:  # noqa: SIM102
            if step >= sums + AHEAD:  # the peers' shards
                offsets = (program + (step - sums - AHEAD) * programs) * BLOCK + tl.arange(0, BLOCK)
                inside = offsets < shard
                nothing = tl.zeros_like(offsets)
                arrived = receive(
                    own + gather, stride, offsets, inside, rank, nothing, WORLD, EMPTY, SPIN_LIMIT
                )
                for peer in tl.static_range(WORLD):
                    index = peer * shard + offsets
                    theirs = inside & (rank != peer)
                    tl.store(out + index, arrived[peer], mask=theirs & (index < words))
                    tl.store(own + gather + peer * stride + offsets, EMPTY, mask=theirs)
    tl.store(epochs + program, (epoch + 1) % SETS)


class TwoShotAllReduce:
    """All-reduces of up to `limit` bytes over `group`, and each of their two shots alone.

    Every rank must make one, outside a capture. Messages of all sizes and dtypes share the slots,
    which take 2 x kinds x `limit` of each rank's memory: all ranks must make the same calls in the
    same order, and calls must not overlap (one stream). programs: the thread blocks of a call,
    which occupy about as many SMs. kinds: of slots: 1 if all calls only scatter, or all only
    gather.
    """

    SMALL, LARGE = (1024, 4), (4096, 16)  # words of a chunk, warps
    PROGRAMS = 32

    def __init__(
        self, limit: int, group: Any, device: torch.device, programs: int = PROGRAMS,
        kinds: int = KINDS,
    ) -> None:  # fmt: skip
        import torch.distributed as dist

        assert triton is not None
        assert programs > 0, programs
        self.limit, self.programs, self.kinds = limit, programs, kinds
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.stride = shard_words(-(-limit // 4), self.world)
        words = SETS * kinds * self.world * self.stride
        assert words < 2**31, limit  # the kernel counts in 32 bits
        self.slots = symmetric.allocate((words,), torch.int32, group, device, bits=EMPTY[4])
        self.epochs = torch.zeros(programs, dtype=torch.int32, device=device)

    def __call__(self, partial: Tensor, blocking: bool, out: Tensor | None = None) -> Tensor:
        """The sum over the ranks, in `out` or a new tensor; `partial` is contiguous and is not
        changed.

        Its bytes are a multiple of 16 and at most `limit`. blocking: see `PushAllReduce`.
        """
        out = torch.empty_like(partial) if out is None else out
        words = partial.nbytes // 4
        self._run(partial, out, words, shard_words(words, self.world), blocking=blocking)
        return out

    def scatter(self, partial: Tensor, average: bool = False) -> Tensor:
        """Sum partial [T, ...] over the ranks; returns this rank's shard of the sum, [...].

        average: the sum is divided by T before it is rounded. A shard's bytes are a multiple of 16.
        """
        out = torch.empty_like(partial[0])
        shard = out.nbytes // 4
        self._run(partial, out, self.world * shard, shard, gathers=False, average=average)
        return out

    def gather(self, own: Tensor) -> Tensor:
        """Gather all ranks' `own` [...], of multiples of 16 bytes: [T, ...]. -0.0 becomes 0.0."""
        out = own.new_empty(self.world, *own.shape)
        shard = own.nbytes // 4
        self._run(own, out, self.world * shard, shard, scatters=False)
        return out

    def gather_sums(self, slots: Tensor, rows: int, out: Tensor) -> None:
        """Sum own slots [T, rows or fewer, n] in rank order; gather all ranks' sums into out [m,
        n].

        rows: the rows of each rank, but the last ranks have what is left of m. `limit` is enough
        for as many rows of every rank. A row of n elements fills whole words.
        """
        shard = rows * out.shape[1] * out.element_size() // 4
        self._run(slots, out, out.nbytes // 4, shard, scatters=False, stride=slots.stride(0))

    def _run(
        self, source: Tensor, out: Tensor, words: int, shard: int, scatters: bool = True,
        gathers: bool = True, average: bool = False, blocking: bool = True,
        stride: int | None = None,
    ) -> None:  # fmt: skip
        """words: of the whole message. shard: words of each rank's shard. stride: elements between
        the shards of `source` that are summed first; None: none are."""
        sums = stride is not None
        assert source.is_contiguous() or sums, source.stride()
        assert source.dtype in DTYPES, source.dtype
        assert 0 < 4 * words <= self.limit, (words, self.limit)
        assert shard <= self.stride, (shard, self.stride)
        assert sums or source.nbytes % 16 == 0, source.shape
        assert self.kinds == KINDS or not (scatters and gathers), self.kinds
        block, warps = self.LARGE if shard >= self.programs * self.LARGE[0] else self.SMALL
        launch(
            _two_shot_all_reduce, (self.programs,), source.device,
            source.view(torch.int32), out.view(torch.int32), self.slots.addresses, self.epochs,
            self.rank, words, shard, self.stride, (stride or 0) * source.element_size() // 4,
            WORLD=self.world, BLOCK=block, PACKED=PACKED[source.dtype], SETS=SETS, AHEAD=AHEAD,
            EMPTY=EMPTY[4], KINDS=self.kinds, SCATTERS=scatters, GATHERS=gathers, SUMS=sums,
            AVERAGE=average,
            SPIN_LIMIT=SPIN_LIMIT, num_warps=warps, dependent=not blocking,
        )  # fmt: skip
