"""Decode attention in one launch: rotate a token, store its key and value, attend, combine."""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.primitives import arrive
from ladder.jit import (
    check_tensor,
    gdc_launch_dependents,
    gdc_wait,
    kernel,
    launch,
    multiplied,
    on_triton,
    tl,
    triton,
)
from ladder.kernels.attention_parts import (
    _begin,
    _block,
    _block_of_pairs,
    _exponents,
    _keys,
    _pairs,
    _values,
)
from ladder.kernels.attention_shapes import heads_at_once, in_pairs, shape
from ladder.kernels.cache_checks import check_cache, check_extras, check_stored
from ladder.kernels.carveout import stages_that_fit
from ladder.kernels.norm import Pair
from ladder.models import storage
from ladder.models.errors import UserError

LOG2_E = 1.4426950408889634


def decode_attention_reference(
    qkv: Tensor, table: Tensor, positions: Tensor, keys: Tensor, values: Tensor, num_heads: int,
    scale: float, bias: Tensor | None = None, gains: Pair | None = None, eps: float = 0.0,
    exponents: Pair | None = None, gives: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    kv_heads = keys.shape[1]
    whole = qkv.float() if bias is None else qkv.float() + bias.float()
    heads = whole.unflatten(-1, (num_heads + 2 * kv_heads, -1))
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if gains is not None:
        q, k = (
            F.rms_norm(x, x.shape[-1:], gain.float(), eps)
            for x, gain in zip((q, k), gains, strict=True)
        )
    cos, sin = table[positions][:, None].chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    rows = torch.arange(len(qkv), device=qkv.device)
    read = []
    for n, (cache, new) in enumerate(((keys, rotate(k).to(qkv.dtype)), (values, v.to(qkv.dtype)))):
        if exponents is None:
            cache[rows, :, positions] = new
            read.append(cache.float())
        else:
            stored, scales = storage.rounded(new, "fp8", storage.LEAST_CACHED)
            cache.view(torch.uint8)[rows, :, positions] = stored.view(torch.uint8)
            exponents[n][rows, :, positions] = storage.exponents(scales)
            read.append(cache.float() * storage.powers(exponents[n])[..., None])
    q = rotate(q).to(qkv.dtype).float()
    seen = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    scores = torch.einsum("bhgd,bhld->bhgl", q.unflatten(1, (-1, num_heads // kv_heads)), read[0])
    weights = (scores * scale).masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    # Masked: unused memory may hold NaN, and 0 times NaN is NaN.
    used = read[1].masked_fill(~seen[:, None, :, None], 0.0)
    return torch.einsum("bhgl,bhld->bhgd", weights, used).flatten(1).to(gives or qkv.dtype)


@kernel("computation")
@no_type_check
def _attention_kernel(
    qkv, table, positions, keys, values, key_exponents, value_exponents, out, part, stat, arrived,
    bias, q_gain, k_gain, scale, eps, L, batch_stride, head_stride,
    BIAS: tl.constexpr, NORM: tl.constexpr,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GC: tl.constexpr, HALF: tl.constexpr,
    HP: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr, SP: tl.constexpr,
    PIECE: tl.constexpr, LEAST: tl.constexpr, KIND: tl.constexpr,
    EXACT: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: the G query heads of one KV head of one sequence, over one split of the keys.

    The split with the new token's position rotates its key, stores key and value, and starts from
    them: this launch reads nothing back that it writes to the cache. The last split to arrive
    combines the results of all splits.
    """
    if PDL:
        gdc_launch_dependents()
    HD: tl.constexpr = 2 * HALF
    HQ: tl.constexpr = HKV * G
    b, h, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, i, d, n = tl.arange(0, GP), tl.arange(0, HP), tl.arange(0, DP), tl.arange(0, BN)
    kind: tl.constexpr = qkv.dtype.element_ty
    half = i < HALF
    # Results of earlier steps are read before the wait: between two steps there is a kernel without
    # dependent launch (`ladder.kernels.choice.embed`), for which all later kernels wait.
    position = tl.maximum(tl.minimum(tl.load(positions + b), L - 1), 0).to(tl.int32)
    end = position + 1
    # The grid is fixed; the splits divide the existing keys among them.
    share = tl.cdiv(tl.cdiv(end, BN), SPLITS) * BN
    first = split * share
    turn = table + position.to(tl.int64) * HD
    cos = tl.load(turn + i, mask=half, other=0)
    sin = tl.load(turn + HALF + i, mask=half, other=0)
    base = b * batch_stride + h.to(tl.int64) * head_stride
    stop = tl.minimum(first + share, position)
    row = b * HKV + h
    # With float32, and with many query heads, the loop has no registers left to begin in.
    LATE: tl.constexpr = (kind != tl.float32) & (GP <= 32)
    if PDL and not LATE:
        gdc_wait()
    if first < end:
        # The state before the loop's first turn.
        high = tl.full([GP], float("-inf"), tl.float32)
        weight = tl.zeros([GP], tl.float32)
        total = tl.zeros([GP, HP if PAIRS else DP], tl.float32)
        q_left, q_right = tl.zeros([GP, HP], KIND), tl.zeros([GP, HP], KIND)
        other, scales = None, None
        if PAIRS:
            other, scales = tl.zeros([GP, HP], tl.float32), tl.zeros([GP, 1], tl.float32)
        # The compiler does not copy single bytes ahead, as it does keys: each block reads the
        # next's.
        k_next = None
        v_next = None
        if key_exponents is not None:
            k_next = _exponents(key_exponents, base, first + n, stop, HD)
            v_next = _exponents(value_exponents, base, first + n, stop, HD)
        if not LATE:
            q_left, q_right, high, weight, total = _begin(
                qkv + b * (HQ + 2 * HKV) * HD, h, position < first + share, base, position, cos,
                sin, keys, values, key_exponents, value_exponents, bias, q_gain, k_gain, scale, eps,
                BIAS, NORM, HKV, G, GP, HALF, HP, DP, LEAST, KIND, kind, False,
            )  # fmt: skip
        # At least one turn: the new token may be the first.
        for start in range(first, tl.maximum(stop, first + 1), BN):
            if PAIRS:
                k_left = _pairs(keys, base, i, start + n, stop, HD)
                v = _pairs(values, base, i, start + n, stop, HD)
            else:
                k_left, k_right = _keys(keys, base, i, start + n, stop, HALF, HD)
                v = _values(values, base, d, start + n, stop, HD)
            # Here, since the compiler copies the first blocks of keys and values to shared memory
            # before the loop: the previous kernel may end while they come.
            if LATE:  # noqa: SIM102  (known when this is compiled; `start` is not)
                if start == first:
                    if PDL:
                        gdc_wait()
                    begun = _begin(
                        qkv + b * (HQ + 2 * HKV) * HD, h, position < first + share, base, position,
                        cos, sin, keys, values, key_exponents, value_exponents, bias, q_gain,
                        k_gain, scale, eps, BIAS, NORM, HKV, G, GP, HALF, HP, DP, LEAST, KIND, kind,
                        PAIRS,
                    )  # fmt: skip
                    if PAIRS:
                        q_left, q_right, high, weight, total, other, scales = begun
                    else:
                        q_left, q_right, high, weight, total = begun
            k_now = None
            v_now = None
            if key_exponents is not None:
                k_now, v_now = k_next, v_next
                k_next = _exponents(key_exponents, base, start + BN + n, stop, HD)
                v_next = _exponents(value_exponents, base, start + BN + n, stop, HD)
            seen = start + n < stop
            if PAIRS:
                high, weight, total, other = _block_of_pairs(
                    high, weight, total, other, q_left, q_right, k_left, v, k_now, v_now, seen,
                    scales, KIND,
                )  # fmt: skip
            else:
                high, weight, total = _block(
                    high, weight, total, q_left, q_right, k_left, k_right, v, k_now, v_now, seen,
                    scale, kind, KIND, EXACT,
                )  # fmt: skip
        if PAIRS:
            total = tl.reshape(tl.join(total, other), (GP, DP))
        inside = (g < G)[:, None] & (d < HD)[None, :]
        if SPLITS == 1:
            y = (total / weight[:, None]).to(out.dtype.element_ty)
            tl.store(out + (row * G + g)[:, None] * HD + d[None, :], y, mask=inside)
        else:
            slot = (row * SPLITS + split) * G + g
            tl.store(part + slot[:, None] * HD + d[None, :], total, mask=inside)
            tl.store(stat + slot * 2, high, mask=g < G)
            tl.store(stat + slot * 2 + 1, weight, mask=g < G)
    elif PDL and LATE:
        gdc_wait()
    if SPLITS > 1:  # noqa: SIM102  (known when this is compiled)
        if arrive(arrived + row, SPLITS, "gpu"):
            tl.debug_barrier()
            # [split, query head, element], PIECE heads at a time: every load before the first use.
            s = tl.arange(0, SP)[:, None, None]  # from SPLITS on, none is used
            c = d[None, None, :]
            # What is moved out of the loop would need registers in it.
            for start in tl.range(0, G, PIECE, disable_licm=True):
                e = start + tl.arange(0, PIECE)[None, :, None]
                used = s * share < end
                if PIECE == GC:
                    used &= e < G
                else:  # a head twice takes fewer registers than a mask
                    e = tl.minimum(e, G - 1)
                slot = (row * SPLITS + s) * G + e
                highs = tl.load(stat + slot * 2, mask=used, other=float("-inf"),
                                cache_modifier=".cg")  # fmt: skip
                weights = tl.load(stat + slot * 2 + 1, mask=used, other=0, cache_modifier=".cg")
                totals = tl.load(part + slot * HD + c, mask=used & (c < HD), other=0,
                                 cache_modifier=".cg")  # fmt: skip
                # -1e30: no NaN for a head beyond G
                best = tl.maximum(tl.max(highs, 0, keep_dims=True), -1e30)
                factor = tl.exp2(highs - best)
                y = tl.sum(totals * factor, 0) / tl.sum(weights * factor, 0)
                e = start + tl.arange(0, PIECE)[:, None]
                to = out + (row * G + e) * HD + d[None, :]
                tl.store(to, y.to(out.dtype.element_ty), mask=(e < G) & (d < HD)[None, :])
            tl.store(arrived + row, 0)  # for the next launch


@torch.no_grad()
def decode_attention(
    qkv: Tensor, table: Tensor, positions: Tensor, keys: Tensor, values: Tensor, num_heads: int,
    scale: float, arrived: Tensor, bias: Tensor | None = None, gains: Pair | None = None,
    eps: float = 0.0, exponents: Pair | None = None, gives: torch.dtype | None = None,
    beside: bool = False, eight_bits: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate one token per sequence, store its key and value, attend: [B, num_heads * head_dim].

    qkv: [B, (num_heads + 2 num_kv_heads) * head_dim], queries, then keys, then values.
    table: [at least L, head_dim] float32, row p holding cos (head_dim / 2) then sin of position p;
        halves are paired as Hugging Face does.
    positions: [B] int64, each token's position, from 0 to L - 1; it attends to 0 .. positions[b].
    keys, values: [B, num_kv_heads, L, head_dim], written in place at positions[b] and not read
        beyond it, where they may hold NaN. Query head i uses KV head i // (heads / KV heads). What
        they hold before positions[b], with its exponents, must be older than the last launch
        without dependent launch: it is read before the previous kernel has ended.
    scale: factor on the scores, usually 1 / sqrt(head_dim).
    arrived: [at least B * num_kv_heads] int32 zeros, and zeros again afterwards; launches that
        share it must follow one another.
    bias: added to each row of qkv. gains: the weights of the norms of queries and of keys, both
        [head_dim], applied before the rotation, with epsilon `eps`.
    exponents: of keys and of values in e4m3 (see ladder.infer.cache), uint8
        [B, num_kv_heads, L] each, written in place at positions[b]. The new token attends to
        what is stored of itself.

    beside: other kernels are meant to run at the same time. eight_bits: the model's weights are
    stored in 8 bits. Both set how many programs share the keys, and so the order of sums.

    The launch depends only on shapes, so a captured graph serves every position. The rotation is in
    float32 and rounded once; scores, softmax and sums are in float32; softmax weights are rounded
    to the dtype of the values before the product, as in flash attention; for a cache in e4m3 that
    is read in pairs, to float16, with the scales of the values. The result is in `gives`, or in the
    dtype of qkv. Not differentiable.
    """
    batch, kv_heads, length, head_dim = keys.shape
    gives = gives or qkv.dtype
    check_stored(keys, values, exponents, qkv=qkv)
    check_tensor("qkv", qkv, (batch, (num_heads + 2 * kv_heads) * head_dim), qkv)
    check_cache(keys, values, positions, qkv)
    if num_heads % kv_heads or head_dim % 2:
        raise UserError(
            f"{num_heads} heads do not fit keys {tuple(keys.shape)}: the KV heads must divide the "
            f"heads, and head_dim must be even"
        )
    if table.dtype != torch.float32 or table.shape[0] < length:
        raise UserError(
            f"table is {table.dtype} {tuple(table.shape)}; expected torch.float32 [>= {length}, "
            f"{head_dim}]"
        )
    check_tensor("table", table, (table.shape[0], head_dim), qkv)
    if arrived.dtype != torch.int32 or arrived.numel() < batch * kv_heads:
        raise UserError(
            f"arrived is {arrived.dtype} {tuple(arrived.shape)}; expected torch.int32 "
            f"[>= {batch * kv_heads}]"
        )
    check_extras(bias, gains, qkv, qkv.shape[1], head_dim)
    if not on_triton(qkv):
        return decode_attention_reference(
            qkv,
            table,
            positions,
            keys,
            values,
            num_heads,
            scale,
            bias,
            gains,
            eps,
            exponents,
            gives,
        )
    q_gain, k_gain = gains or (qkv, qkv)
    out = torch.empty(batch, num_heads * head_dim, dtype=gives, device=qkv.device)
    dims = max(16, triton.next_power_of_2(head_dim))
    group = num_heads // kv_heads
    pairs = exponents is not None and in_pairs(qkv.dtype, head_dim, group)
    block, splits, warps, stages = shape(
        batch * kv_heads, length, dims, dims * qkv.element_size(), exponents is not None, beside,
        eight_bits, pairs,
    )  # fmt: skip
    part = stat = out
    if splits > 1:
        scratch = {"dtype": torch.float32, "device": qkv.device}
        part = torch.empty(batch * num_heads * splits * head_dim, **scratch)
        stat = torch.empty(batch * num_heads * splits * 2, **scratch)
    launch(
        _attention_kernel, (batch, kv_heads, splits), qkv.device,
        qkv, table, positions, keys, values, *(exponents or (None, None)), out, part, stat, arrived,
        qkv if bias is None else bias, q_gain, k_gain, scale * LOG2_E, eps, length,
        keys.stride(0), keys.stride(1),
        BIAS=bias is not None, NORM=gains is not None, HKV=kv_heads, G=group,
        GP=max(16, triton.next_power_of_2(group)),
        GC=triton.next_power_of_2(group), HALF=head_dim // 2,
        HP=max(16, triton.next_power_of_2(head_dim // 2)), DP=dims, BN=block, SPLITS=splits,
        SP=triton.next_power_of_2(splits),
        PIECE=heads_at_once(group, splits, dims), LEAST=127 + storage.LEAST_CACHED,
        KIND=multiplied(torch.float16 if pairs else qkv.dtype),
        EXACT="ieee" if qkv.dtype == torch.float32 else "tf32", PAIRS=pairs, num_warps=warps,
        num_stages=stages_that_fit(stages, 2 * block * dims * keys.element_size(), qkv.device),
    )  # fmt: skip
    return out
