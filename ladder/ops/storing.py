"""Products whose tiles are stored straight at their ranks: one kernel, and nothing is copied.

As `ladder.ops.summing`, but the peers' tiles go to their slots by the product's own stores, and
count themselves there; this rank's own tiles, the last, wait for these counts and add what has
arrived. Of an all-reduce the sums go to all ranks by the same stores, and one copy of each peer's
ends the call. The host enqueues one kernel between two batches of words, and no copy engine has to
start: for short products, where this is longer than what overlaps.

The steps are those of `ladder.ops.schedules.storing`, the kernel that of `ladder.kernels.gemm`.
Source: fused computation-collective operations (Punniyamurthy et al., 2024), zero-copy stores to
peers; the addition is ours.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor

from ladder.jit import interpreted
from ladder.kernels.gemm import GROUP, Addition, Tiling, gemm
from ladder.kernels.slots import SlotArrivals
from ladder.ops import schedules, workspace
from ladder.ops.calls import rows_back, rows_first
from ladder.ops.overlapped import SCATTER, track_plan, tracked_tiling
from ladder.ops.refusals import kernel_refusal
from ladder.ops.registry import implement
from ladder.ops.summing import EVERYWHERE, OPTIONS, even_refusal
from ladder.ops.tilings import tile_of
from ladder.ops.waves import by_tiles


@implement(SCATTER, "storing", kernel_refusal, OPTIONS, surplus=by_tiles(tile_of))
def storing_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int,
    tile: str | None = None, stages: int | None = None, pieces: int = 1, group_m: int = GROUP,
) -> Tensor:  # fmt: skip
    """pieces: of each rank's rows, which are waited for one by one."""
    rows = rows_first(A, scatter_dim)
    space = workspace.workspace(group, SCATTER, A.device)
    out = rows.new_empty(len(rows) // space.world, B.shape[1])
    tiling = tracked_tiling(tile, stages, pieces, group_m)
    _store(space, rows, B, out, tiling, pieces, average=reduce_op == "avg")
    return rows_back(out, A, scatter_dim)


@implement(EVERYWHERE, "storing", even_refusal, OPTIONS, surplus=by_tiles(tile_of))
def storing_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None,
    tile: str | None = None, stages: int | None = None, pieces: int = 1, group_m: int = GROUP,
) -> Tensor:  # fmt: skip
    """pieces: as of the reduce-scatter, and of this rank's sums."""
    rows = A.flatten(0, -2)
    space = workspace.workspace(group, EVERYWHERE, A.device)
    out = rows.new_empty(len(rows), B.shape[1])
    tiling = tracked_tiling(tile, stages, pieces, group_m)
    more = None if addend is None else addend.flatten(0, -2).contiguous()
    _store(space, rows, B, out, tiling, pieces, spread=True, addend=more)
    return out.unflatten(0, A.shape[:-1])


def _store(
    space: workspace.Workspace, rows: Tensor, B: Tensor, out: Tensor, tiling: Tiling, pieces: int,
    average: bool = False, spread: bool = False, addend: Tensor | None = None,
) -> None:  # fmt: skip
    """Put the sum of the ranks' rows @ B into `out`: of this rank's rows, or, `spread`, of all."""
    n, world, rank = B.shape[1], space.world, space.rank
    shard = len(rows) // world
    parts = 2 if spread else 1  # of the memory: partials, then all ranks' sums
    space.reserve(parts * shard * n * rows.element_size())
    plan = space.once(
        ("storing", shard, n, tiling, pieces, spread),
        lambda: track_plan(
            space, shard, n, tiling, pieces, partial(schedules.storing, spread=spread),
            keep=True, dma=False,
        ),
    )  # fmt: skip
    chosen = space.next()
    track = plan.track(space, chosen)
    memory = space.slots(rank, chosen, (parts * shard, n), rows.dtype, dense=True)
    slots = memory.view(parts, world, shard, n)
    whole = out.view(world, shard, n) if spread else out
    arrivals = SlotArrivals(space.own_words("full", chosen), plan.flags, plan.piece)
    addition = Addition(
        whole[rank] if spread else out, slots[0], arrivals, rank, average, plan.counts,
        world * len(plan.counts) if spread else None,  # behind the counters of blocks
    )  # fmt: skip
    theirs = len(plan.order) // world * (world - 1)

    def compute(order: Tensor) -> None:
        gemm(
            rows, B, order, tiling=tiling, shards=world, track=track, addition=addition,
            addend=addend,
        )  # fmt: skip

    # On a GPU one kernel computes all tiles. In the interpreter, whose programs run one after the
    # other, the own tiles are a second one: they wait for tiles of all the peers' programs.
    def product(_: int) -> None:
        compute(plan.order[:theirs] if interpreted() else plan.order)

    def own(_: int) -> None:
        if interpreted():
            compute(plan.order[theirs:])

    def take(chunk: int) -> None:
        piece, peer = divmod(chunk, world)
        part = slice(piece * plan.piece, (piece + 1) * plan.piece)
        whole[peer][part].copy_(slots[1][peer][part])

    space.run(plan.schedule, chosen, {"product": product, "own": own, "take": take})
