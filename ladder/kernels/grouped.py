"""Each expert's rows by its matrix, stored straight at the ranks that own the rows: one kernel.

A persistent product as `ladder.kernels.gemm`, whose tiles are those of the experts' rows. How many
rows an expert has is known on the device only: every program finds its tiles from the offsets. A
tile's rows go where `ladder.kernels.rows.place` says, which runs before; `receive_rows` follows.

Operands are read by TMA where possible; products are accumulated in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any, no_type_check

from torch import Tensor

from ladder.comm.primitives import SPIN_LIMIT, peer, store
from ladder.comm.symmetric import SymmetricTensor
from ladder.jit import begin, jit, kernel, launch, multiplied, multiprocessors, tl, triton
from ladder.kernels.gemm import Tiling, has_tma
from ladder.kernels.rows import await_open, hand_over, piece_of


@jit
@no_type_check
def _put_rows(target, tile, sent, column, N, KIND: tl.constexpr):
    """Store the columns from `column` on of each row that is sent, at its address."""
    n = column + tl.arange(0, tile.shape[1])
    store(target + n[None, :], tile.to(KIND), sent[:, None] & (n < N)[None, :])


@kernel("both")
@no_type_check
def _grouped_push_kernel(
    a, b,  # descriptors with TMA, else pointers: [m, K], and all experts' matrices
    offsets,  # [experts + 1]
    places, owners, out, slots, words, counter, counts, overflow, rank,
    m, experts, N, K, a_stride, b_stride, b_rows, capacity,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    HALVES: tl.constexpr, TMA: tl.constexpr, TURNED: tl.constexpr, KIND: tl.constexpr,
    ALIGN: tl.constexpr, WORLD: tl.constexpr, SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """b_rows: one expert's rows in b as a matrix: K, or N if TURNED ([experts, N, K] in memory)."""
    begin(PDL)
    kind: tl.constexpr = out.dtype.element_ty
    await_open(peer(words, rank, tl.int32), rank, WORLD, SPIN_LIMIT)
    e = tl.arange(0, EXPERTS)
    # Offsets beyond the rows, which the host does not know, must not reach `places` or an owner.
    firsts = tl.load(offsets + e, mask=e < experts, other=0)
    firsts = tl.maximum(tl.minimum(firsts, m), 0).to(tl.int32)
    lasts = tl.load(offsets + e + 1, mask=e < experts, other=0)
    lasts = tl.maximum(tl.minimum(lasts, m), 0).to(tl.int32)
    across = tl.cdiv(N, BN)
    tiles = tl.cdiv(tl.maximum(lasts - firsts, 0), BM) * across  # of each expert
    ends = tl.cumsum(tiles, axis=0)
    for at in tl.range(tl.program_id(0), tl.sum(tiles), tl.num_programs(0)):
        expert = tl.sum((ends <= at).to(tl.int32))
        tile = at - tl.max(tl.where(ends <= at, ends, 0))
        end = tl.sum(tl.where(e == expert, lasts, 0))
        row = tl.sum(tl.where(e == expert, firsts, 0)) + tile // across * BM
        column = tile % across * BN
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(0, K, BK):
            if TMA:
                x = a.load([row, k])
                if TURNED:
                    y = tl.trans(b.load([expert * b_rows + column, k]))
                else:
                    y = b.load([expert * b_rows + k, column])
            else:
                i, j = row + tl.arange(0, BM), k + tl.arange(0, BK)
                n = column + tl.arange(0, BN)
                place = i.to(tl.int64)[:, None] * a_stride + j[None, :]
                x = tl.load(a + place, mask=(i < m)[:, None] & (j < K)[None, :], other=0)
                first = expert.to(tl.int64) * b_rows
                if TURNED:
                    place = (first + n)[None, :] * b_stride + j[:, None]
                else:
                    place = (first + j)[:, None] * b_stride + n[None, :]
                y = tl.load(b + place, mask=(j < K)[:, None] & (n < N)[None, :], other=0)
            total = tl.dot(x.to(KIND), y.to(KIND), total, input_precision="ieee")
        i = row + tl.arange(0, BM)
        at_owner = tl.load(places + i, mask=i < end, other=-1)
        sent = at_owner >= 0
        to = tl.load(owners + i, mask=sent, other=0)
        address = piece_of(slots, rank, to, out, capacity, N, sent, 2)
        address += at_owner.to(tl.int64) * N * 2
        target = tl.multiple_of(address.to(tl.pointer_type(kind))[:, None], [ALIGN, ALIGN])
        if HALVES:
            halves = tl.permute(tl.reshape(total, (BM, 2, BN // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            _put_rows(target, left, sent, column, N, kind)
            _put_rows(target, right, sent, column + BN // 2, N, kind)
        else:
            _put_rows(target, total, sent, column, N, kind)
    hand_over(counter, words, rank, counts, overflow, capacity, WORLD, True)


def grouped_push(
    h: Tensor, W: Tensor, offsets: Tensor, places: Tensor, owners: Tensor, out: Tensor,
    counts: Tensor, overflow: Tensor, slots: SymmetricTensor, words: SymmetricTensor,
    counter: Tensor, tiling: Tiling,
) -> None:  # fmt: skip
    """Multiply rows offsets[e] to offsets[e + 1] - 1 of h by W[e], and store each at its owner.

    h: [m, k], W: [experts, k, n], bfloat16 or float16. The rest: see `push_rows`; out: [T,
    capacity, n].
    """
    experts, size, n = W.shape
    assert h.dtype.itemsize == 2, h.dtype  # as the kernel's addresses count
    h = h.contiguous()
    turned = W.stride(1) == 1 and W.transpose(1, 2).is_contiguous()
    flat = (W.transpose(1, 2) if turned else W.contiguous()).flatten(0, 1)
    # A tile's depth must not reach into the next expert's matrix, whose numbers may be infinite.
    tma = len(h) > 0 and has_tma(h, flat) and (turned or size % tiling.depth == 0)
    first: Any = h
    second: Any = flat
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        block = [tiling.columns, tiling.depth] if turned else [tiling.depth, tiling.columns]
        first = TensorDescriptor.from_tensor(h, [tiling.rows, tiling.depth])
        second = TensorDescriptor.from_tensor(flat, block)
    kind = multiplied(h.dtype)
    launch(
        _grouped_push_kernel, (multiprocessors(h.device, 3),), h.device,
        first, second, offsets.contiguous(), places, owners.contiguous(), out, slots.addresses,
        words.addresses, counter, counts, overflow, words.rank, len(h), experts, n, size,
        h.stride(0), flat.stride(0), n if turned else size, out.shape[1],
        EXPERTS=triton.next_power_of_2(experts), BM=tiling.rows, BN=tiling.columns,
        BK=tiling.depth, HALVES=tiling.halves, TMA=tma, TURNED=turned, KIND=kind,
        ALIGN=16 if n % 8 == 0 else 2, WORLD=len(out), SPIN_LIMIT=SPIN_LIMIT,
        num_warps=tiling.warps, num_stages=tiling.stages, dependent=False,
    )  # fmt: skip
