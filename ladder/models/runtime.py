"""The Runtime: the implementations of computation and communication that a Transformer uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ladder.models.config import ModelConfig
from ladder.models.forward_pass import Norm, Pass, add_norm
from ladder.models.layers import rotary_tables
from ladder.models.loss import LossFunctions
from ladder.models.plan import Plan
from ladder.models.reducer import Reducer
from ladder.models.sublayers import Call

AddNorm = Callable[[Tensor, list[tuple[Tensor, float]], Norm], tuple[Any, Any]]
Rotary = Callable[[ModelConfig, Tensor, torch.dtype], Tensor]


class PassFactory(Protocol):
    """A maker of forward passes, such as a Reducer."""

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> Pass: ...


@dataclass(frozen=True)
class Runtime:
    """The implementations that a model uses; a change is another Runtime (`replace`).

    reducer: communication, and the ranks that this process computes. pick: returns the reducer of
    a pass over tokens of a shape [B, S], if passes have different reducers. compute_dtype: the
    dtype of activations and matrix products; None: that of the parameters. rotary: computes the
    rotary tables. add_norm: adds outputs to the residual and norms it. call: runs a sublayer
    (compiled or checkpointed); None: directly. losses: the functions that read all logits.
    data_shard: the index of this process's part of each parameter's rows, and the number of parts
    (ladder.parallel.data).
    """

    reducer: Reducer = field(default_factory=Reducer)
    pick: Callable[[torch.Size], PassFactory] | None = None
    compute_dtype: torch.dtype | None = None
    rotary: Rotary = rotary_tables
    add_norm: AddNorm = add_norm
    call: Call | None = None
    losses: LossFunctions = field(default_factory=LossFunctions)
    data_shard: tuple[int, int] = (0, 1)

    def begin(self, shape: torch.Size, plan: Plan, norms: Sequence[Norm]) -> Pass:
        """A forward pass over tokens of `shape` [B, S]. norms: one for each read of the plan."""
        factory: PassFactory = self.reducer if self.pick is None else self.pick(shape)
        return factory.begin(self, plan, norms, shape)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """The dtype of the computation, for a parameter `tensor`."""
        return self.compute_dtype or tensor.dtype
