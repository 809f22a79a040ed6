"""The standard plan is Hugging Face's Llama, its rotary scalings included; other plans are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ladder.models import ModelConfig, Transformer
from tests.samples import (
    PLANS,
    fill,
    full_model,
    relative_error,
    sample_tokens,
    small_config,
    virtual,
)

DIFFERENT = 1e-2  # two architectures, or two weights, are at least this far apart


LLAMAS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one KV head": {"num_kv_heads": 1},
    "KV heads as many as heads": {"num_heads": 8, "num_kv_heads": 8, "hidden_size": 64},
    "four KV heads of eight": {"num_heads": 8, "num_kv_heads": 4, "hidden_size": 64},
    "tied": {"tie_embeddings": True},
    "llama3 rope": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "head_dim": 16,
        "max_seq_len": 128,
    },
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}, "max_seq_len": 128},
    "dynamic rope": {
        "rope_scaling": {
            "rope_type": "dynamic",
            "factor": 3.0,
            "original_max_position_embeddings": 128,
        },
        "max_seq_len": 128,
    },
    "yarn rope": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "head_dim": 16,
        "max_seq_len": 128,
    },
    "yarn rope, all its settings": {
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.3,
            "beta_fast": 8.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
        "head_dim": 16,
        "max_seq_len": 128,
    },
    "wide heads": {"head_dim": 14},
    "narrow heads, odd vocabulary, attention bias": {
        "head_dim": 2,
        "vocab_size": 101,
        "attention_bias": True,
    },
    "MLP bias, another eps": {"mlp_bias": True, "norm_eps": 1e-2},
    "both biases, tied": {"mlp_bias": True, "attention_bias": True, "tie_embeddings": True},
}


def hugging_face(config: ModelConfig) -> Any:
    """transformers' Llama of that shape, in float32, with its eager attention."""
    transformers = pytest.importorskip("transformers")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= config.rope_scaling.to_dict()
    llama = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        rope_parameters=rope,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(llama).float().eval()


@pytest.mark.parametrize("name", LLAMAS)
def test_standard_is_hugging_faces_llama(name: str) -> None:
    """Names, shapes and logits. Catches rotary halves paired otherwise, a norm's eps, the scale of
    attention, grouped heads in another order, a rope scaling that is not Llama 3's."""
    config = small_config(**LLAMAS[name])
    theirs = hugging_face(config)
    ours = Transformer(config).float()
    fill(ours, seed=9)
    state = ours.state_dict()
    assert {k: v.shape for k, v in theirs.state_dict().items()} == {
        k: v.shape for k, v in state.items()
    }
    theirs.load_state_dict(state)
    length = 100 if config.max_seq_len > 64 else 12
    tokens = sample_tokens(config, seed=1, length=length)
    with torch.no_grad():
        expected = theirs(tokens).logits
        for ranks in (1, 2, 4):
            logits = virtual(ours, ranks)(tokens)
            assert relative_error(logits, expected) < 1e-5
    # And back: what Hugging Face wrote loads as it is.
    again = Transformer(config)
    again.load_state_dict(theirs.state_dict())
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == config.tie_embeddings
    with torch.no_grad():
        assert relative_error(again(tokens), expected) < 1e-5


@pytest.mark.parametrize("wrong", ["ladder", "hybrid", "lag 2", "parallel"])
def test_another_architecture_is_not_hugging_faces_llama(wrong: str) -> None:
    """The proof that the tolerance above can fail."""
    config = small_config()
    theirs = hugging_face(config)
    ours = Transformer(small_config(PLANS[wrong]))
    fill(ours, seed=9)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    tokens = sample_tokens(config, seed=1)
    with torch.no_grad():
        assert relative_error(ours(tokens), theirs(tokens).logits) > DIFFERENT


@pytest.mark.parametrize("name", ["llama3 rope", "linear rope", "yarn rope"])
def test_rope_scaling_matters(name: str) -> None:
    """The shapes above reach positions at which scaling matters."""
    changes = LLAMAS[name]
    scaled = full_model(small_config(**changes), 9)
    plain = full_model(small_config(**{**changes, "rope_scaling": None}), 9)
    tokens = sample_tokens(scaled.config, seed=1, length=100)
    assert relative_error(scaled(tokens), plain(tokens)) > 1e-3
