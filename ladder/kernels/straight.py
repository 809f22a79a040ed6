"""A product of a decode step whose weights go from memory straight into tensor-core operands.

An instruction multiplies 16 rows of the weight, its first operand, by up to 8 rows of x. It adds up
16 columns, and does not care which: so a lane's 16 bytes of neighbouring columns, as they are
stored, are its operands of two instructions, both of the weight and of x. Nothing passes through
shared memory, and the first step's weights are read before the previous kernel has ended.

Every warp has columns of its own; their sums are added in the order of the warps.
"""

from __future__ import annotations

from typing import no_type_check

from ladder.jit import gdc_wait, jit, tl
from ladder.kernels.landing import _finish


@jit
@no_type_check
def _places(B: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr):
    """Of each 32 neighbouring columns that four lanes read: their row, of B, and the first.

    In an order in which Triton gives 8 rows to a warp's lanes, a split to each warp, and the rest
    to a lane's registers.
    """
    i = tl.arange(0, B * STEPS * SPLITS)
    row = i % 8 + i // (8 * SPLITS) % (B // 8) * 8
    column = (i // 8 % SPLITS * STEPS + i // (B * SPLITS)) * 32
    return row[:, None], column[:, None] + tl.arange(0, 32)[None, :]


@jit
@no_type_check
def _operand(read, B: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr):
    """[split, row, column] of what was read at `_places`: the same registers in the same lanes.

    8 columns of a lane: 2 instructions, of each 2 pairs 8 columns apart.
    """
    read = tl.reshape(read, [STEPS, B // 8, SPLITS, 8, 4, 2, 2, 2])
    read = tl.permute(read, [2, 1, 3, 0, 5, 6, 4, 7])
    return tl.reshape(read, [SPLITS, B, STEPS * 32])


@jit
@no_type_check
def _straight(
    program, x, weight, up, out, squares, add, factor, eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, SPLITS: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight, from 16; MP rows of x, from 8; BK columns a step, SPLITS warps."""
    STEPS: tl.constexpr = BK // (32 * SPLITS)
    row, column = _places(BN, STEPS, SPLITS)
    # Rows beyond the last repeat it, which costs no memory; their results are not stored.
    at = tl.minimum(program * BN + row, N - 1).to(tl.int64) * K + column
    first = (column < K) | (K >= BK)
    # Weights are read once: the L1 cache keeps x.
    w = tl.load(weight + at, mask=first, other=0.0, eviction_policy="evict_first")
    u = w
    if GATED:
        u = tl.load(up + at, mask=first, other=0.0, eviction_policy="evict_first")
    row, x_column = _places(MP, STEPS, SPLITS)
    x_at = tl.minimum(row, M - 1) * K + x_column
    m, n = tl.arange(0, MP)[None, :], program * BN + tl.arange(0, BN)[:, None]
    if PDL:
        gdc_wait()
    if NORM:
        chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
        c = tl.arange(0, CP)[:, None]
        parts = tl.load(squares + m * chunks + c, mask=(m < M) & (c < chunks), other=0)
    total = tl.zeros([SPLITS, BN, MP], tl.float32)
    total_up = tl.zeros([SPLITS, BN, MP], tl.float32)
    for k in tl.static_range(0, K, BK):
        w_next = w
        u_next = u
        if k + BK < K:  # those of the next step are read before this one's are used
            fits = (k + BK + column < K) | (k + 2 * BK <= K)
            w_next = tl.load(weight + at + (k + BK), mask=fits, other=0.0,
                             eviction_policy="evict_first")  # fmt: skip
            if GATED:
                u_next = tl.load(up + at + (k + BK), mask=fits, other=0.0,
                                 eviction_policy="evict_first")  # fmt: skip
        a = tl.load(x + x_at + k, mask=(k + x_column < K) | (k + BK <= K), other=0.0).to(KIND)
        a = tl.permute(_operand(a, MP, STEPS, SPLITS), [0, 2, 1])
        wide = _operand(w.to(KIND), BN, STEPS, SPLITS)
        total = tl.dot(wide, a, total, input_precision="ieee")
        if GATED:
            wide = _operand(u.to(KIND), BN, STEPS, SPLITS)
            total_up = tl.dot(wide, a, total_up, input_precision="ieee")
        w = w_next
        u = u_next
    y = tl.sum(total, 0)
    if NORM:
        scale = tl.rsqrt(tl.sum(parts, 0, keep_dims=True) / K + eps)
        y = y * scale
        if GATED:
            y = y / (1 + tl.exp(-y)) * (tl.sum(total_up, 0) * scale)
    elif GATED:
        y = y / (1 + tl.exp(-y)) * tl.sum(total_up, 0)
    _finish(y, m, n, (m < M) & (n < N), out, add, factor, buffers, start, N, M,
            x.dtype.element_ty, ADD, STORE, PUSH, RANK, WORLD, BITS, EMPTY)  # fmt: skip
