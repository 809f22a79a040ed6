"""A persistent matrix product that can wait for rows, count its tiles, and add the peers' tiles.

As many programs as the GPU runs at once take tile after tile, in an order that the host gives.
Three things can be added, each compiled in only where it is used:

- *Waiting* (`Arrivals`): the rows lie in shards, which peers or copy engines bring. Before a tile
  of a shard, a program waits for the shard's flag (an acquire: `ladder.comm.primitives.wait`).
- *Tracking* (`Track`): a tile goes to the place that a table names, in own memory or a peer's, and
  then counts itself (a release in the scope of the system), so that a copy engine can wait until a
  block of tiles is full. The tables are those of `ladder.ops.track`.
- *Adding* (`Addition`): the tiles of one shard, the last in the order, wait for the peers' partials
  of these tiles, and are stored as the sum over the ranks.

A rank's rows are `shards` pieces of equal length, and a tile has rows of one piece only, whatever
the length: what lies beyond a piece, or beyond the columns, is computed but not written.

Operands are read by TMA where possible (compute capability 9, rows at multiples of 16 bytes),
otherwise by plain loads. Products are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import SPIN_LIMIT, arrive, average, load, peer, put_tile, wait
from ladder.jit import begin, jit, kernel, launch, multiplied, multiprocessors, on_triton, tl
from ladder.kernels.slots import SlotArrivals
from ladder.models.errors import UserError

GEMM_DTYPES = (torch.bfloat16, torch.float16)
GROUP = 8  # rows of tiles that a product computes column by column, so that both inputs stay in L2


@dataclass(frozen=True)
class Tiling:
    """The shape of a tile, rows x columns, in steps of `depth` columns of the first operand.

    stages: steps in flight. halves: the tile is rounded and written in two halves of its columns,
    which takes fewer registers. group_m: see GROUP; for the order of tiles alone.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    stages: int = 4
    warps: int = 8
    halves: bool = True
    group_m: int = GROUP


@dataclass(frozen=True)
class Arrivals:
    """Shards that come while the product runs: shard q's rows are there when flags[q] is 1.

    flags: int32 [shards], of this rank's memory. rank: the shard that is not waited for, since it
    is this rank's own.
    """

    flags: Tensor
    rank: int


@dataclass(frozen=True)
class Track:
    """Where tiles go, and what they count: tables of a Program of `ladder.ops.track`.

    target, counter, chunk: int32 [tiles]. owner: int32 [chunks], the rank that gets a chunk.
    bases: int64 [ranks], the address of each rank's slots, one matrix of all slots' rows. counters:
    int64 [ranks], the address of each rank's counters, which are int32.
    """

    target: Tensor
    counter: Tensor
    chunk: Tensor
    owner: Tensor
    bases: Tensor
    counters: Tensor


@dataclass(frozen=True)
class Addition:
    """A shard of the product that is summed over the ranks, as the others' partials arrive.

    out: [rows of a shard, N], where the sum goes. slots: this rank's, [ranks, rows, N]; its own
    part is not read, and each part is dense. arrivals: of the slots. rank: this rank, and the index
    of its shard. average: the sum is divided by the ranks.
    """

    out: Tensor
    slots: Tensor
    arrivals: SlotArrivals
    rank: int
    average: bool = False


def gemm_reference(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype)


@jit
@no_type_check
def _put(
    matrix, part, row, column, end, N, addend, line, slots, stride, own, rank,
    ADDEND: tl.constexpr, ADDS: tl.constexpr, AVERAGE: tl.constexpr, WORLD: tl.constexpr,
):  # fmt: skip
    """Store a part of a tile at (row, column); an `own` one as the sum with the others' partials.

    addend: a matrix whose rows from `line` on are added to the part. The sum is in the order of the
    ranks, of rounded partials, as that of `ladder.kernels.slots.sum_slots`.
    """
    kind: tl.constexpr = matrix.dtype.element_ty
    if ADDEND or ADDS:
        i, n = tl.arange(0, part.shape[0]), column + tl.arange(0, part.shape[1])
        inside = (row + i < end)[:, None] & (n < N)[None, :]
    if ADDEND:
        at = (line + i).to(tl.int64)[:, None] * N + n[None, :]
        part += tl.load(addend + at, mask=inside, other=0).to(tl.float32)
    if ADDS:
        at = (row + i).to(tl.int64)[:, None] * N + n[None, :]
        mine = part.to(kind).to(tl.float32)
        total = tl.zeros(part.shape, tl.float32)
        for q in tl.static_range(WORLD):
            theirs = load(slots + at, inside & own & (q != rank), 0).to(tl.float32)
            total += tl.where(q == rank, mine, theirs)
            slots += stride
        if AVERAGE:
            total = average(total, WORLD)
        part = tl.where(own, total, part)
    put_tile(matrix, part, row, column, end, N, N)


@kernel("both")
@no_type_check
def _gemm_kernel(
    a, b, out,  # descriptors of a and b with TMA, else pointers
    order,  # int32 [count]
    flags, rank, target, counter, chunk, owner, bases, counters,
    addend, total_out, slots, table, piece, stride,
    rows,  # of a shard
    count, tiles, N, K, a_stride, b_stride, last,  # a's rows, of all shards
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALVES: tl.constexpr,
    TMA: tl.constexpr, TURNED: tl.constexpr, WAITS: tl.constexpr, TRACKS: tl.constexpr,
    ADDEND: tl.constexpr, ADDS: tl.constexpr, AVERAGE: tl.constexpr, WORLD: tl.constexpr,
    KIND: tl.constexpr, SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """TURNED: b is [N, K] in memory, as a weight of nn.Linear; otherwise [K, N]."""
    begin(PDL)
    across = tl.cdiv(N, BN)
    high = tl.cdiv(rows, BM)  # rows of tiles of a shard
    seen = -1  # the piece of the own shard that was waited for last
    # As one loop over the steps of all tiles, the first loads of a tile overlap with the end of the
    # one before. Its rows are loaded after its wait: both are what a tile begins with.
    for at in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):
        tile = tl.load(order + at)
        line = tile // across
        column = tile % across * BN
        shard = line // high
        row = shard * rows + line % high * BM
        if WAITS:  # noqa: SIM102  (known when this is compiled; `shard` is not)
            if shard != rank:
                wait(flags + shard, 1, SPIN_LIMIT, TMA)
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            if TMA:
                x = a.load([row, k])
                y = tl.trans(b.load([column, k])) if TURNED else b.load([k, column])
            else:
                m, i = row + tl.arange(0, BM), k + tl.arange(0, BK)
                n = column + tl.arange(0, BN)
                place = m.to(tl.int64)[:, None] * a_stride + i[None, :]
                # Past L1: other GPUs may have written these rows.
                x = tl.load(a + place, mask=(m < last)[:, None] & (i < K)[None, :], other=0,
                            cache_modifier=".cg")  # fmt: skip
                if TURNED:
                    place = n.to(tl.int64)[None, :] * b_stride + i[:, None]
                else:
                    place = i.to(tl.int64)[:, None] * b_stride + n[None, :]
                y = tl.load(b + place, mask=(i < K)[:, None] & (n < N)[None, :], other=0)
            # Rows behind the shard may not have arrived: they reach no row that is written.
            total = tl.dot(x.to(KIND), y.to(KIND), total, input_precision="ieee")
        matrix = out
        begins = row  # before the tile goes elsewhere
        if TRACKS:
            to = tl.load(owner + tl.load(chunk + tile))
            position = tl.load(target + tile)
            away = position >= tiles  # to a slot, and not to the place in the own product
            line = tl.where(away, position - tiles, position) // across
            shard = line // high
            row = shard * rows + line % high * BM
            # A choice of addresses, not of branches, keeps the stores below one piece of code.
            address = tl.where(away, tl.load(bases + to), out.to(tl.int64))
            matrix = tl.multiple_of(address.to(tl.pointer_type(out.dtype.element_ty)), 16)
        end = (shard + 1) * rows
        own = shard == rank
        if ADDS:
            now = line % high * BM // piece
            if own & (now != seen):  # a poll of each piece, not of each tile
                for q in tl.static_range(WORLD):
                    flag = tl.load(table + now * WORLD + q)
                    if flag >= 0:
                        wait(flags + flag, 1, SPIN_LIMIT)
                seen = now
            row = tl.where(own, line % high * BM, row)
            end = tl.where(own, rows, end)
            address = tl.where(own, total_out.to(tl.int64), matrix.to(tl.int64))
            matrix = tl.multiple_of(address.to(tl.pointer_type(out.dtype.element_ty)), 16)
        if HALVES:
            halves = tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _put(matrix, left, row, column, end, N, addend, begins, slots, stride, own, rank,
                 ADDEND, ADDS, AVERAGE, WORLD)  # fmt: skip
            _put(matrix, right, row, column + BN // 2, end, N, addend, begins, slots, stride, own,
                 rank, ADDEND, ADDS, AVERAGE, WORLD)  # fmt: skip
        else:
            _put(matrix, total, row, column, end, N, addend, begins, slots, stride, own, rank,
                 ADDEND, ADDS, AVERAGE, WORLD)  # fmt: skip
        if TRACKS:
            arrive(peer(counters, to, tl.int32) + tl.load(counter + tile), -1, "sys")


def tiles_of(m: int, n: int, shards: int, tiling: Tiling) -> tuple[int, int]:
    """Rows and columns of tiles of a product of m x n, m in equal shards."""
    return shards * -(-(m // shards) // tiling.rows), -(-n // tiling.columns)


def _readable(matrix: Tensor) -> tuple[Tensor, bool]:
    """The matrix, or a copy, and whether its columns and not its rows lie densely."""
    if matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]:
        return matrix, False
    if matrix.stride(0) == 1 and matrix.stride(1) >= matrix.shape[0]:
        return matrix.t(), True
    return matrix.contiguous(), False


def has_tma(*matrices: Tensor) -> bool:
    """Whether TMA can read them: it needs rows at multiples of 16 bytes, and a Hopper GPU."""
    cuda = [each.device for each in matrices if each.is_cuda]
    if any(torch.cuda.get_device_capability(device) < (9, 0) for device in cuda):
        return False
    return all(
        each.data_ptr() % 16 == 0 and each.stride(0) * each.element_size() % 16 == 0
        for each in matrices
    )


@torch.no_grad()
def gemm(
    a: Tensor, b: Tensor, order: Tensor, *, tiling: Tiling | None = None, shards: int = 1,
    out: Tensor | None = None, arrivals: Arrivals | None = None, track: Track | None = None,
    addition: Addition | None = None, addend: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """a [M, K] times b [K, N]: [M, N], bfloat16 or float16, accumulated in float32.

    order: int32 on a's device, the tiles in the order in which they are computed, all or some; tile
    i is in row i // columns of tiles, where each of the `shards` equal pieces of the rows has rows
    of tiles of its own (`tiles_of`). out: a contiguous [M, N] for the result. arrivals, track,
    addition: see their classes; with `track`, tiles that go to slots are not in the result, nor are
    those of the shard that is summed with `addition`. addend: contiguous [M, N], added to the
    product before it is rounded. Not differentiable.
    """
    tiling = tiling or Tiling()
    (m, size), n = a.shape, b.shape[1]
    down, across = tiles_of(m, n, shards, tiling)
    _check(a, b, order, down * across, shards, out)
    if not on_triton(a):
        assert arrivals is None, "only GPUs share memory"
        assert track is None, "only GPUs share memory"
        assert addition is None, "only GPUs share memory"
        assert addend is None, "for overlapped products"
        found = gemm_reference(a, b)
        return found if out is None else out.copy_(found)
    if out is None:
        out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if a.stride(1) != 1 or a.stride(0) < size:
        assert arrivals is None, "a copy of what has not arrived"
        a = a.contiguous()
    b, turned = _readable(b)
    tma = has_tma(a, b)
    first, second = a, b
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        block = [tiling.columns, tiling.depth] if turned else [tiling.depth, tiling.columns]
        first = TensorDescriptor.from_tensor(a, [tiling.rows, tiling.depth])
        second = TensorDescriptor.from_tensor(b, block)
    one = order  # an address for what is not used
    named = ("target", "counter", "chunk", "owner", "bases", "counters")
    tables: list[Any] = [one if track is None else getattr(track, name) for name in named]
    tables.append(out if addend is None else addend)
    flags, rank = (one, -1) if arrivals is None else (arrivals.flags, arrivals.rank)
    if addition is None:
        tables += [out, out, one, 1, 0]
    else:
        assert arrivals is None, "rows that arrive, and tiles that do"
        slots, parts = addition.slots, addition.arrivals
        assert slots.shape[1:] == (m // shards, n), tuple(slots.shape)
        assert slots[0].is_contiguous()
        assert addition.out.is_contiguous()
        flags, rank = parts.flags, addition.rank
        tables += [addition.out, slots, parts.table, parts.rows, slots.stride(0)]
    # What a tile adds goes through shared memory. An addend takes as much as a stage, and so do the
    # peers' partials if their rows are no multiples of 32 bytes: then one stage less fits.
    more = addend is not None or (addition is not None and n % 16 > 0)
    stages = tiling.stages - (more and tiling.stages > 2)
    # The interpreter has no products of 16 bits.
    kind = multiplied(a.dtype)
    launch(
        _gemm_kernel, (min(len(order), multiprocessors(a.device, 3)),), a.device,
        first, second, out, order, flags, rank, *tables,
        m // shards, len(order), down * across, n, size, a.stride(0), b.stride(0), m,
        BM=tiling.rows, BN=tiling.columns, BK=tiling.depth, HALVES=tiling.halves,
        TMA=tma, TURNED=turned, WAITS=arrivals is not None, TRACKS=track is not None,
        ADDEND=addend is not None, ADDS=addition is not None,
        AVERAGE=addition is not None and addition.average,
        WORLD=1 if addition is None else len(addition.slots), KIND=kind, SPIN_LIMIT=SPIN_LIMIT,
        num_warps=tiling.warps, num_stages=stages, dependent=False,
    )  # fmt: skip
    return out


def _check(
    a: Tensor, b: Tensor, order: Tensor, tiles: int, shards: int, out: Tensor | None
) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or 0 in (*a.shape, *b.shape):
        raise UserError(f"shapes {list(a.shape)}, {list(b.shape)}; expected [M, K] and [K, N]")
    if a.dtype not in GEMM_DTYPES or b.dtype != a.dtype:
        raise UserError(f"dtypes {a.dtype}, {b.dtype}; expected bfloat16 or float16 for both")
    if a.shape[0] % shards:
        raise UserError(f"{a.shape[0]} rows in {shards} shards; expected shards of equal length")
    if order.dtype != torch.int32 or order.dim() != 1 or not 1 <= len(order) <= tiles:
        raise UserError(
            f"order is {order.dtype} {list(order.shape)}; expected int32 [{tiles}], or fewer"
        )
    if out is not None and (tuple(out.shape) != (a.shape[0], b.shape[1]) or out.dtype != a.dtype):
        raise UserError(
            f"out is {out.dtype} {list(out.shape)}; expected {a.dtype} [{a.shape[0]}, {b.shape[1]}]"
        )
    assert out is None or out.is_contiguous()
