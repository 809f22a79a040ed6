"""Embedding bags pooled by one kernel that stores them straight at the rank of the sample.

`pushed` of embedding_bag_all_to_all: `ladder.kernels.bags` says how, `ladder.ops.mailbox` why no
memory is written too early. The host waits for nothing, so a CUDA graph can hold it, too. The
kernel occupies the GPU while it waits for the peers; so all ranks must launch such operators in the
same order, even on several streams.
"""

from __future__ import annotations

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm import capture
from ladder.kernels.bags import MAX_PROGRAMS, ORDERS, default_programs, push_bags
from ladder.models.errors import UserError, unknown
from ladder.ops.checks import check_switch
from ladder.ops.mailbox import addresses, mailbox
from ladder.ops.refusals import peer_refusal
from ladder.ops.registry import implement
from ladder.ops.workspace import workspace

OP = "embedding_bag_all_to_all"


@implement(OP, "pushed", peer_refusal, ("programs", "order", "lent"), insisted=("lent",))
def pushed(
    group: dist.ProcessGroup, weights: list[Tensor], indices: Tensor, offsets: Tensor, mode: str,
    counts: list[int], programs: int | None = None, order: str = "tables", lent: bool = False,
) -> Tensor:  # fmt: skip
    """programs: of the persistent kernel; None: `default_programs`. order: of work, one of ORDERS.

    lent: the result is the shared memory itself, which saves a copy of the peers' part. The next
    call of this operator on this stream overwrites it, on whatever shapes.
    """
    check_switch("lent", lent)
    if order not in ORDERS:
        raise unknown("order", order, ORDERS)
    first = weights[0]
    if programs is None:
        programs = default_programs(first)
    if not 1 <= programs <= MAX_PROGRAMS:
        raise UserError(f"programs={programs}; expected 1 to {MAX_PROGRAMS}")
    tables, world = len(weights), len(counts)
    share = (len(offsets) - 1) // tables // world
    shape = share, sum(counts) * first.shape[1]
    size = shape[0] * shape[1] * first.element_size()
    box = mailbox(group, OP, first, size, 2 * world * MAX_PROGRAMS)
    space = workspace(group, OP, first.device)
    before = list(accumulate(counts, initial=0))
    firsts = space.once(
        ("firsts", *before),
        lambda: torch.tensor(before, dtype=torch.int32, device=first.device),
    )
    for n, each in enumerate(weights):
        if not each.is_contiguous() and capture.capturing():
            raise UserError(
                f"weights[{n}] is not contiguous, so a CUDA graph would read a copy of it; call "
                f".contiguous() once, before the capture"
            )
    dense = [each.contiguous() for each in weights]
    slot = box.slots.own.view(first.dtype)[: shape[0] * shape[1]].view(shape).detach()
    out = slot if lent else first.new_empty(shape)
    push_bags(
        dense, addresses(group, OP, dense), indices.contiguous(), offsets.contiguous(), mode,
        firsts, out, box.slots, box.words, programs=programs, order=order, lent=lent,
    )  # fmt: skip
    return out
