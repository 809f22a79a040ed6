"""The maps of the usual collectives of a product of m x n tiles, for `ladder.ops.track`."""

from __future__ import annotations

from ladder.kernels.gemm import GROUP
from ladder.models.errors import UserError
from ladder.ops.track import Op, TrackMap, dma_map, remote_map


def _shards(m: int, n: int, world: int, rows: int) -> list[list[tuple[int, ...]]]:
    """The chunks of each of `world` shards of m x n tiles: `rows` rows of tiles, the last fewer."""
    if world < 1 or m % world or m < world:
        raise UserError(f"{m} rows of tiles for {world} ranks; give each the same number of rows")
    if rows < 1:
        raise UserError(f"chunks of {rows} rows of tiles; at least 1")
    size = m // world
    return [
        [
            tuple(range((shard * size + start) * n, (shard * size + min(start + rows, size)) * n))
            for start in range(0, size, rows)
        ]
        for shard in range(world)
    ]


def rotated(
    m: int, n: int, world: int, rows: int, rank: int, group: int = GROUP
) -> tuple[int, ...]:
    """The tiles of the peers' shards, from `rank` + 1 on, chunk by chunk, and then of the own.

    So each rank sends to another peer at any time, and what must be sent comes first (T3, 4.4,
    staggering). Within a chunk, `group` rows at a time go column by column.
    """
    shards = _shards(m, n, world, rows)
    found: list[int] = []
    for distance in range(1, world + 1):
        for tiles in shards[(rank + distance) % world]:
            for start in range(0, len(tiles), group * n):
                some = tiles[start : start + group * n]
                found += sorted(some, key=lambda tile: (tile % n, tile))
    return tuple(found)


def ring_reduce_scatter(m: int, n: int, world: int, rows: int) -> TrackMap:
    """The reduce-scatter of T3, Figure 7: chunks travel from rank to rank - 1, and grow on the way.

    m x n tiles, m a multiple of `world`; chunks of `rows` rows of tiles. Shard r of the sum is at
    the places of shard r on rank r. With two updates each, in any order, the sums are exact to the
    bit over runs.
    """
    shards = _shards(m, n, world, rows)
    pieces = len(shards[0])
    ranks = []
    for rank in range(world):
        maps = []
        for distance in range(1, world):
            shard, peer = (rank + distance) % world, (rank - 1) % world
            for chunk in range(shard * pieces, (shard + 1) * pieces):
                first = distance == 1
                maps.append(
                    remote_map(chunk, peer, "add") if first else dma_map(chunk, peer, "add", 2)
                )
        ranks.append(tuple(maps))
    return TrackMap(
        m, n, tuple(chunk for shard in shards for chunk in shard), tuple(ranks),
        orders=tuple(rotated(m, n, world, rows, rank) for rank in range(world)),
    )  # fmt: skip


def all_to_all(
    m: int, n: int, world: int, rows: int, dma: bool = True, group: int = GROUP, keep: bool = False
) -> TrackMap:
    """Shard q of each rank's product goes to rank q, whose slots hold [world, shard], by sender.

    dma: by copy engines; otherwise by the product's own stores. group: see `rotated`. keep: the own
    shard stays where it is computed. Shapes: see `ring_reduce_scatter`.
    """
    shards = _shards(m, n, world, rows)
    pieces, chunks = len(shards[0]), [chunk for shard in shards for chunk in shard]
    ranks = []
    for rank in range(world):
        maps = []
        for distance in range(1, world + 1):
            peer = (rank + distance) % world
            for piece in range(0 if keep and peer == rank else pieces):
                chunk, slot = peer * pieces + piece, len(chunks) + rank * pieces + piece
                by_copy = dma and peer != rank
                maps.append((dma_map if by_copy else remote_map)(chunk, peer, "store", at=slot))
        ranks.append(tuple(maps))
    return TrackMap(
        m, n, tuple(chunks), tuple(ranks), tuple(len(tiles) for tiles in chunks),
        tuple(rotated(m, n, world, rows, rank, group) for rank in range(world)),
    )  # fmt: skip


def direct_reduce_scatter(
    m: int, n: int, world: int, rows: int, dma: bool = True, op: Op = "store"
) -> TrackMap:
    """Shard q of each rank's product goes to rank q, and is summed there.

    op: "store" is the map of `all_to_all`, and rank q sums its slots in the order of the ranks, the
    same to the bit over runs. "add" updates the places of shard q on rank q themselves (T3, 7.1),
    in order of arrival. Shapes: see `ring_reduce_scatter`.
    """
    if op == "store":
        return all_to_all(m, n, world, rows, dma)
    shards = _shards(m, n, world, rows)
    pieces = len(shards[0])
    send = dma_map if dma else remote_map
    return TrackMap(
        m, n, tuple(chunk for shard in shards for chunk in shard),
        tuple(
            tuple(
                send((rank + distance) % world * pieces + piece, (rank + distance) % world, op)
                for distance in range(1, world)
                for piece in range(pieces)
            )
            for rank in range(world)
        ),
        orders=tuple(rotated(m, n, world, rows, rank) for rank in range(world)),
    )  # fmt: skip
