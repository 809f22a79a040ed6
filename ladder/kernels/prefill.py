"""Kernels between the matrix products of a prompt: landing on a rank's rows, SwiGLU, rotary.

All three are bound by memory bandwidth: each reads its inputs once and writes its results once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.jit import begin, check_dtype, check_tensor, jit, kernel, launch, on_triton, tl, triton
from ladder.kernels.cache_checks import check_extras, check_stored
from ladder.kernels.eight_bits import fitting_exponent, power, to_e4m3
from ladder.kernels.limits import MAX_SIZE
from ladder.kernels.norm import Pair
from ladder.models import storage
from ladder.models.errors import UserError

MAX_PIECES = 8
# Elements per program: with 4 warps a thread has four 16-byte loads of bfloat16 from each input in
# flight.
TILE, WARPS = 4096, 4


# -- landing ---------------------------------------------------------------------------------


def land_rows_reference(
    pieces: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, out: Pair | None = None,
    copies: Sequence[Tensor] = (),
) -> Pair:  # fmt: skip
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    for piece in (*pieces, residual):
        total += piece.float()
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    for copy in copies:
        copy.copy_(normed)
    if out is not None:
        return out[0].copy_(total), out[1].copy_(normed)
    return total.to(residual.dtype), normed.to(residual.dtype)


@jit
@no_type_check
def norm_row(total, gain, eps, D: tl.constexpr):
    """The RMSNorm of a row of D elements, padded with zeros, in float32."""
    return total * tl.rsqrt(tl.sum(total * total, 0) / D + eps) * gain


@kernel("landing")
@no_type_check
def _land_rows_kernel(
    residual, weight, landed, normed, eps, p0, p1, p2, p3, p4, p5, p6, p7,
    c0, c1, c2, c3, c4, c5, c6, COUNT: tl.constexpr, COPIES: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # The whole row stays in registers: it is read once, so `landed` may be `residual` itself.
    i = tl.arange(0, BLOCK)
    inside = i < D
    at = tl.program_id(0).to(tl.int64) * D + i
    gain = tl.load(weight + i, mask=inside, other=0).to(tl.float32)
    before = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    if COUNT > 0:
        total += tl.load(p0 + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 1:
        total += tl.load(p1 + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 2:
        total += tl.load(p2 + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 3:
        total += tl.load(p3 + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 4:
        total += tl.load(p4 + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 5:
        total += tl.load(p5 + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 6:
        total += tl.load(p6 + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 7:
        total += tl.load(p7 + at, mask=inside, other=0).to(tl.float32)
    total += before
    tl.store(landed + at, total.to(landed.dtype.element_ty), mask=inside)
    y = norm_row(total, gain, eps, D).to(normed.dtype.element_ty)
    tl.store(normed + at, y, mask=inside)
    if COPIES > 0:
        tl.store(c0 + at, y, mask=inside)
    if COPIES > 1:
        tl.store(c1 + at, y, mask=inside)
    if COPIES > 2:
        tl.store(c2 + at, y, mask=inside)
    if COPIES > 3:
        tl.store(c3 + at, y, mask=inside)
    if COPIES > 4:
        tl.store(c4 + at, y, mask=inside)
    if COPIES > 5:
        tl.store(c5 + at, y, mask=inside)
    if COPIES > 6:
        tl.store(c6 + at, y, mask=inside)


@torch.no_grad()
def land_rows(
    pieces: Sequence[Tensor], residual: Tensor, weight: Tensor, eps: float, out: Pair | None = None,
    copies: Sequence[Tensor] = (),
) -> Pair:  # fmt: skip
    """Sum up to 8 pieces, add the residual, and norm the sum: (new residual, normed), both [M, D].

    pieces: each [M, D], the ranks' parts of one output in rank order, possibly in peers' memory.
    residual: [M, D], D up to 16384, not changed unless `out[0]` is the residual itself.
    weight: [D]. All tensors have one dtype (bfloat16, float16, float32) and are contiguous.
    copies: up to 7, each [M, D], possibly in peers' memory, to which `normed` is also written.

    The pieces are summed in float32 in their order, then the residual is added, and the new
    residual is rounded once. The norm is computed from the sum before that rounding. Not
    differentiable.
    """
    if residual.dim() != 2 or not 1 <= residual.shape[1] <= MAX_SIZE:
        raise UserError(
            f"residual has shape {tuple(residual.shape)}; expected [M, D] with D up to {MAX_SIZE}"
        )
    if len(pieces) > MAX_PIECES:
        raise UserError(f"{len(pieces)} pieces; land at most {MAX_PIECES} at a time")
    rows, size = residual.shape
    named = {f"pieces[{n}]": piece for n, piece in enumerate(pieces)}
    if len(copies) >= MAX_PIECES:
        raise UserError(f"{len(copies)} copies; write at most {MAX_PIECES - 1} at a time")
    named |= {f"copies[{n}]": copy for n, copy in enumerate(copies)}
    named |= dict(zip(("out[0]", "out[1]"), out or (), strict=False))
    check_dtype(residual=residual, weight=weight, **named)
    check_tensor("residual", residual, (rows, size), residual)
    check_tensor("weight", weight, (size,), residual)
    for name, tensor in named.items():
        check_tensor(name, tensor, (rows, size), residual)
    if not on_triton(residual):
        return land_rows_reference(pieces, residual, weight, eps, out, copies)
    landed, normed = (
        (torch.empty_like(residual), torch.empty_like(residual)) if out is None else out
    )
    block = triton.next_power_of_2(size)
    launch(
        _land_rows_kernel, (rows,), residual.device,
        residual, weight, landed, normed, eps, *pieces, *[residual] * (MAX_PIECES - len(pieces)),
        *copies, *[residual] * (MAX_PIECES - 1 - len(copies)),
        COUNT=len(pieces), COPIES=len(copies), D=size, BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        dependent=False,  # on its stream it follows copies and waits, not a kernel
    )  # fmt: skip
    return landed, normed


# -- SwiGLU ----------------------------------------------------------------------------------


def swiglu_reference(packed: Tensor) -> Tensor:
    gate, up = packed.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(packed.dtype)


@kernel("computation")
@no_type_check
def _swiglu_kernel(
    packed, out, M, H: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin(PDL)
    # One grid dimension, since the others are limited to 65535.
    across = tl.cdiv(H, BLOCK)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < M) & (column < H)
    source = packed + row * 2 * H + column
    gate = tl.load(source, mask=inside, other=0).to(tl.float32)
    up = tl.load(source + H, mask=inside, other=0).to(tl.float32)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * H + column, y.to(out.dtype.element_ty), mask=inside)


@torch.no_grad()
def swiglu(packed: Tensor) -> Tensor:
    """silu(gate) * up of packed [M, 2 H], gate then up in each row: [M, H].

    bfloat16, float16 or float32, contiguous. Computed in float32, rounded once. Not
    differentiable.
    """
    if packed.dim() != 2 or packed.shape[1] % 2:
        raise UserError(f"packed has shape {tuple(packed.shape)}; expected [M, 2 H]")
    rows, inner = packed.shape[0], packed.shape[1] // 2
    check_dtype(packed=packed)
    check_tensor("packed", packed, (rows, 2 * inner), packed)
    if not on_triton(packed):
        return swiglu_reference(packed)
    out = torch.empty(rows, inner, dtype=packed.dtype, device=packed.device)
    block = min(512, triton.next_power_of_2(inner))
    tall = TILE // block
    launch(
        _swiglu_kernel, (triton.cdiv(rows, tall) * triton.cdiv(inner, block),), packed.device,
        packed, out, rows, H=inner, ROWS=tall, BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return out


# -- rotary ----------------------------------------------------------------------------------


def rotary_prompt_reference(
    packed: Tensor, table: Tensor, keys: Tensor, values: Tensor, num_heads: int, num_kv_heads: int,
    gains: Pair | None = None, eps: float = 0.0, exponents: Pair | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    length = packed.shape[1]
    heads = packed.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    cos, sin = table[:length, None].chunk(2, dim=-1)

    def rotate(x: Tensor, gain: Tensor | None) -> Tensor:
        whole = x.float()
        if gain is not None:
            whole = F.rms_norm(whole, whole.shape[-1:], gain.float(), eps)
        left, right = whole.chunk(2, dim=-1)
        turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return turned.to(x.dtype).transpose(1, 2)

    q_gain, k_gain = gains or (None, None)
    k, v = rotate(k, k_gain), v.transpose(1, 2)
    if exponents is not None:
        for cache, scales, new in ((keys, exponents[0], k), (values, exponents[1], v)):
            stored, factors = storage.rounded(new, "fp8", storage.LEAST_CACHED)
            cache.view(torch.uint8)[:, :, :length] = stored.view(torch.uint8)
            scales[:, :, :length] = storage.exponents(factors)
        return rotate(q, q_gain), k, v
    keys[:, :, :length], values[:, :, :length] = k, v
    return rotate(q, q_gain), keys[:, :, :length], values[:, :, :length]


@kernel("computation")
@no_type_check
def _rotary_prompt_kernel(
    packed, table, keys, values, key_exponents, value_exponents, out, q_gain, k_gain, eps, S,
    batch_stride, head_stride,
    NORM: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, HALF: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr,
    LEAST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """OUT: the first heads that go to `out`, [B, S, OUT, 2 HALF]."""
    begin(PDL)
    # [token, head, column]: the table's rows are read once for all heads of a program.
    blocks = tl.cdiv(S, TOKENS)
    b = (tl.program_id(0) // blocks).to(tl.int64)
    position = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[None, :, None]).to(tl.int64)
    i = tl.arange(0, BLOCK)[None, None, :]
    here = (position < S) & (i < HALF)
    inside = here & (head < HQ + 2 * HKV)
    source = packed + ((b * S + position) * (HQ + 2 * HKV) + head) * 2 * HALF + i
    left = tl.load(source, mask=inside, other=0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0).to(tl.float32)
    cos = tl.load(table + position * 2 * HALF + i, mask=here, other=0)
    sin = tl.load(table + position * 2 * HALF + HALF + i, mask=here, other=0)
    kind = packed.dtype.element_ty
    turned = head < HQ + HKV
    if NORM:
        squares = tl.sum(left * left, 2, keep_dims=True) + tl.sum(right * right, 2, keep_dims=True)
        norm = tl.rsqrt(squares / (2 * HALF) + eps)
        half = i < HALF
        q_left, q_right = tl.load(q_gain + i, half, 0), tl.load(q_gain + HALF + i, half, 0)
        k_left, k_right = tl.load(k_gain + i, half, 0), tl.load(k_gain + HALF + i, half, 0)
        gain_left = tl.where(head < HQ, q_left, k_left).to(tl.float32)
        gain_right = tl.where(head < HQ, q_right, k_right).to(tl.float32)
        left = tl.where(turned, left * norm * gain_left, left)
        right = tl.where(turned, right * norm * gain_right, right)
    new_left = tl.where(turned, left * cos - right * sin, left).to(kind)
    new_right = tl.where(turned, right * cos + left * sin, right).to(kind)
    given = inside & (head < OUT)
    target = out + ((b * S + position) * OUT + head) * 2 * HALF + i
    tl.store(target, new_left, mask=given)
    tl.store(target + HALF, new_right, mask=given)
    if key_exponents is not None:
        top = tl.maximum(tl.max(tl.abs(new_left), 2, keep_dims=True),
                         tl.max(tl.abs(new_right), 2, keep_dims=True))  # fmt: skip
        exponent = fitting_exponent(top.to(tl.float32), LEAST)
        new_left = to_e4m3(new_left.to(tl.float32) * power(254 - exponent))
        new_right = to_e4m3(new_right.to(tl.float32) * power(254 - exponent))
        row = (b * batch_stride + (head - HQ) * head_stride) // (2 * HALF) + position
        there = (position < S) & (head >= HQ) & (head < HQ + HKV)
        tl.store(key_exponents + row, exponent.to(tl.uint8), mask=there)
        row = (b * batch_stride + (head - HQ - HKV) * head_stride) // (2 * HALF) + position
        there = (position < S) & (head >= HQ + HKV) & (head < HQ + 2 * HKV)
        tl.store(value_exponents + row, exponent.to(tl.uint8), mask=there)
    cached = b * batch_stride + position * 2 * HALF + i
    stored = inside & (head >= HQ) & (head < HQ + HKV)
    target = keys + cached + (head - HQ) * head_stride
    tl.store(target, new_left, mask=stored)
    tl.store(target + HALF, new_right, mask=stored)
    stored = inside & (head >= HQ + HKV)
    target = values + cached + (head - HQ - HKV) * head_stride
    tl.store(target, new_left, mask=stored)
    tl.store(target + HALF, new_right, mask=stored)


@torch.no_grad()
def rotary_prompt(
    packed: Tensor, table: Tensor, keys: Tensor, values: Tensor, num_heads: int, num_kv_heads: int,
    gains: Pair | None = None, eps: float = 0.0, exponents: Pair | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotate the queries and keys of prompts from position 0 on; store their keys and values.

    packed: [B, S, (num_heads + 2 num_kv_heads) * head_dim], queries, then keys, then values.
    table: [at least S, head_dim] float32, row p holding cos (head_dim / 2) then sin of position p;
        halves are paired as Hugging Face does.
    keys, values: [B, num_kv_heads, L, head_dim], L at least S, written in place at 0 .. S - 1; the
        last two dimensions dense.
    gains: the weights of the norms of queries and of keys, both [head_dim], applied before the
        rotation, with epsilon `eps`.

    exponents: of keys and of values in e4m3 (see ladder.infer.cache), uint8 [B, num_kv_heads, L]
        each, written in place.

    Returns queries [B, num_heads, S, head_dim], a view of dense [B, S, num_heads, head_dim], and
    the first S positions of keys and values, which torch's attention takes without another copy;
    for a cache in e4m3, keys and values before they are rounded, views of other memory. The
    rotation is in float32 and rounded once; values are copied bit for bit. Not differentiable.
    """
    heads, head_dim = num_heads + 2 * num_kv_heads, keys.shape[-1]
    if packed.dim() != 3 or packed.shape[2] != heads * head_dim or head_dim % 2:
        raise UserError(
            f"packed has shape {tuple(packed.shape)}; expected [B, S, {heads} x {head_dim}], with "
            f"an even head_dim"
        )
    batch, length, _ = packed.shape
    check_stored(keys, values, exponents, packed=packed)
    check_tensor("packed", packed, (batch, length, heads * head_dim), packed)
    for name, cache in (("keys", keys), ("values", values)):
        expected = (batch, num_kv_heads, keys.shape[2], head_dim)
        if tuple(cache.shape) != expected or cache.shape[2] < length:
            raise UserError(
                f"{name} has shape {tuple(cache.shape)}; expected [{batch}, {num_kv_heads}, L, "
                f"{head_dim}] with the same L of {length} or more for both"
            )
        if cache.stride()[2:] != (head_dim, 1) or cache.stride() != keys.stride():
            raise UserError(f"{name} has strides {cache.stride()}; expected dense rows of head_dim")
        if cache.device != packed.device:
            raise UserError(f"{name} is on {cache.device}, packed on {packed.device}; move it")
    if table.dtype != torch.float32 or table.shape[0] < length:
        raise UserError(
            f"table is {table.dtype} {tuple(table.shape)}; expected torch.float32 [>= {length}, "
            f"{head_dim}]"
        )
    check_tensor("table", table, (table.shape[0], head_dim), packed)
    check_extras(None, gains, packed, 0, head_dim)
    if not on_triton(packed):
        return rotary_prompt_reference(
            packed, table, keys, values, num_heads, num_kv_heads, gains, eps, exponents
        )
    q_gain, k_gain = gains or (packed, packed)
    # A prompt attends to its keys before they are rounded to e4m3, so these are returned, too.
    given = num_heads + (0 if exponents is None else num_kv_heads)
    out = torch.empty(batch, length, given, head_dim, dtype=packed.dtype, device=packed.device)
    block = triton.next_power_of_2(head_dim // 2)
    several = min(4, triton.next_power_of_2(heads))
    tokens = max(1, TILE // (block * several))
    launch(
        _rotary_prompt_kernel,
        (batch * triton.cdiv(length, tokens), triton.cdiv(heads, several)), packed.device,
        packed, table, keys, values, *(exponents or (None, None)), out, q_gain, k_gain, eps, length,
        keys.stride(0), keys.stride(1),
        NORM=gains is not None, HQ=num_heads, HKV=num_kv_heads, HALF=head_dim // 2,
        TOKENS=tokens, HEADS=several, BLOCK=block, OUT=given, LEAST=127 + storage.LEAST_CACHED,
        num_warps=WARPS,
    )  # fmt: skip
    if exponents is None:
        return out.transpose(1, 2), keys[:, :, :length], values[:, :, :length]
    q, k = out.split((num_heads, num_kv_heads), dim=2)
    v = packed.unflatten(-1, (heads, head_dim))[:, :, num_heads + num_kv_heads :]
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
