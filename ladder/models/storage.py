"""How weights are stored: the types of matrices in 8 bits, and their values.

ladder.models.quantised stores a model's matrices so.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ladder.models.eight_bits import BLOCK

FP8_CAPABILITY = (8, 9)  # compute capability of the GPUs that convert e4m3
PIECE = 2**24  # elements that are converted at once
QUANTISED = {
    "fp8": torch.float8_e4m3fn,
    "fp8-block": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST = {"fp8": 448.0, "fp8-block": 448.0, "int8": 127.0}
# The largest error of a stored value: relative to it, and absolute, in units of the scale.
ROUNDING = {"fp8": (2.0**-4, 2.0**-10), "fp8-block": (2.0**-4, 2.0**-10), "int8": (0.0, 0.5)}
LEAST_EXPONENT = -126  # of a scale: smaller numbers are not normal in float32
# The least exponent of a scale in the cache. A softmax weight is multiplied by the scale and
# rounded, in float16 to multiples of 2^-24, which must be far below the scale. Keys and values
# below 2^-20 become 0.
LEAST_CACHED = -10
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
    """The dtype of scales. uint8: powers of two, of which only float32's exponent is stored."""
    return torch.uint8 if kind == "fp8-block" else torch.float32


def scales_of(largest: Tensor, kind: str, least: int = LEAST_EXPONENT) -> Tensor:
    """The scales of groups of elements, from their largest magnitudes, in float32.

    least: the least exponent of fp8's scales.
    """
    if kind == "int8":
        # Divided by a tensor: for a Python number, torch on a GPU multiplies by its reciprocal.
        found = (largest / torch.full_like(largest, LARGEST[kind])).clamp(min=2.0**LEAST_EXPONENT)
        return found.where(largest > 0, 1.0)
    fraction, exponent = torch.frexp(largest)  # largest = fraction * 2^exponent, fraction >= 1/2
    exponent = exponent - 9 + (fraction > LARGEST[kind] / 2**9).int()
    bits = (exponent.clamp(min=least).int() + 127) << 23  # exact, unlike a power
    return bits.view(torch.float32).where(largest > 0, 1.0)


def exponents(scales: Tensor) -> Tensor:
    """The biased float32 exponents, uint8, of scales that are powers of two."""
    return (scales.view(torch.int32) >> 23).to(torch.uint8)


def powers(stored: Tensor) -> Tensor:
    """The powers of two of `exponents`, in float32."""
    return (stored.int() << 23).view(torch.float32)


def divided(values: Tensor, scales: Tensor, kind: str) -> Tensor:
    """values / scales as they are stored: rounded to the nearest, ties to even."""
    scaled = values / scales
    if kind == "int8":
        scaled = scaled.round().clamp(-LARGEST[kind], LARGEST[kind])
    return scaled.to(QUANTISED[kind])


def rounded(values: Tensor, kind: str, least: int = LEAST_EXPONENT) -> tuple[Tensor, Tensor]:
    """values [..., K] as stored, and a float32 scale [...] for each group of K values.

    Values are rounded to the nearest, ties to even. In fp8 a value that becomes zero keeps its
    sign, and one that is not finite becomes NaN. int8 has no NaN: there the scale becomes NaN, and
    with it the whole group. The host does not wait for a GPU.
    """
    exact = values.float()
    largest = exact.abs().amax(-1)
    scales = scales_of(largest, kind, least)
    if kind == "int8":  # which has no NaN
        scales = scales.where(largest.isfinite(), torch.nan)
    else:  # conversions of infinities differ
        exact = exact.where(exact.isfinite(), torch.nan)
    return divided(exact, scales[..., None], kind), scales


def near(values: Tensor, kind: str) -> Tensor:
    """values [..., K] in their own dtype, rounded as they would be stored."""
    stored, scales = rounded(values, kind)
    return stored.float().mul_(scales[..., None]).to(values.dtype)


def widened(scales: Tensor, columns: int) -> Tensor:
    """Scales as float32 [N, 1], or [N, columns] where blocks of columns have their own."""
    if scales.dim() == 1:
        return scales[:, None]
    return powers(scales).repeat_interleave(BLOCK, 1)[:, :columns]


def dequantise(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """stored [N, K] times its scales, in float32 and rounded once to `dtype`.

    Besides the result, only one piece of it is in memory in float32.
    """
    found = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    for rows in pieces(*stored.shape):
        values = stored[rows].to(torch.float32)
        found[rows] = values.mul_(widened(scales[rows], stored.shape[1]))
    return found


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in QUANTISED.values()
