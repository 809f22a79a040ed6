"""Reducers, which sum partials over the ranks: the interface, and the Reducer of one process.

A Reducer is the Transformer's only interface to communication. It lives as long as the model and
holds long-lived state: ranks, process groups, memory of peers. The state of one forward pass is in
the `Pass` that `begin` makes.

Gradients follow one rule for every plan: a rank's gradient is that of its own copy. So each
all-reduce is its own adjoint (forward it sums partials, backward it sums the gradients of the
copies), and the backward pass issues the forward's collectives in reverse, with the same overlap.
The gradients of shared parameters (norm weights, replicated K and V, output biases) are summed over
the ranks once, at the end of a step. The loss is counted once although every rank computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ladder.models.forward_pass import Norm, Pass
from ladder.models.in_flight import InFlight
from ladder.models.plan import Plan
from ladder.models.ranks import Ranks

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime


class Reducer:
    """The reducer of one process that holds all ranks: it does not communicate."""

    def __init__(self, ranks: Ranks = Ranks()) -> None:  # noqa: B008  (frozen)
        self.ranks = ranks

    def begin(self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size) -> Pass:
        """A forward pass over tokens of `shape` [B, S]. norms: one for each read of the plan."""
        return Pass(runtime, self, plan, norms)

    def reduce(self, partial: Tensor, blocking: bool = False) -> InFlight[Tensor]:
        """Start to sum `partial` over the processes, possibly in place. Differentiable.

        blocking: a hint that the caller waits for the sum before it launches anything else.
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
        """Concatenate the processes' [..., V_local] to [..., size]; backward takes the slice."""
        return logits
