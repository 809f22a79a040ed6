"""Specs of parameters: how TP splits them, how they are initialised, whether they decay.

Each module declares the specs of its own parameters (`parameter_specs`), and the model collects
them by full name (`Transformer.specs`). Sharding, initialisation, the optimiser, clipping and
conversion read them there, so a new module needs no change elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ladder.models.ranks import Ranks

INIT_STD = 0.02


class Initialisation(Enum):
    """The initialisation of a parameter; `fill` applies it."""

    ONES = "ones"
    ZEROS = "zeros"
    NORMAL = "normal"  # standard deviation INIT_STD
    EMBEDDING = "embedding"  # like NORMAL, for a matrix whose rows are looked up
    RESIDUAL = "residual"  # of a matrix that writes to the residual: INIT_STD / sqrt(2 num_layers)

    def fill(self, parameter: Tensor, num_layers: int, generator: torch.Generator | None) -> None:
        """Fill a full-sized parameter of a model of `num_layers` layers.

        generator: None is torch's own.
        """
        if self is Initialisation.ONES:
            parameter.fill_(1.0)
        elif self is Initialisation.ZEROS:
            parameter.zero_()
        else:
            residual = self is Initialisation.RESIDUAL
            std = INIT_STD / math.sqrt(2 * num_layers) if residual else INIT_STD
            parameter.normal_(0.0, std, generator=generator)


@dataclass(frozen=True)
class ParameterSpec:
    """The properties of a parameter.

    init: its initialisation.
    decay: whether weight decay applies.
    split: the dimension that TP splits over its processes; None: each process holds it whole.
    heads: the number of heads in the dimension `split`, which must not be cut. The parameter is
        split if the processes divide the heads; otherwise each process holds it whole.
    reads_norm: whether its columns multiply the output of the sublayer's norm, so that the norm's
        weight can be folded into it.
    """

    init: Initialisation
    decay: bool
    split: int | None
    heads: int | None = None
    reads_norm: bool = False

    def split_over(self, processes: int) -> int | None:
        """The dimension split over `processes` processes; None: each of them holds it whole."""
        return None if self.heads is not None and self.heads % processes else self.split

    def shared(self, processes: int) -> bool:
        """Whether each of `processes` processes holds it whole, and only a part of its gradient.

        The parts of the gradient are summed over the processes once per step.
        """
        return self.split_over(processes) is None

    def slices(self, shape: torch.Size, ranks: Ranks) -> tuple[slice, ...]:
        """The part of the full parameter that this process holds, one slice per dimension."""
        slices = [slice(0, size) for size in shape]
        dim = self.split_over(ranks.processes)
        if dim is not None:
            slices[dim] = chunk(slices[dim], ranks.process, ranks.processes)
        return tuple(slices)


def chunk(whole: slice, index: int, count: int) -> slice:
    """One of `count` equal chunks of a slice; the last ones are shorter, or empty."""
    size = math.ceil((whole.stop - whole.start) / count)
    start = min(whole.start + index * size, whole.stop)
    return slice(start, min(start + size, whole.stop))


@runtime_checkable
class Specified(Protocol):
    """A module that declares the specs of its parameters."""

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        """The spec of each of the module's own parameters (not its children's), by its name."""
        ...


def collect_specs(model: nn.Module) -> dict[str, ParameterSpec]:
    """The spec of each parameter of a model, by its full name; tied ones under all their names.

    Raises ValueError for a parameter without a spec.
    """
    specs = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        declared = module.parameter_specs() if isinstance(module, Specified) else {}
        if own not in declared:
            raise ValueError(
                f"parameter {name} has no spec: declare {own!r} in "
                f"{type(module).__name__}.parameter_specs (see ladder.models.parameters)"
            )
        specs[name] = declared[own]
    return specs
