"""Embedding bags that are pooled and stored straight at the rank that owns the sample: one kernel.

A work item is a block of samples of one rank in one table. Program p of P takes items p, p + P, ..
of every rank, or (`tables`) of all ranks together; a receiver knows how each sender numbers them.
So program p receives only what the peers' programs p have sent, and waits for those alone: no
program waits for one of a higher number, and each sends all it has before it waits for what it
receives. Programs of a GPU start in the order of their numbers; so the lowest that has not ended
runs on every rank, and nothing waits for ever, even where not all fit on the GPU at once.

`ladder.ops.mailbox` has the protocol, and why no slot is written too early. Here each program of a
rank is a sender and receiver of its own.

A bag is summed in float32 in the order of its indices, and rounded once.

Idea: embedding + all-to-all in fused computation-collective operations (Punniyamurthy et al.,
2024), III-A, with the zero-copy stores of III-B.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import SPIN_LIMIT, load, peer, rotate, signal, store, wait
from ladder.comm.symmetric import SymmetricTensor
from ladder.jit import begin, check_dtype, jit, kernel, launch, tl
from ladder.kernels.decode_shapes import power_of_2

# tables: table by table, in each the peers' samples first; it spreads the sends over the whole
# call, and few tables are looked up at a time, so that their rows stay in the cache. remote: the
# peers' samples of all tables first, own ones last. oblivious: on every rank, rank 0's samples
# first.
ORDERS = ("remote", "oblivious", "tables")
# Chosen by lookups of bags of 10 to 70 rows of 64 to 256 numbers on an H200
# (benchmarks/results/README.md). A call is slow if not all programs fit on the GPU at once: the
# last then begin only when others have ended.
TILE, WIDEST = 256, 512  # elements of a tile; the most in a row
AHEAD = 10  # rows of a bag that are read at once
MOST_BAGS = 32
MAX_PROGRAMS = 4096
WARP_BYTES = 512  # of a tile for each warp: 16 for a thread
WARPS = {2: 24, 4: 32}  # for each SM, by the bytes of a number


@jit
@no_type_check
def _owner(item, blocks, sender, WORLD: tl.constexpr):
    """The rank of an item's samples in the order `tables`: those of `sender` come last."""
    return rotate(item % (WORLD * blocks) // blocks, sender + 1, WORLD)


@kernel("both")
@no_type_check
def _push_bags_kernel(
    weights,  # int64 [tables]: addresses of dense matrices [rows, DIM]
    indices,
    offsets,  # [tables x batch + 1]
    out,  # [share, columns]
    slots,  # int64 [world]: each rank's, [share, columns]
    words,  # int64 [world]: each rank's, [2 (open, sent), WORLD, STRIDE]
    firsts,  # int32 [world + 1]: each rank's first table, and the number of all
    rank,
    share,  # samples of a rank
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    MEAN: tl.constexpr,
    ORDER: tl.constexpr,  # an index of ORDERS
    LENT: tl.constexpr,  # the result is this rank's slots, and not `out`
    ALIGNED: tl.constexpr,  # every row of every table is at a multiple of 16 bytes
    WORLD: tl.constexpr,
    BAGS: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    SPIN_LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    kind: tl.constexpr = out.dtype.element_ty
    program, programs = tl.program_id(0), tl.num_programs(0)
    own = peer(words, rank, tl.int32)
    for s in tl.static_range(1, WORLD):
        signal(peer(words, rotate(s, rank, WORLD), tl.int32) + rank * STRIDE + program, 1)
    blocks = tl.cdiv(share, BAGS)
    first = tl.load(firsts + rank)
    tables = tl.load(firsts + rank + 1) - first
    columns = tl.load(firsts + WORLD).to(tl.int64) * DIM
    mine = tl.cdiv(tables * blocks - program, programs)  # items of each rank's samples
    for s in tl.static_range(1, WORLD):
        q = rotate(s, rank, WORLD)
        wait(own + q * STRIDE + program, 1, SPIN_LIMIT)
        tl.store(own + q * STRIDE + program, 0)
    first_item, end_item, step = 0, WORLD * mine, 1
    if ORDER == 2:
        first_item, end_item, step = program, tables * (WORLD * blocks), programs
    for i in range(first_item, end_item, step):
        if ORDER == 2:
            item = i
            table = item // (WORLD * blocks)
            to = _owner(item, blocks, rank, WORLD)
        else:
            place = rotate(i, rank + 1 if ORDER == 0 else 0, WORLD, mine)
            to = place // mine
            item = program + place % mine * programs
            table = item // blocks
        sample = item % blocks * BAGS + tl.arange(0, BAGS)
        inside = sample < share
        bag = table.to(tl.int64) * (share * WORLD) + to * share + sample
        start = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
        end = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64)
        longest = tl.max(end - start).to(tl.int32)
        weight = tl.load(weights + table).to(tl.pointer_type(kind))
        if ALIGNED:
            weight = tl.multiple_of(weight, 16)
        # A choice of addresses, not of branches, keeps the stores one piece of code.
        address = tl.load(slots + to)
        if not LENT:
            address = tl.where(to == rank, out.to(tl.int64), address)
        target = tl.multiple_of(address.to(tl.pointer_type(kind)), 16)
        at = sample.to(tl.int64)[:, None] * columns + (first + table).to(tl.int64) * DIM
        for c in tl.static_range(0, DIM, BLOCK):
            column = c + tl.arange(0, BLOCK)
            total = tl.zeros([BAGS, BLOCK], tl.float32)
            for k in range(0, longest, AHEAD):
                rows = ()
                for u in tl.static_range(AHEAD):  # all loads first, so that they overlap
                    there = start + k + u < end
                    index = tl.load(indices + start + k + u, mask=there, other=0).to(tl.int64)
                    row = weight + index[:, None] * DIM + column[None, :]
                    wanted = there[:, None] & (column < DIM)[None, :]
                    rows += (tl.load(row, mask=wanted, other=0),)
                for u in tl.static_range(AHEAD):
                    total += rows[u].to(tl.float32)
            if MEAN:
                length = tl.maximum(end - start, 1).to(tl.float32)
                total = tl.div_rn(total, tl.broadcast_to(length[:, None], [BAGS, BLOCK]))
            within = inside[:, None] & (column < DIM)[None, :]
            store(target + at + column[None, :], total.to(kind), within)
    for s in tl.static_range(1, WORLD):
        to = rotate(s, rank, WORLD)
        signal(peer(words, to, tl.int32) + (WORLD + rank) * STRIDE + program, 1)
    arrived = peer(slots, rank, kind)
    for s in range(1, WORLD):
        q = rotate(s, rank, WORLD)
        flag = own + (WORLD + q) * STRIDE + program
        wait(flag, 1, SPIN_LIMIT)
        tl.store(flag, 0)
        if not LENT:
            first = tl.load(firsts + q)
            ranks = WORLD if ORDER == 2 else 1  # ranks that an item's number counts
            items = (tl.load(firsts + q + 1) - first) * ranks * blocks
            for item in range(program, items, programs):
                sample = item % blocks * BAGS + tl.arange(0, BAGS)
                here = sample < share
                if ORDER == 2:
                    here &= _owner(item, blocks, q, WORLD) == rank
                at = sample.to(tl.int64)[:, None] * columns
                at += (first + item // (ranks * blocks)).to(tl.int64) * DIM
                for c in tl.static_range(0, DIM, BLOCK):
                    column = c + tl.arange(0, BLOCK)
                    within = here[:, None] & (column < DIM)[None, :]
                    moved = load(arrived + at + column[None, :], within, 0)
                    tl.store(out + at + column[None, :], moved, mask=within)


def push_bags(
    weights: list[Tensor], table: Tensor, indices: Tensor, offsets: Tensor, mode: str,
    firsts: Tensor, out: Tensor, slots: SymmetricTensor, words: SymmetricTensor, *,
    programs: int, order: str, lent: bool = False,
) -> None:  # fmt: skip
    """Pool the bags of this rank's tables for all ranks, and receive those of the own samples.

    weights: this rank's tables, contiguous [rows, dim] each; table: their addresses, int64. indices
    and offsets: contiguous, of all samples, table by table. firsts: int32 [T + 1], for each rank
    the number of tables of the ranks before it, then that of all. out: [B / T, tables x dim].
    slots: of 32-bit words, memory for an `out` on each rank; words: zeroed, 2 x T x MAX_PROGRAMS.
    programs: of the kernel, the same on all ranks. order: of ORDERS. lent: the slots are the
    result, `out` is not written.
    """
    rank, world = slots.rank, len(slots.by_rank)
    assert programs <= MAX_PROGRAMS, programs
    assert len(words.own) >= 2 * world * MAX_PROGRAMS, len(words.own)
    assert slots.own.numel() * 4 >= out.numel() * out.element_size()
    _launch(
        weights, table, indices, offsets, mode, firsts, out, slots.addresses, words.addresses, rank,
        WORLD=world, programs=programs, order=order, lent=lent,
    )  # fmt: skip


def pool_bags(
    weights: list[Tensor], indices: Tensor, offsets: Tensor, mode: str, table: Tensor | None = None
) -> Tensor:
    """Pool the bags of tables on one GPU: [batch, tables x dim].

    indices, offsets: of all samples, table by table. weights, table: as for `push_bags`; without
    `table` the addresses are copied from the host, which no CUDA graph can hold, unless there is
    only one.
    """
    tables, device = len(weights), weights[0].device
    weights = [each.contiguous() for each in weights]
    if table is None and tables == 1:  # as for gradients; so the host need not wait
        table = torch.full((1,), weights[0].data_ptr(), device=device)
    elif table is None:
        table = torch.tensor([each.data_ptr() for each in weights], device=device)
    out = weights[0].new_empty((len(offsets) - 1) // tables, tables * weights[0].shape[1])
    firsts = torch.arange(0, 2 * tables, tables, dtype=torch.int32, device=device)
    _launch(
        weights, table, indices.contiguous(), offsets.contiguous(), mode, firsts, out, table, table,
        0, WORLD=1, programs=default_programs(weights[0]), order="tables",
    )  # fmt: skip
    return out


def _launch(
    weights: list[Tensor], table: Tensor, indices: Tensor, offsets: Tensor, mode: str,
    firsts: Tensor, out: Tensor, slots: Tensor, words: Tensor, rank: int, *,
    WORLD: int, programs: int, order: str, lent: bool = False,
) -> None:  # fmt: skip
    check_dtype(out=out, **{f"weights[{n}]": each for n, each in enumerate(weights)})
    dim = weights[0].shape[1]
    bags, columns, warps = _tile(dim, out.itemsize)
    aligned = dim * out.element_size() % 16 == 0
    aligned = aligned and all(each.data_ptr() % 16 == 0 for each in weights)
    launch(
        _push_bags_kernel, (programs,), out.device,
        table, indices, offsets, out, slots, words, firsts, rank, len(out),
        STRIDE=MAX_PROGRAMS, DIM=dim, MEAN=mode == "mean", ORDER=ORDERS.index(order), LENT=lent,
        ALIGNED=aligned, WORLD=WORLD, BAGS=bags, BLOCK=columns, AHEAD=AHEAD,
        SPIN_LIMIT=SPIN_LIMIT, num_warps=warps, dependent=False,
    )  # fmt: skip


def _tile(dim: int, itemsize: int) -> tuple[int, int, int]:
    """Bags of a tile, its columns, and its warps."""
    columns = min(power_of_2(dim), WIDEST)
    bags = min(max(1, TILE // columns), MOST_BAGS)
    return bags, columns, max(1, bags * columns * itemsize // WARP_BYTES)


def default_programs(weight: Tensor) -> int:
    """The number of programs that was fastest for lookups; an SM has room for more than its share.
    It is the same on all GPUs of a kind."""
    if weight.device.type == "cpu":
        return 3
    warps = _tile(weight.shape[1], weight.itemsize)[2]
    sms = torch.cuda.get_device_properties(weight.device).multi_processor_count
    return min(MAX_PROGRAMS, WARPS[weight.itemsize] // warps * sms)
