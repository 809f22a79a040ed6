"""Between the QKV projection and attention: rotate queries and keys, store keys and values."""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ladder.kernels.launch import begin, check, check_dtype, jit, launch, on_triton, tl, triton
from ladder.models.errors import UserError


def rotary_cache_reference(
    qkv: Tensor, table: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
    num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1)).float()
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = table[positions][:, None].chunk(2, dim=-1)

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    rows = torch.arange(len(qkv), device=qkv.device)
    keys[rows, :, positions] = rotate(k).to(keys.dtype)
    values[rows, :, positions] = v.to(values.dtype)
    return rotate(q).to(qkv.dtype)


@jit
@no_type_check
def _rotary_kernel(
    qkv, table, positions, keys, values, q, L, batch_stride, head_stride,
    HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    b, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    i = tl.arange(0, BLOCK)
    position = tl.load(positions + b)
    # A position outside the cache cannot raise here; it must not write to other memory either.
    inside = (i < HALF) & (position >= 0) & (position < L)
    source = qkv + (b * (HQ + 2 * HKV) + head) * 2 * HALF
    left = tl.load(source + i, mask=inside, other=0).to(tl.float32)
    right = tl.load(source + HALF + i, mask=inside, other=0).to(tl.float32)
    cos = tl.load(table + position * 2 * HALF + i, mask=inside, other=0)
    sin = tl.load(table + position * 2 * HALF + HALF + i, mask=inside, other=0)
    cached = b * batch_stride + position * 2 * HALF
    kind = keys.dtype.element_ty
    if head < HQ + HKV:
        new_left = (left * cos - right * sin).to(kind)
        new_right = (right * cos + left * sin).to(kind)
        if head < HQ:
            target = q + (b * HQ + head) * 2 * HALF
            tl.store(target + i, new_left, mask=i < HALF)
            tl.store(target + HALF + i, new_right, mask=i < HALF)
        else:
            target = keys + cached + (head - HQ) * head_stride
            tl.store(target + i, new_left, mask=inside)
            tl.store(target + HALF + i, new_right, mask=inside)
    else:
        target = values + cached + (head - HQ - HKV) * head_stride
        tl.store(target + i, left.to(kind), mask=inside)
        tl.store(target + HALF + i, right.to(kind), mask=inside)


def check_cache(keys: Tensor, values: Tensor, positions: Tensor, like: Tensor) -> None:
    """Raise UserError unless keys and values are alike, [B, heads, L, head_dim], as is the rest.

    The last two dimensions must be dense; a cache cut in the third, `keys[:, :, :extent]`, will do.
    """
    batch = positions.shape[0]
    for name, cache in (("keys", keys), ("values", values)):
        if cache.dim() != 4 or cache.shape[0] != batch or cache.shape != keys.shape:
            raise UserError(
                f"{name} has shape {tuple(cache.shape)}; expected [{batch}, heads, L, head_dim] "
                f"for {batch} positions, and the same for both"
            )
        if cache.stride()[2:] != (cache.shape[3], 1) or cache.stride() != keys.stride():
            raise UserError(f"{name} has strides {cache.stride()}; expected dense rows of head_dim")
        if cache.device != like.device:
            raise UserError(
                f"{name} is on {cache.device}, the rest on {like.device}; move it there"
            )
    check("positions", positions, (batch,), like)
    if positions.dtype != torch.int64:
        raise UserError(f"positions is {positions.dtype}; expected torch.int64")


@torch.no_grad()
def rotary_cache(
    qkv: Tensor, table: Tensor, positions: Tensor, keys: Tensor, values: Tensor,
    num_heads: int, num_kv_heads: int,
) -> Tensor:  # fmt: skip
    """Rotate the queries and keys of one token per sequence; store its keys and values.

    qkv: [B, (num_heads + 2 num_kv_heads) * head_dim], queries, then keys, then values.
    table: [at least L, head_dim] float32, row p holding cos (head_dim / 2) then sin of position p;
        halves are paired as Hugging Face does.
    positions: [B] int64, the place of each token, from 0 to L - 1. Beyond that nothing is stored
        and the queries are zeros (the reference, on a CPU, raises IndexError).
    keys, values: [B, num_kv_heads, L, head_dim], written in place at positions[b].

    Returns the rotated queries, [B, num_heads, head_dim]. Rotates in float32 and rounds once;
    values are copied bit for bit. Not differentiable.
    """
    batch, heads = positions.shape[0], num_heads + 2 * num_kv_heads
    head_dim, length = keys.shape[-1], keys.shape[2]
    check_dtype(qkv=qkv, keys=keys, values=values)
    check("qkv", qkv, (batch, heads * head_dim), qkv)
    check_cache(keys, values, positions, qkv)
    if keys.shape[1] != num_kv_heads or head_dim % 2:
        raise UserError(
            f"keys has shape {tuple(keys.shape)}; expected {num_kv_heads} heads, an even head_dim"
        )
    if table.dtype != torch.float32 or table.shape[0] < length:
        raise UserError(
            f"table is {table.dtype} {tuple(table.shape)}; expected torch.float32 [>= {length}, "
            f"{head_dim}]"
        )
    check("table", table, (table.shape[0], head_dim), qkv)
    if not on_triton(qkv):
        return rotary_cache_reference(qkv, table, positions, keys, values, num_heads, num_kv_heads)
    q = torch.empty(batch, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    launch(
        _rotary_kernel, (batch, heads), qkv.device,
        qkv, table, positions, keys, values, q, length, keys.stride(0), keys.stride(1),
        HQ=num_heads, HKV=num_kv_heads, HALF=head_dim // 2,
        BLOCK=triton.next_power_of_2(head_dim // 2), num_warps=1,
    )  # fmt: skip
    return q
