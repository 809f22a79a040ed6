"""Sums of products in e4m3 as Hopper's tensor cores make them, and a bound of their error.

An instruction adds 32 products to its accumulator. Each product, and the accumulator, is cut to
multiples of 2^(e - 13), e the largest of all their exponents; their sum, cut to 13 bits behind its
first, is the next accumulator (arXiv 2412.19437, 3.3.2; the exact arithmetic: arXiv 2511.10909).
*Promotion*: after an interval of columns the accumulator is added to a sum in float32, and starts
from 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

COLUMNS, BITS = 32, 13  # of an instruction; behind the first bit
LEAST = -6  # e4m3's least exponent
FLOAT32 = 2.0**-24  # the largest error of a sum in float32, relative to it


def _cut(values: Tensor, unit: Tensor) -> Tensor:
    return (values / unit).trunc() * unit


def _power(values: Tensor, least: int) -> Tensor:
    """2^e of each value, e its exponent or `least`; 0 of 0."""
    exponents = (torch.frexp(values)[1] - 1).clamp(min=least).long()
    return ((exponents + 1023) << 52).view(torch.float64).where(values != 0, 0.0)


def multiplied(a: Tensor, b: Tensor, interval: int) -> Tensor:
    """a [M, K] times b [N, K], transposed, both of values of e4m3, in float64: [M, N] float32."""
    total = torch.zeros(len(a), len(b))
    for start in range(0, a.shape[1], interval):
        kept = torch.zeros(len(a), len(b), dtype=torch.float64)
        for k in range(start, min(start + interval, a.shape[1]), COLUMNS):
            columns = slice(k, min(k + COLUMNS, start + interval))
            x, y = a[:, None, columns], b[None, :, columns]
            top = (_power(x, LEAST) * _power(y, LEAST)).amax(-1).maximum(_power(kept, -126))
            unit = top.clamp(min=2.0**-126) * 2.0**-BITS
            found = _cut(x * y, unit[..., None]).sum(-1) + _cut(kept, unit)
            kept = _cut(found, _power(found, -126).clamp(min=2.0**-126) * 2.0**-BITS)
        total += kept.float()
    return total


def largest_error(a: Tensor, b: Tensor, interval: int) -> Tensor:
    """The largest error of `multiplied`, [M, N] in float64.

    A product has 2 bits before the point and 6 behind it, so that only those of exponents below
    e - 7 are cut: each, and the accumulator, by less than 2^(e - 13); their sum by less than 2^-13
    of itself. No exponent is above that of the largest product or of the accumulator, which is its
    exact value, computed here, and at most the error so far.
    """
    shape = len(a), len(b)
    total, spare = a.new_zeros(shape), a.abs() @ b.abs().t()
    for start in range(0, a.shape[1], interval):
        exact, error = a.new_zeros(shape), a.new_zeros(shape)
        for k in range(start, min(start + interval, a.shape[1]), COLUMNS):
            columns = slice(k, min(k + COLUMNS, start + interval))
            powers = _power(a[:, None, columns], LEAST) * _power(b[None, :, columns], LEAST)
            top = powers.amax(-1).maximum(_power(exact.abs() + error, -126))
            cut = ((powers > 0) & (powers < 2.0**-7 * top[..., None])).sum(-1) + (k > start)
            error = error + cut * top * 2.0**-BITS
            exact = exact + a[:, columns] @ b[:, columns].t()
            error = error + 2.0**-BITS * (exact.abs() + error)
        total += error
    additions = -(-a.shape[1] // interval)
    return total + additions * FLOAT32 * (spare + total)
