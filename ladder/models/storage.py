"""How weights are stored: the types of matrices in 8 bits, and their values.

What stores them so: ladder.models.quantised.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FP8_CAPABILITY = (8, 9)  # compute capability of the GPUs that convert e4m3
BLOCK = 128  # columns that share a scale in `fp8-block`
PIECE = 2**24  # elements that are converted at once
QUANTISED = {
    "fp8": torch.float8_e4m3fn,
    "fp8-block": torch.float8_e4m3fn,
    "int8": torch.int8,
}
SCALED = {  # what has a scale of its own
    "fp8": "row",
    "fp8-block": f"{BLOCK} columns of a row",
    "int8": "row",
}


def pieces(rows: int, columns: int) -> Iterator[slice]:
    """The rows of a matrix in slices of about PIECE elements."""
    step = max(1, PIECE // max(1, columns))
    return (slice(start, start + step) for start in range(0, rows, step))


def scale_shape(kind: str, shape: torch.Size) -> torch.Size:
    """The shape of the scales of a matrix of this shape [N, K]: [N], or [N, blocks]."""
    if kind == "fp8-block":
        return torch.Size((shape[0], -(-shape[1] // BLOCK)))
    return shape[:1]


def scale_dtype(kind: str) -> torch.dtype:
    """uint8: a power of two, of which only float32's exponent is stored."""
    return torch.uint8 if kind == "fp8-block" else torch.float32


def widened(scales: Tensor, columns: int) -> Tensor:
    """Scales as float32 [N, 1], or [N, columns] where blocks of columns have their own."""
    if scales.dim() == 1:
        return scales[:, None]
    values = (scales.int() << 23).view(torch.float32)
    return values.repeat_interleave(BLOCK, 1)[:, :columns]


def dequantise(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """stored [N, K] times its scales, in float32 and rounded once to `dtype`.

    Beside the result, only a piece of it is in memory.
    """
    found = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    for rows in pieces(*stored.shape):
        values = stored[rows].to(torch.float32)
        found[rows] = values.mul_(widened(scales[rows], stored.shape[1]))
    return found


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in QUANTISED.values()
