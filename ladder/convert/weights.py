"""How each tensor of a model under one plan is made of a model's under another.

Plans agree on every matrix and differ in the norms alone. Where attention and MLP read one normed
input (`parallel`), the weights of the layer's two norms are folded into the matrices that read
them, which computes the same: W (g * x) = (W g) x. A norm that reads streams which differ between
ranks has the weight for each of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.checkpoint import TensorReader
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer, meta_model


@dataclass(frozen=True)
class Recipe:
    """A tensor of the new model: the old one of its name, changed as the fields say.

    gain: the norm whose weight is folded into its columns. ones: it is a norm's weight which was
    folded. per_rank: it becomes [per_rank, D], a copy for each rank.
    """

    name: str
    shape: tuple[int, ...]
    gain: str | None = None
    ones: bool = False
    per_rank: int = 0

    def make(self, old: Tensor, gain: Tensor | None) -> Tensor:
        """The new tensor of the old one and, where `gain` names one, that norm's weight [D].

        Folded in float32 and rounded to the type that the matrix has.
        """
        if self.ones:
            old = torch.ones_like(old)
        if gain is not None:
            wide = gain.to(torch.promote_types(old.dtype, torch.float32))
            old = (old * wide).to(old.dtype)  # the product is wide, too
            if not old.isfinite().all():
                raise UserError(
                    f"{self.name} times {self.gain} is not finite in {old.dtype}, so that the norm "
                    f"cannot be folded; choose a plan without `parallel` layers"
                )
        if self.per_rank:
            old = old.expand(self.shape).contiguous()
        return old


def recipes(source: ModelConfig, target: ModelConfig) -> list[Recipe]:
    """One for each tensor of the target, which differs from the source in its plan alone.

    Raises UserError where the source's norms are not one for each sublayer, shared by all ranks.
    """
    old, new = meta_model(source), meta_model(target)
    same = source.plan.sublayers == target.plan.sublayers
    if same and source.tp_degree == target.tp_degree:
        return [Recipe(name, tuple(shape)) for name, shape in old.shapes.items()]
    if not all(source.plan.equal_reads) or len(source.plan.sublayers) != 2 * source.num_layers:
        raise UserError(
            f"plan {source.plan.name!r} of the source has norms that other plans lack (shared by "
            f"attention and MLP, or one for each of its T ranks); convert a model of another plan"
        )
    merged = {
        target.plan.layers[n]
        for n, record in enumerate(target.plan.sublayers)
        if record.kind == "attention+mlp"
    }
    gains = norms_read(old, merged)
    folded = {*gains.values()}
    found = []
    for name, size in new.shapes.items():
        shape = tuple(size)
        found.append(
            Recipe(
                name,
                shape,
                gain=gains.get(name),
                ones=name in folded,
                per_rank=shape[0] if len(shape) > len(old.shapes[name]) else 0,
            )
        )
    return found


def norms_read(model: Transformer, layers: Collection[int]) -> dict[str, str]:
    """Each parameter of these layers that multiplies what a norm returns -> that norm's weight.

    By full names; the model has a norm for each sublayer.
    """
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for layer in layers:
        block = model.model.layers[layer]
        norms = block.input_layernorm, block.post_attention_layernorm
        for sublayer, norm in zip((block.self_attn, block.mlp), norms, strict=True):
            for name, _ in sublayer.named_parameters(prefix=names[sublayer]):
                if model.specs[name].reads_norm:
                    found[name] = f"{names[norm]}.weight"
    return found


def make(recipe: Recipe, reader: TensorReader) -> Tensor:
    """The new tensor, from the source's files; where nothing changes, a view of them."""
    gain = None if recipe.gain is None else reader.whole(recipe.gain)
    made = recipe.make(reader.whole(recipe.name), gain)
    reader.close()  # what has been read may then leave the memory
    return made
