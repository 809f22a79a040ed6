"""The input of a product with a weight in e4m3 as two values of e4m3 for each element.

An element in bfloat16 has 8 significant bits: two values of e4m3, of 4 each, are its *pieces*. The
landing that makes a residual stores those, too, so that tensor cores multiply the weight as it is
stored, straight from shared memory, by both pieces, and no thread converts it
(`ladder.kernels.tiles`). Two things are lost: bits of elements below 2^-13 of the row's largest, at
most 2^-21 of it; and what tensor cores cut from the sum of a step's columns
(`ladder.kernels.eight_bits`). Both are less than what rounding to bfloat16 loses.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import ASSEMBLY
from ladder.jit import jit, tl
from ladder.kernels.eight_bits import power, to_e4m3

LOW = 16.0  # factor on the rest of an element, which is its second piece
_LOW = LOW if tl is None else tl.constexpr(LOW)


class Pieces(NamedTuple):
    """x [M, D] as (values[0] + values[1] / LOW) * factors[:, None].

    values: [2, M, D] e4m3. factors: [M] float32, powers of two; NaN of a row that is not finite.
    """

    values: Tensor
    factors: Tensor


def new_pieces(like: Tensor) -> Pieces:
    """Memory for the pieces of a tensor like this one, [M, D]."""
    values = torch.empty(2, *like.shape, dtype=torch.float8_e4m3fn, device=like.device)
    return Pieces(values, torch.empty(len(like), dtype=torch.float32, device=like.device))


def split_reference(x: Tensor, into: Pieces) -> None:
    x = x.float()
    top = x.abs().amax(1, keepdim=True)
    # So the largest is below 2^8. (frexp has 0 for zero's.)
    exponent = (torch.frexp(top)[1] - 8).where(top > 0, -126).clamp(min=-126)
    factors = torch.ldexp(torch.ones_like(top), exponent)
    high = (x / factors).to(torch.float8_e4m3fn)
    into.values[0] = high
    into.values[1] = ((x / factors - high.float()) * LOW).to(torch.float8_e4m3fn)
    into.factors.copy_(factors.where(top.isfinite(), torch.nan).flatten())


@jit
@no_type_check
def _rounded(x):
    """Round x, float32, to the nearest of e4m3's values. One instruction does it for two elements;
    the interpreter's own conversion differs, so it takes `to_e4m3`."""
    if ASSEMBLY:
        return x.to(tl.float8e4nv)
    return to_e4m3(x)


@jit
@no_type_check
def largest(x):
    """The largest magnitude of x, float32, as an integer; NaN is larger than all others."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@jit
@no_type_check
def row_factor(top, factor):
    """Store a row's factor, by its `largest`; returns the factor on its elements for `split`."""
    exponent = tl.maximum(top >> 23, 8)
    tl.store(factor, tl.where(exponent == 255, float("nan"), power(exponent - 7)))
    return power(261 - exponent)


@jit
@no_type_check
def split(x, values, at, inside, size):
    """Store the pieces of x, float32 below 2^8: the first at `at`, the second `size` behind it."""
    high = _rounded(x)
    tl.store(values + at, high, mask=inside)
    tl.store(values + size + at, _rounded((x - high.to(tl.float32)) * _LOW), mask=inside)
