"""What a parameter is: how TP splits it, how it is initialised, whether it decays.

Each module declares the specs of its own parameters (`parameter_specs`), and the model collects
them by full name (`Transformer.specs`). Placement, initialisation, the optimiser, clipping and
conversion read them there, so that a new module brings all that they need to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ladder.models.reducer import Ranks

INIT_STD = 0.02


class Initialisation(Enum):
    """The rule by which a parameter gets its first numbers; `fill` applies it."""

    ONES = "ones"
    ZEROS = "zeros"
    NORMAL = "normal"  # standard deviation INIT_STD
    EMBEDDING = "embedding"  # as NORMAL; its rows are looked up, not multiplied
    RESIDUAL = "residual"  # of a matrix that writes to the residual: INIT_STD / sqrt(2 num_layers)

    def fill(self, parameter: Tensor, num_layers: int, generator: torch.Generator) -> None:
        """Fill a full-sized parameter of a model of so many layers."""
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
    """What every part of the project has to know of a parameter.

    init: its rule of initialisation.
    decay: whether weight decay applies.
    split: the dimension that TP splits over its processes; None: each process holds it whole.
    heads: where `split` is of heads that must not be cut: how many there are. The parameter is
        split where the processes divide them, and whole on each process elsewhere.
    reads_norm: whether its columns multiply what the norm before its sublayer returns, so that the
        norm's weight can be folded into it.
    """

    init: Initialisation
    decay: bool
    split: int | None
    heads: int | None = None
    reads_norm: bool = False

    def split_over(self, processes: int) -> int | None:
        """The dimension split over so many processes; None where each of them holds it whole."""
        return None if self.heads is not None and self.heads % processes else self.split

    def shared(self, processes: int) -> bool:
        """Whether each of so many processes holds it whole, and with it a part of its gradient.

        Those parts are summed over the processes once a step.
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
    """A module that declares what its parameters are."""

    def parameter_specs(self) -> dict[str, ParameterSpec]:
        """The spec of each of the module's own parameters (not its children's), by its name."""
        ...


def collect_specs(model: nn.Module) -> dict[str, ParameterSpec]:
    """The spec of each parameter of a model, by its full name; tied ones under all their names.

    Raises ValueError for a parameter that its module declares none for.
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
