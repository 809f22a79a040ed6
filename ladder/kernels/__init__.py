"""Decode kernels for one GPU, each beside a plain PyTorch reference of the same signature.

Imported without Triton, and run on CPU tensors without it: see `ladder.kernels.launch`.
"""

from ladder.kernels.attention import decode_attention, decode_attention_reference
from ladder.kernels.linear import (
    gate_up,
    gate_up_reference,
    skinny_linear,
    skinny_linear_reference,
)
from ladder.kernels.norm import add_rms_norm, add_rms_norm_reference
from ladder.kernels.rotary import rotary_cache, rotary_cache_reference

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "decode_attention",
    "decode_attention_reference",
    "gate_up",
    "gate_up_reference",
    "rotary_cache",
    "rotary_cache_reference",
    "skinny_linear",
    "skinny_linear_reference",
]
