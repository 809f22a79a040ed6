"""The Runtime: what a Transformer is handed to compute and communicate with."""

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
    """A maker of forward passes, as each Reducer is."""

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> Pass: ...


@dataclass(frozen=True)
class Runtime:
    """What a model computes and communicates with; a change is another Runtime (`replace`).

    reducer: communication, and the ranks that this process computes. pick: the reducer of a pass
    over tokens of that shape [B, S], where not all passes have the same. compute_dtype: what
    activations and matrices are computed in; None: as the parameters are. rotary: the rotary
    tables. add_norm: adds outputs to the residual and norms it. call: runs a sublayer (compiled,
    or checkpointed); None: as it is. losses: the functions that pass over all logits. data_shard:
    this process's part of each parameter's rows, and of how many (ladder.parallel.data).
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
        """A forward pass over tokens of `shape` [B, S]; norms: of each read of the plan."""
        factory: PassFactory = self.reducer if self.pick is None else self.pick(shape)
        return factory.begin(self, plan, norms, shape)

    def dtype_of(self, tensor: Tensor) -> torch.dtype:
        """What is computed in, where the parameters are as `tensor`."""
        return self.compute_dtype or tensor.dtype
