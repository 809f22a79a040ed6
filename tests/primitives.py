"""Kernels of one primitive each: run by Triton's interpreter, and compiled for a GPU.

tests.interpreter imports this for the interpreter, tests.kernels.compiled for a GPU.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch

from ladder.comm.primitives import (
    EMPTY,
    arrive,
    atomic_add,
    clear,
    flush,
    load,
    peer,
    peers,
    peers_across,
    push_across,
    push_to_slots,
    put_tile,
    receive,
    receive_sum,
    rotate,
    signal,
    store,
    wait,
)
from ladder.jit import jit, tl

LIMIT = 100  # polls


@jit
@no_type_check
def send_kernel(buffers, values, flag, rank, BLOCK: tl.constexpr):
    """Values to a peer, and then its flag."""
    i = tl.arange(0, BLOCK)
    store(peer(buffers, rank, tl.float32) + i, tl.load(values + i), i < BLOCK)
    signal(flag, 1)


@jit
@no_type_check
def receive_kernel(flag, values, out, n, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    i = tl.arange(0, BLOCK)
    wait(flag, 3, LIMIT)
    tl.store(out + i, load(values + i, i < n, 0.0))


@jit
@no_type_check
def tma_kernel(values, out, flag, signals, BLOCK: tl.constexpr, LIMIT: tl.constexpr):
    """A block that a peer wrote, read and written by TMA."""
    source = tl.make_tensor_descriptor(values, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [BLOCK, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    wait(flag, 1, LIMIT, True)
    target.store([0, 0], source.load([0, 0]))
    flush()
    signal(signals, 1)


@jit
@no_type_check
def sum_kernel(values, parts, counter, out, BLOCK: tl.constexpr, SCOPE: tl.constexpr):
    """Each program stores twice its value; the last to arrive adds them up."""
    i, program = tl.arange(0, BLOCK), tl.program_id(0)
    tl.store(parts + program * BLOCK + i, 2 * tl.load(values + program * BLOCK + i))
    if arrive(counter, tl.num_programs(0), SCOPE):
        total = tl.zeros([BLOCK], tl.float32)
        for other in range(tl.num_programs(0)):
            total += load(parts + other * BLOCK + i, i < BLOCK, 0.0)
        atomic_add(out + i, total, i < BLOCK)
        tl.store(counter, 0)


@jit
@no_type_check
def tile_kernel(a, b, out, row, column, rows, columns, stride, BLOCK: tl.constexpr):
    """A product of two tiles, rounded and put where it belongs."""
    i = tl.arange(0, BLOCK)
    at = i[:, None] * BLOCK + i[None, :]
    put_tile(out, tl.dot(tl.load(a + at), tl.load(b + at)), row, column, rows, columns, stride)


@jit
@no_type_check
def order_kernel(out, rank, COUNT: tl.constexpr, WORLD: tl.constexpr, PER: tl.constexpr):
    for i in range(COUNT):
        tl.store(out + i, rotate(i, rank, WORLD, PER))


@jit
@no_type_check
def push_kernel(
    buffers, values, n, rank, BLOCK: tl.constexpr, WORLD: tl.constexpr, EMPTY: tl.constexpr
):
    """Words into the slots of every rank."""
    i = tl.arange(0, BLOCK)
    bits = tl.load(values + i, mask=i < n, other=0)
    slots = peers(buffers, rank, WORLD, tl.int32)
    push_to_slots(slots, rank * BLOCK, i, bits, i < n, WORLD, EMPTY)


@jit
@no_type_check
def across_kernel(
    buffers, values, n, rank, BLOCK: tl.constexpr, WORLD: tl.constexpr, WP: tl.constexpr,
    EMPTY: tl.constexpr,
):  # fmt: skip
    """The same, of a word to each rank by a thread of its own."""
    i = tl.arange(0, BLOCK)[None, :, None]
    bits = tl.load(values + i, mask=i < n, other=0)
    slots = peers_across(buffers, WORLD, WP, tl.int32)
    push_across(slots, rank * BLOCK, i, bits, i < n, EMPTY)


@jit
@no_type_check
def exchange_kernel(
    slots, mine, out, n, rank, BLOCK: tl.constexpr, WORLD: tl.constexpr, EMPTY: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """All ranks' words, of which the own ones have no slot."""
    i = tl.arange(0, BLOCK)
    inside = i < n
    own = tl.load(mine + i, mask=inside, other=0)
    words = receive(slots, BLOCK, i, inside, rank, own, WORLD, EMPTY, LIMIT)
    for other in tl.static_range(WORLD):
        tl.store(out + other * BLOCK + i, words[other], mask=inside)
    clear(slots, BLOCK, i, inside, rank, WORLD, EMPTY)


@jit
@no_type_check
def collect_kernel(
    slots, addend, out, n, BLOCK: tl.constexpr, WORLD: tl.constexpr, EMPTY: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' slots and an addend."""
    i = tl.arange(0, BLOCK)
    total = tl.load(addend + i, mask=i < n, other=0)
    total = receive_sum(slots + i, BLOCK, i < n, total, tl.float32, WORLD, EMPTY, LIMIT)
    tl.store(out + i, total, mask=i < n)
    clear(slots + i, BLOCK, 0, i < n, -1, WORLD, EMPTY)


def launches() -> dict[str, tuple[Any, tuple, dict[str, Any]]]:
    """(kernel, arguments, constants) of one launch of each, to be compiled."""
    words, table = torch.zeros(256, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    x, h = torch.zeros(64, 64), torch.zeros(64, 64, dtype=torch.bfloat16)
    options, limit = {"num_warps": 4}, {"LIMIT": LIMIT}
    slots = {"BLOCK": 512, "WORLD": 4, "EMPTY": EMPTY[4]}
    return {
        "send": (send_kernel, (table, x, words, 3), {"BLOCK": 512} | options),
        "receive": (receive_kernel, (words, x, x, 512), {"BLOCK": 512} | limit | options),
        "tma": (tma_kernel, (h, h, words, words), {"BLOCK": 64} | limit | options),
        "sum": (sum_kernel, (x, x, words, x), {"BLOCK": 512, "SCOPE": "gpu"} | options),
        "sum for a peer": (sum_kernel, (x, x, words, x), {"BLOCK": 512, "SCOPE": "sys"} | options),
        "push": (push_kernel, (table, words, 512, 1), slots | options),
        "across": (across_kernel, (table, words, 512, 1), slots | {"WP": 4} | options),
        "exchange": (exchange_kernel, (words, words, words, 512, 1), slots | limit | options),
        "collect": (collect_kernel, (words, x, x, 512), slots | limit | options),
        "tile": (tile_kernel, (h, h, h, 0, 64, 128, 128, 128), {"BLOCK": 64} | options),
    }
