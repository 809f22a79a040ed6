"""Products that add what has arrived: a reduce-scatter without a sum of its own.

A chunk of rows travels from rank to rank + 1, and each rank's product is added to it by cuBLAS, on
the way from the registers to memory. So no kernel reads the partials again. But each rank rounds
the sum, and the order is that of the ring, which starts behind the row's owner and ends at it. This
order is the same in all runs and on all ranks, but it is not that of `staged`, so groups must allow
it (`ladder.ops.allow_any_order`). The steps are those of `ladder.ops.schedules.ring`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.operator_names import REDUCE, SCATTER
from ladder.ops import schedules, workspace
from ladder.ops.blocks import BLOCKS, Blocks, check_streams
from ladder.ops.calls import rows_back, rows_first
from ladder.ops.refusals import peer_refusal
from ladder.ops.registry import implement
from ladder.ops.spread import to_all
from ladder.ops.waves import by_chunks


@implement(SCATTER, "ring", peer_refusal, BLOCKS, ordered=False, surplus=by_chunks(2))
def ring_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int,
    blocks: int = 2, ratio: int = 1, streams: int = 1,
) -> Tensor:  # fmt: skip
    """blocks, ratio, streams: as in `chunked` all-reduces; a block arrives under other products."""
    check_streams(streams)
    rows = rows_first(A, scatter_dim)
    space = workspace.workspace(group, SCATTER, A.device)
    rank, world, n = space.rank, space.world, B.shape[1]
    cut = Blocks(len(rows), world, blocks, ratio)
    chosen, slots = space.begin((cut.height, n), rows.dtype)
    out, begun = rows.new_empty(cut.height, n), rows.new_empty(cut.height, n)
    shards, scale = rows.split(cut.height), 1 / world if reduce_op == "avg" else 1.0
    actions = _steps(
        rank, slots, cut, lambda block, owner: shards[owner][cut.place(block, owner)], B,
        lambda block: out[cut.place(block, rank)], begun, scale=scale,
    )  # fmt: skip
    space.run(
        schedules.ring(rank, world, blocks, streams), chosen, actions,
        memory=(rows, B, begun, out), numbers=(ratio, scale),
    )  # fmt: skip
    return rows_back(out, A, scatter_dim)


@implement(REDUCE, "ring", peer_refusal, BLOCKS, ordered=False, surplus=by_chunks(2))
def ring_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None, blocks: int = 2,
    ratio: int = 1, streams: int = 1,
) -> Tensor:  # fmt: skip
    """blocks, ratio, streams: as in `chunked`. The sums go to all ranks as they do there."""
    check_streams(streams)
    rows = A.flatten(0, -2)
    space = workspace.workspace(group, REDUCE, rows.device)
    rank, world, n = space.rank, space.world, B.shape[1]
    cut = Blocks(len(rows), world, blocks, ratio)
    height = 2 * cut.height  # of a slot: the rows that grow, then the sums of a rank
    chosen, slots = space.begin((height, n), rows.dtype)
    total, begun = rows.new_empty(len(rows), n), rows.new_empty(cut.height, n)
    more = None if addend is None else addend.flatten(0, -2)
    actions = _steps(
        rank, slots, cut, lambda block, owner: rows[cut.part(block, owner)], B,
        lambda block: total[cut.part(block, rank)], begun,
        None if more is None else lambda block, owner: more[cut.part(block, owner)],
    )  # fmt: skip
    space.run(
        schedules.ring(rank, world, blocks, streams, spread=True), chosen,
        {**actions, **to_all(rank, slots, cut, [total])},
        memory=(rows, B, more, begun, total), numbers=ratio,
    )  # fmt: skip
    return total.unflatten(0, A.shape[:-1])


def _steps(
    rank: int, slots: list[Tensor], cut: Blocks, rows: Callable[[int, int], Tensor], B: Tensor,
    out: Callable[[int], Tensor], begun: Tensor,
    addend: Callable[[int, int], Tensor] | None = None, scale: float = 1.0,
) -> dict[str, Callable[[int], object]]:  # fmt: skip
    """The actions `product`, `copy` and `fetch` of the ring.

    rows, addend: give the rows of a block and an owner. out: gives the memory of this rank's sums
    of a block. begun: memory of the chunks that begin here, as high as a slot. scale: factor on the
    sums.
    """
    world, blocks = cut.world, len(cut.starts) - 1

    def at(number: int) -> tuple[int, int, int, Tensor]:
        """The step, block, owner, and memory of the travelling chunk, or of the sum at its end."""
        step, block = divmod(number, blocks)
        owner = (rank - 1 - step) % world
        if step == world - 1:
            return step, block, owner, out(block)
        memory = slots[rank][step] if step else begun
        return step, block, owner, memory[cut.place(block, owner)]

    def product(number: int) -> None:
        step, block, owner, travels = at(number)
        mine = rows(block, owner)
        if len(mine) == 0:
            return
        more = None if addend is None else addend(block, owner)
        if step == 0 and more is None:
            torch.mm(mine, B, out=travels)
        elif step == 0:
            torch.addmm(more, mine, B, out=travels)
        else:
            if more is not None:
                travels.add_(more)
            last = scale if step == world - 1 else 1.0
            # In place: torch copies what it adds to, if the result is elsewhere.
            travels.addmm_(mine, B, beta=last, alpha=last)

    def copy(number: int) -> None:
        step, block, owner, travels = at(number)
        to = slots[(rank + 1) % world][step + 1][cut.place(block, owner)]
        to.copy_(travels, non_blocking=True)

    def fetch(number: int) -> None:
        step, block, owner, total = at(number)
        total.copy_(slots[rank][step][cut.place(block, owner)], non_blocking=True)

    return {"product": product, "copy": copy, "fetch": fetch}
