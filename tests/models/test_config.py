"""A model's config: all that it holds is saved, and a bad field is named."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ladder.models import ModelConfig, UserError
from tests.samples import PLANS, small_config


def test_round_trip_of_all_that_a_config_holds() -> None:
    config = small_config(
        tie_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        head_dim=6,
        rope_theta=5e5,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": 16},
    )
    assert config.rope_scaling is not None
    assert (config.rope_scaling.factor, config.rope_scaling.low_freq_factor) == (4.0, 1.0)
    assert ModelConfig.from_dict(yaml.safe_load(yaml.safe_dump(config.to_dict()))) == config


def test_config_ties_tp_degree_to_the_plan() -> None:
    """T is in the config exactly where it is part of the function."""
    with pytest.raises(UserError, match="tp_degree"):
        small_config("desync-2x")
    with pytest.raises(UserError, match="tp_degree=2"):
        small_config("ladder", tp_degree=2)
    with pytest.raises(UserError, match="tp_degree=3"):
        small_config("desync-2x", tp_degree=3)
    for bad in (0, -2, 2.0, True, "2"):
        with pytest.raises(UserError, match="tp_degree"):
            small_config("desync-2x", tp_degree=bad)
    with pytest.raises(UserError, match="num_kv_heads"):
        small_config("desync-2x", tp_degree=4, num_heads=12, num_kv_heads=6, head_dim=4)
    assert small_config("desync-2x", tp_degree=4, num_heads=8, num_kv_heads=2).tp_degree == 4


def test_a_plan_that_states_its_degree() -> None:
    """It is the model's, if none is given; where the plan does not depend on T, it is not."""
    ranges = [{"layers": "0-3", "preset": "accumulate-4x-lag2"}]
    config = small_config({"tp_degree": 2, "layers": ranges})
    assert config == small_config({"tp_degree": 2, "layers": ranges}, tp_degree=2)
    assert config.tp_degree == small_config(config.plan).tp_degree == 2
    desync = [{"layers": "0-3", "preset": "desync-2x"}]  # without sqrt(T)
    assert small_config({"tp_degree": 2, "layers": desync}).tp_degree == 2
    assert small_config({"tp_degree": 2, "layers": [{"layers": "0-3"}]}).tp_degree is None
    with pytest.raises(UserError, match="holds records of another T, tp_degree=2"):
        small_config({"tp_degree": 2, "layers": ranges}, tp_degree=4)
    with pytest.raises(UserError, match=r"^tp_degree=3 does not divide num_heads=4"):
        small_config({"tp_degree": 3, "layers": ranges})


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
@pytest.mark.parametrize("name", ["desync-2x", "dtp-1", "own at once, peers 1 later", "none"])
def test_output_bias_needs_equal_residuals(name: str, field: str) -> None:
    """A bias that one rank adds would stay on that rank."""
    with pytest.raises(UserError, match=field):
        small_config(PLANS.get(name, name), 2, True, **{field: True})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 0}, ["vocab_size=0"]),
        ({"hidden_size": 32.0}, ["hidden_size=32.0"]),
        ({"num_layers": True}, ["num_layers=True"]),
        ({"max_seq_len": -1}, ["max_seq_len=-1"]),
        ({"hidden_size": 30}, ["hidden_size=30", "num_heads=4", "head_dim"]),
        ({"head_dim": 5}, ["head_dim=5 must be an even"]),
        ({"hidden_size": 20}, ["head_dim=5 (hidden_size=20 / num_heads=4) must be an even"]),
        ({"head_dim": -2}, ["head_dim=-2"]),
        ({"num_kv_heads": 3}, ["num_heads=4", "num_kv_heads=3; choose"]),
        ({"attention_bias": True, "qkv_bias": True}, ["qkv_bias=True", "attention_bias=True"]),
        ({"mixer": []}, ["mixer=[] must be a name"]),
        ({"feed_forward": None}, ["feed_forward=None must be a name"]),
        ({"rope_scaling": {"factr": 2.0}}, ["factr", "did you mean 'factor'"]),
        ({"rope_scaling": {"rope_type": "yarns"}}, ["rope_type 'yarns'", "did you mean 'yarn'"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["original_max_position_embeddings=None"]),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, ["rope_type ['yarn']"]),
        ({"rope_scaling": {"rope_type": "linear", "beta_fast": 2}}, ["beta_fast=2", "leave it"]),
    ],
)
def test_a_bad_config_names_its_field(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        small_config(**change)
    for word in words:
        assert word in str(error.value)


def test_a_bad_key_of_a_config_names_the_nearest() -> None:
    data = small_config().to_dict()
    with pytest.raises(UserError, match="did you mean 'hidden_size'"):
        ModelConfig.from_dict({**data, "hiden_size": 32})
    del data["vocab_size"]
    with pytest.raises(UserError, match="vocab_size"):
        ModelConfig.from_dict(data)
