"""Maps of tiles: refused if wrong, and executed in any order of events with the exact result."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ladder.models import UserError
from ladder.ops.track import ChunkMap, Program, TrackMap, dma_map, remote_map
from ladder.ops.track_maps import all_to_all, direct_reduce_scatter, ring_reduce_scatter
from ladder.ops.track_reference import Execution, StuckError

STANDARD: dict[str, Callable[..., TrackMap]] = {
    "ring": ring_reduce_scatter,
    "all-to-all by copies": all_to_all,
    "all-to-all by stores": lambda *shape: all_to_all(*shape, dma=False),
    "direct by copies": direct_reduce_scatter,
    "direct by added copies": lambda *shape: direct_reduce_scatter(*shape, op="add"),
    "direct by added stores": lambda *shape: direct_reduce_scatter(*shape, False, "add"),
}
# rows and columns of tiles, ranks, rows of a chunk: one rank, ragged chunks, several chunks
SHAPES = [(2, 1, 1, 1), (2, 3, 2, 1), (9, 2, 3, 2), (8, 2, 4, 1), (4, 3, 4, 5), (24, 1, 8, 2)]
Products = list[list[int]]


def products_of(track: TrackMap, source: random.Random) -> Products:
    """Numbers so large that no two sums of different updates are equal."""
    return [[source.getrandbits(60) for _ in range(track.tiles)] for _ in range(track.world)]


def expected(name: str, track: TrackMap, products: Products, rank: int) -> dict[int, int]:
    """What the collective leaves on `rank`, by position: an account of its own."""
    size = track.tiles // track.world
    shard = range(rank * size, (rank + 1) * size)
    if "ring" in name or "added" in name:
        return {tile: sum(product[tile] for product in products) for tile in shard}
    return {
        track.tiles + sender * size + n: products[sender][tile]
        for sender in range(track.world)
        for n, tile in enumerate(shard)
    }


def check(
    name: str, track: TrackMap, programs: list[Program], source: random.Random, one_stream: bool
) -> None:
    """One order of events, all that must hold in it."""
    products = products_of(track, source)
    run = Execution(programs, products, source.randrange, one_stream).run()
    blocks = [(rank, block) for rank, each in enumerate(track.blocks) for block in each]
    fired = Counter((each.rank, each.block.positions) for each in run.fired)
    assert fired == Counter((rank, block.positions) for rank, block in blocks)
    assert set(fired.values()) == {1}
    for each in run.fired:  # nothing comes after it
        found = tuple(run.memory[each.rank].get(position) for position in each.block.positions)
        assert each.values == found, (each.rank, each.block)
    for rank in range(track.world):
        left = {
            position: value
            for each in run.fired
            if each.rank == rank and each.block.copy is None
            for position, value in zip(each.block.positions, each.values, strict=True)
        }
        assert left == expected(name, track, products, rank), rank


def check_orders(name: str, track: TrackMap, programs: list[Program], orders: int) -> None:
    """Random orders of events, with copies one after the other and each as soon as it can."""
    for seed in range(orders):
        check(name, track, programs, random.Random(seed), one_stream=seed % 2 == 0)


def compiled(track: TrackMap) -> list[Program]:
    return [track.compile(rank) for rank in range(track.world)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", STANDARD)
def test_any_order_of_arrival_gives_the_exact_result(name: str, shape: tuple[int, ...]) -> None:
    """Each block fires once and after all its updates, nothing waits for ever, the sums are exact.

    One tile's count, address or counter that is wrong fails it: see below.
    """
    track = STANDARD[name](*shape)
    check_orders(name, track, compiled(track), 20)


@pytest.mark.parametrize("name", STANDARD)
def test_any_shape_gives_the_exact_result(name: str) -> None:
    source = random.Random(7)
    for _ in range(20):
        world, columns, rows = source.randint(1, 6), source.randint(1, 4), source.randint(1, 3)
        track = STANDARD[name](world * source.randint(1, 5), columns, world, rows)
        check_orders(name, track, compiled(track), 2)


@pytest.mark.parametrize("tiles", [1, 2, 5])
def test_blocks_of_another_size_than_the_chunks(tiles: int) -> None:
    """A rank that moves blocks of `tiles`, beside ranks that move whole chunks."""
    ring = ring_reduce_scatter(8, 3, 4, 2)
    finer = tuple(replace(each, tiles=tiles) if each.dma else each for each in ring.ranks[2])
    track = replace(ring, ranks=(*ring.ranks[:2], finer, ring.ranks[3]))
    assert len(track.blocks[2]) > len(ring.blocks[2])
    check_orders("ring", track, compiled(track), 20)


def table(name: str, at: int, change: int) -> Callable[[Program], Program]:
    def mutated(program: Program) -> Program:
        tensor = getattr(program, name).clone()
        tensor[at] += change
        return replace(program, **{name: tensor})

    return mutated


def unflagged(program: Program) -> Program:
    n = next(n for n, block in enumerate(program.blocks) if block.flags)
    block = replace(program.blocks[n], flags=program.blocks[n].flags[1:])
    return replace(program, blocks=(*program.blocks[:n], block, *program.blocks[n + 1 :]))


def twice(program: Program) -> Program:
    return replace(program, order=torch.cat([program.order, program.order[:1]]))


MUTATIONS: dict[str, Callable[[Program], Program]] = {
    "an update less": table("count", 0, -1),
    "an update more": table("count", 0, 1),
    "a tile in another place": table("target", 3, 1),
    "a tile that counts elsewhere": table("counter", 6, 1),
    "a chunk to another rank": table("peer", 1, 1),
    "a flag that is not waited for": unflagged,
    "a tile left out": lambda program: replace(program, order=program.order[1:]),
    "a tile computed twice": twice,
}


@pytest.mark.parametrize("name", ["ring", "direct by copies"])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_table_fails(name: str, mutation: str) -> None:
    track = STANDARD[name](8, 2, 4, 1)
    programs = compiled(track)
    programs[0] = MUTATIONS[mutation](programs[0])
    with pytest.raises(AssertionError):
        check_orders(name, track, programs, 200)


def test_a_ring_is_that_of_the_paper() -> None:
    """T3, Figure 12, for GPU 0 of four, whose stages are our chunks 1, 2, 3 and 0."""
    ring = ring_reduce_scatter(4, 1, 4, 1)
    assert ring.ranks[0] == (
        remote_map(1, 3, "add"),
        dma_map(2, 3, "add", updates=2),
        dma_map(3, 3, "add", updates=2),
    )
    assert [ring.order(rank) for rank in range(2)] == [(1, 2, 3, 0), (2, 3, 0, 1)]
    assert ring.updates(0, 0) == 2  # the last chunk stays, when rank 1's has come


def test_tables_of_a_direct_reduce_scatter() -> None:
    """Two ranks, four tiles each: a copy engine takes the peer's half to the slots."""
    program = direct_reduce_scatter(2, 2, 2, 1).compile(0)
    assert program.order.tolist() == [2, 3, 0, 1]
    assert program.chunk.tolist() == [0, 0, 1, 1]
    assert program.peer.tolist() == [0, 0]
    assert program.target.tolist() == [4, 5, 2, 3]  # the own half lies in the own slot at once
    assert program.counter.tolist() == [1, 1, 0, 0]
    assert program.count.tolist() == [2, 2, 0]  # the copy; the own slot; the peer's, by a flag
    assert [block.flags for block in program.blocks] == [(), (), (0,)]
    copy = program.blocks[0].copy
    assert copy is not None
    assert (copy.peer, copy.positions, copy.flag) == (1, (4, 5), 0)
    tensors = [value for value in vars(program).values() if isinstance(value, torch.Tensor)]
    assert {tensor.dtype for tensor in tensors} == {torch.int32}


HALVES = ((0, 1), (2, 3))


def halves(*ranks: list[ChunkMap], **changes: Any) -> TrackMap:
    """A product of 2 x 2 tiles in two chunks."""
    fields = {"chunks": HALVES, "ranks": tuple(tuple(maps) for maps in ranks)} | changes
    return TrackMap(2, 2, **fields)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "tile twice": (
        lambda: halves([], chunks=((0, 1), (1, 2, 3))),
        "tile 1 is in chunk 0 and in chunk 1",
    ),
    "tile missing": (lambda: halves([], chunks=((0, 1), (3,))), "tile 2 is in no chunk"),
    "no such tile": (lambda: halves([], chunks=((0, 1), (2, 4))), "tile 4; tiles are 0 to 3"),
    "empty chunk": (lambda: halves([], chunks=(*HALVES, ())), "chunk 2 has no tiles"),
    "no ranks": (lambda: halves(), "ranks is empty"),
    "no such peer": (lambda: halves([remote_map(0, 1)]), r"rank 0: remote_map\(.*ranks are 0 to 0"),
    "itself": (lambda: halves([dma_map(0, 0, at=1)]), "the peer is the rank itself"),
    "no such op": (lambda: halves([remote_map(0, 1, "max")], []), "op is one of store, add"),  # type: ignore[arg-type]
    "no such chunk": (lambda: halves([remote_map(2, 1)], []), "chunks are 0 to 1"),
    "no such place": (lambda: halves([remote_map(0, 1, at=2)], []), "places are 0 to 1"),
    "two maps": (lambda: halves([remote_map(0, 1), dma_map(0, 1)], []), "has a map already"),
    "another size": (
        lambda: halves([remote_map(0, 1, at=2)], [], slots=(3,)),
        "the chunk has 2 tiles, and place 2 3",
    ),
    "block too large": (lambda: halves([dma_map(0, 1, "add", tiles=3)], []), "tiles is 1 to 2"),
    "updates": (
        lambda: halves([dma_map(0, 1, "add")], [dma_map(0, 2, "add")], []),
        r"rank 1: dma_map\(.*has 2 update\(s\), by the own product, rank 0's dma_map.*updates=2",
    ),
    "an overwritten update": (
        lambda: halves([remote_map(0, 1)], []),
        'place 0 of rank 1 has 2 updates, by the own product, rank 0.*say op="add"',
    ),
    "a circle": (
        lambda: halves([dma_map(0, 1, "add", 2)], [dma_map(0, 0, "add", 2)]),
        r"rank 0: dma_map\(chunk=0, peer=1.*never starts",
    ),
    "a circle by the order of copies": (
        lambda: replace(
            ring := ring_reduce_scatter(4, 1, 4, 1), ranks=tuple(maps[::-1] for maps in ring.ranks)
        ),
        "never starts.*in the order of its maps",
    ),
    "orders": (lambda: halves([], orders=((0, 1, 2, 2),)), "each of the 4 tiles once"),
    "orders of some": (lambda: halves([], [], orders=((0, 1, 2, 3),)), "1 orders for 2 ranks"),
    "no whole chunk": (
        lambda: halves([], [remote_map(1.5, 0)]),  # type: ignore[arg-type]
        r"rank 1: remote_map\(chunk=1.5, peer=0.*: chunk=1.5 must be a whole number",
    ),
    "no whole peer": (lambda: halves([dma_map(0, 1.0)], []), r"rank 0: dma_map\(.*: peer=1.0 must"),  # type: ignore[arg-type]
    "peer as text": (lambda: halves([remote_map(0, "1")], []), "rank 0: .*peer='1' must be a"),  # type: ignore[arg-type]
    "no whole place": (lambda: halves([remote_map(0, 1, at=True)], []), "at=True must be a whole"),
    "no whole updates": (
        lambda: halves([dma_map(0, 1, "add", 1.0)], []),  # type: ignore[arg-type]
        "rank 0: .*updates=1.0 must be a whole",
    ),
    "no whole tiles": (
        lambda: halves([dma_map(0, 1, tiles=1.5)], []),  # type: ignore[arg-type]
        "rank 0: .*: tiles=1.5 must be a whole",
    ),
    "a bare map": (
        lambda: halves([], ranks=(remote_map(0, 1), ())),
        r"rank 0: its maps are remote_map\(chunk=0.*; give a tuple of them",
    ),
    "no map": (lambda: halves([], [(0, 1)]), r"rank 1: \(0, 1\) is no map; call remote_map"),  # type: ignore[list-item]
    "bare chunks": (lambda: halves([], chunks=(0, 1, 2)), "chunk 0 is 0; give a tuple of its"),
    "no whole tile": (lambda: halves([], chunks=((0, 1), (2, 3.0))), "chunk 1 has tile 3.0; tiles"),
    "no whole slot": (lambda: halves([], slots=(2.0,)), "each has a whole number of tiles"),
    "bare slots": (lambda: halves([], slots=2), "slots=2 must be a tuple"),
    "bare orders": (lambda: halves([], orders=(1,)), "rank 0: its order does not name each"),
    "no whole rows": (
        lambda: replace(halves([]), rows=2.0),  # type: ignore[arg-type]
        "rows=2.0 must be a whole number of tiles",
    ),
    "rows": (lambda: ring_reduce_scatter(6, 1, 4, 1), "6 rows of tiles for 4 ranks"),
    "chunk rows": (lambda: all_to_all(8, 1, 4, 0), "chunks of 0 rows"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_map_is_refused(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(UserError, match=words):
        make()


def test_a_wait_that_never_ends_is_reported() -> None:
    program = table("count", 0, 1)(halves([]).compile(0))
    with pytest.raises(StuckError, match="never become full"):
        Execution([program], [[1, 2, 3, 4]], lambda n: 0).run()


def test_a_rank_that_the_map_does_not_have_is_refused() -> None:
    track = ring_reduce_scatter(4, 3, 2, 1)
    for rank in (-1, 2, 1.0):
        with pytest.raises(UserError, match=rf"rank={rank} of 2 ranks; give 0 to 1"):
            track.compile(rank)  # type: ignore[arg-type]
