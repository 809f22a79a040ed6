"""How a tensor of the new model is made of the old one's: norms folded into what reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ladder.convert.command import convert
from ladder.convert.weights import recipes
from ladder.models import ModelConfig, sublayers
from ladder.models.layers import ColumnParallelLinear
from tests.convert.folders import assert_same_bits, save, tensors
from tests.samples import small_config


def test_folded_norms_are_rounded_once_and_nothing_else_changes(tmp_path: Path) -> None:
    source = save(tmp_path / "hf")
    old = {name: value.bfloat16() for name, value in tensors(source).items()}
    for path in source.glob("*.safetensors*"):
        path.unlink()
    save_file(old, source / "model.safetensors")
    convert(source, tmp_path / "ours", "parallel")
    expected = dict(old)
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        first = old[f"{prefix}input_layernorm.weight"].float()
        second = expected.pop(f"{prefix}post_attention_layernorm.weight").float()
        for name in ("q_proj", "k_proj", "v_proj"):
            name = f"{prefix}self_attn.{name}.weight"
            expected[name] = (old[name].float() * first).bfloat16()
        for name in ("gate_proj", "up_proj"):
            name = f"{prefix}mlp.{name}.weight"
            expected[name] = (old[name].float() * second).bfloat16()
        expected[f"{prefix}input_layernorm.weight"] = torch.ones(32, dtype=torch.bfloat16)
    assert_same_bits(tensors(tmp_path / "ours"), expected)


class Routed(sublayers.MLP):
    """A feed-forward with another matrix that reads the normed residual."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.router = ColumnParallelLinear(config.hidden_size, 4, bias=False)


def test_norms_are_folded_into_what_specs_say_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name: a table of names would leave the router without its norm's weight."""
    monkeypatch.setitem(sublayers.FEED_FORWARDS, "swiglu", Routed)
    found = recipes(small_config("standard"), small_config("parallel@1-1"))
    gains = {each.name: each.gain for each in found if each.gain is not None}
    prefix = "model.layers.1."
    reads = {f"self_attn.{name}": "input_layernorm" for name in ("q_proj", "k_proj", "v_proj")}
    for name in ("gate_proj", "up_proj", "router"):
        reads[f"mlp.{name}"] = "post_attention_layernorm"
    assert gains == {
        f"{prefix}{name}.weight": f"{prefix}{norm}.weight" for name, norm in reads.items()
    }
    assert [each.name for each in found if each.ones] == [f"{prefix}input_layernorm.weight"]
