"""Products of 2 to 64 rows of a decode step in tiles, by tensor cores, through shared memory."""

from __future__ import annotations

from typing import no_type_check

from ladder.comm.primitives import arrive
from ladder.jit import gdc_wait, jit, tl
from ladder.kernels.eight_bits import power, widened
from ladder.kernels.landing import _finish, _targets
from ladder.kernels.pieces import low_factor


@jit
@no_type_check
def _block_scales(scales, rows, block, inside, blocks: tl.constexpr):
    """The scales of a block of each row, as they are stored: exponents, for `power`. rows: where
    each row's `blocks` scales begin."""
    return tl.load(scales + rows + block, mask=inside & (block < blocks), other=127)


@jit
@no_type_check
def _block_factors(scales, rows, block, inside, blocks: tl.constexpr):
    """`_block_scales` as factors. Loops of tiles, which are not unrolled, carry the exponents:
    else a step's end waits for a load. Threads' products take 3 % longer so."""
    return power(_block_scales(scales, rows, block, inside, blocks).to(tl.int32))


@jit
@no_type_check
def _step_scales(
    scales, rows, first, inside, blocks: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """`_block_scales` of COUNT blocks from `first` on: one or two."""
    one = _block_scales(scales, rows, first, inside, blocks)
    other = one
    if COUNT == 2:
        other = _block_scales(scales, rows, first + 1, inside, blocks)
    return one, other


@jit
@no_type_check
def _bring(matrix, rows, first, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Bring COLUMNS of some rows, from `first` on, into the L2 cache. rows: [BN, 1], where they
    begin."""
    LINE: tl.constexpr = 128 // (matrix.dtype.element_ty.primitive_bitwidth // 8)
    columns = tl.minimum(first + tl.arange(0, COLUMNS // LINE) * LINE, K - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [matrix + rows + columns[None, :]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
@no_type_check
def _bring_first(
    program, first, weight, up, N, K: tl.constexpr, BN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """`_bring` for a tile's rows, of both weights if GATED; see `_tile`."""
    if COLUMNS > 0:
        end = tl.minimum(N, (program + 1) * ROWS)
        n = program * ROWS + tl.arange(0, BN)[:, None]
        own = tl.minimum(n, end - 1).to(tl.int64) * K
        _bring(weight, own, first, K, COLUMNS)
        if GATED:
            _bring(up, own, first, K, COLUMNS)


@jit
@no_type_check
def _halves(both, MP: tl.constexpr, BN: tl.constexpr):
    """[MP, 2 BN] as two [MP, BN]."""
    return tl.split(tl.permute(tl.reshape(both, [MP, 2, BN]), (0, 2, 1)))


@jit
@no_type_check
def _row_scales(scales, up_scales, n, end, GATED: tl.constexpr, SCALED: tl.constexpr):
    """The scales of rows n of both weights; 1 for weights without scales."""
    own, of_up = 1.0, 1.0
    if SCALED:
        own = tl.load(scales + n, mask=n < end, other=0)
        if GATED:
            of_up = tl.load(up_scales + n, mask=n < end, other=0)
    return own, of_up


@jit
@no_type_check
def _scaled(
    y, y_up, own, of_up, norm, GATED: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr
):
    """The sums times `_row_scales` and the norm's factor; if GATED, both as one result."""
    if SCALED:
        y = y * own
        y_up = y_up * of_up
    if NORM:
        y = y * norm
        y_up = y_up * norm
    if GATED:
        y = y / (1 + tl.exp(-y)) * y_up
    return y


@jit
@no_type_check
def _steps(share, K: tl.constexpr, BK: tl.constexpr, SHARES: tl.constexpr):
    """The first step of a share of the columns, and the one after its last."""
    STEPS: tl.constexpr = (K + BK - 1) // BK
    EACH: tl.constexpr = (STEPS + SHARES - 1) // SHARES
    first, end = share * EACH, (share + 1) * EACH
    if SHARES > 1:
        end = tl.minimum(end, STEPS)
    return first, end


@jit
@no_type_check
def _whole(
    total, sums, arrived, program, share, MP: tl.constexpr, TILE: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """The sum of all shares of a tile, [MP, TILE], and whether this program has it: the last one to
    arrive, which adds them in their order. total: this program's share. sums, arrived: see
    `ladder.kernels.decode.project`."""
    own = sums + (program * SHARES).to(tl.int64) * (MP * TILE)
    at = tl.arange(0, MP)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(own + share * (MP * TILE) + at, total)
    last = arrive(arrived + program, SHARES, "gpu")
    whole = tl.zeros([MP, TILE], tl.float32)
    if last:
        tl.store(arrived + program, 0)
        for i in tl.static_range(SHARES):
            whole += tl.load(own + i * (MP * TILE) + at, cache_modifier=".cg")
    return whole, last


@jit
@no_type_check
def _tile(
    program, share, x, weight, up, scales, up_scales, sums, arrived, out, squares, add, factor, eps,
    buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    CHUNKS: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, GIVES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    SWAP: tl.constexpr, ALIGN: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows of the weight, up to BN, in steps of BK columns; STAGES in shared memory.

    GATED: the rows of `up` follow in the same tile. PARTS: the columns of a step are in so many
    parts, each for one warp, which multiplies all rows by them; 1: a warp has some rows, and all
    columns. SWAP: W x^T and not x W^T, in one part. Hopper's wgmma multiplies 64 rows of a matrix
    in registers or in shared memory by one in shared memory: so W is converted in registers, and
    few rows of x are not padded to 64. SHARES: programs that share a tile's columns; this one has
    part `share` of them.
    """
    TILE: tl.constexpr = 2 * BN if GATED else BN
    m, n = tl.arange(0, MP)[:, None], program * ROWS + tl.arange(0, BN)[None, :]
    end = tl.minimum(N, (program + 1) * ROWS)
    first_step, last_step = _steps(share, K, BK, SHARES)
    part = 0
    if PARTS == 1:
        m_x, j, columns = m, tl.arange(0, TILE)[:, None], tl.arange(0, BK)[None, :]
        total = tl.zeros([TILE, MP] if SWAP else [MP, TILE], tl.float32)
    else:
        part = tl.arange(0, PARTS)[:, None, None]
        m_x, j = tl.arange(0, MP)[None, :, None], tl.arange(0, TILE)[None, :, None]
        columns = part * (BK // PARTS) + tl.arange(0, BK // PARTS)[None, None, :]
        total = tl.zeros([PARTS, MP, TILE], tl.float32)
    n_w = program * ROWS + j % BN
    inside = n_w < end
    rows = n_w.to(tl.int64) * K
    if GATED:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        rows += tl.where(j < BN, 0, (up.to(tl.int64) - weight.to(tl.int64)) // size)
    rows = tl.multiple_of(rows, [ALIGN] * len(rows.shape))
    if BLOCK > 0:  # the scales of a step are read in the step before
        blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
        if SWAP:
            across = tl.arange(0, TILE)[:, None]
        elif PARTS == 1:
            across = tl.arange(0, TILE)[None, :]
        else:
            across = tl.arange(0, TILE)[None, None, :]
        scaled = program * ROWS + across % BN
        scale_rows = scaled.to(tl.int64) * blocks
        if GATED:
            scale_rows += tl.where(across < BN, 0, up_scales.to(tl.int64) - scales.to(tl.int64))
        scale = _block_scales(scales, scale_rows, first_step * PARTS + part, scaled < end, blocks)
    SCALED: tl.constexpr = (scales is not None) & (BLOCK == 0)
    if AHEAD:
        own, of_up = _row_scales(scales, up_scales, n, end, GATED, SCALED)
        targets = _targets(buffers, PUSH, WORLD, 0, BITS)
    if PDL:
        _bring_first(program, first_step * BK, weight, up, N, K, BN, ROWS, EARLY * BK, GATED)
        gdc_wait()
    if NORM:  # read here, so that nothing waits for it at the end
        c = tl.arange(0, CP)[None, :]
        parts = tl.load(squares + m * CHUNKS + c, mask=(m < M) & (c < CHUNKS), other=0)
    # e4m3 becomes float16 by one instruction, bfloat16 by four. So a row whose norm is known is
    # scaled into float16 by a power of two: no element is beyond the norm, at most 2^15, and what
    # small ones lose is at most 2^-38 of it. (Fused models multiply so on GPUs other than Hopper;
    # there, they take x in pieces.)
    E4M3: tl.constexpr = weight.dtype.element_ty == tl.float8e4nv
    HALF: tl.constexpr = NORM & (PARTS > 1) & E4M3 & (x.dtype.element_ty == tl.bfloat16)
    if HALF:
        exponent = tl.sum(parts, 1).to(tl.int32, bitcast=True) >> 23
        shrink = power(127 + 14 - ((exponent - 126) >> 1))
    # Counted by steps: by columns, loops of weights in 8 bits took a fifth longer.
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        at = step * BK + columns
        fits = (at < K) | (K % BK == 0)
        a = tl.load(x + m_x * K + at, mask=fits & ((m_x < M) | (M == MP)), other=0)
        w = tl.load(weight + rows + at, mask=fits & inside, other=0.0)
        if HALF:
            a = (a.to(tl.float32) * shrink[None, :, None]).to(tl.float16)
            w = w.to(tl.float16)
        else:
            a, w = a.to(KIND), widened(w, KIND)
        before = total if BLOCK == 0 else tl.zeros_like(total)
        if SWAP:
            product = tl.dot(w, tl.trans(a), before, input_precision="ieee")
        elif PARTS == 1:
            product = tl.dot(a, tl.trans(w), before, input_precision="ieee")
        else:
            product = tl.dot(a, tl.permute(w, (0, 2, 1)), before, input_precision="ieee")
        if BLOCK == 0:
            total = product
        else:  # a part of a step is a block
            total += product * power(scale.to(tl.int32))
            block = (step + 1) * PARTS + part
            scale = _block_scales(scales, scale_rows, block, scaled < end, blocks)
    if PARTS > 1:
        total = tl.sum(total, 0)
    elif SWAP:
        total = tl.trans(total)
    kept = (m < M) & (n < end)
    if SHARES > 1:
        total, last = _whole(total, sums, arrived, program, share, MP, TILE, SHARES)
        kept &= last
    total_up = total
    if GATED:
        total, total_up = _halves(total, MP, BN)
    norm = 1.0
    if NORM:
        norm = tl.rsqrt(tl.sum(parts, 1, keep_dims=True) / K + eps)
        if HALF:
            norm = norm / shrink[:, None]
    if not AHEAD:
        own, of_up = _row_scales(scales, up_scales, n, end, GATED, SCALED)
        targets = _targets(buffers, PUSH, WORLD, 0, BITS)
    y = _scaled(total, total_up, own, of_up, norm, GATED, NORM, SCALED)
    _finish(y, m, n, kept, out, add, factor, targets, start, N, M,
            GIVES, ADD, STORE, PUSH, RANK, WORLD, 0, BITS, EMPTY)  # fmt: skip


@jit
@no_type_check
def _tile_of_pieces(
    program, share, weight, up, scales, up_scales, sums, arrived, pieces, factors, out, squares,
    add, factor, eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr,
    ADD: tl.constexpr, STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, GIVES: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    ALIGN: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """As `_tile`, for x that is given in pieces (ladder.kernels.pieces) of the weight's type.

    wgmma multiplies 64 rows at least, and few weights have 64 for each SM. So a step's columns are
    in PARTS parts. Each part of each of the tile's rows is a row of the first operand, and each
    part of both pieces of x is a row of the second. Products of different parts are not used.
    """
    TILE: tl.constexpr = 2 * BN if GATED else BN
    WIDTH: tl.constexpr = BK // PARTS
    TURN: tl.constexpr = BLOCK if BLOCK > 0 else WIDTH  # columns that are multiplied at once
    m, n = tl.arange(0, MP)[:, None], program * ROWS + tl.arange(0, BN)[None, :]
    end = tl.minimum(N, (program + 1) * ROWS)
    first_step, last_step = _steps(share, K, BK, SHARES)
    columns = tl.arange(0, TURN)[None, :]
    j = tl.arange(0, PARTS * TILE)[:, None]
    n_w, columns_w = program * ROWS + j % BN, j // TILE * WIDTH + columns
    rows_w = n_w.to(tl.int64) * K
    if GATED:
        rows_w += tl.where(j % TILE < BN, 0, up.to(tl.int64) - weight.to(tl.int64))
    rows_w = tl.multiple_of(rows_w, [ALIGN, ALIGN])
    i = tl.arange(0, 2 * PARTS * MP)[:, None]
    m_x, columns_x = i % MP, i // MP % PARTS * WIDTH + columns
    rows_x = (i // (PARTS * MP) * M + m_x) * K
    if BLOCK > 0:  # as in `_tile`
        blocks: tl.constexpr = (K + BLOCK - 1) // BLOCK
        scale_rows = n_w.to(tl.int64) * blocks
        if GATED:
            scale_rows += tl.where(j % TILE < BN, 0, up_scales.to(tl.int64) - scales.to(tl.int64))
        # each row's first block of a step
        first = (first_step * PARTS + j // TILE) * (WIDTH // TURN)
        exponents = _step_scales(scales, scale_rows, first, n_w < end, blocks, WIDTH // TURN)
    SCALED: tl.constexpr = BLOCK == 0
    if AHEAD:
        own, of_up = _row_scales(scales, up_scales, n, end, GATED, SCALED)
        targets = _targets(buffers, PUSH, WORLD, 0, BITS)
    if PDL:
        _bring_first(program, first_step * BK, weight, up, N, K, BN, ROWS, EARLY * BK, GATED)
        gdc_wait()
    norm = tl.load(factors + m, mask=m < M, other=0)
    if NORM:
        c = tl.arange(0, CP)[None, :]
        parts = tl.load(squares + m * CHUNKS + c, mask=(m < M) & (c < CHUNKS), other=0)
    SUM: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros([PARTS * TILE, 2 * PARTS * MP], SUM)
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        for turn in tl.static_range(WIDTH // TURN):
            at = step * BK + turn * TURN + columns_x
            there = ((at < K) | (K % BK == 0)) & ((m_x < M) | (M == MP))
            a = tl.load(pieces + rows_x + at, mask=there, other=0.0)
            at = step * BK + turn * TURN + columns_w
            there = ((at < K) | (K % BK == 0)) & (n_w < end)
            w = tl.load(weight + rows_w + at, mask=there, other=0.0)
            # Of e4m3, tensor cores keep 14 bits of a sum and cut the rest: here, of no more than a
            # turn.
            if BLOCK == 0:
                total = tl.dot(w.to(KIND), tl.trans(a.to(KIND)), total,
                               max_num_imprecise_acc=WIDTH, out_dtype=SUM)  # fmt: skip
            else:
                product = tl.dot(w.to(KIND), tl.trans(a.to(KIND)), out_dtype=SUM)
                total += product * power(exponents[turn].to(tl.int32))
        if BLOCK > 0:
            first += PARTS * (WIDTH // TURN)
            exponents = _step_scales(scales, scale_rows, first, n_w < end, blocks, WIDTH // TURN)
    total = tl.reshape(total.to(tl.float32), [PARTS, TILE, 2, PARTS, MP])
    one = tl.arange(0, PARTS)
    same = one[:, None, None, None, None] == one[None, None, None, :, None]
    total = tl.sum(tl.sum(tl.where(same, total, 0.0), 3), 0)
    high, low = tl.split(tl.permute(total, (0, 2, 1)))
    total = tl.trans(high + low * (1.0 / low_factor(weight.dtype.element_ty)))
    kept = (m < M) & (n < end)
    if SHARES > 1:
        total, last = _whole(total, sums, arrived, program, share, MP, TILE, SHARES)
        kept &= last
    total_up = total
    if GATED:
        total, total_up = _halves(total, MP, BN)
    if NORM:
        norm *= tl.rsqrt(tl.sum(parts, 1, keep_dims=True) / K + eps)
    if not AHEAD:
        own, of_up = _row_scales(scales, up_scales, n, end, GATED, SCALED)
        targets = _targets(buffers, PUSH, WORLD, 0, BITS)
    y = _scaled(total, total_up, own, of_up, norm, GATED, True, SCALED)
    _finish(y, m, n, kept, out, add, factor, targets, start, N, M,
            GIVES, ADD, STORE, PUSH, RANK, WORLD, 0, BITS, EMPTY)  # fmt: skip
