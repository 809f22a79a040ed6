"""The tensors of a folder whose matrices are in 8 bits (`ladder convert --weights`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ladder.convert.weights import Made, Recipe, make
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, unknown
from ladder.models.quantised import matrices, norms_of, quantise, refuse_sublayers
from ladder.models.storage import QUANTISED, scale_dtype, scale_shape
from ladder.models.transformer import meta_model, tensor_shapes
from ladder.reader import EMBEDDING, HEAD, TensorReader


def refuse_weights(config: ModelConfig, kind: str, to: str) -> None:
    """Raise UserError unless a folder of this config and format can hold matrices of `kind`."""
    if kind not in QUANTISED:
        raise unknown("type of --weights", kind, QUANTISED)
    if to != "ladder":
        raise UserError(
            f"--weights={kind} with --to {to}: transformers' classes do not read our matrices in "
            f"8 bits; leave one of the two out"
        )
    refuse_sublayers(meta_model(config), kind)
    if any(len(shape) == 2 and "norm" in name for name, shape in tensor_shapes(config).items()):
        raise UserError(
            f"--weights={kind}: plan {config.plan.name!r} has norms with a weight for each of its "
            f"T ranks, which cannot be folded into matrices that ranks share; convert without it, "
            f"and give --weights {kind} to generate, eval or bench inference"
        )


def untied(config: ModelConfig) -> ModelConfig:
    """The config with a head of its own: the embedding is not stored in 8 bits."""
    return replace(config, tie_embeddings=False)


def in_eight_bits(
    todo: Sequence[Recipe], reader: TensorReader, config: ModelConfig, kind: str
) -> list[Made]:
    """The tensors of these recipes for a folder of `untied(config)`, with matrices in `kind`."""
    found = {each.name: each for each in todo}
    found.setdefault(HEAD, replace(found[EMBEDDING], name=EMBEDDING))
    model = meta_model(untied(config))
    norms = norms_of(model)
    weights = {f"{name}.weight": norms.get(name) for name, _ in matrices(model)}
    folded = {f"{norm}.weight" for norm in norms.values()}
    scales: dict[str, Tensor] = {}

    def weight(name: str) -> Tensor:
        norm = weights[name]
        gain = None if norm is None else make(found[f"{norm}.weight"], reader)
        stored, scales[name] = quantise(make(found[name], reader), kind, name, gain)
        return stored

    def other(name: str) -> Tensor:
        value = make(found[name], reader)
        return torch.ones_like(value) if name in folded else value

    result = []
    for name, shape in model.shapes.items():
        count = math.prod(shape)
        if name in weights:
            result.append(Made(name, count, partial(weight, name)))
            own = f"{name.removesuffix('weight')}scales"
            nbytes = math.prod(scale_shape(kind, shape)) * scale_dtype(kind).itemsize
            result.append(Made(own, nbytes, partial(scales.pop, name)))
        else:
            nbytes = count * reader.dtype(found[name].name).itemsize
            result.append(Made(name, nbytes, partial(other, name)))
    return result
