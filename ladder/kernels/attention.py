"""Attention of one new token per sequence to its cached keys, split over the keys."""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ladder.kernels.launch import (
    INTERPRETED,
    begin,
    check,
    check_dtype,
    jit,
    launch,
    on_triton,
    tl,
    triton,
)
from ladder.kernels.rotary import check_cache
from ladder.models.errors import UserError

LOG2_E = 1.4426950408889634
# Programs wanted: twice the SMs of an H100 or H200. A constant, and not read from the device, so
# that what is summed in which order does not depend on where it runs.
PROGRAMS = 264
MAX_SPLITS = 128


def decode_attention_reference(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    group = q.shape[1] // keys.shape[1]
    seen = torch.arange(keys.shape[2], device=q.device) <= positions[:, None]
    scores = torch.einsum("bhgd,bhld->bhgl", q.unflatten(1, (-1, group)).float(), keys.float())
    weights = (scores * scale).masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    # Masked, because 0 times the NaN that unused memory may hold is NaN.
    used = values.float().masked_fill(~seen[:, None, :, None], 0.0)
    y = torch.einsum("bhgl,bhld->bhgd", weights, used).flatten(1).to(q.dtype)
    return y if out is None else out.copy_(y)


@jit
@no_type_check
def _attention_kernel(
    q, keys, values, positions, out, part, stat, scale, L, batch_stride, head_stride,
    HKV: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, HD: tl.constexpr, DP: tl.constexpr,
    BN: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: the G query heads of one KV head of one sequence, over one split of the keys."""
    begin(PDL)
    b, h, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, d, n = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, BN)
    end = tl.minimum(tl.load(positions + b) + 1, L).to(tl.int32)
    # The grid is fixed, but not what a program takes: the splits share the keys that there are.
    share = tl.cdiv(tl.cdiv(end, BN), SPLITS) * BN
    first = split * share
    if first < end:
        row = b * HKV * G + h * G + g  # of [B * Hq]
        inside = (g < G)[:, None] & (d < HD)[None, :]
        query = tl.load(q + row[:, None] * HD + d[None, :], mask=inside, other=0).to(KIND)
        base = b * batch_stride + h.to(tl.int64) * head_stride
        high = tl.full([GP], float("-inf"), tl.float32)
        weight = tl.zeros([GP], tl.float32)
        total = tl.zeros([GP, DP], tl.float32)
        for start in range(first, tl.minimum(first + share, end), BN):
            place = start + n
            # Each block holds a key that may be seen, so `high` is finite after the first; beyond
            # `end` memory may hold NaN, so keys and values are masked, not their weights alone.
            seen = place < end
            at = base + place[:, None] * HD + d[None, :]
            mask = seen[:, None] & (d < HD)[None, :]
            k = tl.load(keys + at, mask=mask, other=0).to(KIND)
            v = tl.load(values + at, mask=mask, other=0)
            score = tl.dot(query, tl.trans(k), input_precision=EXACT) * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            new = tl.maximum(high, tl.max(score, 1))
            shrink = tl.exp2(high - new)
            p = tl.exp2(score - new[:, None])
            weight = weight * shrink + tl.sum(p, 1)
            total *= shrink[:, None]
            total += tl.dot(p.to(v.dtype).to(KIND), v.to(KIND), input_precision=EXACT)
            high = new
        if SPLITS == 1:
            y = (total / weight[:, None]).to(out.dtype.element_ty)
            tl.store(out + row[:, None] * HD + d[None, :], y, mask=inside)
        else:
            slot = row * SPLITS + split
            tl.store(part + slot[:, None] * HD + d[None, :], total, mask=inside)
            tl.store(stat + slot * 2, high, mask=g < G)
            tl.store(stat + slot * 2 + 1, weight, mask=g < G)


@jit
@no_type_check
def _combine_kernel(
    part, stat, positions, out, L,
    HQ: tl.constexpr, HD: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr, SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: BD elements of one query head's output, over the splits that had keys."""
    begin(PDL)
    row, s = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    end = tl.minimum(tl.load(positions + row // HQ) + 1, L).to(tl.int32)
    used = s * (tl.cdiv(tl.cdiv(end, BN), SPLITS) * BN) < end
    slot = row * SPLITS + s
    high = tl.load(stat + slot * 2, mask=used, other=float("-inf"))
    weight = tl.load(stat + slot * 2 + 1, mask=used, other=0)
    # Every load before the first use: one round trip to memory.
    mask = used[:, None] & (d < HD)[None, :]
    total = tl.load(part + slot[:, None] * HD + d[None, :], mask=mask, other=0)
    factor = tl.exp2(high - tl.max(high, 0))
    y = tl.sum(total * factor[:, None], 0) / tl.sum(weight * factor, 0)
    tl.store(out + row * HD + d, y.to(out.dtype.element_ty), mask=d < HD)


def _splits(sequences_and_heads: int, blocks: int) -> int:
    """Splits of the keys, a power of two: enough programs to fill the GPU, none without a block."""
    wanted = min(-(-PROGRAMS // sequences_and_heads), blocks, MAX_SPLITS)
    return 1 << (wanted.bit_length() - 1)


@torch.no_grad()
def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from one token per sequence to keys 0 .. positions[b]: [B, Hq * head_dim].

    q: [B, Hq, head_dim]. keys, values: [B, Hkv, L, head_dim], Hkv dividing Hq: query head i uses
        KV head i // (Hq / Hkv). What they hold beyond positions[b] is not read: it may be NaN.
    positions: [B] int64, from 0 to L - 1 (larger ones attend to all L).
    scale: factor on the scores, 1 / sqrt(head_dim) as a rule.

    The launch depends on shapes alone, so a captured graph serves every position. Scores, softmax
    and sums are float32; softmax weights are rounded to the dtype of the values before they are
    multiplied, as flash attention does. Not differentiable.
    """
    batch, heads, head_dim = q.shape
    check_dtype(q=q, keys=keys, values=values)
    check("q", q, (batch, heads, head_dim), q)
    check_cache(keys, values, positions, q)
    kv_heads, length = keys.shape[1], keys.shape[2]
    if positions.shape[0] != batch or keys.shape[3] != head_dim or heads % kv_heads:
        raise UserError(
            f"q {tuple(q.shape)} does not fit keys {tuple(keys.shape)}: the batch and head_dim "
            f"must be equal, and the KV heads must divide the heads"
        )
    if out is not None:
        check("out", out, (batch, heads * head_dim), q)
        check_dtype(q=q, out=out)
    if not on_triton(q):
        return decode_attention_reference(q, keys, values, positions, scale, out)
    if out is None:
        out = torch.empty(batch, heads * head_dim, dtype=q.dtype, device=q.device)
    dims = max(16, triton.next_power_of_2(head_dim))
    # At most 16 KiB a block of keys: in float32 more of them spills registers (seen in ptxas).
    block = max(16, min(64, 16384 // (dims * q.element_size())))
    splits = _splits(batch * kv_heads, triton.cdiv(length, block))
    part = stat = out
    if splits > 1:
        scratch = {"dtype": torch.float32, "device": q.device}
        part = torch.empty(batch * heads * splits * head_dim, **scratch)
        stat = torch.empty(batch * heads * splits * 2, **scratch)
    launch(
        _attention_kernel, (batch, kv_heads, splits), q.device,
        q, keys, values, positions, out, part, stat, scale * LOG2_E, length,
        keys.stride(0), keys.stride(1),
        HKV=kv_heads, G=heads // kv_heads, GP=max(16, triton.next_power_of_2(heads // kv_heads)),
        HD=head_dim, DP=dims, BN=block, SPLITS=splits,
        # The interpreter has no bfloat16 product.
        KIND=tl.float32 if INTERPRETED else getattr(tl, str(q.dtype).removeprefix("torch.")),
        EXACT="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        launch(
            _combine_kernel, (batch * heads, triton.cdiv(head_dim, 32)), q.device,
            part, stat, positions, out, length,
            HQ=heads, HD=head_dim, BD=32, BN=block, SPLITS=splits, num_warps=4,
        )  # fmt: skip
    return out
