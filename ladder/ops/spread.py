"""Products whose sum every rank gets, overlapped: reduce-scatter and all-gather by blocks of rows.

The rows are in `blocks`, and each block in a chunk for each rank. While cuBLAS computes a block,
copy engines push the chunks of the last one to their owners; each owner adds its chunk, in rank
order, or lands it, once for all ranks, and copy engines push that to the others under the next
products. With one block, only the reduce-scatter is hidden. The steps are those of
`ladder.ops.schedules.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.kernels.slots import land_slots, sum_slots
from ladder.models.errors import UserError
from ladder.ops import schedules, workspace
from ladder.ops.overlapped import landing_refusal, peer_refusal
from ladder.ops.registry import implement

MAX_BLOCKS = 8


@implement("matmul_all_reduce", "chunked", peer_refusal, ("blocks",))
def chunked_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None, blocks: int = 1
) -> Tensor:
    """blocks: of rows, whose sums are sent while later ones are computed."""
    rows = A.flatten(0, -2)
    total = rows.new_empty(len(rows), B.shape[1])

    def add(slots: Tensor, mine: slice) -> None:
        sum_slots(slots, total[mine])

    _spread(group, rows, B, [total], add, blocks, addend)
    return total.unflatten(0, A.shape[:-1])


@implement("matmul_all_reduce_add_rms_norm", "chunked", landing_refusal, ("blocks",))
def chunked_landing(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float,
    blocks: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """blocks: see `chunked_matmul_all_reduce`. A row is landed by one rank, for all."""
    rows, before, gain = A.flatten(0, -2), residual.flatten(0, -2).contiguous(), weight.contiguous()
    landed, normed = torch.empty_like(before), torch.empty_like(before)

    def land(slots: Tensor, mine: slice) -> None:
        land_slots(slots, before[mine], gain, eps, (landed[mine], normed[mine]))

    _spread(group, rows, B, [landed, normed], land, blocks)
    return landed.view(residual.shape), normed.view(residual.shape)


def _spread(
    group: dist.ProcessGroup, rows: Tensor, B: Tensor, outs: list[Tensor],
    finish: Callable[[Tensor, slice], object], blocks: int, addend: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill `outs`, each [m, n], on all ranks: `finish` puts there what this rank's rows give.

    finish: called with this rank's slots of some rows [T, rows, n], and which rows these are.
    """
    if not 1 <= blocks <= MAX_BLOCKS:
        raise UserError(f"blocks={blocks}; expected 1 to {MAX_BLOCKS}")
    space = workspace.workspace(group, "matmul_all_reduce", rows.device)
    rank, world, n = space.rank, space.world, B.shape[1]
    # All sizes follow from the shapes and the options, so they are the same on all ranks.
    shard = -(-len(rows) // (world * blocks))
    held = (1 + len(outs)) * blocks  # chunks in a slot: those to add, then those of each output
    space.reserve(held * shard * n * rows.element_size())
    chosen = space.next()
    slots = [space.slots(q, chosen, (held * shard, n), rows.dtype) for q in range(world)]
    partial = rows.new_empty(len(rows), n)
    more = None if addend is None else addend.flatten(0, -2)

    def part(chunk: int) -> slice:
        """The rows of a chunk; the last chunks may have fewer, or none."""
        return slice(min(chunk * shard, len(rows)), min((chunk + 1) * shard, len(rows)))

    def place(chunk: int, kind: int = 0) -> slice:
        """Where a chunk's rows are in a slot: 0 to add, n for the nth output."""
        start, size = (kind * blocks + chunk // world) * shard, part(chunk)
        return slice(start, start + size.stop - size.start)

    def product(chunk: int) -> None:
        mine = part(chunk)
        if mine.start < mine.stop:
            own = chunk % world == rank
            to = slots[rank][rank][place(chunk)] if own else partial[mine]
            if more is None:
                torch.mm(rows[mine], B, out=to)
            else:
                torch.addmm(more[mine], rows[mine], B, out=to)

    def copy(chunk: int) -> None:
        slots[chunk % world][rank][place(chunk)].copy_(partial[part(chunk)], non_blocking=True)

    def spread(chunk: int) -> None:
        mine = chunk // world * world + rank
        for kind, out in enumerate(outs, start=1):
            to = slots[chunk % world][rank][place(mine, kind)]
            to.copy_(out[part(mine)], non_blocking=True)

    def add(chunk: int) -> None:
        mine = part(chunk)
        if mine.start < mine.stop:
            finish(slots[rank][:, place(chunk)], mine)

    def take(chunk: int) -> None:
        for kind, out in enumerate(outs, start=1):
            arrived = slots[rank][chunk % world][place(chunk, kind)]
            out[part(chunk)].copy_(arrived, non_blocking=True)

    space.run(
        schedules.all_reduce(rank, world, blocks), chosen,
        {"product": product, "copy": copy, "sum": add, "spread": spread, "take": take},
    )  # fmt: skip
