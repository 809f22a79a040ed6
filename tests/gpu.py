"""A model, tokens and numbers of ranks for tests on GPUs."""

from __future__ import annotations

from typing import Any

import torch

from ladder.models import ModelConfig, Transformer
from ladder.parallel.sharding import initialise, local_parameters, shard_model

WORLDS = [world for world in (1, 2, 4) if world <= torch.cuda.device_count()]


def make(
    plan: str, degree: int | None, dtype: torch.dtype, max_seq_len: int = 2048,
    qwen: bool = False, **where: Any,
) -> Transformer:  # fmt: skip
    """qwen: with biases of queries, keys and values, and norms of queries and keys."""
    config = ModelConfig(
        max_seq_len=max_seq_len,
        vocab_size=515,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        plan=plan,  # type: ignore[arg-type]
        tp_degree=degree,
        qkv_bias=qwen,
        qk_norm=qwen,
    )
    with torch.device("meta"):
        model = Transformer(config)
    shard_model(model, **where, dtype=dtype)
    initialise(model, 1)
    with torch.no_grad():  # what every rank's part of them is
        for name, local, _ in local_parameters(model):
            if name.endswith("bias"):
                local.fill_(0.1)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                local.copy_(torch.linspace(0.5, 1.5, len(local)))
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(2)
    both = torch.randint(0, 515, (2, 3, 65), generator=source)
    return both[0], both[1]
