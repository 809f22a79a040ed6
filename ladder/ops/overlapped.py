"""Products that overlap with the exchange of their rows, by copy engines over peer memory.

- `chunked`: cuBLAS multiplies the ranks' chunks one by one, while others are copied.
- `waiting` (all_gather_matmul): one persistent product that waits for each shard to arrive.
- `tracked` (matmul_reduce_scatter): one persistent product whose tiles count themselves, and copies
  that wait for a count.

A reduce-scatter ends in a sum, or in a landing: one kernel that waits for the pieces of each row,
adds them and the residual, and norms. All-reduces are in `ladder.ops.spread`, and products that add
what has arrived in `ladder.ops.ring` and `ladder.ops.summing`. `ladder.ops.schedules` has the order
of the steps; this module has what each step does. Sums are in rank order, in float32, rounded once,
as in `staged`; the partials of `chunked` are cuBLAS's for m / T rows, which may differ in the last
bit from those for m rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.kernels.gemm import GROUP, Arrivals, Tiling, Track, gemm, tiles_of
from ladder.kernels.slots import SlotArrivals
from ladder.models.errors import UserError
from ladder.operator_names import GATHER, LANDING, SCATTER
from ladder.ops import schedules, track_schedules, workspace
from ladder.ops.blocks import BLOCKS, STREAMS, Blocks, check_streams
from ladder.ops.calls import rows_back, rows_first
from ladder.ops.finish import ALL_ROWS, Finish, adding, landing
from ladder.ops.refusals import (
    kernel_refusal,
    landing_kernel_refusal,
    landing_refusal,
    peer_refusal,
)
from ladder.ops.registry import implement
from ladder.ops.steps import Schedule
from ladder.ops.tilings import ORDERED, tile_of, tiling_of
from ladder.ops.track import Program, TrackMap
from ladder.ops.track_maps import all_to_all, rotated
from ladder.ops.waves import by_chunks, by_tiles

Beside = tuple[Callable[[], None], tuple[Tensor, ...]]  # see `scatter_chunks`


def _table(values: Any, device: torch.device, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.as_tensor(values, dtype=dtype).to(device)


# -- all_gather_matmul ------------------------------------------------------------------------


@implement(GATHER, "chunked", peer_refusal, STREAMS, surplus=by_chunks(1))
def chunked_all_gather_matmul(
    group: dist.ProcessGroup, A: Tensor, Bs: list[Tensor], gather_dim: int, return_A: bool,
    streams: int = 1,
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    """streams: 2: products take turns on two streams; one begins while another's last tiles run."""
    check_streams(streams)
    space = workspace.workspace(group, GATHER, A.device)
    own = rows_first(A, gather_dim).contiguous()
    return _gathered(*gather_chunks(space, own, Bs, return_A, streams), A, gather_dim)


def gather_chunks(
    space: workspace.Workspace, own: Tensor, Bs: list[Tensor], return_A: bool, streams: int
) -> tuple[Tensor | None, list[Tensor]]:
    """(the shards of all ranks or None, their products with each B). own: this rank's shard."""
    rank = space.rank
    chosen, slots = space.begin(own.shape, own.dtype)
    whole, outs = _outputs(space.world, own, Bs, return_A)

    def product(q: int) -> None:
        shard = own if q == rank else slots[rank][q]
        mine = slice(q * len(own), (q + 1) * len(own))
        for B, out in zip(Bs, outs, strict=True):
            torch.mm(shard, B, out=out[mine])

    space.run(
        schedules.all_gather(rank, space.world, streams=streams, keeps=return_A), chosen,
        {"product": product, **_gathering(rank, own, slots, whole)},
        memory=(own, whole, *Bs, *outs),
    )  # fmt: skip
    return whole, outs


def _gathering(
    rank: int, own: Tensor, slots: list[Tensor], whole: Tensor | None
) -> dict[str, Callable[[int], object]]:
    """The actions `copy` and `keep` of a gather's schedule. whole: where the shards are kept."""

    def keep(q: int) -> None:
        assert whole is not None
        shard = own if q == rank else slots[rank][q]
        whole[q * len(own) : (q + 1) * len(own)].copy_(shard, non_blocking=True)

    return {"copy": lambda q: slots[q][rank].copy_(own, non_blocking=True), "keep": keep}


@implement(GATHER, "waiting", kernel_refusal, ORDERED, surplus=by_tiles(tile_of))
def waiting_all_gather_matmul(
    group: dist.ProcessGroup, A: Tensor, Bs: list[Tensor], gather_dim: int, return_A: bool,
    tile: str | None = None, stages: int | None = None, group_m: int = GROUP,
) -> tuple[Tensor | None, list[Tensor]]:  # fmt: skip
    own, tiling = rows_first(A, gather_dim).contiguous(), tiling_of(tile, stages, group_m)
    space = workspace.workspace(group, GATHER, A.device)
    rank, world = space.rank, space.world
    chosen, slots = space.begin(own.shape, own.dtype, dense=True)
    whole, outs = _outputs(world, own, Bs, return_A)
    rows = slots[rank].flatten(0, 1)
    arrivals = Arrivals(space.own_words("arrived", chosen), rank)
    orders = [_order(space, len(rows), B.shape[1], tiling) for B in Bs]

    def product(_: int) -> None:
        for B, out, order in zip(Bs, outs, orders, strict=True):
            gemm(rows, B, order, tiling=tiling, shards=world, out=out, arrivals=arrivals)

    space.run(
        schedules.all_gather(rank, world, waiting=True, keeps=return_A), chosen,
        {
            "product": product, "own": lambda q: slots[q][q].copy_(own),
            **_gathering(rank, own, slots, whole),
        },
        memory=(own, whole, *Bs, *outs), numbers=tiling,
    )  # fmt: skip
    return _gathered(whole, outs, A, gather_dim)


def _order(space: workspace.Workspace, m: int, n: int, tiling: Tiling) -> Tensor:
    return space.once(
        ("order", m, n, tiling),
        lambda: _table(arrival_order(m, n, space.world, space.rank, tiling), space.device),
    )


def arrival_order(m: int, n: int, world: int, rank: int, tiling: Tiling) -> tuple[int, ...]:
    """The tiles of the own shard first, then those of the others, in the order of arrival."""
    down, across = tiles_of(m, n, world, tiling)
    return rotated(down, across, world, down // world, rank - 1, tiling.group_m)


def _outputs(
    world: int, own: Tensor, Bs: list[Tensor], return_A: bool
) -> tuple[Tensor | None, list[Tensor]]:
    rows = world * len(own)
    outs = [own.new_empty(rows, B.shape[1]) for B in Bs]
    return own.new_empty(rows, own.shape[1]) if return_A else None, outs


def _gathered(
    whole: Tensor | None, outs: list[Tensor], A: Tensor, dim: int
) -> tuple[Tensor | None, list[Tensor]]:
    back = [rows_back(out, A, dim) for out in outs]
    return None if whole is None else rows_back(whole, A, dim), back


# -- matmul_reduce_scatter, and its landing ---------------------------------------------------


@implement(SCATTER, "chunked", peer_refusal, (*BLOCKS, "pairs"), surplus=by_chunks(1))
def chunked_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int,
    blocks: int = 1, ratio: int = 1, streams: int = 1, pairs: bool = False,
) -> Tensor:  # fmt: skip
    """blocks, ratio: see `Blocks`. streams: as of `chunked_all_gather_matmul`. pairs: the chunks of
    two neighbouring peers are one product; with blocks=1 alone."""
    check_streams(streams)
    if pairs and blocks > 1:
        raise UserError(f"pairs=true with blocks={blocks}; set pairs=false, or blocks=1")
    rows = rows_first(A, scatter_dim)
    space = workspace.workspace(group, SCATTER, A.device)
    out, finish = adding(space.world, rows, B, reduce_op == "avg")
    scatter_chunks(space, rows, B, finish, (blocks, ratio, streams), pairs=pairs)
    return rows_back(out, A, scatter_dim)


@implement(LANDING, "chunked", landing_refusal, STREAMS, surplus=by_chunks(1))
def chunked_landing(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float,
    scatter_dim: int, streams: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """streams: as of `chunked_all_gather_matmul`."""
    check_streams(streams)
    landed, normed, finish = landing(residual, weight, eps, scatter_dim)
    space = workspace.workspace(group, SCATTER, A.device)
    scatter_chunks(space, rows_first(A, scatter_dim), B, finish, (1, 1, streams), waiting=True)
    return rows_back(landed, A, scatter_dim), rows_back(normed, A, scatter_dim)


def scatter_chunks(
    space: workspace.Workspace, rows: Tensor, B: Tensor, finish: Finish,
    options: tuple[int, int, int], waiting: bool = False, pairs: bool = False,
    beside: Beside | None = None,
) -> None:  # fmt: skip
    """Run `finish` with the ranks' parts of this rank's rows of rows @ B.

    options: blocks, ratio, streams. waiting: `finish` waits for the parts by itself. pairs: see
    `chunked_matmul_reduce_scatter`. Both are for one block. beside: a function that runs behind the
    products, while parts travel, and its memory.
    """
    blocks, ratio, streams = options
    rank, world, n = space.rank, space.world, B.shape[1]
    cut = Blocks(len(rows), world, blocks, ratio)
    chosen, slots = space.begin((cut.height, n), rows.dtype)
    partial = rows.new_empty(len(rows), n)
    chunks, partials = rows.split(cut.height), partial.split(cut.height)
    arrivals: SlotArrivals | None = None
    if waiting:
        flags = [-1 if q == rank else q for q in range(world)]
        table = space.once(("arrivals", cut.height), lambda: _table([flags], space.device))
        arrivals = SlotArrivals(space.own_words("arrived", chosen), table, cut.height)

    def of(chunk: int) -> tuple[int, slice]:
        """The owner of a chunk, and the chunk's rows among the owner's."""
        block, owner = divmod(chunk, world)
        return owner, cut.place(block, owner)

    def product(chunk: int) -> None:
        q, mine = of(chunk)
        to = slots[rank][rank] if q == rank else partials[q]
        torch.mm(chunks[q][mine], B, out=to[mine])

    def both(first: int) -> None:
        mine = slice(first * cut.height, (first + 2) * cut.height)
        torch.mm(rows[mine], B, out=partial[mine])

    def copy(chunk: int) -> None:
        q, mine = of(chunk)
        slots[q][rank][mine].copy_(partials[q][mine], non_blocking=True)

    def add(chunk: int) -> None:
        _, mine = of(chunk)
        finish.run(slots[rank][:, mine], mine, arrivals)

    work, memory = beside or ((lambda: None), ())
    about = waiting, streams, blocks, pairs, beside is not None
    space.run(
        schedules.reduce_scatter(rank, world, *about), chosen,
        {"product": product, "both": both, "copy": copy, "sum": add, "beside": lambda _: work()},
        memory=(rows, B, partial, *finish.memory, *memory), numbers=(finish.numbers, ratio),
    )  # fmt: skip


@dataclass(frozen=True)
class TrackPlan:
    """The tables of a product whose tiles count themselves, made once for a shape.

    moves: for each block that is copied, the peer and the rows of its shard. flags, piece: for
    `SlotArrivals`.
    """

    schedule: Schedule
    order: Tensor
    target: Tensor
    counter: Tensor
    chunk: Tensor
    owner: Tensor
    moves: dict[int, tuple[int, slice]]
    flags: Tensor
    piece: int

    def track(self, space: workspace.Workspace, chosen: int) -> Track:
        """The kernel's argument: these tables, and the addresses of the set `chosen`."""
        bases, counters = space.tables("full")[chosen]
        return Track(self.target, self.counter, self.chunk, self.owner, bases, counters)


def tracked_map(
    shard: int, n: int, world: int, tiling: Tiling, pieces: int, keep: bool = False
) -> tuple[TrackMap, int]:
    """The map of `tracked`'s product of `world` x `shard` rows, and its columns of tiles."""
    down, across = tiles_of(world * shard, n, world, tiling)
    high = -(-down // world // pieces)
    return all_to_all(down, across, world, high, group=tiling.group_m, keep=keep), across


def track_plan(
    space: workspace.Workspace, shard: int, n: int, tiling: Tiling, pieces: int,
    schedule: Callable[[Program, int], Schedule], keep: bool = False,
) -> TrackPlan:  # fmt: skip
    """The map of `tracked_map`, compiled for this rank. keep: see `all_to_all`."""
    world = space.world
    track, across = tracked_map(shard, n, world, tiling, pieces, keep)
    high = track.rows // world
    program = track.compile(space.rank)
    moves: dict[int, tuple[int, slice]] = {}
    for number, block in enumerate(program.blocks):
        if block.copy is not None:
            first, last = block.positions[0] // across, block.positions[-1] // across
            start, stop = (first % high) * tiling.rows, (last % high + 1) * tiling.rows
            moves[number] = block.copy.peer, slice(start, min(stop, shard))
    # Slots lie behind all chunks; that of piece p of rank q is slot q x pieces + p.
    held = len(track.chunks) // world  # pieces, of which there may be fewer than asked for
    flags = [[-1] * world for _ in range(held)]
    for block in program.blocks:
        slot = block.place - len(track.chunks)
        if slot >= 0 and block.flags:
            (flags[slot % held][slot // held],) = block.flags
    tables = program.order, program.target, program.counter, program.chunk, program.peer
    order, target, counter, chunk, owner = (each.to(space.device) for each in tables)
    return TrackPlan(
        schedule(program, world), order, target, counter, chunk, owner, moves,
        _table(flags, space.device), -(-high // pieces) * tiling.rows,
    )  # fmt: skip


@implement(SCATTER, "tracked", kernel_refusal, (*ORDERED, "pieces"), surplus=by_tiles(tile_of))
def tracked_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int,
    tile: str | None = None, stages: int | None = None, pieces: int = 1,
    group_m: int = GROUP,
) -> Tensor:  # fmt: skip
    """pieces: the copies that move each peer's chunk, if it has as many rows of tiles."""
    tiling, rows = tracked_tiling(tile, stages, pieces, group_m), rows_first(A, scatter_dim)
    space = workspace.workspace(group, SCATTER, A.device)
    out, finish = adding(space.world, rows, B, reduce_op == "avg")
    scatter_tiles(space, rows, B, finish, tiling, pieces)
    return rows_back(out, A, scatter_dim)


@implement(
    LANDING, "tracked", landing_kernel_refusal, (*ORDERED, "pieces"), surplus=by_tiles(tile_of)
)
def tracked_landing(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float,
    scatter_dim: int, tile: str | None = None, stages: int | None = None, pieces: int = 1,
    group_m: int = GROUP,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """pieces: as in the reduce-scatter; a row lands when every rank's piece of it has arrived."""
    tiling, rows = tracked_tiling(tile, stages, pieces, group_m), rows_first(A, scatter_dim)
    landed, normed, finish = landing(residual, weight, eps, scatter_dim)
    space = workspace.workspace(group, SCATTER, A.device)
    scatter_tiles(space, rows, B, finish, tiling, pieces, waiting=True)
    return rows_back(landed, A, scatter_dim), rows_back(normed, A, scatter_dim)


def tracked_tiling(
    tile: str | None, stages: int | None, pieces: int, group_m: int
) -> Tiling:  # fmt: skip
    if pieces < 1:
        raise UserError(f"pieces={pieces}; expected 1 or more")
    return tiling_of(tile, stages, group_m)


def scatter_tiles(
    space: workspace.Workspace, rows: Tensor, B: Tensor, finish: Finish, tiling: Tiling,
    pieces: int, waiting: bool = False,
) -> None:  # fmt: skip
    """As `scatter_chunks`, by one product whose tiles count themselves."""
    n, world, rank = B.shape[1], space.world, space.rank
    shard = len(rows) // world
    space.reserve(shard * n * rows.element_size())
    plan = space.once(
        ("tracked", shard, n, tiling, pieces, waiting),
        lambda: track_plan(
            space, shard, n, tiling, pieces, partial(track_schedules.tracked, waiting=waiting)
        ),
    )
    chosen = space.next()
    track = plan.track(space, chosen)
    # The kernel takes a rank's slots as one matrix of all their rows.
    slots = [space.slots(q, chosen, (shard, n), rows.dtype, dense=True) for q in range(world)]
    computed = rows.new_empty(len(rows), n)
    partials = computed.view(world, shard, n)
    flags = SlotArrivals(space.own_words("arrived", chosen), plan.flags, plan.piece)

    def product(_: int) -> None:
        gemm(rows, B, plan.order, tiling=tiling, shards=world, out=computed, track=track)

    def copy(number: int) -> None:
        peer, part = plan.moves[number]
        slots[peer][rank][part].copy_(partials[peer][part], non_blocking=True)

    space.run(
        plan.schedule, chosen,
        {
            "product": product, "copy": copy,
            "sum": lambda _: finish.run(slots[rank], ALL_ROWS, flags if waiting else None),
        },
        memory=(rows, B, computed, *finish.memory), numbers=(tiling, pieces, finish.numbers),
    )  # fmt: skip
