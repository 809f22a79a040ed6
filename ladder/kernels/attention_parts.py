"""What a program of decode attention does: reads keys and values, begins with a token, attends."""

from __future__ import annotations

from typing import Any, no_type_check

from ladder.comm.primitives import ASSEMBLY
from ladder.jit import jit, tl
from ladder.kernels.eight_bits import fitting_exponent, power, to_e4m3, widened


@jit
@no_type_check
def _keys(cache, base, i, positions, stop, HALF: tl.constexpr, HD: tl.constexpr):
    """Both halves of the keys at `positions`, [BN, HP]; 0 from `stop` on, where NaN may lie."""
    at = base + positions.to(tl.int64)[:, None] * HD + i[None, :]
    mask = (positions < stop)[:, None] & (i < HALF)[None, :]
    # 0.0: an integer has no conversion to 8-bit floats
    left = tl.load(cache + at, mask=mask, other=0.0)
    return left, tl.load(cache + at + HALF, mask=mask, other=0.0)


@jit
@no_type_check
def _values(cache, base, d, positions, stop, HD: tl.constexpr):
    at = base + positions.to(tl.int64)[:, None] * HD + d[None, :]
    return tl.load(cache + at, mask=(positions < stop)[:, None] & (d < HD)[None, :], other=0.0)


@jit
@no_type_check
def _pairs(cache, base, j, positions, stop, HD: tl.constexpr):
    """The keys or values of an e4m3 cache at `positions`, as pairs of bytes, int16 [BN, HD / 2]; 0
    from `stop` on. Within a head 32 bits are enough for any offset, and need fewer registers."""
    of_head = cache.to(tl.pointer_type(tl.int16), bitcast=True) + (base >> 1)
    at = of_head + (positions[:, None] * (HD // 2) + j[None, :])
    return tl.load(at, mask=(positions < stop)[:, None], other=0)


def _converted(bytes_of_pairs: str) -> Any:
    """The assembly that converts these bytes of two pairs, as `prmt` numbers them, to float16."""
    return tl and tl.constexpr(
        "{ .reg .b32 t; .reg .b16 lo, hi; prmt.b32 t, $1, 0, "
        + bytes_of_pairs
        + "; mov.b32 {lo, hi}, t; cvt.rn.f16x2.e4m3x2 $0, lo; }"
    )


FIRST, SECOND = _converted("0x20"), _converted("0x31")


@jit
@no_type_check
def _of_pairs(x, NUMBER: tl.constexpr, KIND: tl.constexpr):
    """The first (0) or second (1) number of each pair, in float16; in the interpreter in KIND.

    Tensor cores get numbers of 16 bits from shared memory in either order, but single bytes of
    values one by one. And two numbers take two instructions; to bfloat16 it would be four.
    """
    if ASSEMBLY:
        assembly: tl.constexpr = SECOND if NUMBER else FIRST
        return tl.inline_asm_elementwise(assembly, "=r,r", [x], tl.float16, True, 2)
    byte = (x >> 8 * NUMBER).to(tl.uint8)
    return byte.to(tl.float8e4nv, bitcast=True).to(KIND)


@jit
@no_type_check
def _exponents(exponents, base, positions, stop, HD: tl.constexpr):
    """The exponents of keys' or values' scales at `positions`, [BN]; from `stop` on, that of 1."""
    at = exponents + base // HD + positions
    return tl.load(at, mask=positions < stop, other=127)


@jit
@no_type_check
def _small(x, exponent):
    """(x over its scale in e4m3, the float32 that this stands for)."""
    found = to_e4m3(x.to(tl.float32) * power(254 - exponent))
    return found, found.to(tl.float32) * power(exponent)


@jit
@no_type_check
def _block(
    high, weight, total, q_left, q_right, k_left, k_right, v, k_exponent, v_exponent, seen, scale,
    WEIGHT: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Attend to one block of keys, at least one of which is visible, so that `high` is finite.

    WEIGHT: the dtype to which softmax weights are rounded.
    """
    score = tl.dot(q_left, tl.trans(widened(k_left, KIND)), input_precision=EXACT)
    score += tl.dot(q_right, tl.trans(widened(k_right, KIND)), input_precision=EXACT)
    if k_exponent is not None:
        score *= power(k_exponent.to(tl.int32))[None, :]
    score = tl.where(seen[None, :], score * scale, float("-inf"))
    top = tl.maximum(high, tl.max(score, 1))
    shrink = tl.exp2(high - top)
    p = tl.exp2(score - top[:, None])
    weight = weight * shrink + tl.sum(p, 1)
    total *= shrink[:, None]
    if v_exponent is not None:
        p *= power(v_exponent.to(tl.int32))[None, :]
    total += tl.dot(p.to(WEIGHT).to(KIND), widened(v, KIND), input_precision=EXACT)
    return top, weight, total


@jit
@no_type_check
def _block_of_pairs(
    high, weight, first, second, q_first, q_second, k, v, k_exponent, v_exponent, seen, scales,
    KIND: tl.constexpr,
):  # fmt: skip
    """As `_block`, for keys and values in e4m3, in pairs: everything is multiplied in float16.

    first, second: the sums of the values' first and second numbers. scales: those of the queries'
    scores, [GP, 1]. A softmax weight takes the scale of its value into its exponent, and `high` is
    the maximum of both together: what is rounded is 2^15 at most, whatever the values' scales.
    """
    score = tl.dot(q_first, tl.trans(_of_pairs(k, 0, KIND)))
    score += tl.dot(q_second, tl.trans(_of_pairs(k, 1, KIND)))
    score *= scales * power(k_exponent.to(tl.int32))[None, :]
    score += (v_exponent.to(tl.int32) - 127).to(tl.float32)[None, :]
    score = tl.where(seen[None, :], score, float("-inf"))
    top = tl.maximum(high, tl.max(score, 1) - 15.0)
    shrink = tl.exp2(high - top)
    p = tl.exp2(score - top[:, None])
    weight = weight * shrink + tl.sum(p * power(254 - v_exponent.to(tl.int32))[None, :], 1)
    p = p.to(tl.float16).to(KIND)
    first = first * shrink[:, None] + tl.dot(p, _of_pairs(v, 0, KIND))
    second = second * shrink[:, None] + tl.dot(p, _of_pairs(v, 1, KIND))
    return top, weight, first, second


@jit
@no_type_check
def _queries_of_pairs(query, query_right, KIND: tl.constexpr):
    """From queries in halves, [GP, HP] each: the first and second numbers of their pairs, in KIND,
    and the scales of their scores, [GP, 1].

    float16 holds every number of a query exactly that is not 2^-29 of its largest or less.
    """
    GP: tl.constexpr = query.shape[0]
    HP: tl.constexpr = query.shape[1]
    whole = tl.reshape(tl.permute(tl.join(query, query_right), (0, 2, 1)), (GP, HP, 2))
    whole = whole.to(tl.float32)
    largest = tl.max(tl.max(tl.abs(whole), 2), 1)
    exponent = tl.minimum(268 - (largest.to(tl.int32, bitcast=True) >> 23), 253)
    first, second = tl.split(whole * power(exponent)[:, None, None])
    return first.to(KIND), second.to(KIND), power(254 - exponent)[:, None]


@jit
@no_type_check
def _begin(
    token, h, mine, base, position, cos, sin, keys, values, key_exponents, value_exponents,
    bias, q_gain, k_gain, scale, eps,
    BIAS: tl.constexpr, NORM: tl.constexpr, HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    HALF: tl.constexpr, HP: tl.constexpr, DP: tl.constexpr, LEAST: tl.constexpr,
    KIND: tl.constexpr, kind: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """The token's rotated queries, in halves, and the result of attention to it alone: (maximum,
    weight, total). This is empty unless the token is `mine`; then its key and value are stored,
    too.

    PAIRS: queries and total are the first and second numbers of pairs, and the scales of the
    queries' scores come last."""
    HD: tl.constexpr = 2 * HALF
    HQ: tl.constexpr = HKV * G
    g, i, d = tl.arange(0, GP), tl.arange(0, HP), tl.arange(0, DP)
    half = i < HALF
    high = tl.full([GP], float("-inf"), tl.float32)
    weight = tl.zeros([GP], tl.float32)
    total = tl.zeros([GP, DP], tl.float32)
    source = token + (h * G + g)[:, None] * HD + i[None, :]
    inside = (g < G)[:, None] & half[None, :]
    left = tl.load(source, mask=inside, other=0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    if BIAS:
        added = bias + (h * G + g)[:, None] * HD + i[None, :]
        left += tl.load(added, mask=inside, other=0).to(tl.float32)
        right += tl.load(added + HALF, mask=inside, other=0).to(tl.float32)
    if NORM:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        norm = tl.rsqrt(squares / HD + eps)[:, None]
        left *= norm * tl.load(q_gain + i, mask=half, other=0).to(tl.float32)[None, :]
        right *= norm * tl.load(q_gain + HALF + i, mask=half, other=0).to(tl.float32)[None, :]
    query = (left * cos[None, :] - right * sin[None, :]).to(kind)
    query_right = (right * cos[None, :] + left * sin[None, :]).to(kind)
    if mine:
        new = token + (HQ + h) * HD
        new_left = tl.load(new + i, mask=half, other=0).to(tl.float32)
        new_right = tl.load(new + HALF + i, mask=half, other=0).to(tl.float32)
        value = tl.load(new + HKV * HD + d, mask=d < HD, other=0)
        if BIAS:
            of_key = bias + (HQ + h) * HD
            new_left += tl.load(of_key + i, mask=half, other=0).to(tl.float32)
            new_right += tl.load(of_key + HALF + i, mask=half, other=0).to(tl.float32)
            more = tl.load(of_key + HKV * HD + d, mask=d < HD, other=0).to(tl.float32)
            value = (value.to(tl.float32) + more).to(kind)
        if NORM:
            key_squares = tl.sum(new_left * new_left, 0) + tl.sum(new_right * new_right, 0)
            key_norm = tl.rsqrt(key_squares / HD + eps)
            new_left *= key_norm * tl.load(k_gain + i, mask=half, other=0).to(tl.float32)
            new_right *= key_norm * tl.load(k_gain + HALF + i, mask=half, other=0).to(tl.float32)
        key = (new_left * cos - new_right * sin).to(kind)
        key_right = (new_right * cos + new_left * sin).to(kind)
        target = base + position.to(tl.int64) * HD
        place = base // HD + position
        if key_exponents is not None:
            top = tl.maximum(tl.max(tl.abs(key), 0), tl.max(tl.abs(key_right), 0))
            exponent = fitting_exponent(top.to(tl.float32), LEAST)
            tl.store(key_exponents + place, exponent.to(tl.uint8))
            stored_key, key = _small(key, exponent)
            stored_right, key_right = _small(key_right, exponent)
            exponent = fitting_exponent(tl.max(tl.abs(value), 0).to(tl.float32), LEAST)
            tl.store(value_exponents + place, exponent.to(tl.uint8))
            stored_value, value = _small(value, exponent)
        else:
            stored_key, stored_right, stored_value = key, key_right, value
        tl.store(keys + target + i, stored_key, mask=half)
        tl.store(keys + target + HALF + i, stored_right, mask=half)
        tl.store(values + target + d, stored_value, mask=d < HD)
        products = query.to(tl.float32) * key.to(tl.float32)[None, :]
        products += query_right.to(tl.float32) * key_right.to(tl.float32)[None, :]
        high = tl.sum(products, 1) * scale
        weight = tl.full([GP], 1.0, tl.float32)
        total += value.to(tl.float32)[None, :]
        if PAIRS:
            # As `_block_of_pairs` counts: with the value's scale, and up to 2^15. Otherwise the
            # other weights would be rounded relative to one that is far larger than they can be.
            high += (exponent - 142).to(tl.float32)
            weight *= power(269 - exponent)
            total *= power(269 - exponent)
    if PAIRS:
        first, second, scales = _queries_of_pairs(query, query_right, KIND)
        total, other = tl.split(tl.reshape(total, (GP, HP, 2)))
        return first, second, high, weight, total, other, scales * scale
    else:  # noqa: RET505  (known when this is compiled)
        return query.to(KIND), query_right.to(KIND), high, weight, total
