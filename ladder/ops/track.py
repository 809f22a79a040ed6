"""Track and trigger in software: the tiles of a product are counted, and full counts start copies.

A `TrackMap` declares, for each of T ranks that compute products of the same shape, where the tiles
of the product go: straight to a peer (`remote_map`), or into own memory, from which a copy engine
moves blocks of them to a peer as soon as all their updates have come (`dma_map`), or nowhere. It is
data: it validates itself, `compile` makes of it the tables that a kernel and a CUDA stream read,
and `ladder.ops.track_reference` executes it in any order of events. It says nothing of time. The
maps of the usual collectives are in `ladder.ops.track_maps`.

Source: T3 (Pati et al., 2024), 4.2 (tracker and triggers), 4.4 and Figure 12 (the two calls). Its
tracker is counters in device memory here, to which the kernel's tiles add, and a CUDA stream that
waits for a counter before it copies.

Memory of a rank, in tiles. The *positions* 0, 1, ... are the tiles of its own product, row by row;
behind them lie the *slots*, memory for chunks that arrive. A *place* is where one chunk lies: place
c is chunk c of the own product, and place len(chunks) + s is slot s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

from ladder.models.errors import UserError, is_whole

Op = Literal["store", "add"]


@dataclass(frozen=True)
class ChunkMap:
    """Where one chunk of a rank's product goes: made by `remote_map` and `dma_map`."""

    chunk: int
    peer: int
    op: Op
    at: int
    dma: bool
    updates: int = 1
    tiles: int | None = None

    def __str__(self) -> str:
        call = f"(chunk={self.chunk!r}, peer={self.peer!r}, op={self.op!r}"
        call += "" if self.at == self.chunk else f", at={self.at!r}"
        if not self.dma:
            return f"remote_map{call})"
        call += f", updates={self.updates!r}"
        return f"dma_map{call})" if self.tiles is None else f"dma_map{call}, tiles={self.tiles!r})"


def remote_map(chunk: int, peer: int, op: Op = "store", at: int | None = None) -> ChunkMap:
    """The product's own stores write the tiles of `chunk` to place `at` of rank `peer`.

    op: "add" updates what is there. at: None for the place `chunk`. The peer may be the own rank,
    with another place. Own memory has no copy of the chunk.
    """
    return ChunkMap(chunk, peer, op, chunk if at is None else at, dma=False)


def dma_map(
    chunk: int,
    peer: int,
    op: Op = "store",
    updates: int = 1,
    tiles: int | None = None,
    at: int | None = None,
) -> ChunkMap:
    """The tiles of `chunk` stay in own memory until a copy engine moves them to place `at` of peer.

    It moves blocks of `tiles` tiles (None: the whole chunk), each as soon as each of its tiles has
    had `updates` updates: the own product's, and those that peers send to this place. The copies of
    a rank start in the order of its maps. op: a GPU's copy engine can only "store"; with "add", the
    map is for memory that can update itself, as in T3, or for a kernel that moves the blocks.
    """
    return ChunkMap(chunk, peer, op, chunk if at is None else at, True, updates, tiles)


@dataclass(frozen=True)
class Copy:
    """The copy of a full block to `positions` of `peer`, whose flag `flag` is set afterwards."""

    peer: int
    op: Op
    positions: tuple[int, ...]
    flag: int


@dataclass(frozen=True)
class Block:
    """Tiles of one place that become full together; then they are moved, or stay to be read.

    count: of this rank's counter with the block's number, to which each tile that a kernel has
    written here adds 1, this rank's or a peer's. flags: of this rank, set by the copies that arrive
    here. The block is full when the counter is `count` and all flags are set.
    """

    place: int
    positions: tuple[int, ...]
    count: int
    flags: tuple[int, ...]
    copy: Copy | None


@dataclass(frozen=True)
class Program:
    """A TrackMap compiled for one rank. All tensors are int32, on the CPU.

    order [tiles]: the tiles in the order in which the product computes them. chunk [tiles]: the
    chunk of each tile. target [tiles]: the position to which it is written, and counter [tiles]:
    the counter to which it then adds 1, both in the memory of rank peer [chunks]; add [chunks]: 1
    where it updates what is there, 0 where it replaces it. count [blocks]: of this rank's counters,
    the values of full blocks. blocks: those with a copy first, in the order of their copies.
    """

    rank: int
    order: Tensor
    chunk: Tensor
    target: Tensor
    counter: Tensor
    peer: Tensor
    add: Tensor
    count: Tensor
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class TrackMap:
    """The declaration for all ranks; a mistake in it is a UserError at once.

    rows, columns: the tiles of a rank's product. chunks: the tiles of each chunk, in the order in
    which they lie in another place; each tile is in one chunk. ranks: each rank's maps; a chunk
    without one stays where it is. slots: the tiles of each slot. orders: each rank's order of
    tiles; empty: row by row.
    """

    rows: int
    columns: int
    chunks: tuple[tuple[int, ...], ...]
    ranks: tuple[tuple[ChunkMap, ...], ...]
    slots: tuple[int, ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self._check_chunks()
        for rank, maps in enumerate(self.ranks):
            self._check_maps(rank, maps)
        for rank in range(self.world):
            for place in range(len(self.chunks) + len(self.slots)):
                self._check_updates(rank, place)
        self._check_copies()

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def tiles(self) -> int:
        return self.rows * self.columns

    def order(self, rank: int) -> tuple[int, ...]:
        """The tiles of `rank` in the order in which its product computes them."""
        return self.orders[rank] if self.orders else tuple(range(self.tiles))

    @cached_property
    def slot_starts(self) -> tuple[int, ...]:
        """The position of each slot's first tile, and the position behind the last slot."""
        return tuple(accumulate(self.slots, initial=self.tiles))

    def positions(self, place: int) -> tuple[int, ...]:
        """The positions of the tiles of a place, in order."""
        if place < len(self.chunks):
            return self.chunks[place]
        slot = place - len(self.chunks)
        return tuple(range(self.slot_starts[slot], self.slot_starts[slot + 1]))

    @cached_property
    def _arrivals(self) -> dict[tuple[int, int], list[tuple[int, ChunkMap]]]:
        """What peers, and remote maps of the own rank, send to each (rank, place), by sender."""
        found: dict[tuple[int, int], list[tuple[int, ChunkMap]]] = {}
        for sender, maps in enumerate(self.ranks):
            for each in maps:
                found.setdefault((each.peer, each.at), []).append((sender, each))
        return found

    @cached_property
    def _map_of(self) -> dict[tuple[int, int], ChunkMap]:
        return {(rank, each.chunk): each for rank, maps in enumerate(self.ranks) for each in maps}

    def keeps(self, rank: int, place: int) -> bool:
        """Whether the own product writes this place: a chunk that no remote map sends away."""
        own = self._map_of.get((rank, place))
        return place < len(self.chunks) and (own is None or own.dma)

    def updates(self, rank: int, place: int) -> int:
        """The number of updates of each tile of a place."""
        return self.keeps(rank, place) + len(self._arrivals.get((rank, place), ()))

    # ---- validation

    def _check_chunks(self) -> None:
        for name, value in (("rows", self.rows), ("columns", self.columns)):
            if not is_whole(value) or value < 1:
                raise UserError(f"{name}={value!r} must be a whole number of tiles, 1 or more")
        for name in ("chunks", "ranks", "slots", "orders"):
            if not isinstance(getattr(self, name), Sequence):
                raise UserError(f"{name}={getattr(self, name)!r} must be a tuple")
        if not self.ranks:
            raise UserError("ranks is empty; give each rank's maps, [] for none")
        owner: dict[int, int] = {}
        for chunk, tiles in enumerate(self.chunks):
            if not isinstance(tiles, Sequence):
                raise UserError(f"chunk {chunk} is {tiles!r}; give a tuple of its tiles")
            if not tiles:
                raise UserError(f"chunk {chunk} has no tiles; leave it out")
            for tile in tiles:
                if not is_whole(tile) or not 0 <= tile < self.tiles:
                    raise UserError(
                        f"chunk {chunk} has tile {tile!r}; tiles are 0 to {self.tiles - 1}"
                    )
                if tile in owner:
                    raise UserError(
                        f"tile {tile} is in chunk {owner[tile]} and in chunk {chunk}; each tile is "
                        f"in one chunk"
                    )
                owner[tile] = chunk
        missing = next((tile for tile in range(self.tiles) if tile not in owner), None)
        if missing is not None:
            raise UserError(f"tile {missing} is in no chunk; each tile is in one chunk")
        if any(not is_whole(size) or size < 1 for size in self.slots):
            raise UserError(f"slots {self.slots}; each has a whole number of tiles, 1 or more")
        if self.orders and len(self.orders) != self.world:
            raise UserError(f"{len(self.orders)} orders for {self.world} ranks; give one for each")
        for rank, order in enumerate(self.orders):
            whole = isinstance(order, Sequence) and all(map(is_whole, order))
            if not whole or sorted(order) != list(range(self.tiles)):
                raise UserError(
                    f"rank {rank}: its order does not name each of the {self.tiles} tiles once"
                )

    def _check_maps(self, rank: int, maps: Sequence[ChunkMap]) -> None:
        if not isinstance(maps, Sequence):
            raise UserError(f"rank {rank}: its maps are {maps}; give a tuple of them")
        mapped: set[int] = set()
        places = len(self.chunks) + len(self.slots)
        for each in maps:
            if not isinstance(each, ChunkMap):
                raise UserError(f"rank {rank}: {each!r} is no map; call remote_map or dma_map")
            where = f"rank {rank}: {each}"
            for name in ("chunk", "peer", "at", "updates", "tiles"):
                value = getattr(each, name)
                if not is_whole(value) and (name, value) != ("tiles", None):
                    raise UserError(f"{where}: {name}={value!r} must be a whole number")
            if not 0 <= each.chunk < len(self.chunks):
                raise UserError(f"{where}: chunks are 0 to {len(self.chunks) - 1}")
            if each.chunk in mapped:
                raise UserError(f"{where}: chunk {each.chunk} has a map already; it goes one way")
            mapped.add(each.chunk)
            if not 0 <= each.peer < self.world:
                raise UserError(f"{where}: ranks are 0 to {self.world - 1}")
            if each.op not in get_args(Op):
                raise UserError(f"{where}: op is one of {', '.join(get_args(Op))}")
            if not 0 <= each.at < places:
                raise UserError(f"{where}: places are 0 to {places - 1}")
            if each.peer == rank and (each.dma or each.at == each.chunk):
                raise UserError(
                    f"{where}: the peer is the rank itself; leave the map out and the chunk stays, "
                    f"or write it to another place by remote_map"
                )
            size, room = len(self.chunks[each.chunk]), len(self.positions(each.at))
            if size != room:
                raise UserError(f"{where}: the chunk has {size} tiles, and place {each.at} {room}")
            if each.tiles is not None and not 1 <= each.tiles <= size:
                raise UserError(f"{where}: tiles is 1 to {size}, the tiles of the chunk")

    def _check_updates(self, rank: int, place: int) -> None:
        writers = ["the own product"] if self.keeps(rank, place) else []
        arrivals = self._arrivals.get((rank, place), [])
        writers += [f"rank {sender}'s {each}" for sender, each in arrivals]
        own = self._map_of.get((rank, place))
        if own is not None and own.dma and own.updates != len(writers):
            raise UserError(
                f"rank {rank}: {own}: each tile of place {place} has {len(writers)} update(s), by "
                f"{', '.join(writers)}; say updates={len(writers)}"
            )
        for sender, each in arrivals:
            if each.op == "store" and len(writers) > 1:
                raise UserError(
                    f"rank {sender}: {each}: place {place} of rank {rank} has {len(writers)} "
                    f"updates, by {', '.join(writers)}; store would replace the others: say "
                    f'op="add", or give it a slot'
                )

    def _check_copies(self) -> None:
        """Raise UserError unless every copy, which waits for its flags and the one before, can
        start."""
        after: dict[tuple[int, int], list[tuple[int, int]]] = {}
        waits: dict[tuple[int, int], int] = {}
        senders = {
            (block.copy.peer, block.copy.flag): (rank, n)
            for rank, blocks in enumerate(self.blocks)
            for n, block in enumerate(blocks)
            if block.copy is not None
        }
        for rank, blocks in enumerate(self.blocks):
            copies = [(n, block) for n, block in enumerate(blocks) if block.copy is not None]
            for n, block in copies:
                first = [senders[rank, flag] for flag in block.flags]
                first += [(rank, n - 1)] if n > 0 else []
                waits[rank, n] = len(first)
                for each in first:
                    after.setdefault(each, []).append((rank, n))
        ready = [copy for copy, count in waits.items() if count == 0]
        while ready:
            for later in after.get(ready.pop(), ()):
                waits[later] -= 1
                if waits[later] == 0:
                    ready.append(later)
        for (rank, n), count in waits.items():
            if count > 0:
                own = self._map_of[rank, self.blocks[rank][n].place]
                raise UserError(
                    f"rank {rank}: {own} never starts: it waits for a copy that waits for it; the "
                    f"copies of a rank start in the order of its maps"
                )

    # ---- compilation

    @cached_property
    def blocks(self) -> tuple[tuple[Block, ...], ...]:
        """Each rank's blocks: those with a copy first, in the order of their copies."""
        outlines = [list(self._outlines(rank)) for rank in range(self.world)]
        flags = [0] * self.world
        arriving: list[dict[int, list[int]]] = [{} for _ in self.ranks]  # by position
        copies: dict[tuple[int, int], Copy] = {}
        for rank, blocks in enumerate(outlines):
            for n, (place, start, stop) in enumerate(blocks):
                own = self._map_of.get((rank, place))
                if own is None or not own.dma:
                    continue
                targets = self.positions(own.at)[start:stop]
                copies[rank, n] = Copy(own.peer, own.op, targets, flags[own.peer])
                for position in targets:
                    arriving[own.peer].setdefault(position, []).append(flags[own.peer])
                flags[own.peer] += 1
        return tuple(
            tuple(
                Block(
                    place,
                    positions := self.positions(place)[start:stop],
                    self._kernel_updates(rank, place) * len(positions),
                    tuple(sorted({f for p in positions for f in arriving[rank].get(p, ())})),
                    copies.get((rank, n)),
                )
                for n, (place, start, stop) in enumerate(blocks)
            )
            for rank, blocks in enumerate(outlines)
        )

    def _outlines(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(place, its first tile, the one behind its last) of each block of a rank."""
        moved = [each for each in self.ranks[rank] if each.dma]
        for each in moved:
            size = len(self.chunks[each.chunk])
            step = each.tiles or size
            for start in range(0, size, step):
                yield each.chunk, start, min(start + step, size)
        gone = {each.chunk for each in moved}
        for place in range(len(self.chunks) + len(self.slots)):
            if place not in gone and self.updates(rank, place) > 0:
                yield place, 0, len(self.positions(place))

    def _kernel_updates(self, rank: int, place: int) -> int:
        """The updates of each tile of a place that kernels make, and not copies."""
        arrivals = self._arrivals.get((rank, place), ())
        return self.keeps(rank, place) + sum(not each.dma for _, each in arrivals)

    def compile(self, rank: int) -> Program:
        """The tables for the kernel and the copy engine of one rank."""
        if not is_whole(rank) or rank not in range(self.world):
            raise UserError(f"rank={rank!r} of {self.world} ranks; give 0 to {self.world - 1}")
        counter_at = [
            {position: n for n, block in enumerate(blocks) for position in block.positions}
            for blocks in self.blocks
        ]
        chunk_of, target, counter = ([0] * self.tiles for _ in range(3))
        peer, add = ([0] * len(self.chunks) for _ in range(2))
        for chunk, tiles in enumerate(self.chunks):
            own = self._map_of.get((rank, chunk))
            if own is None or own.dma:
                peer[chunk], add[chunk] = rank, int(self.updates(rank, chunk) > 1)
                targets = tiles
            else:
                peer[chunk], add[chunk] = own.peer, int(own.op == "add")
                targets = self.positions(own.at)
            for tile, position in zip(tiles, targets, strict=True):
                chunk_of[tile], target[tile] = chunk, position
                counter[tile] = counter_at[peer[chunk]][position]
        count = [block.count for block in self.blocks[rank]]
        lists = self.order(rank), chunk_of, target, counter, peer, add, count
        a, b, c, d, e, f, g = (torch.tensor(each, dtype=torch.int32) for each in lists)
        return Program(rank, a, b, c, d, e, f, g, self.blocks[rank])
