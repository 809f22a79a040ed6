"""Rows that go to the rank that owns them, and back, over peer memory, with counts on the device.

Kernels that follow one another on a stream; `ladder.ops.mailbox` has their protocol, and why no
memory is written too early. Words: int32 [2 (open, sent), T, 2] of each rank; the second of a pair
is a number of rows that comes with `open`.

- `place`: where each row goes, and *open*: each peer learns how many of this rank's rows it owns.
- `push_rows`, `push_pieces` (and `ladder.kernels.grouped`): wait for open, store, and *send*: the
  last program to finish clears `open` and sets `sent` at every peer.
- `receive_rows`, `gather_rows`: wait for `sent`, read the slots; the last program clears `sent`.

No kernel waits for one of its own rank, or for a program of the same kernel of a peer; so it does
not matter how many programs run at once. Rows are moved as integers of 2 or 4 bytes.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import SPIN_LIMIT, arrive, load, peer, rotate, signal, store, wait
from ladder.comm.symmetric import SymmetricTensor
from ladder.jit import begin, jit, kernel, launch, tl, triton

WORDS = 4  # int32 words for each rank: (open, count), (sent, unused)
CHUNK, SCAN, PLACE_WARPS = 1024, 2048, 16  # rows of a program of `place`; rows it counts at once
TILE, WIDEST, WARPS = 2048, 512, 4  # elements of a tile; the most in a row
PROGRAMS = 1024  # of a kernel that moves rows, at most


def dense(rows: Tensor) -> Tensor:
    """`rows`, or a copy, contiguous and at a multiple of 16 bytes."""
    rows = rows.contiguous()
    return rows.clone() if rows.data_ptr() % 16 else rows


def as_bits(rows: Tensor) -> Tensor:
    """Dense [..., D] as integers of 4 bytes, or of 2 where a row has no whole number of these."""
    size = rows.shape[-1] * rows.element_size()
    return rows.view(torch.int32 if size % 4 == 0 else torch.int16)


def _tile(bits: Tensor) -> dict[str, int]:
    """The shape of a tile of rows, and the alignment of each row in bytes."""
    size, width = bits.shape[-1], bits.element_size()
    wide = min(WIDEST, triton.next_power_of_2(size))
    return {"BM": TILE // wide, "BN": wide, "ALIGN": 16 if size * width % 16 == 0 else width}


def _programs(rows: int, tile: dict[str, int], device: torch.device) -> tuple[int]:
    most = 3 if device.type == "cpu" else PROGRAMS
    return (max(1, min(-(-rows // tile["BM"]), most)),)


@kernel("both")
@no_type_check
def _place_kernel(
    owners, limit, places, words, rank, m, capacity,
    WORLD: tl.constexpr, RANKS: tl.constexpr, LIMITED: tl.constexpr, CHUNK: tl.constexpr,
    SCAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    end = m
    if LIMITED:
        end = tl.minimum(tl.load(limit), m).to(tl.int32)
    ranks = tl.arange(0, RANKS)
    known = (ranks < WORLD)[:, None]
    first = tl.program_id(0) * CHUNK
    # Every program counts the rows before its own; so none waits for another.
    seen = tl.zeros([RANKS, SCAN], tl.int32)
    for start in range(0, first, SCAN):
        i = start + tl.arange(0, SCAN)
        own = tl.load(owners + i, mask=(i < first) & (i < end), other=-1)
        seen += ((own[None, :] == ranks[:, None]) & known).to(tl.int32)
    before = tl.sum(seen, axis=1)
    i = first + tl.arange(0, CHUNK)
    own = tl.load(owners + i, mask=i < end, other=-1)
    mine = ((own[None, :] == ranks[:, None]) & known).to(tl.int32)
    place = tl.sum(mine * (before[:, None] + tl.cumsum(mine, axis=1) - 1), axis=0)
    sent = (tl.sum(mine, axis=0) > 0) & (place < capacity)
    tl.store(places + i, tl.where(sent, place, -1), mask=i < m)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        totals = before + tl.sum(mine, axis=1)
        for s in tl.static_range(WORLD):
            q = rotate(s, rank, WORLD)
            pair = peer(words, q, tl.int32) + rank * 2
            tl.store(pair + 1, tl.sum(tl.where(ranks == q, totals, 0)))
            if s > 0:
                signal(pair, 1)


def place(
    owners: Tensor, limit: Tensor | None, capacity: int, words: SymmetricTensor
) -> Tensor:  # fmt: skip
    """int32 [m]: the number of each row among those of its owner; -1 if it is not sent.

    owners: [m], int32 or int64. limit: rows from this number on, one element, are not sent. This
    rank opens its slots: all that reads them has been enqueued before.
    """
    world, m = len(words.by_rank), len(owners)
    places = owners.new_empty(m, dtype=torch.int32)
    launch(
        _place_kernel, (max(1, -(-m // CHUNK)),), owners.device,
        owners.contiguous(), owners if limit is None else limit, places, words.addresses,
        words.rank, m, capacity, WORLD=world, RANKS=triton.next_power_of_2(world),
        LIMITED=limit is not None, CHUNK=CHUNK, SCAN=SCAN, num_warps=PLACE_WARPS, dependent=False,
    )  # fmt: skip
    return places


@jit
@no_type_check
def await_open(own, rank, WORLD: tl.constexpr, SPIN_LIMIT: tl.constexpr):
    """Wait until the slots of every peer may be written. own: this rank's words."""
    for s in tl.static_range(1, WORLD):
        wait(own + rotate(s, rank, WORLD) * 2, 1, SPIN_LIMIT)


@jit
@no_type_check
def hand_over(
    counter, words, rank, counts, overflow, capacity, WORLD: tl.constexpr, COUNTS: tl.constexpr
):
    """The end of a program that has stored rows at peers; the last of all tells the peers.

    COUNTS: the last one also stores how many rows each rank has for this one, int64, and how many
    do not fit: a peer may overwrite its number for the next call as soon as it has seen `sent`.
    """
    # In the scope of the system, so that each program's own release covers its stores to peers.
    if arrive(counter, tl.num_programs(0), "sys"):
        own = peer(words, rank, tl.int32)
        tl.store(counter, 0)
        if COUNTS:
            lost = tl.full([], 0, tl.int64)
            for q in tl.static_range(WORLD):
                count = tl.load(own + q * 2 + 1, cache_modifier=".cg").to(tl.int64)
                tl.store(counts + q, count)
                lost += tl.maximum(count - capacity, 0)
            tl.store(overflow, lost)
        for s in tl.static_range(1, WORLD):
            tl.store(own + rotate(s, rank, WORLD) * 2, 0)
        for s in tl.static_range(1, WORLD):
            to = peer(words, rotate(s, rank, WORLD), tl.int32)
            signal(to + (WORLD + rank) * 2, 1)


@jit
@no_type_check
def close(counter, own, rank, WORLD: tl.constexpr):
    """The end of a program that has waited for `sent` of the peers; the last of all clears it."""
    if arrive(counter, tl.num_programs(0), "gpu"):
        tl.store(counter, 0)
        for s in tl.static_range(1, WORLD):
            tl.store(own + (WORLD + rotate(s, rank, WORLD)) * 2, 0)


@jit
@no_type_check
def piece_of(slots, rank, to, out, capacity, size, inside, BYTES: tl.constexpr):
    """Addresses of the piece of `rank` at the ranks `to`: in their slots, or in the own `out`.

    size: elements of a row, of BYTES each.
    """
    address = tl.load(slots + to, mask=inside, other=0)
    address = tl.where(to == rank, out.to(tl.int64), address)
    return address + tl.cast(rank, tl.int64) * capacity * size * BYTES


@kernel("both")
@no_type_check
def _push_rows_kernel(
    x, places, owners, out, slots, words, counter, counts, overflow, rank, m, size, capacity,
    BYTES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr,
    WORLD: tl.constexpr, SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    await_open(peer(words, rank, tl.int32), rank, WORLD, SPIN_LIMIT)
    for block in range(tl.program_id(0), tl.cdiv(m, BM), tl.num_programs(0)):
        i = block * BM + tl.arange(0, BM)
        at = tl.load(places + i, mask=i < m, other=-1)
        sent = at >= 0
        to = tl.load(owners + i, mask=sent, other=0)
        address = piece_of(slots, rank, to, out, capacity, size, sent, BYTES)
        address += at.to(tl.int64) * size * BYTES
        target = address.to(tl.pointer_type(x.dtype.element_ty))[:, None]
        target = tl.multiple_of(target, [ALIGN, ALIGN])
        row = i.to(tl.int64)[:, None] * size
        for c in range(0, size, BN):
            column = c + tl.arange(0, BN)
            inside = sent[:, None] & (column < size)[None, :]
            value = tl.load(x + row + column[None, :], mask=inside, other=0)
            store(target + column[None, :], value, inside)
    hand_over(counter, words, rank, counts, overflow, capacity, WORLD, True)


def push_rows(
    x: Tensor, places: Tensor, owners: Tensor, out: Tensor, counts: Tensor, overflow: Tensor,
    slots: SymmetricTensor, words: SymmetricTensor, counter: Tensor,
) -> None:  # fmt: skip
    """Store each row at its owner, after `place`, before `receive_rows`.

    x: [m, size] and out: [T, capacity, size], of integers (`as_bits`). counts: int64 [T], and
    overflow, int64 []: written.
    """
    tile = _tile(x)
    launch(
        _push_rows_kernel, _programs(len(x), tile, x.device), x.device,
        x, places, owners.contiguous(), out, slots.addresses, words.addresses, counter, counts,
        overflow, words.rank, len(x), x.shape[1], out.shape[1], BYTES=x.element_size(),
        WORLD=len(out), SPIN_LIMIT=SPIN_LIMIT, num_warps=WARPS, dependent=False, **tile,
    )  # fmt: skip


@kernel("both")
@no_type_check
def _receive_rows_kernel(
    out, counts, slots, words, counter, rank, size, capacity,
    BM: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr, WORLD: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    own = peer(words, rank, tl.int32)
    arrived = peer(slots, rank, out.dtype.element_ty)
    for s in range(WORLD):
        q = rotate(s, rank, WORLD)
        if q != rank:
            wait(own + (WORLD + q) * 2, 1, SPIN_LIMIT)
        count = tl.load(counts + q)
        for block in range(tl.program_id(0), tl.cdiv(capacity, BM), tl.num_programs(0)):
            j = block * BM + tl.arange(0, BM)
            theirs = (j < count) & (q != rank)
            written = (j < capacity) & (theirs | (j >= count))  # own rows are there
            row = (tl.cast(q, tl.int64) * capacity + j)[:, None] * size
            for c in range(0, size, BN):
                column = c + tl.arange(0, BN)
                inside = (column < size)[None, :]
                value = load(arrived + row + column[None, :], theirs[:, None] & inside, 0)
                tl.store(out + row + column[None, :], value, mask=written[:, None] & inside)
    close(counter, own, rank, WORLD)


def receive_rows(
    out: Tensor, counts: Tensor, slots: SymmetricTensor, words: SymmetricTensor, counter: Tensor
) -> None:
    """Take the peers' rows from the slots, and put zeros behind those of every rank."""
    tile = _tile(out)
    launch(
        _receive_rows_kernel, _programs(out.shape[1], tile, out.device), out.device,
        out, counts, slots.addresses, words.addresses, counter, words.rank, out.shape[2],
        out.shape[1], WORLD=len(out), SPIN_LIMIT=SPIN_LIMIT, num_warps=WARPS, dependent=False,
        **tile,
    )  # fmt: skip


@kernel("both")
@no_type_check
def _push_pieces_kernel(
    rows, slots, words, counter, rank, size, capacity,
    BM: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr, WORLD: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    own = peer(words, rank, tl.int32)
    for s in range(1, WORLD):
        to = rotate(s, rank, WORLD)
        wait(own + to * 2, 1, SPIN_LIMIT)
        count = tl.minimum(tl.load(own + to * 2 + 1, cache_modifier=".cg"), capacity)
        target = peer(slots, to, rows.dtype.element_ty)
        for block in range(tl.program_id(0), tl.cdiv(count, BM), tl.num_programs(0)):
            j = block * BM + tl.arange(0, BM)
            source = (tl.cast(to, tl.int64) * capacity + j)[:, None] * size
            place = (tl.cast(rank, tl.int64) * capacity + j)[:, None] * size
            for c in range(0, size, BN):
                column = c + tl.arange(0, BN)
                inside = (j < count)[:, None] & (column < size)[None, :]
                value = tl.load(rows + source + column[None, :], mask=inside, other=0)
                store(target + place + column[None, :], value, inside)
    hand_over(counter, words, rank, words, words, capacity, WORLD, False)


def push_pieces(
    rows: Tensor, slots: SymmetricTensor, words: SymmetricTensor, counter: Tensor
) -> None:
    """Store piece q of rows [T, capacity, size] at rank q: as many rows as q has asked for."""
    tile = _tile(rows)
    launch(
        _push_pieces_kernel, _programs(rows.shape[1], tile, rows.device), rows.device,
        rows, slots.addresses, words.addresses, counter, words.rank, rows.shape[2], rows.shape[1],
        WORLD=len(rows), SPIN_LIMIT=SPIN_LIMIT, num_warps=WARPS, dependent=False, **tile,
    )  # fmt: skip


@kernel("both")
@no_type_check
def _gather_rows_kernel(
    rows, places, owners, out, slots, words, counter, rank, m, size, capacity,
    BM: tl.constexpr, BN: tl.constexpr, ALIGN: tl.constexpr, WORLD: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    kind: tl.constexpr = out.dtype.element_ty
    own = peer(words, rank, tl.int32)
    for s in tl.static_range(1, WORLD):
        wait(own + (WORLD + rotate(s, rank, WORLD)) * 2, 1, SPIN_LIMIT)
    arrived = tl.load(slots + rank)
    for block in range(tl.program_id(0), tl.cdiv(m, BM), tl.num_programs(0)):
        i = block * BM + tl.arange(0, BM)
        at = tl.load(places + i, mask=i < m, other=-1)
        sent = at >= 0
        of = tl.load(owners + i, mask=sent, other=0)
        address = tl.where(of == rank, rows.to(tl.int64), arrived)
        source = tl.multiple_of(address.to(tl.pointer_type(kind))[:, None], [ALIGN, ALIGN])
        row = (of.to(tl.int64) * capacity + at)[:, None] * size
        to = i.to(tl.int64)[:, None] * size
        for c in range(0, size, BN):
            column = c + tl.arange(0, BN)
            within = (column < size)[None, :]
            value = load(source + row + column[None, :], sent[:, None] & within, 0)
            tl.store(out + to + column[None, :], value, mask=(i < m)[:, None] & within)
    close(counter, own, rank, WORLD)


def gather_rows(
    rows: Tensor, places: Tensor, owners: Tensor, out: Tensor, slots: SymmetricTensor,
    words: SymmetricTensor, counter: Tensor,
) -> None:  # fmt: skip
    """out [m, size]: each row from the piece of its owner, which pushed it; zeros if not sent."""
    tile = _tile(out)
    launch(
        _gather_rows_kernel, _programs(len(out), tile, out.device), out.device,
        rows, places, owners.contiguous(), out, slots.addresses, words.addresses, counter,
        words.rank, len(out), out.shape[1], rows.shape[1], WORLD=len(rows),
        SPIN_LIMIT=SPIN_LIMIT, num_warps=WARPS, dependent=False, **tile,
    )  # fmt: skip
