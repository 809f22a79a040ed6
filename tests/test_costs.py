"""The costs of layers, against counts by hand and the parameters of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ladder.bench.floors import prefill_floor_s
from ladder.config import model_config
from ladder.costs import (
    cache_bytes,
    decode_bytes,
    inference_bytes,
    layer_parameters,
    prefill_flops,
    reduce_bytes,
    sublayer_parameters,
    training_flops_per_token,
    vocabulary_parameters,
)
from ladder.infer.cache import Cache
from ladder.models import ModelConfig, Transformer
from ladder.models.quantised import quantise_model
from ladder.parallel.sharding import initialise

SHAPE = ModelConfig(vocab_size=10, hidden_size=8, intermediate_size=12, num_layers=3, num_heads=4,
                    num_kv_heads=2, max_seq_len=64)  # fmt: skip


def test_parameters_are_those_of_a_model() -> None:
    """By sublayer, of a shape whose heads are not hidden_size wide together."""
    config = replace(SHAPE, head_dim=6)
    model = Transformer(config)
    for name, kind in (("self_attn", "attention"), ("mlp", "mlp")):
        counted = sum(
            parameter.numel()
            for key, parameter in model.named_parameters()
            if f"layers.1.{name}." in key
        )
        assert sublayer_parameters(config, kind) == counted
    both = sublayer_parameters(config, "attention+mlp")
    assert layer_parameters(config) == both == 8 * 6 * (4 + 4 + 2 + 2) + 3 * 8 * 12
    assert vocabulary_parameters(config) == model.model.embed_tokens.weight.numel() == 80


def test_inference_by_hand() -> None:
    # a layer: q, o 8 x 8; k, v 4 x 8; three 12 x 8: 480 weights, 240 a rank; head 80, 40 a rank
    # a token of the cache: one KV head of 2 on each rank, key and value: 4 numbers a layer
    assert decode_bytes(SHAPE, 2, 5, 8) == 2 * (3 * (240 + 4 * 8 * 5) + 40)
    # attention of a token that sees half of 6: 2 products x 2 FLOPs x 8 x 3
    # of the last layer k and v of all 30 tokens, 64 weights, and the rest of 5 tokens
    products = 2 * (2 * 480 * 30 + 64 * 30 + 416 * 5)
    attention = 2 * (2 * 2 * 8 * 3) * 30 + 2 * 2 * 8 * 6 * 5
    flops = (products + attention + 2 * 80 * 5) / 2
    assert prefill_flops(SHAPE, 2, 5, 6) == flops
    assert prefill_floor_s(SHAPE, 2, 5, 6, 1e30, 10.0) == flops / 10
    assert prefill_floor_s(SHAPE, 2, 5, 6, 10.0, 1e30) == 2 * 3 * 240 / 10
    # more ranks than KV heads: each holds one, of 2, key and value
    narrow = replace(SHAPE, num_kv_heads=1)
    layer = (2 * 64 + 2 * 16 + 288) / 2
    assert decode_bytes(narrow, 2, 5, 8) == 2 * (3 * (layer + 4 * 8 * 5) + 40)


def counted_bytes(shape: ModelConfig, weights: str) -> int:
    """The bytes of a model's matrices and their scales, without the embedding."""
    model = Transformer(shape).to(torch.bfloat16)
    initialise(model, 0)
    quantise_model(model, weights)
    return sum(
        parameter.nbytes
        for name, parameter in model.named_parameters()
        if "norm" not in name and "embed" not in name
    )


def test_bytes_of_a_cache_as_stored() -> None:
    """Of each head and token a byte for each element, and the exponent."""
    model = Transformer(SHAPE).to(torch.bfloat16)
    for kind, name in (("auto", "bf16"), ("fp8", "fp8")):
        counted = sum(each.nbytes for each in Cache(model, 2, 5, kind).tensors())
        assert cache_bytes(SHAPE, 1, 10, name) == counted
        assert decode_bytes(SHAPE, 1, 2, 5, "int8", name) == (
            decode_bytes(SHAPE, 1, 0, 0, "int8") + counted
        )


def test_bytes_of_blocks() -> None:
    """A byte for each 128, where blocks are whole."""
    shape = replace(SHAPE, hidden_size=128, intermediate_size=256, num_heads=8, head_dim=16)
    assert decode_bytes(shape, 1, 0, 0, "fp8-block") == counted_bytes(shape, "fp8-block")


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_bytes_of_weights_as_stored(weights: str) -> None:
    """One byte each, a float32 scale for each row of this rank; the cache stays in bfloat16."""
    # rows of a rank: q, k, v 4 + 2 + 2; gate, up 6 + 6; o and down, whose inputs are split, 8 + 8
    layer, head = 240 + 4 * (8 + 12 + 16), 40 + 4 * 5
    cache = 2 * 3 * 4 * 8 * 5
    assert decode_bytes(SHAPE, 2, 5, 8, weights) == 3 * layer + head + cache
    assert prefill_floor_s(SHAPE, 2, 5, 6, 10.0, 1e30, weights) == 3 * layer / 10
    assert decode_bytes(SHAPE, 1, 0, 0, weights) == counted_bytes(SHAPE, weights)


def test_virtual_ranks_have_keys_and_values_of_their_own() -> None:
    """T 4 on two processes: of two KV heads each process holds one twice, of four one each."""
    virtual = replace(SHAPE, plan="desync-2x", tp_degree=4)
    assert cache_bytes(SHAPE, 2, 10) == 2 * 3 * 4 * 10
    assert cache_bytes(virtual, 2, 10) == 2 * 3 * 8 * 10
    assert cache_bytes(replace(virtual, num_kv_heads=4), 2, 10) == 2 * 3 * 8 * 10


def test_the_memory_of_inference_by_hand() -> None:
    weights, vocabulary, largest = 3 * 240, 2 * 40, 96  # the largest: 8 x 12
    cache = 3 * 4 * 20 * 5
    inner = (4 * 12 + 6 * 8) / 2
    activations, logits = 30 * (8 * 8 + inner), 6 * 5 * 10
    found = inference_bytes(SHAPE, 2, 5, 6, 20)
    assert found == 2 * (weights + vocabulary + largest + cache + activations + logits)


def test_a_reduce_sums_one_vector_of_hidden_size_for_each_token() -> None:
    assert reduce_bytes(SHAPE, 3) == 3 * 8 * 2
    assert reduce_bytes(SHAPE, 3, itemsize=4) == 3 * 8 * 4


@pytest.mark.parametrize("name", ["paper-1b", "llama-3-8b", "2b-class"])
def test_flops_follow_the_models_parameters(name: str) -> None:
    """A matrix left out, the input embedding counted, or attention counted twice is off by more."""
    config = model_config(name)
    with torch.device("meta"):
        model = Transformer(config)
    counted = sum(
        parameter.numel()
        for key, parameter in model.named_parameters()
        if "embed_tokens" not in key and "norm" not in key
    )
    if config.tie_embeddings:
        counted += config.vocab_size * config.hidden_size
    attention = 6 * config.num_layers * 2048 * config.num_heads * config.head_dim
    assert training_flops_per_token(config, 2048) == 6 * counted + attention
