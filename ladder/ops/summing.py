"""Products that add the peers' partials of this rank's rows, tile by tile: no sum follows.

One persistent product computes the peers' rows first; its tiles count themselves, and copy engines
send full blocks of them. This rank's own tiles come last: each waits for the peers' partials of its
rows, which have arrived by then, adds them in the order of the ranks, and is stored as the sum. So
a reduce-scatter ends with its product. For an all-reduce the own tiles count themselves, too, and
copy engines send each block of sums to all ranks under the blocks that follow; the last is exposed.

The steps are those of `ladder.ops.track_schedules.summing`, the kernel is that of
`ladder.kernels.gemm`.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from ladder.jit import interpreted
from ladder.kernels.gemm import GROUP, Addition, Tiling, gemm
from ladder.kernels.slots import SlotArrivals
from ladder.operator_names import REDUCE, SCATTER
from ladder.ops import track_schedules, workspace
from ladder.ops.calls import rows_back, rows_first
from ladder.ops.overlapped import track_plan, tracked_tiling
from ladder.ops.refusals import kernel_refusal
from ladder.ops.registry import Call, implement
from ladder.ops.tilings import ORDERED, tile_of
from ladder.ops.waves import by_tiles

OPTIONS = (*ORDERED, "pieces")
PIECES = {SCATTER: 2, REDUCE: 4}


def even_refusal(call: Call) -> str | None:
    """The ranks must share the rows evenly, since each sums as many."""
    if call.exact and call.exact[0] % call.ranks:
        return f"{call.ranks} ranks do not share {call.exact[0]} rows evenly"
    return kernel_refusal(call)


@implement(SCATTER, "summing", kernel_refusal, OPTIONS, surplus=by_tiles(tile_of))
def summing_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int,
    tile: str | None = None, stages: int | None = None, pieces: int = PIECES[SCATTER],
    group_m: int = GROUP,
) -> Tensor:  # fmt: skip
    """pieces: copies of each peer's rows; fewer if one had less than group_m rows of tiles."""
    rows = rows_first(A, scatter_dim)
    space = workspace.workspace(group, SCATTER, A.device)
    out = rows.new_empty(len(rows) // space.world, B.shape[1])
    tiling = tracked_tiling(tile, stages, pieces, group_m)
    _add(space, rows, B, out, tiling, pieces, average=reduce_op == "avg")
    return rows_back(out, A, scatter_dim)


@implement(REDUCE, "summing", even_refusal, OPTIONS, surplus=by_tiles(tile_of))
def summing_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None,
    tile: str | None = None, stages: int | None = None, pieces: int = PIECES[REDUCE],
    group_m: int = GROUP,
) -> Tensor:  # fmt: skip
    """pieces: the copies of each peer's rows, as in the reduce-scatter, and of this rank's sums."""
    rows = A.flatten(0, -2)
    space = workspace.workspace(group, REDUCE, A.device)
    out = rows.new_empty(len(rows), B.shape[1])
    tiling = tracked_tiling(tile, stages, pieces, group_m)
    more = None if addend is None else addend.flatten(0, -2).contiguous()
    _add(space, rows, B, out, tiling, pieces, spread=True, addend=more)
    return out.unflatten(0, A.shape[:-1])


def pieces_of(shard: int, tiling: Tiling, pieces: int) -> int:
    """The pieces of a rank's rows, none of less than group_m rows of tiles: tiles are ordered
    within a piece, and a weight is read once for each group of their rows."""
    return min(pieces, max(1, -(-shard // tiling.rows) // tiling.group_m))


def _add(
    space: workspace.Workspace, rows: Tensor, B: Tensor, out: Tensor, tiling: Tiling, pieces: int,
    average: bool = False, spread: bool = False, addend: Tensor | None = None,
) -> None:  # fmt: skip
    """Put the sum of the ranks' rows @ B into `out`: this rank's rows, or all with `spread`."""
    n, world, rank = B.shape[1], space.world, space.rank
    shard = len(rows) // world
    height = 2 * shard if spread else shard  # of a slot: partials, then a rank's sums
    pieces = pieces_of(shard, tiling, pieces)
    chosen, slots = space.begin((height, n), rows.dtype)
    plan = space.once(
        ("summing", shard, n, tiling, pieces, spread),
        lambda: track_plan(
            space,
            shard,
            n,
            tiling,
            pieces,
            partial(track_schedules.summing, spread=spread),
            keep=True,
        ),
    )
    track = plan.track(space, chosen)
    computed = rows.new_empty(len(rows), n)
    partials = computed.view(world, shard, n)
    sums = out.view(world, shard, n)[rank] if spread else out
    arrivals = SlotArrivals(space.own_words("arrived", chosen), plan.flags, plan.piece)
    addition = Addition(sums, slots[rank][:, :shard], arrivals, rank, average)
    theirs = len(plan.order) // world * (world - 1)

    def compute(order: Tensor) -> None:
        gemm(
            rows, B, order, tiling=tiling, shards=world, out=computed, track=track,
            addition=addition, addend=addend,
        )  # fmt: skip

    # On a GPU one kernel computes all tiles, and is launched before the copies' waits: streams may
    # share a queue of the hardware, in which a wait would keep the kernel from starting. In the
    # interpreter, where no copy begins before a kernel has ended, the own tiles are a second one.
    def product(_: int) -> None:
        compute(plan.order[:theirs] if interpreted() else plan.order)

    def own(_: int) -> None:
        if interpreted():
            compute(plan.order[theirs:])

    def copy(number: int) -> None:
        peer, part = plan.moves[number]
        slots[peer][rank][part].copy_(partials[peer][part], non_blocking=True)

    def part_of(piece: int) -> slice:
        return slice(piece * plan.piece, min((piece + 1) * plan.piece, shard))

    def give(chunk: int) -> None:
        peer, mine = chunk % world, part_of(chunk // world)
        slots[peer][rank][shard:][mine].copy_(sums[mine], non_blocking=True)

    def take(chunk: int) -> None:
        peer, mine = chunk % world, part_of(chunk // world)
        out.view(world, shard, n)[peer][mine].copy_(slots[rank][peer][shard:][mine])

    space.run(
        plan.schedule, chosen,
        {"product": product, "own": own, "copy": copy, "spread": give, "take": take},
        memory=(rows, B, addend, computed, out), numbers=(tiling, pieces, average),
    )  # fmt: skip
