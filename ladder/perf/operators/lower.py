"""The schedules of an operator's call, and what each of their steps does, without a GPU.

Sizes, slots and tables are computed as in `ladder.ops.overlapped`, `ladder.ops.spread`,
`ladder.ops.ring` and `ladder.ops.summing`. The schedules, the blocks of rows and the `TrackMap` are
imported from `ladder.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ladder.bench.ops.points import BY_COLUMNS, OpPoint
from ladder.costs import BF16
from ladder.kernels.gemm import GROUP, tiles_of
from ladder.operator_names import (
    GATHER,
    GATHER_BACKWARD,
    LANDING,
    REDUCE,
    SCATTER,
    SCATTER_BACKWARD,
)
from ladder.ops import schedules, track_schedules
from ladder.ops.blocks import WHOLE, Blocks
from ladder.ops.gradient_schedules import gathered_gradients
from ladder.ops.overlapped import tracked_map
from ladder.ops.steps import ALL, Schedule, Word, Work
from ladder.ops.summing import PIECES, pieces_of
from ladder.ops.tilings import tiling_of
from ladder.ops.track_maps import rotated
from ladder.perf.operators.cost import OperatorCost
from ladder.perf.operators.run import Copies, Moves, Task, Tasks, Tiles

OPS = (GATHER, SCATTER, REDUCE, LANDING, GATHER_BACKWARD, SCATTER_BACKWARD)


@dataclass(frozen=True)
class Size:
    """The size of a rank's product: [rows, inputs] x [inputs, outputs]."""

    rows: int
    outputs: int
    inputs: int
    ranks: int

    @property
    def shard(self) -> int:
        return self.rows // self.ranks

    @property
    def line(self) -> int:
        """Bytes of a row of the result."""
        return BF16 * self.outputs


def size_of(point: OpPoint) -> Size:
    if point.op in BY_COLUMNS:
        return Size(point.m, point.n // point.ranks, point.k, point.ranks)
    return Size(point.m, point.n, point.k // point.ranks, point.ranks)


def sum_bytes(op: str, ranks: int) -> int:
    """How many rows are read and written for one row of the ranks' sum. A landing also reads and
    writes the residual's row, and writes the normed one."""
    return ranks + (3 if op == LANDING else 1)


Lowered = tuple[Sequence[Schedule], Tasks]


def chunked(
    cost: OperatorCost, op: str, size: Size, blocks: int = 1, ratio: int = 1, streams: int = 1,
    push: bool = False, pairs: bool = False, whole: bool = False,
) -> Lowered:  # fmt: skip
    if op == GATHER:
        return _gathered(cost, size, partial(schedules.all_gather, streams=streams))
    if op == SCATTER_BACKWARD:
        about = {"streams": streams, "pairs": pairs, "whole": whole}
        return _gathered(cost, size, partial(gathered_gradients, **about))
    if op == REDUCE:
        return _spread(cost, size, (blocks, ratio, streams), push)
    cut, world = Blocks(size.rows, size.ranks, blocks, ratio), size.ranks

    def tasks(rank: int, step: Work) -> Task:
        rows = height(cut.place(*divmod(step.chunk, world)))
        if step.action in ("product", "both"):
            several = 2 if step.action == "both" else 1
            return cost.product(several * rows, size.outputs, size.inputs)
        if step.action == "beside":  # the matrix's gradient
            return cost.product(size.inputs, size.outputs, size.rows)
        if step.action == "copy":
            return cost.copies(size.line * rows)
        return cost.moves(size.line * rows * sum_bytes(op, world))

    options = op == LANDING, streams, blocks, pairs, op == GATHER_BACKWARD
    return [schedules.reduce_scatter(r, world, *options) for r in range(world)], tasks


def _gathered(cost: OperatorCost, size: Size, schedule: Callable[..., Schedule]) -> Lowered:
    """schedule: maps a rank and the number of ranks to the rank's schedule."""

    def tasks(rank: int, step: Work) -> Task:
        rows = (2 if step.action.endswith("both") else 1) * size.shard
        rows = size.rows if step.chunk == ALL else rows
        if step.action == "copy":
            return cost.copies(BF16 * size.shard * size.inputs)
        if step.action == "own":
            return cost.moves(2 * BF16 * size.shard * size.inputs)
        if step.action.startswith("add"):  # the matrix's gradient of these rows
            return cost.product(size.inputs, size.outputs, rows)
        return cost.product(rows, size.outputs, size.inputs)

    return [schedule(rank, size.ranks) for rank in range(size.ranks)], tasks


def _spread(cost: OperatorCost, size: Size, options: tuple[int, int, int], push: bool) -> Lowered:
    blocks, ratio, streams = options
    world = size.ranks
    cut = Blocks(size.rows, world, blocks, ratio)

    def tasks(rank: int, step: Work) -> Task:
        block, owner = divmod(step.chunk, world)
        rows = height(cut.part(block, owner))
        if step.action == "product":
            return cost.product(rows, size.outputs, size.inputs)
        if step.action == "sum":
            return cost.moves(size.line * rows * sum_bytes(REDUCE, world))
        if step.action == "push":  # counts as a copy: it waits for the copies before it on the link
            return Copies(cost.pushes(size.line * rows * world, world))
        return _to_all(cost, size, cut, rank, step) or cost.copies(size.line * rows)

    return [schedules.all_reduce(r, world, blocks, streams, push) for r in range(world)], tasks


def blocked(
    cost: OperatorCost, op: str, size: Size, blocks: int = WHOLE.blocks, ratio: int = WHOLE.ratio,
    streams: int = WHOLE.streams,
) -> Lowered:  # fmt: skip
    world = size.ranks
    cut = Blocks(size.rows, world, blocks, ratio, whole=True)

    def tasks(rank: int, step: Work) -> Task:
        if step.action in ("product", "push"):
            rows = height(cut.whole(step.chunk))
            if step.action == "product":
                return cost.product(rows, size.outputs, size.inputs)
            return Copies(2 * cost.pushes(size.line * rows, world))  # both shots
        rows = height(cut.part(*divmod(step.chunk, world)))
        if step.action == "sum":
            return cost.moves(size.line * rows * sum_bytes(REDUCE, world))
        return _to_all(cost, size, cut, rank, step) or cost.copies(size.line * rows)

    made = [schedules.blocked_all_reduce(r, world, blocks, streams) for r in range(world)]
    return made, tasks


def _to_all(cost: OperatorCost, size: Size, cut: Blocks, rank: int, step: Work) -> Task | None:
    """`spread` and `take` of `ladder.ops.spread.to_all`."""
    block, peer = divmod(step.chunk, size.ranks)
    if step.action == "spread":
        return cost.copies(size.line * height(cut.part(block, rank)))
    if step.action == "take":
        return cost.moves(2 * size.line * height(cut.part(block, peer)))
    return None


def ring(
    cost: OperatorCost, op: str, size: Size, blocks: int = 2, ratio: int = 1, streams: int = 1
) -> Lowered:
    world, spread = size.ranks, op == REDUCE
    cut = Blocks(size.rows, world, blocks, ratio)

    def tasks(rank: int, step: Work) -> Task:
        if step.action in ("spread", "take"):
            found = _to_all(cost, size, cut, rank, step)
            assert found is not None
            return found
        number, block = divmod(step.chunk, blocks)
        owner = (rank - 1 - number) % world
        rows = height(cut.part(block, owner) if spread else cut.place(block, owner))
        if step.action == "product":
            return cost.product(rows, size.outputs, size.inputs)
        if step.action == "fetch":
            return cost.moves(2 * size.line * rows)
        return cost.copies(size.line * rows)

    return [schedules.ring(r, world, blocks, streams, spread) for r in range(world)], tasks


def waiting(
    cost: OperatorCost, op: str, size: Size, tile: str | None = None, stages: int | None = None,
    group_m: int = GROUP,
) -> Lowered:  # fmt: skip
    tiling, world = tiling_of(tile, stages, group_m), size.ranks
    down, across = tiles_of(size.rows, size.outputs, world, tiling)
    high = down // world
    shard = BF16 * size.shard * size.inputs
    us = cost.tile(size.rows, size.outputs, size.inputs, tiling.rows * tiling.columns)

    def tasks(rank: int, step: Work) -> Task:
        if step.action == "own":
            return cost.moves(2 * shard)
        if step.action == "copy":
            return cost.copies(shard)
        needs = []
        for each in rotated(down, across, world, high, rank - 1, tiling.group_m):
            owner = each // across // high
            needs.append(None if owner == rank else Word(rank, "arrived", owner))
        return Tiles(down * across, us, needs)

    return [schedules.all_gather(r, world, waiting=True) for r in range(world)], tasks


def tracked(
    cost: OperatorCost, op: str, size: Size, tile: str | None = None, stages: int | None = None,
    pieces: int = 1, group_m: int = GROUP,
) -> Lowered:  # fmt: skip
    """Tiles count themselves as the Program of the operator's own TrackMap says. A copy begins when
    its block is full."""
    tiling, world = tiling_of(tile, stages, group_m), size.ranks
    track, across = tracked_map(size.shard, size.outputs, world, tiling, pieces)
    programs = [track.compile(rank) for rank in range(world)]
    us = cost.tile(size.rows, size.outputs, size.inputs, tiling.rows * tiling.columns)

    def tasks(rank: int, step: Work) -> Task:
        if step.action == "product":
            counter = programs[rank].counter.tolist()
            counts = [Word(rank, "full", counter[n]) for n in programs[rank].order.tolist()]
            return Tiles(track.tiles, us, counts=counts)
        if step.action == "copy":
            high = len(programs[rank].blocks[step.chunk].positions) // across
            return cost.copies(size.line * min(high * tiling.rows, size.shard))
        return cost.moves(size.line * size.shard * sum_bytes(op, world))

    made = [track_schedules.tracked(each, world, op == LANDING) for each in programs]
    return made, tasks


def summing(
    cost: OperatorCost, op: str, size: Size, tile: str | None = None, stages: int | None = None,
    pieces: int | None = None, group_m: int = GROUP,
) -> Lowered:  # fmt: skip
    """As `tracked`, but a tile of the rank's own rows waits for the last peer that sends them."""
    tiling, world, spread = tiling_of(tile, stages, group_m), size.ranks, op == REDUCE
    cut = pieces_of(size.shard, tiling, PIECES[op] if pieces is None else pieces)
    track, across = tracked_map(size.shard, size.outputs, world, tiling, cut, keep=True)
    programs = [track.compile(rank) for rank in range(world)]
    us = cost.tile(size.rows, size.outputs, size.inputs, tiling.rows * tiling.columns)
    held, high = len(track.chunks) // world, track.rows // world  # pieces; rows of tiles of a rank
    piece = -(-high // cut)

    def rows_of(number: int) -> int:
        return min(piece * tiling.rows, size.shard - number * piece * tiling.rows)

    def product(rank: int) -> Tiles:
        program, last = programs[rank], (rank + 1) % world
        flags = {block.place - len(track.chunks): block.flags for block in program.blocks}
        order, counter = program.order.tolist(), program.counter.tolist()
        needs: list[Word | None] = []
        for each in order:
            owner, line = divmod(each // across, high)
            arrives = flags[last * held + line // piece] if owner == rank else ()
            needs.append(Word(rank, "arrived", arrives[0]) if arrives else None)
        return Tiles(track.tiles, us, needs, [Word(rank, "full", counter[n]) for n in order])

    def tasks(rank: int, step: Work) -> Task:
        if step.action == "product":
            return product(rank)
        if step.action == "own":  # it comes at the end of the product, which does the work
            return Moves(0.0)
        if step.action == "copy":
            return cost.copies(size.line * rows_of(programs[rank].blocks[step.chunk].place % held))
        rows = size.line * rows_of(step.chunk // world)
        return cost.copies(rows) if step.action == "spread" else cost.moves(2 * rows)

    return [track_schedules.summing(each, world, spread) for each in programs], tasks


def height(rows: slice) -> int:
    return max(0, rows.stop - rows.start)


OVERLAPPED: dict[str, tuple[Callable[..., Lowered], tuple[str, ...]]] = {
    "chunked": (chunked, OPS),
    "blocked": (blocked, (REDUCE,)),
    "ring": (ring, (SCATTER, REDUCE)),
    "waiting": (waiting, (GATHER,)),
    "tracked": (tracked, (SCATTER, LANDING)),
    "summing": (summing, (SCATTER, REDUCE)),
}
