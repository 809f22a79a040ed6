"""A product of 3 to 64 rows of a decode step in tiles, by tensor cores, through shared memory."""

from __future__ import annotations

from typing import no_type_check

from ladder.jit import gdc_wait, jit, tl
from ladder.kernels.eight_bits import widened
from ladder.kernels.landing import _finish


@jit
@no_type_check
def _block_scales(scales, n, block, N, blocks: tl.constexpr):
    """The scales of blocks of rows n, of which only float32's exponents are stored."""
    inside = (n < N) & (block < blocks)
    bits = tl.load(scales + n * blocks + block, mask=inside, other=127).to(tl.int32)
    return (bits << 23).to(tl.float32, bitcast=True)


@jit
@no_type_check
def _bring(matrix, rows, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Bring the first COLUMNS of `rows` [BN, 1], which begin there, into the L2 cache."""
    LINE: tl.constexpr = 128 // (matrix.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.minimum(tl.arange(0, COLUMNS // LINE) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [matrix + rows + columns[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
@no_type_check
def _tile(
    program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of the weight, of up to BN, in steps of BK columns; STAGES in shared memory."""
    m, n = tl.arange(0, MP)[:, None], program * ROWS + tl.arange(0, BN)[None, :]
    end = tl.minimum(N, (program + 1) * ROWS)
    columns = tl.arange(0, BK)
    rows = tl.trans(n).to(tl.int64) * K  # [BN, 1]
    total = tl.zeros([MP, BN], tl.float32)
    total_up = tl.zeros([MP, BN], tl.float32)
    if BLOCK > 0:  # those of a step are read in the step before
        blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
        scale_w = _block_scales(scales, n, 0, N, blocks)
        scale_u = scale_w
        if GATED:
            scale_u = _block_scales(up_scales, n, 0, N, blocks)
    if PDL:
        if EARLY > 0:
            own = tl.minimum(tl.trans(n), end - 1).to(tl.int64) * K
            _bring(weight, own, K, EARLY * BK)
            if GATED:
                _bring(up, own, K, EARLY * BK)
        gdc_wait()
    if NORM:  # read here, so that nothing waits for it at the end
        chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
        c = tl.arange(0, CP)[None, :]
        parts = tl.load(squares + m * chunks + c, mask=(m < M) & (c < chunks), other=0)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        at = k + columns[None, :]
        fits = (at < K) | (K % BK == 0)
        a = tl.load(x + m * K + at, mask=fits & ((m < M) | (M == MP)), other=0).to(KIND)
        w = tl.load(weight + rows + at, mask=fits & (tl.trans(n) < end), other=0.0)
        w = widened(w, KIND)
        if BLOCK == 0:
            total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
        else:  # a step is a block
            part = tl.dot(a, tl.trans(w), input_precision="ieee")
            total += part * scale_w
            scale_w = _block_scales(scales, n, k // BLOCK + 1, N, blocks)
        if GATED:
            u = tl.load(up + rows + at, mask=fits & (tl.trans(n) < end), other=0.0)
            u = widened(u, KIND)
            if BLOCK == 0:
                total_up = tl.dot(a, tl.trans(u), total_up, input_precision="ieee")
            else:
                part = tl.dot(a, tl.trans(u), input_precision="ieee")
                total_up += part * scale_u
                scale_u = _block_scales(up_scales, n, k // BLOCK + 1, N, blocks)
    y = total
    if (scales is not None) & (BLOCK == 0):
        y = y * tl.load(scales + n, mask=n < end, other=0)
    if (up_scales is not None) & (BLOCK == 0):
        total_up = total_up * tl.load(up_scales + n, mask=n < end, other=0)
    if NORM:
        scale = tl.rsqrt(tl.sum(parts, 1, keep_dims=True) / K + eps)
        y = y * scale
        total_up = total_up * scale
    if GATED:
        y = y / (1 + tl.exp(-y)) * total_up
    _finish(y, m, n, (m < M) & (n < end), out, add, factor, buffers, start, N, M,
            x.dtype.element_ty, ADD, STORE, PUSH, RANK, WORLD, BITS, EMPTY)  # fmt: skip
