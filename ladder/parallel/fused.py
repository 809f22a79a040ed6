"""Sequence parallelism with the exchanges inside matrix products.

Some sublayers wait for the gather of their input, and the scatter of their output blocks. Only
their own products can hide these exchanges. There `column` is `all_gather_matmul` on the rows that
this rank has normed, and `row` is `matmul_reduce_scatter`, whose result is this rank's rows of the
sum:

    rows --norm--> [gather, Q K V] attention [output, scatter] --> rows

Where a plan keeps a sum in flight, the pass is that of `ladder.parallel.sequence`: its gathers and
scatters run beneath whole sublayers. The plan decides for each sublayer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ladder.models.errors import UserError
from ladder.models.forward_pass import MATRIX_PRODUCTS, Landed, Norm, Operators, Output
from ladder.models.in_flight import InFlight
from ladder.models.layers import ParallelLinear
from ladder.models.plan import Landing, Plan
from ladder.models.ranks import Ranks
from ladder.parallel.sequence import SequencePass, SequenceReducer, check_rows

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime


@dataclass(frozen=True)
class FusedProducts:
    """The products of one sublayer, over the ranks of the process group `group`.

    shape: [B, S], the tokens of the pass. scatters: whether `row` sums over the ranks.
    """

    group: str
    shape: torch.Size
    scatters: bool

    def column(self, x: Tensor, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """x: this rank's rows [B * S / T, D], which are gathered, or all of them [B, S, D]."""
        if x.dim() == 3:
            return MATRIX_PRODUCTS.column(x, weights)
        plain = [held(weight, x.dtype) for weight in weights]
        matrices = [matrix.t() for matrix, _ in plain]
        _, products = torch.ops.ladder.all_gather_matmul(
            x, matrices, 0, self.group, return_A=torch.is_grad_enabled()
        )  # the gathered rows are for the backward pass
        found = []
        for product, (_, bias) in zip(products, plain, strict=True):
            whole = product.unflatten(0, self.shape)
            found.append(whole if bias is None else whole + bias)
        return tuple(found)

    def row(self, x: Tensor, weight: nn.Module) -> Tensor:
        """A partial [B, S, D], or this rank's rows of the sum, [B * S / T, D]."""
        if not self.scatters:
            return MATRIX_PRODUCTS.row(x, weight)
        matrix, bias = held(weight, x.dtype)
        # Not a Summed: FSDP must find the tensors in what a sublayer returns.
        rows: Tensor = torch.ops.ladder.matmul_reduce_scatter(
            x.flatten(0, 1), matrix.t(), "sum", 0, self.group
        )
        return rows if bias is None else rows + bias  # once, since the rows are this rank's alone


def held(
    weight: nn.Module, dtype: torch.dtype, instead: str = "sequence"
) -> tuple[Tensor, Tensor | None]:
    """The matrix of a linear module, and its bias. instead: a reducer for all other modules."""
    if not isinstance(weight, ParallelLinear):
        raise UserError(
            f"reducer=fused multiplies by plain matrices, and here is a {type(weight).__name__} "
            f"(of an adapter?); use reducer={instead}"
        )
    return weight.held(dtype)


class FusedReducer(SequenceReducer):
    """The reducer of sequence parallelism whose blocking exchanges are inside matrix products.

    The operators' table (`ladder.ops.table`) picks their implementation. Sums over the group may be
    in any order, as those of the other reducers are; a fixed order would exclude faster
    implementations.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup) -> None:
        import ladder.ops  # late: no command but training needs its 0.1 s

        super().__init__(ranks, group)
        ladder.ops.allow_any_order(group.group_name)

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> FusedPass:
        check_rows(shape[0], shape[1], self.ranks.processes)
        return FusedPass(runtime, self, plan, norms, shape)


class FusedPass(SequencePass):
    """A pass whose reads are this rank's rows, [B * S / T, D], where nothing hides their gather."""

    def operators(self, n: int) -> Operators:
        scatters = n < len(self.plan.sublayers) and self.plan.blocking[n]
        return FusedProducts(self.reducer.group.group_name, self.shape, scatters)

    def reduce(self, n: int, partial: Tensor) -> Output:
        return Output(InFlight(partial)) if partial.dim() == 2 else super().reduce(n, partial)

    def land(
        self, n: int, arrivals: Sequence[tuple[Landing, Output]], norm: Norm
    ) -> InFlight[Landed]:
        if n and not self.plan.blocking[n - 1]:
            return super().land(n, arrivals, norm)
        with self._stream(here=True):
            return InFlight(self._add_norm(arrivals, norm))

    def hidden(self) -> Tensor:
        rows = super().hidden()
        if rows.dim() == 3:
            return rows
        whole: Tensor = torch.ops.ladder.all_gather(rows, 0, self.reducer.group.group_name)
        return whole.unflatten(0, self.shape)
