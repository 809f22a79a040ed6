"""Conversion of a model's tensors from one plan to another.

All plans have the same matrices and differ only in the norms. Where attention and MLP read one
normed input (`parallel`), the weights of the layer's two norms are folded into the matrices that
read them, which computes the same: W (g * x) = (W g) x. A norm that reads residuals which differ
between ranks has a weight for each rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.checkpoint import TensorReader
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer, meta_model


@dataclass(frozen=True)
class Recipe:
    """How to make a tensor of the new model from the old tensor of the same name.

    gain: the norm whose weight is folded into the tensor's columns. ones: the tensor is a norm's
    weight that was folded, and becomes ones. per_rank: it becomes [per_rank, D], a copy per rank.
    """

    name: str
    shape: tuple[int, ...]
    gain: str | None = None
    ones: bool = False
    per_rank: int = 0

    def make(self, old: Tensor, gain: Tensor | None) -> Tensor:
        """The new tensor. gain: the norm weight [D] to fold, if `self.gain` names a norm.

        Folding is computed in float32 and rounded to the matrix's dtype.
        """
        if self.ones:
            old = torch.ones_like(old)
        if gain is not None:
            wide = gain.to(torch.promote_types(old.dtype, torch.float32))
            old = (old * wide).to(old.dtype)  # the product is in float32, too
            if not old.isfinite().all():
                raise UserError(
                    f"{self.name} times {self.gain} is not finite in {old.dtype}, so the norm "
                    f"cannot be folded; choose a plan without `parallel` layers"
                )
        if self.per_rank:
            old = old.expand(self.shape).contiguous()
        return old


def recipes(source: ModelConfig, target: ModelConfig) -> list[Recipe]:
    """The recipes of all tensors of the target, which differs from the source only in its plan.

    Raises UserError unless the source has one norm per sublayer, shared by all ranks.
    """
    old, new = meta_model(source), meta_model(target)
    same = source.plan.sublayers == target.plan.sublayers
    if same and source.tp_degree == target.tp_degree:
        return [Recipe(name, tuple(shape)) for name, shape in old.shapes.items()]
    if not source.has_usual_norms:
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
    """Each parameter of these layers that multiplies a norm's output -> that norm's weight.

    By full names; the model has a norm for each sublayer.
    """
    names = {module: name for name, module in model.named_modules()}
    found = {}
    for layer in layers:
        block = model.model.layers[layer]
        for slot, norm in zip(block.slots, map(block.norm, ("attention", "mlp")), strict=True):
            for name, _ in slot.named_parameters(prefix=names[slot]):
                if model.specs[name].reads_norm:
                    found[name] = f"{names[norm]}.weight"
    return found


def make(recipe: Recipe, reader: TensorReader) -> Tensor:
    """The new tensor, made from the source's files; an unchanged tensor is a view of the file.

    Raises UserError for a value that is not finite.
    """
    gain = None if recipe.gain is None else _finite(recipe.gain, reader)
    made = recipe.make(_finite(recipe.name, reader), gain)
    reader.close()  # lets the system drop the pages that were read
    return made


def _finite(name: str, reader: TensorReader) -> Tensor:
    """A tensor of the source's files. Raises UserError if a value is not finite."""
    value = reader.whole(name)
    if not is_finite(value):
        files = {chunk.file for chunk in reader.files[name]}
        where = reader.folder / files.pop() if len(files) == 1 else reader.folder
        raise UserError(
            f"{where}: tensor {name!r} holds NaN or infinity; fetch the file again, or give an "
            f"earlier checkpoint"
        )
    return value


def is_finite(value: Tensor) -> bool:
    """Whether all values are finite; needs no memory, as `isfinite` does. NaN passes through."""
    return all(bool(each.isfinite()) for each in value.aminmax())


def cast(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`. Raises UserError if a value is too large for that."""
    found = value.to(dtype)
    if found is not value and not is_finite(found):
        short = str(dtype).removeprefix("torch.")
        raise UserError(
            f"--dtype={short}: a value of {name!r} is too large for {short}; choose bfloat16 or "
            f"float32"
        )
    return found


@dataclass(frozen=True)
class Made:
    """A tensor to write: its size, and the function that makes it, called once and in order."""

    name: str
    nbytes: int
    make: Callable[[], Tensor]


def plainly(
    todo: Sequence[Recipe], reader: TensorReader, dtype: torch.dtype | None = None
) -> list[Made]:
    """The tensors of these recipes, in `dtype`; None: in the source's types."""

    def made(recipe: Recipe) -> Made:
        name, kind = recipe.name, dtype or reader.dtype(recipe.name)
        nbytes = math.prod(recipe.shape) * kind.itemsize
        return Made(name, nbytes, lambda: cast(name, make(recipe, reader), kind))

    return [made(each) for each in todo]
