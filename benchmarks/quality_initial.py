"""Initial weights of a run of benchmarks/quality.py whose unreduced outputs begin larger."""

from __future__ import annotations

from pathlib import Path

import torch

from ladder.checkpoint import WEIGHTS, model_entries, write_config, write_tensors
from ladder.files import make_folder
from ladder.models import ModelConfig, Plan, Transformer
from ladder.models.parameters import Initialisation
from ladder.parallel.sharding import initialise

SLOTS = {"attention": ("self_attn",), "mlp": ("mlp",), "attention+mlp": ("self_attn", "mlp")}


def unreduced(plan: Plan) -> list[str]:
    """The names of the modules whose outputs no reduce sums, as `model.layers.0.self_attn`."""
    return [
        f"model.layers.{layer}.{slot}"
        for record, layer in zip(plan.sublayers, plan.layers, strict=True)
        if record.reduce == "none"
        for slot in SLOTS[record.kind]
    ]


@torch.no_grad()
def write_initial(config: ModelConfig, seed: int, scale: float, folder: Path) -> None:
    """Write the weights with which a training from `seed` begins, for its key `init`.

    The output matrices of unreduced sublayers (o_proj, down_proj) are `scale` times larger.
    """
    model = Transformer(config)
    initialise(model, seed)
    outputs = set(unreduced(config.plan))
    for name, parameter in model.named_parameters():
        slot = name.rsplit(".", 2)[0]
        if slot in outputs and model.specs[name].init is Initialisation.RESIDUAL:
            parameter.mul_(scale)
    make_folder(folder)
    write_tensors(folder, WEIGHTS, model_entries(model), writer=True)
    write_config(folder, config, eos_token_id=None)
