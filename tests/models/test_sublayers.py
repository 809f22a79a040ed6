"""A feed-forward of another kind: it is counted, and what knows only the usual one refuses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.costs import sublayer_parameters
from ladder.hf_config import config_to_huggingface
from ladder.infer.fused import can_fuse
from ladder.models import ModelConfig, Transformer, UserError
from ladder.models.layers import ColumnParallelLinear, RowParallelLinear
from ladder.models.sublayers import FEED_FORWARDS, Context, Sublayer
from tests.samples import full_model, small_config


class Ungated(Sublayer):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.intermediate_size, False)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, False)

    def compute(self, x: Tensor, context: Context) -> Any:
        (up,) = context.operators.column(self.wanted(x, context), (self.up_proj,))
        return context.operators.row(F.relu(up), self.down_proj)


@pytest.fixture
def ungated(monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setitem(FEED_FORWARDS, "ungated", Ungated)
    return small_config(feed_forward="ungated")


def test_its_matrices_are_counted(ungated: ModelConfig) -> None:
    assert sublayer_parameters(ungated, "mlp") == 2 * 32 * 48
    whole = sublayer_parameters(ungated, "attention+mlp")
    assert whole == sublayer_parameters(ungated, "attention") + 2 * 32 * 48


def test_kernels_for_another_refuse_it(ungated: ModelConfig) -> None:
    model = full_model(ungated, 1, torch.float32)
    assert not can_fuse(model)
    assert can_fuse(full_model(small_config("ladder"), 1, torch.float32))
    assert model(torch.zeros(1, 3, dtype=torch.long)).isfinite().all()


def test_hugging_face_has_no_such_model(ungated: ModelConfig) -> None:
    with pytest.raises(UserError, match="feed_forward='ungated'"):
        config_to_huggingface(ungated, torch.float32)


@pytest.mark.parametrize("slot", ["mixer", "feed_forward"])
def test_an_unknown_name_is_refused(slot: str) -> None:
    with pytest.raises(UserError, match=f"{slot}.*swigul"):
        Transformer(small_config(**{slot: "swigul"}))
