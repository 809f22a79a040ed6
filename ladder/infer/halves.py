"""Inputs of decode products in float16: attention's output and SwiGLU's, for weights in e4m3.

Hopper converts two values of e4m3 to float16 by one instruction, and to bfloat16 by four. float16
holds nothing beyond 65504; but both inputs have bounds, by Cauchy and Schwarz: no normed input of D
elements is longer than sqrt(D), so no element of its product is beyond sqrt(D) times the length of
the weight's row. (The row is multiplied by the norm's weight where that is not folded into the
matrix.) By that bound they are scaled by a power of two, which scales of weights take up: no kernel
multiplies by it. What changes is the rounding, which loses no more than bfloat16's of an element
above 2^-31 of the bound; and where the cache is in fp8, what is below its least scale.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ladder.models.storage import pieces
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
    """Scale values, the last `values` rows of `qkv` and `bias`, so that float16 holds what
    attention gives `output`: none of its elements is beyond the largest value. gain: as above."""
    most = _lengths(qkv, gain)[-values:] * math.sqrt(qkv.weight.shape[1])
    if bias is not None:
        most += bias[-values:].abs()
    exponent = _exponent(most.max())
    _scale(qkv, slice(-values, None), output, exponent)
    if bias is not None:
        bias[-values:] *= 2.0**exponent


def _lengths(matrix: Matrix, gain: Tensor) -> Tensor:
    """Of the rows of a matrix in e4m3, times `gain`: [N] float32."""
    assert matrix.scales is not None
    rows = matrix.weight
    squares = [(rows[some].float() * gain).square().sum(1) for some in pieces(*rows.shape)]
    return torch.cat(squares).sqrt() * matrix.scales


def _exponent(bound: Tensor) -> int:
    """Of the power of two by which what has this bound becomes at most MOST."""
    most = float(bound)
    if not math.isfinite(most) or most == 0:  # there is nothing to scale
        return 0
    return max(-100, min(100, math.floor(math.log2(MOST / most))))


def _scale(source: Matrix, rows: slice, target: Matrix, exponent: int) -> None:
    """Scale `rows` of what `source` gives, which is what `target` takes."""
    assert source.scales is not None
    assert target.scales is not None
    source.scales, target.scales = source.scales.clone(), target.scales * 2.0**-exponent
    source.scales[rows] *= 2.0**exponent
    target.gives = torch.bfloat16
