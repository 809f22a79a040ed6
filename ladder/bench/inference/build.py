"""The benchmark's models: with random weights made on the device, or a checkpoint's."""

from __future__ import annotations

import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ladder.bench.inference.points import InferencePoint
from ladder.checkpoint import newest, quantised_as
from ladder.infer.load import (
    agreed,
    fuse_prompts,
    load_stored,
    refuse_device,
    set_activations,
)
from ladder.models.config import ModelConfig
from ladder.models.parameters import Initialisation
from ladder.models.sublayers import Attention
from ladder.models.transformer import Transformer, meta_model
from ladder.parallel.choose import inference_base
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import fill_in_8_bits, local_parameters, shard_model
from ladder.plans import CHECKPOINT

SHARPNESS = 2.0  # factor on q_proj: flat random attention would hide errors by averaging


def tp_mesh(device: torch.device, tp: int) -> DeviceMesh | None:
    """The mesh of this process's TP group; None at TP 1."""
    mesh = make_mesh(device, tp) if tp > 1 else None
    return None if mesh is None else mesh["tp"]


@torch.no_grad()
def random_model(
    config: ModelConfig,
    reducer: str,
    tp: int,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    kind: str | None = None,
) -> Transformer:
    """A model with random weights made on the device, the same at every TP and for every plan.

    Every parameter is drawn whole, with a seed from its name, and then sliced. Matrices keep the
    variance of their input, so every layer affects the logits, which have variance 1. kind: the
    type in which matrices are stored, one after another: a name in QUANTISED; None: `dtype`.
    """
    model = meta_model(config)
    place = device if kind is None else "meta"
    shard_model(model, tp_mesh(device, tp), device=place, dtype=dtype, reducer=reducer)
    modules = model.named_modules()
    queries = {f"{name}.q_proj.weight" for name, each in modules if isinstance(each, Attention)}

    def fill(name: str, local: Tensor, part: tuple[slice, ...]) -> None:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        whole = torch.empty(model.shapes[name], device=device, dtype=dtype)
        _fill(whole, model.specs[name].init, config, generator)
        local.copy_(whole[part])
        if name in queries:
            local.mul_(SHARPNESS)

    if kind is None:
        for name, local, part in local_parameters(model):
            fill(name, local, part)
    else:
        agreed(lambda: fill_in_8_bits(model, kind, device, fill))
    return model


def _fill(
    weight: Tensor, init: Initialisation, config: ModelConfig, generator: torch.Generator
) -> None:
    if init is Initialisation.ONES:  # not all 1, so that exchanged norms are detected
        weight.normal_(1.0, 0.2, generator=generator)
    elif init is Initialisation.ZEROS:
        weight.normal_(0.0, 0.2, generator=generator)
    else:
        looked_up = init is Initialisation.EMBEDDING and not config.tie_embeddings
        scale = 1.0 if looked_up else weight.shape[1] ** -0.5
        weight.normal_(0.0, scale, generator=generator)


def build_model(
    point: InferencePoint, config: ModelConfig, reducer: str, device: torch.device
) -> Transformer:
    """The model of a point in bfloat16; with a checkpoint's weights for the plan `checkpoint`.

    Its matrices are stored in the point's type, also those of random models.
    """
    kind = None if point.weights == "bf16" else point.weights
    fuses = reducer == "fused" and not config.plan.no_comm
    reducer = inference_base(reducer, point.tp)
    refuse_device(kind, device)
    if point.plan != CHECKPOINT or point.no_comm:
        model = random_model(config, reducer, point.tp, device, kind=kind)
    else:
        folder = newest(Path(point.model))
        kind = None if quantised_as(folder) else kind
        model = load_stored(
            folder, kind, tp_mesh(device, point.tp), device=device, dtype=torch.bfloat16,
            reducer=reducer,
        )  # fmt: skip
    if fuses:
        fuse_prompts(model)
    set_activations(model, "fp8" if point.activations == "fp8" else "auto")
    return model
