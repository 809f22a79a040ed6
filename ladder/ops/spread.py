"""Products whose sum every rank gets, overlapped: reduce-scatter and all-gather by blocks of rows.

The rows are in `blocks`, and each block in a chunk for each rank. While cuBLAS computes the next
chunks, copy engines push the peers' chunks to their owners. Each owner then computes its own part,
and adds its chunk in rank order, or lands it, once for all ranks. Copy engines push the result to
the others under the next products. The exchange of the last block is exposed: with one block, all
of it. There `push` lets one kernel add, send and receive (`ladder.comm.two_shot`), which takes less
than a kernel, a copy engine and a copy. The steps are those of `ladder.ops.schedules.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.kernels.slots import land_slots, sum_slots
from ladder.operator_names import REDUCE, REDUCE_LANDING
from ladder.ops import schedules, workspace
from ladder.ops.blocks import BLOCKS, Blocks, check_streams
from ladder.ops.checks import check_switch
from ladder.ops.pushed import all_shots
from ladder.ops.refusals import landing_refusal, peer_refusal
from ladder.ops.registry import implement
from ladder.ops.waves import by_chunks
from ladder.ops.workspace import Memory

MOST_PUSHED = 2**31  # bytes; the kernel counts the words of its slots in 32 bits


@implement(
    REDUCE, "chunked", peer_refusal, (*BLOCKS, "push"), surplus=by_chunks(1)
)  # fmt: skip
def chunked_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None, blocks: int = 1,
    ratio: int = 1, streams: int = 1, push: bool = False,
) -> Tensor:  # fmt: skip
    """blocks: of rows, whose sums are sent while later ones are computed; ratio: see `Blocks`.

    streams: as of `ladder.ops.overlapped.chunked_all_gather_matmul`. push: a kernel sends the last
    block's sums, if a row of them is whole words of 32 bits, and all are no more than 2 GiB.
    """
    check_switch("push", push)
    rows = A.flatten(0, -2)
    total = rows.new_empty(len(rows), B.shape[1])

    def add(slots: Tensor, mine: slice) -> None:
        sum_slots(slots, total[mine])

    _spread(group, rows, B, [total], add, ((), ()), (blocks, ratio, streams), addend, push)
    return total.unflatten(0, A.shape[:-1])


@implement(REDUCE_LANDING, "chunked", landing_refusal, BLOCKS, surplus=by_chunks(1))
def chunked_landing(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float,
    blocks: int = 1, ratio: int = 1, streams: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Options: see `chunked_matmul_all_reduce`. A row is landed by one rank, for all."""
    rows, before, gain = A.flatten(0, -2), residual.flatten(0, -2).contiguous(), weight.contiguous()
    landed, normed = torch.empty_like(before), torch.empty_like(before)

    def land(slots: Tensor, mine: slice) -> None:
        land_slots(slots, before[mine], gain, eps, (landed[mine], normed[mine]))

    uses = (before, gain), eps
    _spread(group, rows, B, [landed, normed], land, uses, (blocks, ratio, streams))
    return landed.view(residual.shape), normed.view(residual.shape)


def _spread(
    group: dist.ProcessGroup, rows: Tensor, B: Tensor, outs: list[Tensor],
    finish: Callable[[Tensor, slice], object], uses: tuple[Memory, Hashable],
    options: tuple[int, int, int],
    addend: Tensor | None = None, push: bool = False,
) -> None:  # fmt: skip
    """Fill `outs`, each [m, n], on all ranks; `finish` computes this rank's rows of them.

    finish: called with this rank's slots of some rows [T, rows, n], and the slice of these rows.
    uses: its memory and numbers beside `outs`. options: blocks, ratio, streams. push: the last
    block of the one output by a kernel.
    """
    (blocks, ratio, streams), (memory, numbers) = options, uses
    check_streams(streams)
    space = workspace.workspace(group, REDUCE, rows.device)
    rank, world, n = space.rank, space.world, B.shape[1]
    # All sizes follow from the shapes and the options, so they are the same on all ranks.
    cut = Blocks(len(rows), world, blocks, ratio)
    height = (1 + len(outs)) * cut.height  # of a slot: the rows to add, then those of each output
    last = cut.whole(blocks - 1)
    high = cut.height - cut.starts[-2]  # of a rank; the last ones may have fewer
    line = n * rows.element_size()
    push = push and last.start < last.stop and line % 4 == 0 and world * high * line <= MOST_PUSHED
    shots = all_shots(space, group, world * high * line, kinds=1) if push else None
    chosen, slots = space.begin((height, n), rows.dtype)
    partial = rows.new_empty(len(rows), n)
    more = None if addend is None else addend.flatten(0, -2)

    def product(chunk: int) -> None:
        block, owner = divmod(chunk, world)
        mine = cut.part(block, owner)
        if mine.start < mine.stop:
            to = slots[rank][rank][cut.place(block, owner)] if owner == rank else partial[mine]
            multiply(rows, B, more, mine, to)

    def add(chunk: int) -> None:
        block = chunk // world
        mine = cut.part(block, rank)
        if mine.start < mine.stop:
            finish(slots[rank][:, cut.place(block, rank)], mine)

    def push_last(_: int) -> None:
        mine = slots[rank][:, cut.place(blocks - 1, rank)]
        assert shots is not None
        shots.gather_sums(mine, high, outs[0][last])

    space.run(
        schedules.all_reduce(rank, world, blocks, streams, push), chosen,
        {
            "product": product, "sum": add, "push": push_last,
            **to_owners(rank, slots, cut, partial), **to_all(rank, slots, cut, outs),
        },
        memory=(rows, B, more, partial, *outs, *memory), numbers=(numbers, ratio, shots),
    )  # fmt: skip


def multiply(rows: Tensor, B: Tensor, addend: Tensor | None, some: slice, out: Tensor) -> None:
    """Some of the rows of rows @ B + addend, into `out`."""
    if addend is None:
        torch.mm(rows[some], B, out=out)
    else:
        torch.addmm(addend[some], rows[some], B, out=out)


def to_owners(
    rank: int, slots: list[Tensor], cut: Blocks, partial: Tensor
) -> dict[str, Callable[[int], object]]:
    """The action `copy` of a schedule: a chunk of this rank's product to the rank that adds it."""

    def copy(chunk: int) -> None:
        block, owner = divmod(chunk, cut.world)
        to = slots[owner][rank][cut.place(block, owner)]
        to.copy_(partial[cut.part(block, owner)], non_blocking=True)

    return {"copy": copy}


def to_all(
    rank: int, slots: list[Tensor], cut: Blocks, outs: list[Tensor]
) -> dict[str, Callable[[int], object]]:
    """The actions `spread` and `take` of a schedule: this rank's rows of `outs` to all others."""

    def spread(chunk: int) -> None:
        block, peer = divmod(chunk, cut.world)
        for kind, out in enumerate(outs, start=1):
            to = slots[peer][rank][cut.place(block, rank, kind)]
            to.copy_(out[cut.part(block, rank)], non_blocking=True)

    def take(chunk: int) -> None:
        block, peer = divmod(chunk, cut.world)
        for kind, out in enumerate(outs, start=1):
            arrived = slots[rank][peer][cut.place(block, peer, kind)]
            out[cut.part(block, peer)].copy_(arrived, non_blocking=True)

    return {"spread": spread, "take": take}
