"""A product of a decode step whose weights go from memory straight into tensor-core operands.

An instruction multiplies 16 rows of the weight, its first operand, by up to 8 rows of x. It adds up
16 columns, and does not care which: so a lane's 16 bytes of neighbouring columns, as they are
stored, are its operands of two instructions, both of the weight and of x. Nothing passes through
shared memory, and the first two steps' weights are read before the previous kernel has ended.

Every warp has columns of its own; their sums are added in the order of the warps. What is read
stays in words of two columns until it is multiplied: Triton keeps each 16-bit number that a loop
carries in a register of its own.
"""

from __future__ import annotations

from typing import no_type_check

from ladder.jit import gdc_wait, jit, tl
from ladder.kernels.landing import _finish


@jit
@no_type_check
def _places(B: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr):
    """Of each 16 neighbouring words that four lanes read: their row, of B, and where they are.

    A word is two columns. In an order in which Triton gives 8 rows to a warp's lanes, a split to
    each warp, and the rest to a lane's registers.
    """
    i = tl.arange(0, B * STEPS * SPLITS)
    row = i % 8 + i // (8 * SPLITS) % (B // 8) * 8
    word = (i // 8 % SPLITS * STEPS + i // (B * SPLITS)) * 16
    return row[:, None], word[:, None] + tl.arange(0, 16)[None, :]


@jit
@no_type_check
def _operand(words, B: tl.constexpr, STEPS: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr,
             WIDE: tl.constexpr):  # fmt: skip
    """[split, row, column] of what was read at `_places`: the same registers in the same lanes.

    A lane's first two words are its operand of one instruction, the other two of the next.
    """
    low = words.to(tl.int16).to(KIND, bitcast=True)
    high = (words >> 16).to(tl.int16).to(KIND, bitcast=True)
    columns = tl.reshape(tl.join(low, high), [STEPS, B // 8, SPLITS, 8, 4, 2, 2, 2])
    columns = tl.permute(columns, [2, 1, 3, 0, 5, 4, 6, 7])
    return tl.reshape(columns, [SPLITS, B, STEPS * 32]).to(WIDE)


@jit
@no_type_check
def _weights(matrix, at, k, word, K: tl.constexpr, BK: tl.constexpr):
    """Words of the step from word k on. They are read once: the L1 cache keeps x."""
    inside = (k + word < K // 2) | (K % (2 * BK) == 0)
    words = matrix.to(tl.pointer_type(tl.int32))
    return tl.load(words + at + k, mask=inside, other=0, eviction_policy="evict_first")


@jit
@no_type_check
def _rows(x, at, k, word, K: tl.constexpr, BK: tl.constexpr):
    inside = (k + word < K // 2) | (K % (2 * BK) == 0)
    return tl.load(x.to(tl.pointer_type(tl.int32)) + at + k, mask=inside, other=0)


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
    STEP: tl.constexpr = BK // 2  # words
    KIND_X: tl.constexpr = x.dtype.element_ty
    row, word = _places(BN, STEPS, SPLITS)
    # Rows beyond the last repeat it, which costs no memory; their results are not stored.
    at = tl.minimum(program * BN + row, N - 1).to(tl.int64) * (K // 2) + word
    # Two steps take turns: one is read while the other is multiplied. Registers that are never
    # used, such as u0 without GATED, are not there.
    w0 = _weights(weight, at, 0, word, K, BK)
    u0 = w0
    if GATED:
        u0 = _weights(up, at, 0, word, K, BK)
    w1 = w0
    u1 = w0
    if K > BK:
        w1 = _weights(weight, at, STEP, word, K, BK)
        if GATED:
            u1 = _weights(up, at, STEP, word, K, BK)
    row, x_word = _places(MP, STEPS, SPLITS)
    x_at = tl.minimum(row, M - 1) * (K // 2) + x_word
    m, n = tl.arange(0, MP)[None, :], program * BN + tl.arange(0, BN)[:, None]
    if PDL:
        gdc_wait()
    a0 = _rows(x, x_at, 0, x_word, K, BK)
    a1 = a0
    if K > BK:
        a1 = _rows(x, x_at, STEP, x_word, K, BK)
    if NORM:
        chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
        c = tl.arange(0, CP)[:, None]
        parts = tl.load(squares + m * chunks + c, mask=(m < M) & (c < chunks), other=0)
    total = tl.zeros([SPLITS, BN, MP], tl.float32)
    total_up = tl.zeros([SPLITS, BN, MP], tl.float32)
    # A loop that the compiler cannot unroll (N is at least 1): else it puts loads between the
    # instructions that wait for the loads before, and each pays the memory's latency.
    for k in tl.range(0, tl.minimum(N, 1) * (K // 2), 2 * STEP, num_stages=1):
        b = tl.permute(_operand(a0, MP, STEPS, SPLITS, KIND_X, KIND), [0, 2, 1])
        wide = _operand(w0, BN, STEPS, SPLITS, KIND_X, KIND)
        total = tl.dot(wide, b, total, input_precision="ieee")
        if GATED:
            wide = _operand(u0, BN, STEPS, SPLITS, KIND_X, KIND)
            total_up = tl.dot(wide, b, total_up, input_precision="ieee")
        if K > 2 * BK:  # noqa: SIM102  (known when this is compiled)
            if k + 2 * STEP < K // 2:
                a0 = _rows(x, x_at, k + 2 * STEP, x_word, K, BK)
                w0 = _weights(weight, at, k + 2 * STEP, word, K, BK)
                if GATED:
                    u0 = _weights(up, at, k + 2 * STEP, word, K, BK)
        if K > BK:
            b = tl.permute(_operand(a1, MP, STEPS, SPLITS, KIND_X, KIND), [0, 2, 1])
            wide = _operand(w1, BN, STEPS, SPLITS, KIND_X, KIND)
            total = tl.dot(wide, b, total, input_precision="ieee")
            if GATED:
                wide = _operand(u1, BN, STEPS, SPLITS, KIND_X, KIND)
                total_up = tl.dot(wide, b, total_up, input_precision="ieee")
        if K > 2 * BK:  # noqa: SIM102
            if k + 2 * STEP < K // 2:
                a1 = _rows(x, x_at, k + 3 * STEP, x_word, K, BK)
                w1 = _weights(weight, at, k + 3 * STEP, word, K, BK)
                if GATED:
                    u1 = _weights(up, at, k + 3 * STEP, word, K, BK)
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
