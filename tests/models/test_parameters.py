"""Specs of parameters: every parameter has one, and what follows from it."""

from __future__ import annotations

import math
import zlib

import pytest
import torch
from torch import Tensor, nn

from ladder.models import layers
from ladder.models.transformer import Transformer, meta_model
from ladder.parallel.sharding import initialise
from tests.samples import small_config


class Routed(layers.MLP):
    """A feed-forward with a matrix more, which does not say what it is."""

    def __init__(self, config: object) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.router = nn.Linear(8, 4, bias=False)


def test_a_parameter_without_a_spec_is_an_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches what the names' table did: `router.weight` was whole on every rank, unsaid."""
    monkeypatch.setattr(layers, "MLP", Routed)
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
    initialise(model, seed=5)
    for name, parameter in model.named_parameters():
        expected = old_numbers(name, parameter.shape, 5, model.config.num_layers)
        assert torch.equal(parameter, expected), name
