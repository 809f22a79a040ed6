"""Products of few rows of a decode step, whose threads multiply and add."""

from __future__ import annotations

from typing import no_type_check

from ladder.jit import gdc_wait, jit, tl
from ladder.kernels.eight_bits import widened
from ladder.kernels.landing import _finish, _targets
from ladder.kernels.tiles import _block_factors


@jit
@no_type_check
def _product(
    program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    WP: tl.constexpr, CHUNKS: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr,
    GIVES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program of a product: BN rows of the weight."""
    # [row of x, row of the weight, column]: three dimensions give all loads the same layout.
    m = tl.arange(0, MP)[:, None, None]
    n = program * BN + tl.arange(0, BN)[None, :, None]
    columns = tl.arange(0, BK)[None, None, :]
    row = n.to(tl.int64) * K  # heads with 2**31 elements and more exist
    # Weights depend on no other kernel, so those of the first step are read before the wait.
    # (0.0: an integer has no conversion to 8-bit floats.)
    first = (n < N) & ((columns < K) | (K >= BK))
    w = tl.load(weight + row + columns, mask=first, other=0.0)
    u = w
    if GATED:
        u = tl.load(up + row + columns, mask=first, other=0.0)
    if BLOCK > 0:
        blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
        eights = 8 * tl.arange(0, BK // 8)[None, None, :]  # columns
        scale_w = _block_factors(scales, n * blocks, eights // BLOCK, n < N, blocks)
        scale_u = scale_w
        if GATED:
            scale_u = _block_factors(up_scales, n * blocks, eights // BLOCK, n < N, blocks)
    targets = _targets(buffers, PUSH, WORLD, WP, BITS)
    if PDL:
        gdc_wait()
    # A thread sums its 8 neighbouring columns at once: one accumulator per row and not eight.
    total = tl.zeros([MP, BN, BK // 8], tl.float32)
    total_up = tl.zeros([MP, BN, BK // 8], tl.float32)
    for k in tl.static_range(0, K, BK):
        at = k + columns
        fits = (at < K) | (K % BK == 0)
        if k > 0:
            w = tl.load(weight + row + at, mask=fits & (n < N), other=0.0)
            if GATED:
                u = tl.load(up + row + at, mask=fits & (n < N), other=0.0)
            if BLOCK > 0:
                block = (k + eights) // BLOCK
                scale_w = _block_factors(scales, n * blocks, block, n < N, blocks)
                if GATED:
                    scale_u = _block_factors(up_scales, n * blocks, block, n < N, blocks)
        a = tl.load(x + m * K + at, mask=fits & ((m < M) | (M == MP)), other=0).to(tl.float32)
        part = tl.sum(tl.reshape(a * widened(w, tl.float32), [MP, BN, BK // 8, 8]), 3)
        if BLOCK > 0:
            part *= scale_w
        total += part
        if GATED:
            part = tl.sum(tl.reshape(a * widened(u, tl.float32), [MP, BN, BK // 8, 8]), 3)
            if BLOCK > 0:
                part *= scale_u
            total_up += part
    y = tl.sum(total, 2, keep_dims=True)
    inside = (m < M) & (n < N)
    # Row scales read before the products slowed steps of one row in fp8 by 9 %, on one stream. Each
    # is read where it is needed, not both at once as by `_row_scales`: so it was timed.
    SCALED: tl.constexpr = (scales is not None) & (BLOCK == 0)
    if SCALED:
        y = y * tl.load(scales + n, mask=n < N, other=0)
    if NORM:  # read before the products, it slowed steps of a 70B of two rows by 1 to 2 %
        c = tl.arange(0, CP)[None, None, :]
        parts = tl.load(squares + m * CHUNKS + c, mask=(m < M) & (c < CHUNKS), other=0)
        scale = tl.rsqrt(tl.sum(parts, 2, keep_dims=True) / K + eps)
        y = y * scale
    if GATED:
        y_up = tl.sum(total_up, 2, keep_dims=True)
        if NORM:
            y_up = y_up * scale
        if SCALED:
            y_up = y_up * tl.load(up_scales + n, mask=n < N, other=0)
        y = y / (1 + tl.exp(-y)) * y_up
    _finish(y, m, n, inside, out, add, factor, targets, start, N, M, GIVES, ADD, STORE, PUSH,
            RANK, WORLD, WP, BITS, EMPTY)  # fmt: skip
