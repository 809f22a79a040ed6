"""Products whose sum every rank gets, overlapped by blocks of rows of all ranks.

As `chunked` (ladder.ops.spread), but cuBLAS computes a block at once, and not the ranks' chunks of
it one by one: few rows take as long as the weight takes to read, so chunks of few rows cost more
than they hide. Copy engines push a block's chunks to their owners while the next block is computed,
and its sums to all ranks while the one after that is. No product is left to hide the last block:
one kernel adds, sends and receives it (`ladder.comm.two_shot`). The steps are those of
`ladder.ops.schedules.blocked_all_reduce`.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ladder.kernels.slots import sum_slots
from ladder.models.errors import UserError
from ladder.operator_names import REDUCE
from ladder.ops import schedules, workspace
from ladder.ops.blocks import BLOCKS, WHOLE, Blocks, check_streams
from ladder.ops.pushed import all_shots
from ladder.ops.refusals import peer_refusal
from ladder.ops.registry import Call, implement
from ladder.ops.spread import multiply, to_all, to_owners
from ladder.ops.waves import by_blocks

MOST_LAST = 2**30  # bytes of the last block; its kernel counts the words of its slots in 32 bits


def refusal(call: Call) -> str | None:
    columns = (call.exact or call.sizes)[1]
    if columns * call.dtype.itemsize % 16:
        return f"its rows, of {columns} columns, are no multiples of 16 bytes"
    return peer_refusal(call)


@implement(REDUCE, "blocked", refusal, BLOCKS, surplus=by_blocks)
def blocked_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None,
    blocks: int = WHOLE.blocks, ratio: int = WHOLE.ratio, streams: int = WHOLE.streams,
) -> Tensor:  # fmt: skip
    """blocks, ratio: see `Blocks`. streams: as of
    `ladder.ops.overlapped.chunked_all_gather_matmul`, for whole blocks."""
    check_streams(streams)
    rows, n = A.flatten(0, -2), B.shape[1]
    total = rows.new_empty(len(rows), n)
    space = workspace.workspace(group, REDUCE, rows.device)
    rank, world = space.rank, space.world
    cut = Blocks(len(rows), world, blocks, ratio, whole=True)
    last = cut.whole(blocks - 1)
    size = (last.stop - last.start) * n * rows.element_size()
    if size > MOST_LAST:
        raise UserError(
            f"blocks={blocks}: the last one has {size / 2**30:.1f} GiB of sums, and at most 1 GiB "
            f"are sent at once; give more blocks, or a higher ratio"
        )
    shots = all_shots(space, group, size) if size else None
    chosen, slots = space.begin((2 * cut.height, n), rows.dtype)  # to add, then the sums
    partial = rows.new_empty(len(rows), n)
    more = None if addend is None else addend.flatten(0, -2)

    def product(block: int) -> None:
        some = cut.whole(block)
        multiply(rows, B, more, some, partial[some])

    def add(chunk: int) -> None:
        block = chunk // world
        mine = cut.part(block, rank)
        if mine.start < mine.stop:
            arrived = slots[rank][:, cut.place(block, rank)]
            sum_slots(arrived, total[mine], own=(rank, partial[mine]))

    def push(_: int) -> None:
        if shots is not None:
            shots(partial[last], True, total[last])

    space.run(
        schedules.blocked_all_reduce(rank, world, blocks, streams), chosen,
        {
            "product": product, "sum": add, "push": push,
            **to_owners(rank, slots, cut, partial), **to_all(rank, slots, cut, [total]),
        },
        memory=(rows, B, more, partial, total), numbers=(ratio, shots),
    )  # fmt: skip
    return total.unflatten(0, A.shape[:-1])
