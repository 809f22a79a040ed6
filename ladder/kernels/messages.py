"""Rows of activations as messages in 8 bits, for all-reduces (`ladder.parallel.eight_bits`).

A message is uint8 [M, bytes]: for each row its D elements, e4m3 or int8, then its scale in float32.
Both begin at multiples of 16 bytes, so that kernels move 16 at once; padding has any value. A row
with an element that is not finite becomes NaN, by its scale.
"""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ladder.jit import begin, jit, kernel, launch, on_triton, tl, triton
from ladder.kernels.eight_bits import fitting_exponent, power, to_e4m3, widened
from ladder.kernels.limits import MAX_SIZE, UNIT, message_bytes
from ladder.models.errors import UserError
from ladder.models.storage import QUANTISED, rounded


def scale_at(size: int) -> int:
    """The byte in a message's row at which its scale begins, for rows of `size` elements."""
    return message_bytes(size) - UNIT


def _message(rows: int, size: int, like: Tensor) -> Tensor:
    """An empty message; as float32, since the scales are written so."""
    if not 1 <= size <= MAX_SIZE:
        raise UserError(f"rows have {size} columns; messages in 8 bits have 1 to {MAX_SIZE}")
    return torch.empty(rows, message_bytes(size) // 4, dtype=torch.float32, device=like.device)


def _scales(message: Tensor, size: int) -> Tensor:
    """The scales of a message, float32 [M], a view."""
    return message.view(torch.float32)[:, scale_at(size) // 4]


# -- the references --------------------------------------------------------------------------


def pack_reference(rows: Tensor, kind: str, count: int) -> Tensor:
    size = rows.shape[1]
    message = _message(count, size, rows)
    filled = torch.zeros(count, size, dtype=torch.float32, device=rows.device)
    filled[: len(rows)] = rows
    small, scales = rounded(filled, kind)
    message.view(torch.uint8)[:, :size] = small.view(torch.uint8)
    _scales(message, size).copy_(scales.where(filled.isfinite().all(1), torch.nan))
    return message.view(torch.uint8)


def unpack_reference(parts: Tensor, kind: str, size: int, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(parts.shape[1], size, device=parts.device)
    for part in parts:
        small = part[:, :size].view(QUANTISED[kind])
        total += small.float().mul_(_scales(part, size)[:, None])
    return total.to(dtype)


def sum_messages_reference(own: Tensor, parts: Tensor, rank: int, kind: str) -> Tensor:
    world, count, _ = parts.shape
    size = own.shape[1]
    total = torch.zeros(count, size, device=own.device)
    for other in range(world):
        if other == rank:
            total[: len(own)] += own
        else:
            total += unpack_reference(parts[other : other + 1], kind, size, torch.float32)
    return pack_reference(total, kind, count)


# -- the kernels -----------------------------------------------------------------------------


@jit
@no_type_check
def _store_row(value, message, scales, row, i, inside, AT: tl.constexpr, STRIDE: tl.constexpr,
               INT8: tl.constexpr):  # fmt: skip
    """Store a row, float32, in a message, rounded as by `ladder.models.storage.rounded`."""
    # As integers, the magnitudes of floats are in order, and NaN is above infinity.
    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.where(inside, bits, 0), 0)
    top = largest.to(tl.float32, bitcast=True)
    if INT8:
        scale = tl.maximum(tl.div_rn(top, 127.0), 1.1754943508222875e-38)  # 2^-126
        scale = tl.where(largest == 0, 1.0, scale)
        ratio = tl.div_rn(value, tl.zeros_like(value) + scale)
        # Rounded to the nearest, ties to even: in float32 so large a sum has no fraction.
        whole = (ratio + 12582912.0) - 12582912.0  # 1.5 x 2^23
        small = tl.minimum(tl.maximum(whole, -127.0), 127.0).to(tl.int8)
    else:
        exponent = fitting_exponent(top, 1)
        scale = power(exponent)
        small = to_e4m3(value * power(254 - exponent))
    scale = tl.where(largest < 0x7F800000, scale, float("nan"))
    start = row.to(tl.int64) * STRIDE
    tl.store(message + start + i, small.to(tl.uint8, bitcast=True), mask=inside)
    tl.store(scales + (start + AT) // 4, scale)


@jit
@no_type_check
def _load_row(message, scales, row, i, inside, AT: tl.constexpr, STRIDE: tl.constexpr,
              INT8: tl.constexpr):  # fmt: skip
    """A row of a message, in float32."""
    start = row.to(tl.int64) * STRIDE
    stored = tl.load(message + start + i, mask=inside, other=0)
    scale = tl.load(scales + (start + AT) // 4)
    small = stored.to(tl.int8 if INT8 else tl.float8e4nv, bitcast=True)
    return widened(small, tl.float32) * scale


@kernel("computation")
@no_type_check
def _pack_kernel(
    rows, message, scales, M, D: tl.constexpr, AT: tl.constexpr, STRIDE: tl.constexpr,
    INT8: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < D
    value = tl.load(rows + row.to(tl.int64) * D + i, mask=inside & (row < M), other=0)
    _store_row(value.to(tl.float32), message, scales, row, i, inside, AT, STRIDE, INT8)


@kernel("computation")
@no_type_check
def _sum_messages_kernel(
    own, parts, part_scales, message, scales, M, count, RANK: tl.constexpr, WORLD: tl.constexpr,
    D: tl.constexpr, AT: tl.constexpr, STRIDE: tl.constexpr, INT8: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < D
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(WORLD):
        if other == RANK:
            at = row.to(tl.int64) * D + i
            total += tl.load(own + at, mask=inside & (row < M), other=0).to(tl.float32)
        else:
            place = other * count + row
            total += _load_row(parts, part_scales, place, i, inside, AT, STRIDE, INT8)
    _store_row(total, message, scales, row, i, inside, AT, STRIDE, INT8)


@kernel("computation")
@no_type_check
def _unpack_messages_kernel(
    parts, scales, out, count, PARTS: tl.constexpr, D: tl.constexpr, AT: tl.constexpr,
    STRIDE: tl.constexpr, INT8: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < D
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += _load_row(parts, scales, part * count + row, i, inside, AT, STRIDE, INT8)
    tl.store(out + row.to(tl.int64) * D + i, total.to(out.dtype.element_ty), mask=inside)


def _launch(kernel, programs: int, like: Tensor, *args, size: int, kind: str, **meta) -> None:
    block = triton.next_power_of_2(size)
    launch(
        kernel, (programs,), like.device, *args, D=size, AT=scale_at(size),
        STRIDE=message_bytes(size), INT8=kind == "int8", BLOCK=block,
        num_warps=max(1, min(16, block // 512)), **meta,
    )  # fmt: skip


@torch.no_grad()
def pack(rows: Tensor, kind: str, count: int) -> Tensor:
    """rows [M, D] as a message of `count` >= M rows, uint8; those beyond M are zeros.

    kind: fp8 or int8. Each finite row is rounded as by `ladder.models.storage.rounded`.
    """
    if not on_triton(rows):
        return pack_reference(rows, kind, count)
    rows, size = rows.contiguous(), rows.shape[1]
    message = _message(count, size, rows)
    _launch(
        _pack_kernel, count, rows, rows, message.view(torch.uint8), message, len(rows),
        size=size, kind=kind,
    )  # fmt: skip
    return message.view(torch.uint8)


@torch.no_grad()
def sum_messages(own: Tensor, parts: Tensor, rank: int, kind: str) -> Tensor:
    """A message of the sums, added in float32 and in the order of the ranks.

    own: this rank's rows [M, D], not rounded. parts: the ranks' messages [T, count, bytes], of
    which this rank's is not read; count >= M, and own rows beyond M are zeros.
    """
    if not on_triton(own):
        return sum_messages_reference(own, parts, rank, kind)
    world, count, _ = parts.shape
    own, size = own.contiguous(), own.shape[1]
    message = _message(count, size, own)
    _launch(
        _sum_messages_kernel, count, own, own, parts, parts.view(torch.float32),
        message.view(torch.uint8), message, len(own), count, RANK=rank, WORLD=world,
        size=size, kind=kind, enable_fp_fusion=False,  # products are rounded, as in the reference
    )  # fmt: skip
    return message.view(torch.uint8)


@torch.no_grad()
def unpack(parts: Tensor, kind: str, size: int, dtype: torch.dtype) -> Tensor:
    """The rows of messages [P, M, bytes], added in float32 in this order: [M, size] in `dtype`."""
    if not on_triton(parts):
        return unpack_reference(parts, kind, size, dtype)
    count, parts = parts.shape[1], parts.contiguous()
    out = torch.empty(count, size, dtype=dtype, device=parts.device)
    _launch(
        _unpack_messages_kernel, count, out, parts, parts.view(torch.float32), out, count,
        PARTS=len(parts), size=size, kind=kind, enable_fp_fusion=False,
    )  # fmt: skip
    return out
