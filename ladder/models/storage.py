"""How weights are stored: the types of matrices in 8 bits, and their values.

What stores them so: ladder.models.quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_CAPABILITY = (8, 9)  # compute capability of the GPUs that convert e4m3
QUANTISED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}


def dequantise(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """stored [N, K] * scales [N], in float32 and rounded once to `dtype`."""
    return (stored.to(torch.float32) * scales[:, None]).to(dtype)


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in QUANTISED.values()
