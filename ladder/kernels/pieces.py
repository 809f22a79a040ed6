"""The input of a product with a weight in 8 bits as two values in 8 bits for each element.

An element in bfloat16 has 8 significant bits. The landing that makes a residual stores two values
of the weight's type for each element, too, its *pieces*. So tensor cores multiply the weight as it
is stored, straight from shared memory, by both pieces, and no thread converts it
(`ladder.kernels.tiles`). What is lost:

- e4m3: two values of 4 significant bits hold all 8, but of elements below 2^-13 of the row's
  largest, which lose at most 2^-21 of it; and tensor cores cut the sum of a step's columns
  (`ladder.kernels.eight_bits`). Both are less than what rounding to bfloat16 loses.
- int8: at most 2^-15.9 of the row's largest. Rounding to bfloat16 loses more of an element above a
  128th of the largest. A program's sums are exact, up to MOST_COLUMNS.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import ASSEMBLY
from ladder.jit import jit, tl
from ladder.kernels.eight_bits import power, to_e4m3

LOWS = {torch.float8_e4m3fn: 16.0, torch.int8: 254.0}  # see `Pieces`
LARGEST = 127.0  # of int8
LEAST = 2.0**-100  # of int8: a row whose largest element is smaller is as good as zero
_E4M3_LOW, _INT8_LOW, _LARGEST, _LEAST = (
    value if tl is None else tl.constexpr(value) for value in (*LOWS.values(), LARGEST, LEAST)
)
MOST_COLUMNS = 2**17  # of a product whose sums of int8 are below 2^31


class Pieces(NamedTuple):
    """x [M, D] as (values[0] + values[1] / LOWS[values.dtype]) * factors[:, None].

    values: [2, M, D] e4m3 or int8. factors: [M] float32, for e4m3 powers of two; NaN of a row that
    is not finite.
    """

    values: Tensor
    factors: Tensor


def new_pieces(like: Tensor, dtype: torch.dtype) -> Pieces:
    """Memory for the pieces, of this dtype, of a tensor like this one, [M, D]."""
    values = torch.empty(2, *like.shape, dtype=dtype, device=like.device)
    return Pieces(values, torch.empty(len(like), dtype=torch.float32, device=like.device))


def split_reference(x: Tensor, into: Pieces) -> None:
    x, kind = x.float(), into.values.dtype
    top = x.abs().amax(1, keepdim=True)
    if kind == torch.int8:
        factors = top.clamp(min=LEAST) / LARGEST
        scaled = x * (LARGEST / top.clamp(min=LEAST))
        high = scaled.round()
    else:
        # So the largest is below 2^8. (frexp has 0 for zero's.)
        exponent = (torch.frexp(top)[1] - 8).where(top > 0, -126).clamp(min=-126)
        factors = torch.ldexp(torch.ones_like(top), exponent)
        scaled = x / factors
        high = scaled.to(kind).float()
    low = (scaled - high) * LOWS[kind]
    into.values[0] = high.to(kind)
    into.values[1] = (low.round() if kind == torch.int8 else low).to(kind)
    into.factors.copy_(factors.where(top.isfinite(), torch.nan).flatten())


@jit
@no_type_check
def _e4m3(x):
    """Round x, float32, to the nearest of e4m3's values. One instruction does it for two elements;
    the interpreter's own conversion differs, so it takes `to_e4m3`."""
    if ASSEMBLY:
        return x.to(tl.float8e4nv)
    return to_e4m3(x)


@jit
@no_type_check
def _rounded(x, KIND: tl.constexpr):
    """Round x, float32, to the nearest of KIND's values."""
    if KIND == tl.int8:  # noqa: SIM108, SIM300  (KIND is a constexpr)
        # From 1.5 x 2^23 on, the last bits of a float32 count ones.
        found = (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        found = _e4m3(x)
    return found


@jit
@no_type_check
def largest(x):
    """The largest magnitude of x, float32, as an integer; NaN is larger than all others."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@jit
@no_type_check
def row_factor(top, factor, KIND: tl.constexpr):
    """Store a row's factor, by its `largest`; returns the factor on its elements for `split`."""
    finite = top < 0x7F800000
    if KIND == tl.int8:  # noqa: SIM300  (KIND is a constexpr)
        most = tl.maximum(top.to(tl.float32, bitcast=True), _LEAST)
        own, shrink = tl.div_rn(most, _LARGEST), tl.div_rn(_LARGEST, most)
    else:
        exponent = tl.maximum(top >> 23, 8)
        own, shrink = power(exponent - 7), power(261 - exponent)
    tl.store(factor, tl.where(finite, own, float("nan")))
    return shrink


@jit
@no_type_check
def low_factor(KIND: tl.constexpr):
    """LOWS, by a Triton type."""
    return _INT8_LOW if KIND == tl.int8 else _E4M3_LOW  # noqa: SIM300  (KIND is a constexpr)


@jit
@no_type_check
def split(x, values, at, inside, size):
    """Store the pieces of x, float32, in the range of `row_factor`: the first at `at`, the second
    `size` behind it."""
    KIND: tl.constexpr = values.dtype.element_ty
    high = _rounded(x, KIND)
    tl.store(values + at, high, mask=inside)
    low = (x - high.to(tl.float32)) * low_factor(KIND)
    tl.store(values + size + at, _rounded(low, KIND), mask=inside)
