"""Why fused kernels cannot run a model of some shape. This needs the config alone, and no torch,
since predictions ask, too."""

from __future__ import annotations

from ladder.kernels.limits import MAX_SIZE
from ladder.models.config import ModelConfig


def shape_refusals(config: ModelConfig) -> list[str]:
    """The features of a shape that `ladder.infer.fused.fuse` refuses, whatever the weights are."""
    found = {
        f"mixer={config.mixer} and feed_forward={config.feed_forward}": not config.has_usual_slots,
        "biases of outputs (attention_bias)": config.attention_bias,
        "biases of MLPs (mlp_bias)": config.mlp_bias,
        f"hidden_size={config.hidden_size} above {MAX_SIZE}": config.hidden_size > MAX_SIZE,
    }
    return [reason for reason, here in found.items() if here]
