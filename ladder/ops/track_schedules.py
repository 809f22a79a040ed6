"""The schedules of products whose tiles count themselves; `ladder.ops.schedules` has the rules."""

from __future__ import annotations

from ladder.ops.schedules import _collect, _release, _send, _sum, _ways, others
from ladder.ops.steps import ALL, COPIES, Await, Follow, Put, Record, Schedule, Step, Word, Work
from ladder.ops.track import Program


def tracked(program: Program, world: int, waiting: bool = False) -> Schedule:
    """One product whose tiles count themselves; a copy of a block waits until its count is full.

    `copy` n moves block n of the program, whose slots are those of `all_to_all` in
    `ladder.ops.track_maps`. Other actions: as in `reduce_scatter`.
    """
    rank, steps = program.rank, _counted(program)
    steps += _sum(rank, _arriving(program), waiting)
    steps += [Put("main", Word(rank, "full", n), 0) for n in _kept(program)]
    return (*steps, *_release(rank, world))


def summing(program: Program, world: int, spread: bool = False) -> Schedule:
    """As `tracked`, but the product adds what has arrived to its own tiles, which are the last.

    Actions: `product` computes the peers' tiles, and `own` this rank's, which wait for what the
    peers send; one kernel does both where kernels run beside copies. spread: each block of sums
    goes to all ranks as soon as its count is full: `spread` b x T + q and `take` b x T + q, as in
    `all_reduce`, block b of the `pieces` that a rank's own tiles are in.
    """
    rank, flags, kept = program.rank, _arriving(program), _kept(program)
    words = tuple(Word(rank, "arrived", flag) for flag in flags)
    steps = [*_counted(program), Work("main", "own", rank, words)]
    behind = max(flags, default=-1) + 1  # the first flag of sums; each rank has as many before
    for piece, n in enumerate(kept if spread else ()):
        full = Word(rank, "full", n)
        steps += [Await("copies", full, program.blocks[n].count), Put("copies", full, 0)]
        for peer in others(rank, world):
            flag = behind + piece * world + rank
            steps += _send(rank, peer, piece * world + peer, flag, False, "spread")
    steps += [Put("main", word, 0) for word in words]
    steps += [Put("main", Word(rank, "full", n), 0) for n in (() if spread else kept)]
    ways = _ways(world) if spread else COPIES[:1]
    steps += [Follow(way, "begun") for way in ways[1:]]
    for piece in range(len(kept) if spread else 0):
        steps += _collect(rank, world, piece, behind)
    return (*steps, *_release(rank, world, copied=spread, ways=ways))


def _counted(program: Program) -> list[Step]:
    """The product, and the copies of its blocks, each as soon as it is full."""
    rank = program.rank
    steps: list[Step] = [Record("main", "begun"), Follow("copies", "begun")]
    steps.append(Work("main", "product", ALL))
    sent: set[int] = set()
    for n, block in enumerate(program.blocks):
        if block.copy is None:
            continue
        full = Word(rank, "full", n)
        steps += [Await("copies", full, block.count), Put("copies", full, 0)]
        steps += _send(rank, block.copy.peer, n, block.copy.flag, block.copy.peer not in sent)
        sent.add(block.copy.peer)
    return steps


def _arriving(program: Program) -> list[int]:
    """The flags of the blocks that arrive."""
    return sorted({flag for block in program.blocks for flag in block.flags})


def _kept(program: Program) -> list[int]:
    """The blocks that stay on the rank that computes them."""
    return [n for n, block in enumerate(program.blocks) if block.copy is None and block.count > 0]
