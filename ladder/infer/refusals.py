"""Why fused kernels do not run a model of some shape: by its config alone, without torch, since
predictions ask it, too."""

from __future__ import annotations

from ladder.kernels.limits import MAX_SIZE
from ladder.models.config import ModelConfig


def shape_refusals(config: ModelConfig) -> list[str]:
    """What `ladder.infer.fused.fuse` does not support of this shape, whatever its weights are."""
    found = {
        f"mixer={config.mixer} and feed_forward={config.feed_forward}": not config.has_usual_slots,
        "biases of outputs (attention_bias)": config.attention_bias,
        "biases of MLPs (mlp_bias)": config.mlp_bias,
        f"hidden_size={config.hidden_size} above {MAX_SIZE}": config.hidden_size > MAX_SIZE,
    }
    return [reason for reason, here in found.items() if here]
