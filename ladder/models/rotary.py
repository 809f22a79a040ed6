"""Rotary frequencies, scaled as in transformers (modeling_rope_utils)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ladder.models.config import ModelConfig, RopeScaling


def rotary_frequencies(config: ModelConfig, device: torch.device) -> tuple[Tensor, float]:
    """Radians per position, [head_dim / 2] float32, and the factor of cos and sin."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (exponent / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type == "dynamic":  # unscaled up to max_seq_len
        return frequency, 1.0
    if scaling.rope_type == "linear":
        return frequency / scaling.factor, 1.0
    kept = _kept(scaling, config, frequency)
    scaled = kept * frequency + (1 - kept) * frequency / scaling.factor
    return scaled, scaling.attention_factor or 1.0


def _kept(scaling: RopeScaling, config: ModelConfig, frequency: Tensor) -> Tensor:
    """The unscaled fraction of each frequency, 0 to 1; the rest is divided by `factor`."""
    original = scaling.original_max_position_embeddings
    assert original is not None
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        assert low is not None
        assert high is not None
        turns = original * frequency / (2 * math.pi)
        return ((turns - low) / (high - low)).clamp(0, 1)
    # YaRN (arXiv 2309.00071, 3.2), whose ramp is over the index of a frequency.
    size = config.head_dim

    def index(turns: float | None) -> float:
        """The index of the frequency with that many turns over the original context."""
        assert turns is not None
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    first, last = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    indices = torch.arange(size // 2, device=frequency.device, dtype=torch.float32)
    return 1 - ((indices - first) / (last - first)).clamp(0, 1)
