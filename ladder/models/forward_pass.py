"""One forward pass: the residual, the outputs in flight, and the operators of its sublayers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ladder.models.in_flight import InFlight
from ladder.models.plan import Landing, Plan

if TYPE_CHECKING:
    from torch import nn

    from ladder.models.reducer import Reducer
    from ladder.models.runtime import Runtime

Norm = Callable[[Tensor], Tensor]
Landed = tuple[Any, ...]  # (residual, normed): what a landing gives


def select_positions(x: Tensor, last: Tensor) -> Tensor:
    """Of x [..., B, S, D] the position `last` [B] of each sequence: [..., B, 1, D]."""
    return x[..., torch.arange(len(last), device=last.device), last, :].unsqueeze(-2)


def add_norm(
    residual: Tensor, addends: list[tuple[Tensor, float]], norm: Norm
) -> tuple[Tensor, Tensor]:
    """Add (tensor, factor) pairs to the residual, in order, and norm it: (residual, normed)."""
    for value, factor in addends:
        residual = residual + value if factor == 1 else torch.add(residual, value, alpha=factor)
    return residual, norm(residual)


@dataclass
class Summed:
    """What a `row` operator returns that has started the reduce itself.

    total: the sum over the ranks. own: this rank's partial, where the plan needs it apart.
    """

    total: InFlight[Tensor]
    own: Tensor | None = None


class Operators(Protocol):
    """How sublayers compute: `column` on what they read, `row` for what they return.

    A fused operator may gather while it multiplies, or reduce while it multiplies. What `row`
    returns says by its type what is left for `Pass.write` to do: a Tensor is a partial, a `Summed`
    is reduced already, and a pass may have a type of its own for a product that it runs itself.
    """

    def column(self, x: Any, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """What a sublayer reads, x [(R,) B, S, D], times each weight: [(R,) B, S, N / T] each."""
        ...

    def row(self, x: Tensor, weight: nn.Module) -> Any:
        """x [(R,) B, S, K / T] times `weight`: a partial [(R,) B, S, D], or what stands for it."""
        ...


class MatrixProducts:
    """The operators by default: each weight's own product."""

    def column(self, x: Tensor, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        return tuple([weight(x) for weight in weights])  # a list: compilers know those

    def row(self, x: Tensor, weight: nn.Module) -> Any:
        return weight(x)


MATRIX_PRODUCTS = MatrixProducts()


@dataclass
class Output:
    """A sublayer's output: its sum over the ranks, and this rank's own partial where needed."""

    total: InFlight[Any] | None
    own: Tensor | None = None


class Pass:
    """One forward pass with the residual whole on every rank.

    `start` it with the embedding; then for each sublayer n of the plan `read(n)` gives its input
    and `write(n, partial)` takes what it returns, and starts the reduce; `read(N)` gives what the
    head reads. A reducer with a pass of its own replaces `land`, `reduce` and `narrow`.

    residual: [B, S, D] (or [held, B, S, D]), what the newest read gave before its norm.
    """

    def __init__(
        self, runtime: Runtime, reducer: Reducer, plan: Plan, norms: Sequence[Norm]
    ) -> None:
        self.runtime, self.reducer, self.plan, self.norms = runtime, reducer, plan, norms
        self.ranks = reducer.ranks
        self.residual: Any = None
        self.outputs: dict[int, Output] = {}
        self.landing: InFlight[Landed] | None = None  # of the next read, begun early
        self.last: Tensor | None = None

    @property
    def operators(self) -> Operators:
        return MATRIX_PRODUCTS

    def start(self, embedded: Tensor) -> None:
        """The residual begins as the sum of the ranks' `embedded` [B, S, D]."""
        residual = self.sum_embedded(embedded).to(self.runtime.dtype_of(embedded))
        held = self.ranks.held
        self.residual = residual if held == 1 else residual.expand(held, *residual.shape)

    def select_last(self, last: Tensor) -> None:
        """Keep one position of each sequence, `last` [B], from the last attention's output on."""
        self.last = last

    def read(self, n: int) -> Any:
        """The input of sublayer n (n = N: of the head): the residual, landed and normed.

        Also starts the landing of read n + 1, where the plan lets it run beneath sublayer n.
        """
        landing, self.landing = self.landing or self._begin(n), None
        self.residual, normed = landing.wait()
        if n == len(self.plan.sublayers):
            return self._final(normed)
        if self.plan.early[n + 1] and not self._narrows(n):
            self.landing = self._begin(n + 1)
        return normed

    def write(self, n: int, partial: Any) -> None:
        """Take what sublayer n returned and start its reduce; returns at once."""
        if self._narrows(n):
            assert self.last is not None
            self.narrow(self.last)
        if isinstance(partial, Summed):
            self.outputs[n] = Output(partial.total, partial.own)
        else:
            self.outputs[n] = self.reduce(n, partial)

    def logits(self, head: nn.Module) -> Tensor:
        """The head's product of the last read: [B, S, V_local]."""
        (logits,) = self.operators.column(self.read(len(self.plan.sublayers)), (head,))
        return logits

    # -- what a pass of another kind does in its own way ---------------------------------------

    def sum_embedded(self, embedded: Tensor) -> Tensor:
        return self.reducer.sum(embedded)

    def reduce(self, n: int, partial: Any) -> Output:
        """Start to sum the partial of sublayer n, [B, S, D] or [held, B, S, D], over all ranks."""
        record = self.plan.sublayers[n]
        own = partial if self.plan.own_needed[n] else None
        if record.reduce == "none":
            return Output(None, own)
        if record.reduce == "residual":
            partial = torch.add(partial, self.residual, alpha=1 / self.ranks.degree)
        elif own is not None and self.ranks.held == 1:
            partial = partial.clone()  # the reduce may overwrite what it is given
        return Output(self.reducer.reduce(self.sum_held(partial), self.plan.blocking[n]), own)

    def land(self, arrivals: Sequence[tuple[Landing, Output]], norm: Norm) -> InFlight[Landed]:
        """Start to add `arrivals` to the residual, and to norm it.

        Called as early as the plan allows: with a lag before the sublayer beneath which the
        arrivals travel. This one does it all when it is waited for.
        """

        def finish(_: Landed) -> Landed:
            residual, addends = self.residual, list[tuple[Tensor, float]]()
            for landing, output in arrivals:
                if landing.summed:
                    assert output.total is not None
                    total, output.total = output.total.wait(), None  # its own part may land later
                    if landing.replaces:
                        residual, addends = total.expand_as(residual), []
                    else:
                        addends.append((total, 1.0))
                if landing.own:
                    assert output.own is not None
                    addends.append((output.own, landing.own))
            return self.runtime.add_norm(residual, addends, norm)

        return InFlight((), finish)

    def narrow(self, last: Tensor) -> None:
        """Go on with one position of each sequence, `last` [B]: nothing later reads the others.

        What is on its way is waited for.
        """
        self.residual = select_positions(self.residual, last)
        for output in self.outputs.values():
            if output.total is not None:
                output.total = InFlight(select_positions(output.total.wait(), last))
            if output.own is not None:
                output.own = select_positions(output.own, last)

    # -- shared ----------------------------------------------------------------------------------

    def sum_held(self, partial: Tensor) -> Tensor:
        """Sum over the virtual ranks held here: [held, B, S, D] -> [B, S, D]."""
        return partial.sum(0) if self.ranks.held > 1 else partial

    def _narrows(self, n: int) -> bool:
        return self.last is not None and n == self.plan.last_attention

    def _begin(self, n: int) -> InFlight[Landed]:
        """Start the landing of read n."""
        arrivals = [(each, self.outputs[each.output]) for each in self.plan.landings[n]]
        for output in self.plan.done[n]:  # so that its memory is free once it has landed
            del self.outputs[output]
        # Virtual ranks whose residuals are equal at the end are normed once, in `_final`.
        once = n == len(self.plan.sublayers) and self._equal_at_the_end
        return self.land(arrivals, (lambda x: x) if once else self.norms[n])

    @property
    def _equal_at_the_end(self) -> bool:
        return self.ranks.held > 1 and self.plan.equal_reads[-1]

    def _final(self, normed: Any) -> Any:
        """The head's input: one copy where the ranks' residuals are equal, else their mean."""
        if self.plan.final_mean:
            return self.reducer.sum(self.sum_held(normed)) / self.ranks.degree
        if self._equal_at_the_end:
            return self.norms[-1](normed[0])
        return normed if self.ranks.held == 1 else normed[0]
