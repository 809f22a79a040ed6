"""Model folders: a small model, saved as ours or as Hugging Face's Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ladder import checkpoint
from ladder.checkpoint import model_entries, write_config
from ladder.models import ModelConfig, Transformer
from ladder.parallel.sharding import initialise, shard_model

TOKENS = torch.randint(0, 91, (2, 11), generator=torch.Generator().manual_seed(0))


def save_llama(folder: Path, **changes: Any) -> LlamaForCausalLM:
    """A random Llama, saved by transformers in several files."""
    torch.manual_seed(1)
    fields = {"vocab_size": 91, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
              "eos_token_id": [3, 5], "initializer_range": 0.2} | changes  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    model.save_pretrained(folder, max_shard_size="20KB")
    return model


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16, "rope_theta": 5e5}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
        "mscale_all_dim": 0.3, "beta_fast": 4, "rope_theta": 500.0}  # fmt: skip
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 1e4},
    "yarn": YARN,
    "yarn of the longest": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4},
}


def make(plan: str = "desync-2x", degree: int | None = 4) -> Transformer:
    config = ModelConfig(91, 32, 56, 2, 4, 4, max_seq_len=64, plan=plan, tp_degree=degree)  # type: ignore[arg-type]
    model = Transformer(config)
    shard_model(model)
    initialise(model, 2)
    return model


def save_ours(folder: Path, model: Transformer) -> None:
    write_config(folder, model.config, eos_token_id=0)
    checkpoint.write_tensors(folder, checkpoint.WEIGHTS, model_entries(model), writer=True)
