"""Triton functions for kernels that access peers: what every fused kernel is made of.

A rank hands data to another in one of two ways.

- *Signals.* `store`, `put_tile` or `atomic_add` write to a peer's memory, then `signal` sets a flag
  there; the peer calls `wait`, and reads by `load`. Programs of one GPU count themselves by
  `arrive`. These are for large data, and for copy engines, which can wait for such a word, and set
  it (`ladder.comm.driver`).
- *Slots, whose data is its own flag*, for small data. An empty slot holds EMPTY, which is never
  sent (`sendable`); a reader polls the slot until it holds something else (`receive`,
  `receive_sum`), and clears it afterwards (`clear`). There are no flags and no barriers. Each user
  shows why no slot is written before it is clear: `ladder.comm.push`, `ladder.comm.two_shot`,
  `ladder.parallel.decode`.

*Memory ordering.* Plain accesses of a program have no order that another GPU can rely on. Only a
release (`signal`, `arrive`) orders all accesses of the program before it, and only an acquire
(`wait`, `arrive`) that reads what the release wrote orders those after it; a slot orders nothing
but its own word. Each function below says which kind of access it makes.

buffers: int64 [world], the addresses of each rank's memory (`SymmetricTensor.addresses`). inside:
which elements are accessed. All functions run in Triton's interpreter, too, where programs run one
after the other: there must be other processes to wait for.

Idea: the Lamport protocol of NCCL's LL and of TensorRT-LLM's one-shot all-reduce; device-side
communication functions for Triton, as in fused computation-collective operations (Punniyamurthy et
al., 2024), III-D.
"""

from __future__ import annotations

from typing import no_type_check

from ladder.jit import INTERPRETED, jit, tl

# The content of an empty slot, by element size in bytes: the bits of -0.0, the least integer.
EMPTY = {2: -(2**15), 4: -(2**31)}
SPIN_LIMIT = 1 << 27  # polls of an empty slot, over a minute, before the kernel traps
# Whether these functions are compiled: Triton's interpreter has no assembly.
ASSEMBLY = None if tl is None else tl.constexpr(not INTERPRETED)


@jit
@no_type_check
def rotate(i, rank, WORLD: tl.constexpr, PER=1):
    """The i-th of WORLD x PER tiles in the order of `rank`: the PER tiles of shard `rank` first.

    By default the i-th rank: rank, rank + 1, ... So each rank sends to a different peer at any
    time, which balances the links. With `rank` + 1 the own shard comes last, and what must be sent
    first. It accesses no memory.
    """
    return (rank + i // PER) % WORLD * PER + i % PER


@jit
@no_type_check
def peer(buffers, rank, BITS: tl.constexpr):
    """A pointer of type BITS to the memory of `rank`; aligned for 16-byte accesses.

    A weak load: the host has written the table, or a kernel that has ended.
    """
    return tl.multiple_of(tl.load(buffers + rank).to(tl.pointer_type(BITS)), 16)


@jit
@no_type_check
def peers(buffers, rank, WORLD: tl.constexpr, BITS: tl.constexpr):
    """Pointers of type BITS to the memory of `rank`, rank + 1, ...; a tuple."""
    found = ()
    for i in tl.static_range(WORLD):
        found += (peer(buffers, rotate(i, rank, WORLD), BITS),)
    return found


@jit
@no_type_check
def load(pointers, inside, other):
    """Load what peers or copy engines have written to own memory, from L2 and not a stale L1 line.

    A weak load: it is ordered by a `wait` or `arrive` before it, and by nothing else.
    """
    return tl.load(pointers, mask=inside, other=other, cache_modifier=".cg")


@jit
@no_type_check
def store(pointers, values, inside):
    """Store to own memory or a peer's.

    A weak store: others see it after a `signal` or `arrive` of this program, in no order before.
    Accesses of 16 bytes a thread are as fast as a copy; masks and addresses of unknown alignment
    silently narrow them.
    """
    tl.store(pointers, values, mask=inside)


@jit
@no_type_check
def put_tile(matrix, tile, row, column, rows, columns, stride):
    """Store `tile` [BM, BN] at (row, column) of a rows x columns matrix, own or a peer's.

    stride: elements between its rows. What is outside is left out. `column`, `columns` and `stride`
    that are known to be multiples of 16 give accesses of 16 bytes. Weak stores: see `store`.
    """
    m, n = row + tl.arange(0, tile.shape[0]), column + tl.arange(0, tile.shape[1])
    at = m.to(tl.int64)[:, None] * stride + n[None, :]
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    store(matrix + at, tile.to(matrix.dtype.element_ty), inside)


@jit
@no_type_check
def atomic_add(pointers, values, inside):
    """Add to own memory or a peer's, each element atomically, in no order.

    Relaxed, in the scope of the system: no element is lost, but nothing is ordered; `signal`
    afterwards, as for `store`. Sums of floats depend on the order of arrival.
    """
    tl.atomic_add(pointers, values, mask=inside, sem="relaxed", scope="sys")


@jit
@no_type_check
def _barrier():
    """A barrier of the program's threads, in a form that leaves the loop around it pipelined.

    Triton pipelines no loop with a `tl.debug_barrier` in it.
    """
    if ASSEMBLY:
        tl.inline_asm_elementwise("bar.sync 0; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@jit
@no_type_check
def signal(flag, value):
    """Set `flag`, one int32 word, own or a peer's, after all accesses of this program.

    A barrier of the program's threads, and a release in the scope of the system: a program that
    sees the value by `wait` sees everything that this one has written. TMA stores need a `flush`
    before.
    """
    _barrier()  # every thread's stores come before the release, which one thread does
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@jit
@no_type_check
def wait(flag, value, SPIN_LIMIT: tl.constexpr, TMA: tl.constexpr = False):
    """Wait until `flag`, one int32 word of own memory, is at least `value`.

    One thread polls, by an acquire in the scope of the system, and the others follow it through a
    barrier: all accesses of the program after this see what was written before the `signal` or
    `arrive` that set the value. TMA: its TMA loads see that, too. After SPIN_LIMIT polls the kernel
    traps.
    """
    spins = 0
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < value:
        spins = count_spin(spins, SPIN_LIMIT)
    if TMA:
        _fence_tma()


@jit
@no_type_check
def arrive(counter, count, SCOPE: tl.constexpr):
    """Add 1 to `counter`, an int32 word; returns whether this is the last of `count` programs.

    A barrier of the program's threads, then acquire and release: the last one sees everything that
    the others wrote before they arrived; each of the others sees what was written before the
    arrivals ahead of its own. SCOPE: gpu if all programs, and all that wait for the counter, are on
    this GPU; sys for a counter of a peer, or one for which a copy engine waits. Whoever acts on the
    full count sets it back to 0.
    """
    _barrier()  # every thread's stores come before the release, which one thread does
    return tl.atomic_add(counter, 1, sem="acq_rel", scope=SCOPE) == count - 1


@jit
@no_type_check
def flush():
    """Complete this program's TMA stores, so that a `signal` or `arrive` that follows orders them.

    It waits until they are written, not only read from shared memory, and orders TMA's accesses
    and the threads' own (a proxy fence).
    """
    if ASSEMBLY:
        tl.inline_asm_elementwise(
            "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1
        )
    _fence_tma()


@jit
@no_type_check
def _fence_tma():
    """Order this thread's accesses by TMA and by itself, before and after."""
    if ASSEMBLY:
        tl.inline_asm_elementwise("fence.proxy.async; mov.u32 $0, 0;", "=r", [], tl.int32, False, 1)


@jit
@no_type_check
def sendable(bits, EMPTY: tl.constexpr):
    """`bits` with EMPTY replaced by 0, that is -0.0 by 0.0."""
    return tl.where(bits == EMPTY, 0, bits).to(bits.dtype)


@jit
@no_type_check
def push_to_slots(slots, start, offsets, bits, inside, WORLD: tl.constexpr, EMPTY: tl.constexpr):
    """Store `bits` at start + offsets of every rank's slots, also its own, in the order of `slots`.

    slots: `peers`, of the type of `bits`. Weak stores; each word is its own flag.
    """
    bits = sendable(bits, EMPTY)
    for i in tl.static_range(WORLD):
        store(slots[i] + start + offsets, bits, inside)


@jit
@no_type_check
def peers_across(buffers, WORLD: tl.constexpr, WP: tl.constexpr, BITS: tl.constexpr):
    """Pointers of type BITS to the memory of rank 0, 1, ..., WORLD - 1, along the last of three
    dimensions, [1, 1, WP]; null beyond. For `push_across`.

    WP: WORLD, rounded up to a power of two. Each thread loads the pointers of its own ranks. Scalar
    pointers, as of `peers`, are moved to uniform registers as soon as they are loaded; a warp waits
    for this move before it issues its later loads.
    """
    ranks = tl.arange(0, WP)[None, None, :]
    return tl.load(buffers + ranks, mask=ranks < WORLD, other=0).to(tl.pointer_type(BITS))


@jit
@no_type_check
def push_across(slots, start, offsets, bits, inside, EMPTY: tl.constexpr):
    """As `push_to_slots`, by one store, in which another thread writes each rank's word.

    slots: `peers_across`. offsets, bits, inside: three dimensions, of which the last is 1.
    """
    there = slots.to(tl.int64) != 0
    store(slots + start + offsets, sendable(bits, EMPTY), inside & there)


@jit
@no_type_check
def clear(slots, stride, offsets, inside, rank, WORLD: tl.constexpr, EMPTY: tl.constexpr):
    """Set `offsets` of every rank's part of this rank's slots to EMPTY, except the part of `rank`.

    rank: -1 for no exception. Weak stores to own memory.
    """
    for other in tl.static_range(WORLD):
        tl.store(slots + other * stride + offsets, EMPTY, mask=inside & (rank != other))


@jit
@no_type_check
def count_spin(spins, limit: tl.constexpr):
    """Count one more poll of an empty slot; above `limit` the kernel traps, so no rank hangs."""
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

    All peers' words are read before any is compared, so that the reads overlap. Volatile loads, in
    no order: a word that has arrived says nothing of any other memory.
    """
    words = ()
    for _ in tl.static_range(WORLD):
        words += (mine,)
    missing = 1
    spins = 0
    while missing > 0:
        arrived = ()
        least = tl.zeros_like(offsets)
        for other in tl.static_range(WORLD):
            word = tl.load(
                slots + other * stride + offsets,
                mask=inside & (rank != other),
                other=mine,
                volatile=True,
            )
            arrived += (word,)
        for other in tl.static_range(WORLD):
            least = tl.minimum(least, arrived[other])
        words = arrived
        missing = (tl.min(least) == EMPTY).to(tl.int32)
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
    """Wait for every rank's part, of type `kind`; return `total` plus all, added in rank order.

    Volatile loads, as in `receive`.
    """
    arrived = total
    spins = 0
    missing = 1
    while missing > 0:
        # One vector per rank, not a matrix over the ranks: a sum across warps would need shared
        # memory, and a kernel that needs much of it cannot run beside one that needs little.
        arrived = total
        least = tl.zeros(total.shape, slots.dtype.element_ty)
        for other in tl.static_range(WORLD):
            bits = tl.load(slots + other * stride, mask=inside, other=0, volatile=True)
            least = tl.minimum(least, bits)
            arrived += bits.to(kind, bitcast=True).to(tl.float32)
        missing = (tl.min(least) == EMPTY).to(tl.int32)
        spins = count_spin(spins, SPIN_LIMIT)
    return arrived


@jit
@no_type_check
def average(total, WORLD: tl.constexpr):
    """`total`, float32, divided by the ranks, correctly rounded."""
    if WORLD & (WORLD - 1) == 0:
        total *= 1 / WORLD  # exact, and without the registers of a division
    else:
        total = tl.div_rn(total, tl.full(total.shape, WORLD, tl.float32))
    return total


@jit
@no_type_check
def add_up(words, WORLD: tl.constexpr, PACKED: tl.constexpr, AVERAGE: tl.constexpr = False):
    """The sum of the ranks' words, in float32 and rank order, rounded once, as words.

    PACKED: a word has 0: one float32; 1: two bfloat16; 2: two float16. AVERAGE: the sum is divided
    by the ranks before it is rounded.
    """
    low = tl.zeros(words[0].shape, tl.float32)
    if PACKED == 2:
        high = tl.zeros(words[0].shape, tl.float32)
        for other in tl.static_range(WORLD):
            one = words[other].to(tl.int16).to(tl.float16, bitcast=True)
            two = (words[other] >> 16).to(tl.int16).to(tl.float16, bitcast=True)
            low += one.to(tl.float32)
            high += two.to(tl.float32)
        if AVERAGE:
            low, high = average(low, WORLD), average(high, WORLD)
        left = low.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        right = high.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        total = left | right
    elif PACKED == 1:
        high = tl.zeros(words[0].shape, tl.float32)
        for other in tl.static_range(WORLD):
            low += (words[other] << 16).to(tl.float32, bitcast=True)
            high += (words[other] & -65536).to(tl.float32, bitcast=True)
        if AVERAGE:
            low, high = average(low, WORLD), average(high, WORLD)
        left = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        right = high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16
        total = left | right
    else:
        for other in tl.static_range(WORLD):
            low += words[other].to(tl.float32, bitcast=True)
        if AVERAGE:
            low = average(low, WORLD)
        total = low.to(tl.int32, bitcast=True)
    return total
