"""How partials become sums over the ranks: the interface, and the Reducer of one process.

A Reducer is what a `Transformer` knows of communication. It lives as long as the model and holds
what is long-lived: ranks, process groups, memory of peers. What belongs to one forward pass is in
the `Pass` that `begin` makes.

Gradients follow one rule for every plan: a rank's gradient is that of its own copy. So each
all-reduce is its own adjoint (forward it sums partials, backward it sums the gradients of the
copies), the backward pass issues the forward's collectives in reverse, with the same overlap, and
what ranks share (norm weights, replicated K and V, output biases) is summed over the ranks once,
at the end of a step. The loss is counted once although every rank computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ladder.models.forward_pass import Norm, Pass
from ladder.models.in_flight import InFlight
from ladder.models.plan import Plan

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime


@dataclass(frozen=True)
class Ranks:
    """The tensor-parallel ranks that this process computes: `held` of `degree`, from `first` on.

    More than one held rank are *virtual ranks*: hidden states then carry a leading dimension of
    that size, [held, B, S, D] in place of [B, S, D].
    """

    degree: int = 1
    first: int = 0
    held: int = 1

    @property
    def processes(self) -> int:
        return self.degree // self.held

    @property
    def process(self) -> int:
        return self.first // self.held


class Reducer:
    """Communication of one process, which holds all ranks: there is none."""

    def __init__(self, ranks: Ranks = Ranks()) -> None:
        self.ranks = ranks

    def begin(self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size) -> Pass:
        """A forward pass over tokens of `shape` [B, S]; norms: of each read of the plan."""
        return Pass(runtime, self, plan, norms)

    def reduce(self, partial: Tensor, blocking: bool = False) -> InFlight[Tensor]:
        """Start to sum `partial` over the processes, perhaps in place. Differentiable.

        blocking: a hint that the sum is waited for before anything else is launched.
        """
        return InFlight(partial)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over the processes. Differentiable."""
        return self.reduce(partial, blocking=True).wait()

    def sum_(self, value: Tensor) -> Tensor:
        """Sum over the processes in place, outside autograd."""
        return value

    def max_(self, value: Tensor) -> Tensor:
        """Maximum over the processes in place, outside autograd."""
        return value

    def gather(self, logits: Tensor, size: int) -> Tensor:
        """Join each process's [..., V_local] into [..., size]. The gradient is each one's slice."""
        return logits
