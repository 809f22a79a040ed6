"""Prefill with the residual sharded by tokens, its blocking exchanges inside matrix products.

Where a sublayer waits for the sum of the one before, `row` is
`matmul_reduce_scatter_add_rms_norm`, which multiplies, sums, adds and norms this rank's rows, and
the next `column` is `all_gather_matmul` on them:

    rows --[gather, Q K V] attention [output, scatter, add, norm]--> rows --[gather, gate up] ...

The operators' table (`ladder.ops.table`) picks their implementations. All else is as in
`ladder.parallel.sharded`: sums that a plan keeps in flight, as a ladder's, run beneath whole
sublayers; the one sum of attention and MLP side by side is scattered after both; the end of a
prompt is narrowed to its last position.

Where the ranks' residuals differ, as those of desync, they stay whole, and `row` is
`matmul_all_reduce` wherever the plan waits for a sum at once (`FusedSums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ladder.kernels.prefill import swiglu
from ladder.models.errors import UserError
from ladder.models.forward_pass import MATRIX_PRODUCTS, Landed, Norm, Operators, Output, Pass
from ladder.models.in_flight import InFlight
from ladder.models.layers import RMSNorm, local
from ladder.models.plan import Landing, Plan
from ladder.models.ranks import Ranks
from ladder.models.reducer import Reducer
from ladder.parallel.fused import held
from ladder.parallel.matrix import Matrix
from ladder.parallel.reducers import AsyncReducer, PushReducer
from ladder.parallel.refusals import sharded_refusal, sums_in_products
from ladder.parallel.sharded import ShardedPass, ShardedReducer

if TYPE_CHECKING:
    from ladder.models.runtime import PassFactory, Runtime


@dataclass(frozen=True)
class LandedRows:
    """This rank's rows after a fused landing: of the residual and of its norm, [rows, D] each."""

    residual: Tensor
    normed: Tensor


class FusedPrefill(ShardedReducer):
    """The reducer of prefill whose blocking exchanges are inside matrix products.

    transport: the transport of all other exchanges. `collective` sums in the backend's own order;
    then the operators may sum in any order, too.
    """

    def __init__(
        self, ranks: Ranks, group: dist.ProcessGroup, plan: Plan, transport: str = "collective"
    ) -> None:
        import ladder.ops  # late: other reducers do not need its 0.1 s

        super().__init__(ranks, group, plan, transport)
        if transport == "collective":
            ladder.ops.allow_any_order(group.group_name)

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> FusedPrefillPass:
        return FusedPrefillPass(runtime, self, plan, norms, shape)


class FusedPrefillPass(ShardedPass):
    """A pass whose reads after a fused landing are this rank's normed rows, [rows, D].

    tokens: [B, S]. Rows behind the last token, where T does not divide them, are zeros.
    """

    def __init__(
        self, runtime: Runtime, reducer: FusedPrefill, plan: Plan, norms: Sequence[Norm],
        tokens: torch.Size,
    ) -> None:  # fmt: skip
        super().__init__(runtime, reducer, plan, norms)
        self.tokens, self.group_name = tokens, reducer.group.group_name

    def operators(self, n: int) -> Operators:
        return _Products(self, n)

    def sums(self, n: int) -> bool:
        """Whether `row` of sublayer n sums over the ranks.

        A record of attention and MLP has two rows, which are added before the one exchange.
        """
        return (
            n < len(self.plan.sublayers)
            and self.plan.blocking[n]
            and self.plan.sublayers[n].kind != "attention+mlp"
            and not self.narrowed
        )

    def lands(self, n: int) -> bool:
        """Whether `row` of sublayer n then also lands and norms: nothing else lands there."""
        alone = self.plan.landings[n + 1] == (Landing(n, summed=True),)
        return alone and isinstance(self.norms[n + 1], RMSNorm)

    def gathers(self, n: int) -> bool:
        """Whether read n gathers. Where nothing hides the gather, `column` gathers instead."""
        both = n < len(self.plan.sublayers) and self.plan.sublayers[n].kind == "attention+mlp"
        hidden = n == 0 or not self.plan.blocking[n - 1]
        return hidden or (both and self._narrows(n))  # its MLP reads the last positions alone

    def own_residual(self) -> Tensor:
        whole = self.shape is None
        return self._own_rows(self.residual.flatten(0, 1)) if whole else self.residual

    def padded(self, rows: Tensor) -> Tensor:
        """Rows [B * S, K] and, behind them, zeros, so that every rank has as many rows."""
        missing = self._share(len(rows)) * self.ranks.processes - len(rows)
        return F.pad(rows, (0, 0, 0, missing)) if missing else rows

    def whole(self, rows: Tensor) -> Tensor:
        """Rows [at least B * S, N] without their padding: [B, S, N]."""
        return rows[: self.tokens.numel()].unflatten(0, self.tokens)

    def reduce(self, n: int, partial: Tensor | LandedRows) -> Output:
        if isinstance(partial, LandedRows):
            return Output(InFlight(partial))
        if partial.dim() == 2:  # this rank's rows of the sum: one piece, and its source
            return Output(InFlight(([partial], partial)))
        return super().reduce(n, partial)

    def land(
        self, n: int, arrivals: Sequence[tuple[Landing, Output]], norm: Norm
    ) -> InFlight[Landed]:
        values = [output.total.value for _, output in arrivals if output.total is not None]
        if not values or not isinstance(values[0], LandedRows):
            return super().land(n, arrivals, norm)
        (landed,) = values
        self.shape = self.residual.shape if self.shape is None else self.shape
        return InFlight((landed.residual, landed.normed))

    def hidden(self) -> Tensor:
        rows = super().hidden()
        if rows.dim() == 3:
            return rows
        return self.whole(torch.ops.ladder.all_gather(rows, 0, self.group_name))


@dataclass
class _Products:
    """The operators of sublayer n of a pass.

    gathered: the gathered input of a record of attention and MLP, which calls `column` twice.
    """

    run: FusedPrefillPass
    n: int
    gathered: Tensor | None = None

    def column(self, x: Tensor, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """x: this rank's rows [rows, D], which are gathered, or all of them [B, S, D]."""
        run = self.run
        if x.dim() == 3 or self.gathered is not None:
            return MATRIX_PRODUCTS.column(x if x.dim() == 3 else self.gathered, weights)
        plain = [_plain(weight, x.dtype) for weight in weights]
        records = run.plan.sublayers
        twice = self.n < len(records) and records[self.n].kind == "attention+mlp"
        rows, products = torch.ops.ladder.all_gather_matmul(
            x, [matrix.t() for matrix, _, _ in plain], 0, run.group_name, return_A=twice
        )
        self.gathered = run.whole(rows) if twice else None
        found = []
        for product, (_, bias, gated) in zip(products, plain, strict=True):
            whole = run.whole(swiglu(product) if gated else product)
            found.append(whole if bias is None else whole + bias)
        return tuple(found)

    def row(self, x: Tensor, weight: nn.Module) -> Tensor | LandedRows:
        """A partial [B, S, D]; or this rank's rows of the sum, [rows, D]; or LandedRows."""
        run, n = self.run, self.n
        if x.shape[1] == 1 or not run.sums(n):  # one position: the pass is narrowed after it
            return run.row(x, weight)
        matrix, bias, _ = _plain(weight, x.dtype)
        rows, name = run.padded(x.flatten(0, 1)), run.group_name
        if bias is not None or not run.lands(n):
            total: Tensor = torch.ops.ladder.matmul_reduce_scatter(rows, matrix.t(), "sum", 0, name)
            return total if bias is None else total + bias  # once, since the rows are of one rank
        norm = run.norms[n + 1]
        assert isinstance(norm, RMSNorm)
        gain = local(norm.weight).to(x.dtype).flatten()
        return LandedRows(
            *torch.ops.ladder.matmul_reduce_scatter_add_rms_norm(
                rows, matrix.t(), run.own_residual(), gain, norm.eps, 0, name
            )
        )


def _plain(weight: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, bool]:
    """A matrix [N, K], its bias, and whether its product is gated."""
    if not isinstance(weight, Matrix):
        return *held(weight, dtype, "async"), False
    if weight.scales is not None:
        raise UserError(
            "reducer=fused multiplies by matrices of 16 or 32 bits, and these are stored in 8: use "
            "--weights bf16, or another reducer"
        )
    return weight.weight.to(dtype), None, weight.gated


@dataclass(frozen=True)
class Reduced:
    """The sum over the ranks of all that a sublayer's reduce sums: [B, S, D]."""

    total: Tensor


class FusedSums:
    """Makes passes whose blocking sums are inside products, for plans whose residuals differ.

    Such residuals cannot be sharded by tokens: `row` is `matmul_all_reduce`, which also adds what
    else the reduce sums (the residual, or the open group). base: the reducer for all the rest.
    """

    def __init__(self, base: Reducer) -> None:
        import ladder.ops  # late: see FusedPrefill

        assert isinstance(base, AsyncReducer), base
        self.base = base
        if not isinstance(base, PushReducer):  # a PushReducer sums in the order of the ranks
            ladder.ops.allow_any_order(base.group.group_name)

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> FusedSumsPass:
        return FusedSumsPass(runtime, self.base, plan, norms)


class FusedSumsPass(Pass):
    """A pass with the whole residual on every rank: see `FusedSums`."""

    reducer: AsyncReducer

    def operators(self, n: int) -> Operators:
        fused = n < len(self.plan.sublayers) and sums_in_products(self.plan, n)
        return _Sums(self, n) if fused else MATRIX_PRODUCTS

    def reduce(self, n: int, partial: Tensor | Reduced) -> Output:
        if not isinstance(partial, Reduced):
            return super().reduce(n, partial)
        if self.plan.group_begins[n] is not None:
            self.group = None  # it is in the sum
        return Output(InFlight(partial.total))


@dataclass(frozen=True)
class _Sums:
    """The operators of sublayer n of a FusedSumsPass."""

    run: FusedSumsPass
    n: int

    def column(self, x: Tensor, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        return MATRIX_PRODUCTS.column(x, weights)

    def row(self, x: Tensor, weight: nn.Module) -> Tensor | Reduced:
        run = self.run
        if x.shape[1] == 1:  # a few rows: other kernels are made for these
            return MATRIX_PRODUCTS.row(x, weight)
        matrix, bias, _ = _plain(weight, x.dtype)
        addend: Tensor | None = run.group
        if run.plan.sublayers[self.n].reduce == "residual":
            addend = run.residual / run.ranks.degree
        total: Tensor = torch.ops.ladder.matmul_all_reduce(
            x, matrix.t(), run.reducer.group.group_name, None if addend is None else addend.to(x)
        )
        return Reduced(total if bias is None else total + bias)


def fused_passes(base: AsyncReducer, plan: Plan, transport: str = "collective") -> PassFactory:
    """The factory of passes of prompts by fused operators. See `fused_refusal`."""
    if sharded_refusal(plan, base.ranks) is None:
        return FusedPrefill(base.ranks, base.group, plan, transport)
    return FusedSums(base)


class FusedPrompts:
    """Picks a pass's reducer: fused operators for prompts, the model's own for all else.

    For a model that no engine has packed; an engine keeps to this choice (`ladder.infer.fused`).
    """

    def __init__(self, base: Reducer, plan: Plan) -> None:
        assert isinstance(base, AsyncReducer), base
        self.base, self.prompts = base, fused_passes(base, plan)

    def __call__(self, shape: torch.Size) -> PassFactory:
        return self.base if shape[1] == 1 else self.prompts
