"""Triton functions for kernels that access peers, with slots whose data is its own flag.

A rank writes directly into a *slot* in another rank's memory. An empty slot holds EMPTY, which is
never sent; a reader polls the slot until it holds something else, and clears it afterwards. There
are no flags and no barriers. Each user shows why no slot is written before it is clear:
`ladder.comm.push`, `ladder.comm.two_shot`, `ladder.parallel.decode`.

buffers: int64 [world], the addresses of each rank's slots (`SymmetricTensor.addresses`).

Idea: the Lamport protocol of NCCL's LL and of TensorRT-LLM's one-shot all-reduce.
"""

from __future__ import annotations

from typing import no_type_check

from ladder.jit import jit, tl

# The content of an empty slot, by element size in bytes: the bits of -0.0.
EMPTY = {2: -(2**15), 4: -(2**31)}
SPIN_LIMIT = 1 << 27  # polls of an empty slot, over a minute, before the kernel traps


@jit
@no_type_check
def peer(buffers, rank, BITS: tl.constexpr):
    """A pointer of type BITS to the slots of `rank`; aligned for 16-byte accesses."""
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(BITS)), 16)


@jit
@no_type_check
def peers(buffers, rank, WORLD: tl.constexpr):
    """Pointers to the slots of `rank`, rank + 1, ..., as 32-bit words; a tuple.

    In this order each rank pushes to a different peer first, which balances the links.
    """
    found = ()
    for i in tl.static_range(WORLD):
        found += (peer(buffers, (rank + i) % WORLD, tl.int32),)
    return found


@jit
@no_type_check
def sendable(bits, EMPTY: tl.constexpr):
    """`bits` with EMPTY replaced by 0, that is -0.0 by 0.0."""
    return tl.where(bits == EMPTY, 0, bits).to(bits.dtype)


@jit
@no_type_check
def push_to_slots(
    buffers, start, offsets, bits, inside, FIRST: tl.constexpr, WORLD: tl.constexpr,
    BITS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Store `bits`, integers of type BITS, at start + offsets of every rank's slots, also its own.

    FIRST: the rank whose slots are written first.
    """
    bits = sendable(bits, EMPTY)
    for i in tl.static_range(WORLD):
        slots = peer(buffers, (FIRST + i) % WORLD, BITS)
        tl.store(slots + start + offsets, bits, mask=inside)


@jit
@no_type_check
def clear(slots, stride, offsets, inside, rank, WORLD: tl.constexpr, EMPTY: tl.constexpr):
    """Set `offsets` of every rank's part of this rank's slots to EMPTY, except the part of `rank`.

    rank: -1 for no exception.
    """
    for other in tl.static_range(WORLD):
        tl.store(slots + other * stride + offsets, EMPTY, mask=inside & (rank != other))


@jit
@no_type_check
def count_spin(spins, limit: tl.constexpr):
    """Count one more poll of an empty slot; above `limit` the kernel traps: no rank hangs."""
    spins += 1
    if spins > limit:
        tl.inline_asm_elementwise(
            "trap; mov.u32 $0, 0;", "=r,r", [spins], tl.int32, is_pure=False, pack=1
        )
    return spins


@jit
@no_type_check
def receive(
    slots,  # this rank's: rank p's words are at slots + p * stride + offsets
    stride,
    offsets,
    inside,
    rank,
    mine,  # this rank's own words, which have no slot; none of them is `EMPTY`
    WORLD: tl.constexpr,
    EMPTY: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
):
    """Wait for every peer's words; return all ranks' words, a tuple by rank.

    All peers' words are read before any is compared, so that the reads overlap.
    """
    words = ()
    for _ in tl.static_range(WORLD):
        words += (mine,)
    missing = 1
    spins = 0
    while missing > 0:
        arrived = ()
        empty = tl.zeros_like(offsets)
        for other in tl.static_range(WORLD):
            word = tl.load(
                slots + other * stride + offsets,
                mask=inside & (rank != other),
                other=mine,
                volatile=True,
            )
            arrived += (word,)
        for other in tl.static_range(WORLD):
            empty |= (arrived[other] == EMPTY).to(tl.int32)
        words = arrived
        missing = tl.max(empty)
        spins = count_spin(spins, SPIN_LIMIT)
    return words


@jit
@no_type_check
def receive_sum(
    slots,  # this rank's: rank p's part is at slots + p * stride
    stride,
    inside,
    total,
    kind: tl.constexpr,
    WORLD: tl.constexpr,
    EMPTY: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
):
    """Wait for every rank's part, of type `kind`; return `total` plus all, added in rank order."""
    arrived = total
    spins = 0
    missing = 1
    while missing > 0:
        # One vector per rank, not a matrix over the ranks: a sum across warps would need shared
        # memory, and a kernel that needs much of it cannot run beside one that needs little.
        arrived = total
        empty = tl.zeros(total.shape, tl.int32)
        for other in tl.static_range(WORLD):
            bits = tl.load(slots + other * stride, mask=inside, other=0, volatile=True)
            empty |= (bits == EMPTY).to(tl.int32)
            arrived += bits.to(kind, bitcast=True).to(tl.float32)
        missing = tl.max(empty)
        spins = count_spin(spins, SPIN_LIMIT)
    return arrived


@jit
@no_type_check
def add_up(words, WORLD: tl.constexpr, PACKED: tl.constexpr):
    """The sum of the ranks' words, in float32 and rank order, rounded once, as words.

    PACKED: a word has two bfloat16, otherwise one float32.
    """
    low = tl.zeros(words[0].shape, tl.float32)
    if PACKED:
        high = tl.zeros(words[0].shape, tl.float32)
        for other in tl.static_range(WORLD):
            low += (words[other] << 16).to(tl.float32, bitcast=True)
            high += (words[other] & -65536).to(tl.float32, bitcast=True)
        left = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        right = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        total = left | right
    else:
        for other in tl.static_range(WORLD):
            low += words[other].to(tl.float32, bitcast=True)
        total = low.to(tl.int32, bitcast=True)
    return total
