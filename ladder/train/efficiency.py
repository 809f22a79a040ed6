"""How well a run uses its GPUs: model FLOPs per token, and their share of what the GPU could do."""

from __future__ import annotations

import torch

from ladder.models.config import ModelConfig

# Dense bfloat16 FLOPs per second, by a part of the GPU's name; vendors' data sheets.
PEAKS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12}


def flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of training on one token, forward and backward, the model's own work alone.

    6 x parameters without the input embedding, and 6 x layers x sequence x attention width for
    causal attention, counted once (half of the square). What is computed again under activation
    checkpointing does not count. Where documents are masked apart, less is computed: this counts
    the whole window all the same.
    """
    size, head = config.hidden_size, config.head_dim
    width = config.num_heads * head
    attention = size * (2 * width + 2 * config.num_kv_heads * head)
    layer = attention + 3 * size * config.intermediate_size
    parameters = config.num_layers * layer + config.vocab_size * size
    return 6.0 * parameters + 6.0 * config.num_layers * seq_len * width


def peak_flops(device: torch.device) -> float | None:
    """What one GPU could do, None where it is not known (a CPU, another GPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
