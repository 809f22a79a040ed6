"""Specs of parameters: every parameter has one, and what follows from it."""

from __future__ import annotations

import math
import zlib

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ladder.models import sublayers
from ladder.models.config import ModelConfig
from ladder.models.parameters import Initialisation
from ladder.models.ranks import Ranks
from ladder.models.transformer import Transformer, meta_model
from ladder.parallel.sharding import initialise
from tests.samples import small_config


class Routed(sublayers.MLP):
    """A feed-forward with an additional matrix that has no spec."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.router = nn.Linear(8, 4, bias=False)


def test_a_parameter_without_a_spec_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches what the names' table did: `router.weight` was whole on every rank, unsaid."""
    monkeypatch.setitem(sublayers.FEED_FORWARDS, "swiglu", Routed)
    wanted = r"model\.layers\.0\.mlp\.router\.weight has no spec: .* Linear\.parameter_specs"
    with pytest.raises(ValueError, match=wanted):
        meta_model(small_config())


def old_numbers(name: str, shape: torch.Size, seed: int, num_layers: int) -> Tensor:
    """A parameter's first numbers, by its name alone: the formula of the first release."""
    generator = torch.Generator().manual_seed(
        (seed * 1_000_003 + zlib.crc32(name.encode())) % 2**63
    )
    if "norm" in name:
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    writes = name.endswith(("o_proj.weight", "down_proj.weight"))
    std = 0.02 / math.sqrt(2 * num_layers) if writes else 0.02
    return torch.empty(shape).normal_(0.0, std, generator=generator)


@pytest.mark.parametrize(
    "config",
    [
        small_config("desync-2x", 2, True, qkv_bias=True, qk_norm=True),
        small_config("parallel", attention_bias=True, mlp_bias=True, tie_embeddings=True),
    ],
)
@torch.no_grad()
def test_the_numbers_of_a_seed_stay(config: object) -> None:
    """Bit for bit: runs and results of before are those of their seeds."""
    model = Transformer(config)  # type: ignore[arg-type]
    initialise(model, seed=np.int64(5))
    for name, parameter in model.named_parameters():
        expected = old_numbers(name, parameter.shape, 5, model.config.num_layers)
        assert torch.equal(parameter, expected), name


def test_what_each_process_holds() -> None:
    """Each number once over the processes, or whole on each, where its gradient is shared: norms,
    output biases, and the two heads of keys and values that four processes cannot divide."""
    config = small_config("ladder", qk_norm=True, attention_bias=True, mlp_bias=True, vocab_size=10)
    model = meta_model(config)
    whole = set()
    for name, shape in model.shapes.items():
        spec, held = model.specs[name], torch.zeros(shape)
        for process in range(4):
            held[spec.slices(shape, Ranks(4, process))] += 1
        assert held.unique().tolist() == [4 if spec.shared(4) else 1], name
        if spec.shared(4):
            whole.add(name.split(".", 3)[-1] if "layers" in name else name)
    assert whole == {
        "input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight",
        "self_attn.q_norm.weight", "self_attn.k_norm.weight", "self_attn.o_proj.bias",
        "self_attn.k_proj.weight", "self_attn.k_proj.bias", "self_attn.v_proj.weight",
        "self_attn.v_proj.bias", "mlp.down_proj.bias",
    }  # fmt: skip
    keys = model.specs["model.layers.0.self_attn.k_proj.weight"]
    assert (keys.split_over(2), config.num_kv_heads) == (0, 2)


def test_the_norms_of_each_rank_are_split_over_the_processes() -> None:
    model = meta_model(small_config("desync-2x", 4, True, num_kv_heads=4))
    found = {
        (len(shape), model.specs[name].split, model.specs[name].decay)
        for name, shape in model.shapes.items()
        if "norm" in name
    }
    assert found == {(1, None, False), (2, 0, False)}


def test_a_tied_parameter_has_the_spec_of_each_of_its_names() -> None:
    """transformers initialises the head by its own name, tied or not."""
    model = meta_model(small_config(tie_embeddings=True))
    assert "lm_head.weight" not in model.shapes
    assert model.specs["lm_head.weight"].init is Initialisation.NORMAL
