"""Rows that are stored straight at the rank that owns them, or that they came from.

`pushed` of all_to_all_rows and return_rows: `ladder.kernels.rows` says how, `ladder.ops.mailbox`
why no memory is written too early. Counts stay on the device, the host waits for nothing, and
only rows that exist are sent, not their padding. Rows of any dtype are moved as they are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.kernels.rows import (
    WORDS,
    as_bits,
    dense,
    gather_rows,
    place,
    push_pieces,
    push_rows,
    receive_rows,
)
from ladder.ops.mailbox import Mailbox, mailbox
from ladder.ops.refusals import peer_refusal
from ladder.ops.registry import Call, implement
from ladder.ops.rows import Sent, received


def move_refusal(call: Call) -> str | None:
    """Nothing is added, so any dtype can be moved."""
    return peer_refusal(replace(call, dtype=torch.float32))


def mailbox_of(group: dist.ProcessGroup, op: str, like: Tensor, size: int) -> Mailbox:
    """A mailbox for the kernels of rows, for pieces of `size` bytes."""
    world = dist.get_world_size(group)
    return mailbox(group, op, like, world * size, world * WORDS)


@implement("all_to_all_rows", "pushed", move_refusal)
def pushed_all_to_all_rows(
    group: dist.ProcessGroup, x: Tensor, owners: Tensor, capacity: int
) -> Sent:
    columns = x.shape[1]
    box = mailbox_of(group, "all_to_all_rows", x, capacity * columns * x.element_size())
    found = received(box.world, capacity, columns, x)
    out, counts, overflow = found
    memory = box.slots, box.words
    places = place(owners, None, capacity, box.words)
    push_rows(
        as_bits(dense(x)), places, owners, as_bits(out), counts, overflow, *memory, box.counters
    )
    receive_rows(as_bits(out), counts, *memory, box.counters[1:])
    return found


@implement("return_rows", "pushed", move_refusal)
def pushed_return_rows(group: dist.ProcessGroup, rows: Tensor, owners: Tensor) -> Tensor:
    _, capacity, columns = rows.shape
    box = mailbox_of(group, "return_rows", rows, capacity * columns * rows.element_size())
    out = rows.new_empty(len(owners), columns)
    memory, bits = (box.slots, box.words), as_bits(dense(rows))
    places = place(owners, None, capacity, box.words)
    push_pieces(bits, *memory, box.counters)
    gather_rows(bits, places, owners, as_bits(out), *memory, box.counters[1:])
    return out
