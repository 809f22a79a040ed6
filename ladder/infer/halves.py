"""float16 inputs of decode products with weights in 8 bits: attention's output and SwiGLU's.

Hopper converts two values of e4m3 to float16 with one instruction, and to bfloat16 with four; two
of int8 with three, and with four. float16 holds nothing beyond 65504, but both inputs have bounds,
by Cauchy and Schwarz: no normed input of D elements is longer than sqrt(D), so no element of its
product is beyond sqrt(D) times the length of the weight's row. (The row is multiplied by the norm's
weight where that is not folded into the matrix.) The inputs are scaled by a power of two that
follows from this bound. The weights' scales absorb the factor, so no kernel multiplies by it. Only
rounding changes: elements above 2^-31 of the bound lose no more than in bfloat16. With an fp8
cache, values below its least scale change, too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ladder.models.storage import pieces, widened
from ladder.parallel.matrix import Matrix

MOST = 2.0**15  # half of what float16 holds: the rest is for rounding


def halve_swiglu(gate_up: Matrix, gain: Tensor, down: Matrix) -> None:
    """Let `gate_up` give `down` its input in float16. gain: [D], the norm's weight, or ones if it
    is folded into `gate_up`."""
    assert gate_up.scales is not None
    gate, up = _lengths(gate_up, gain).chunk(2)
    exponent = _exponent((gate * up).max() * gate_up.weight.shape[1])
    _scale(gate_up, slice(len(gate), None), down, exponent)
    gate_up.gives = torch.float16


def halve_attention(
    qkv: Matrix, gain: Tensor, bias: Tensor | None, values: int, output: Matrix
) -> None:
    """Scale attention's values so that float16 holds the input of `output`.

    No element of attention's output is beyond the largest value. values: the number of rows of
    values, the last ones of `qkv` and `bias`. gain: as in `halve_swiglu`.
    """
    most = _lengths(qkv, gain)[-values:] * math.sqrt(qkv.weight.shape[1])
    if bias is not None:
        most += bias[-values:].abs()
    exponent = _exponent(most.max())
    _scale(qkv, slice(-values, None), output, exponent)
    if bias is not None:
        bias[-values:] *= 2.0**exponent


def _lengths(matrix: Matrix, gain: Tensor) -> Tensor:
    """The lengths of the rows of a matrix in 8 bits, times `gain`: [N] float32."""
    scales, (count, columns) = matrix.scales, matrix.weight.shape
    assert scales is not None
    lengths = []
    for some in pieces(count, columns):
        rows, by = matrix.weight[some].float() * gain, widened(scales[some], columns)
        # Squares of a row's stored values fit in float32, whatever its scale is.
        top = by.amax(1, keepdim=True)
        lengths.append((rows * (by / top)).square().sum(1).sqrt() * top[:, 0])
    return torch.cat(lengths)


def _exponent(bound: Tensor) -> int:
    """The exponent of the power of two that scales values within `bound` to at most MOST."""
    most = float(bound)
    if not math.isfinite(most) or most == 0:  # there is nothing to scale
        return 0
    return max(-100, min(100, math.floor(math.log2(MOST / most))))


def _scale(source: Matrix, rows: slice, target: Matrix, exponent: int) -> None:
    """Scale `rows` of the output of `source` by 2^exponent, and undo that in `target`'s product."""
    assert source.scales is not None
    assert target.scales is not None
    source.scales = source.scales.clone()
    source.scales[rows] = _shifted(source.scales[rows], exponent)
    target.scales = _shifted(target.scales, -exponent)
    target.gives = torch.bfloat16


def _shifted(scales: Tensor, exponent: int) -> Tensor:
    """scales * 2^exponent, as they are stored."""
    if scales.dtype != torch.uint8:
        return scales * 2.0**exponent
    # Exponents. Of those at the lower end the values are too small to show in any result.
    return (scales.int() + exponent).clamp(1, 254).to(torch.uint8)
