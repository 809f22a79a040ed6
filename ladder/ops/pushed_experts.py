"""Experts' products whose rows go straight to the ranks that own them.

Two implementations of matmul_all_to_all, which differ in the product:

- `pushed`: one persistent product, whose tiles are stored at the owners as they are done.
- `grouped`: torch's grouped product, then a kernel that pushes its rows.

Offsets and counts stay on the device, and the host waits for nothing. `ladder.kernels.rows` has the
rest, `ladder.ops.mailbox` why no memory is written too early.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels.grouped import grouped_push
from ladder.kernels.rows import as_bits, place, push_rows, receive_rows
from ladder.models.errors import UserError
from ladder.ops.pushed_rows import mailbox_of
from ladder.ops.refusals import kernel_refusal, peer_refusal
from ladder.ops.registry import Call, implement
from ladder.ops.rows import Sent, received
from ladder.ops.tilings import TILING, tiling_of

OP = "matmul_all_to_all"


@implement(OP, "pushed", kernel_refusal, TILING)
def pushed_matmul_all_to_all(
    group: dist.ProcessGroup, h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, capacity: int,
    tile: str | None = None, stages: int | None = None,
) -> Sent:  # fmt: skip
    n, tiling = W.shape[2], tiling_of(tile, stages)
    box = mailbox_of(group, OP, h, capacity * n * h.element_size())
    found = received(box.world, capacity, n, h)
    out, counts, overflow = found
    memory = box.slots, box.words
    places = place(owners, offsets[-1:], capacity, box.words)
    grouped_push(
        h, W, offsets, places, owners, out, counts, overflow, *memory, box.counters, tiling
    )
    receive_rows(as_bits(out), counts, *memory, box.counters[1:])
    return found


def grouped_refusal(call: Call) -> str | None:
    if call.dtype != torch.bfloat16:
        return (
            f"torch's grouped product takes bfloat16, not {str(call.dtype).removeprefix('torch.')}"
        )
    if not hasattr(F, "grouped_mm"):
        return "this torch has no torch.nn.functional.grouped_mm; install a newer one"
    return peer_refusal(call)


@implement(OP, "grouped", grouped_refusal)
def grouped_matmul_all_to_all(
    group: dist.ProcessGroup, h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, capacity: int
) -> Sent:
    _, k, n = W.shape
    if k % 8 or n % 8:
        raise UserError(f"k={k}, n={n}: torch's grouped product needs multiples of 8; pad them")
    box = mailbox_of(group, OP, h, capacity * n * h.element_size())
    found = received(box.world, capacity, n, h)
    out, counts, overflow = found
    memory = box.slots, box.words
    # Before `place` opens the slots: an error of torch's must not leave them open.
    ends = offsets[1:].clamp(0, len(h)).to(torch.int32)  # the host cannot check them
    y = F.grouped_mm(h.contiguous(), W, offs=ends)
    places = place(owners, offsets[-1:], capacity, box.words)
    push_rows(as_bits(y), places, owners, as_bits(out), counts, overflow, *memory, box.counters)
    receive_rows(as_bits(out), counts, *memory, box.counters[1:])
    return found
