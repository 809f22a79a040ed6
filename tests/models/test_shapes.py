"""The model shapes in configs/models, against the parameter counts that their sources publish."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
import yaml

from ladder.models import ModelConfig, Transformer
from tests import ROOT

FOLDER = ROOT / "configs" / "models"

# Published parameters, tied embeddings once: a wrong number of layers, (KV) heads or rows of the
# vocabulary, or a wrong tie, misses an exact count.
LLAMAS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3-8b": 8_030_261_248,
    "codellama-34b": 33_743_970_304,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}
OTHERS = {  # lowest and highest: the papers say 1B, 3B and 176B; the rest is ours
    "paper-1b": (1.0e9, 1.3e9),
    "paper-3b": (2.9e9, 3.6e9),
    "bloom-176b": (176e9 * 0.98, 176e9 * 1.02),
    "2b-class": (1.9e9, 2.1e9),
    "quality-30m": (0.27e8, 0.33e8),
    "quality-100m": (0.95e8, 1.05e8),
    "quality-100m-16h": (0.95e8, 1.05e8),
    "quality-300m": (2.9e8, 3.2e8),
    "half-8b": (3.9e9, 4.1e9),
    "quarter-8b": (1.9e9, 2.1e9),
    "tiny": (0.4e6, 0.6e6),
}
# The largest T that each shape is meant for: one node of 8, two of them for the largest.
LARGEST_TP = dict.fromkeys((*LLAMAS, *OTHERS), 8) | {
    "paper-3b": 4,  # 8 does not divide its 36 heads
    "quality-100m": 4,
    "bloom-176b": 16,
    "llama-3.1-405b": 16,
}


def data(name: str) -> dict:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def count(config: ModelConfig) -> int:
    """Parameters by formula: four attention and three MLP matrices, two norms a layer."""
    size = config.hidden_size
    heads = 2 * config.num_heads + 2 * config.num_kv_heads  # q and o, k and v
    attention = heads * config.head_dim * size
    mlp = 3 * size * config.intermediate_size
    vocabulary = config.vocab_size * size * (1 if config.tie_embeddings else 2)
    return vocabulary + config.num_layers * (attention + mlp + 2 * size) + size


def test_every_shape_is_listed_here() -> None:
    assert {path.stem for path in FOLDER.glob("*.yaml")} == {*LLAMAS, *OTHERS}


@pytest.mark.parametrize("name", sorted((*LLAMAS, *OTHERS)))
class TestShape:
    def test_is_complete_and_typed(self, name: str) -> None:
        names = {item.name for item in fields(ModelConfig)}
        names -= {"plan", "tp_degree", "mixer", "feed_forward"}  # the same for all of them
        assert set(data(name)) == names
        # YAML 1.1 reads 1e-5 and 1e6, without a dot, as strings
        for key in ("rope_theta", "norm_eps"):
            assert isinstance(data(name)[key], float), key

    def test_has_the_published_number_of_parameters(self, name: str) -> None:
        parameters = count(ModelConfig.from_dict(data(name)))
        print(f"{name}: {parameters:,}")
        if name in LLAMAS:
            assert parameters == LLAMAS[name]
        else:
            lowest, highest = OTHERS[name]
            assert lowest <= parameters <= highest

    def test_builds_with_that_number(self, name: str) -> None:
        config = ModelConfig.from_dict(data(name))
        with torch.device("meta"):
            model = Transformer(config)
        # parameters() yields a tied matrix once
        assert sum(parameter.numel() for parameter in model.parameters()) == count(config)

    def test_splits_over_the_ranks_it_is_meant_for(self, name: str) -> None:
        config = ModelConfig.from_dict(data(name))
        degree = 1
        while degree <= LARGEST_TP[name]:
            config.check_divides(degree, "tp")
            degree *= 2


def test_bloom_has_the_mlp_parameters_of_the_original() -> None:
    config = ModelConfig.from_dict(data("bloom-176b"))
    assert 3 * config.intermediate_size == pytest.approx(2 * 4 * config.hidden_size, rel=0.01)
    assert config.intermediate_size % 128 == 0
