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
Landed = tuple[Any, ...]  # (residual, normed), the result of a landing


def select_positions(x: Tensor, last: Tensor) -> Tensor:
    """The position `last` [B] of each sequence of x [..., B, S, D]: [..., B, 1, D]."""
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
    """The result of a `row` operator that has started the reduce itself.

    total: the sum over the ranks. own: this rank's partial, if the plan needs it separately.
    """

    total: InFlight[Tensor]
    own: Tensor | None = None


class Operators(Protocol):
    """The matrix products of sublayers: `column` for their input, `row` for their output.

    A fused operator may gather or reduce while it multiplies. The type of `row`'s result tells
    `Pass.write` what is left to do: a Tensor is a partial, a `Summed` is already reduced, and a
    pass may have a type of its own for a product that it runs later. A pass that shards the
    residual may give `column`, and take from `row`, this rank's rows [B * S / T, D] alone: see
    ladder.parallel.fused.
    """

    def column(self, x: Any, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        """The input x [(R,) B, S, D] times each weight: [(R,) B, S, N / T] each."""
        ...

    def row(self, x: Tensor, weight: nn.Module) -> Any:
        """x [(R,) B, S, K / T] times `weight`: a partial [(R,) B, S, D], or an object for it."""
        ...


class MatrixProducts:
    """The default operators: one product per weight."""

    def column(self, x: Tensor, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        return tuple([weight(x) for weight in weights])  # a list, which torch.compile supports

    def row(self, x: Tensor, weight: nn.Module) -> Any:
        return weight(x)


MATRIX_PRODUCTS = MatrixProducts()


@dataclass
class Output:
    """A sublayer's output: its sum over the ranks, and this rank's own partial if needed."""

    total: InFlight[Any] | None
    own: Tensor | None = None


class Pass:
    """One forward pass with the whole residual on every rank.

    `start` takes the embedding. For each sublayer n of the plan, `read(n)` returns its input, and
    `write(n, partial)` takes its output and starts the reduce. `read(N)` returns the head's input.
    A reducer with a pass of its own overrides `land`, `reduce` and `narrow`.

    residual: [B, S, D] (or [held, B, S, D]), the residual of the newest read, before its norm; None
        after the last read.
    base: its part that is equal on all ranks, while a group is open or its sum in flight: the
        residual without the own parts of such groups. It is never computed as a difference, which
        would have rounding errors that differ from rank to rank.
    group: the sum of this rank's plain partials in the open group, if there is one.
    """

    def __init__(
        self, runtime: Runtime, reducer: Reducer, plan: Plan, norms: Sequence[Norm]
    ) -> None:
        self.runtime, self.reducer, self.plan, self.norms = runtime, reducer, plan, norms
        self.ranks = reducer.ranks
        self.residual: Any = None
        self.outputs: dict[int, Output] = {}
        self.landing: InFlight[Landed] | None = None  # the landing of the next read, started early
        self.base: Any = None
        self.group: Any = None
        self.last: Tensor | None = None

    def operators(self, n: int) -> Operators:
        """The operators of sublayer n, or of the head.

        They have no state: with activation checkpointing, a sublayer uses them again later.
        """
        return MATRIX_PRODUCTS

    def start(self, embedded: Tensor) -> None:
        """Set the residual to the sum of the ranks' `embedded` [B, S, D]."""
        residual = self.sum_embedded(embedded).to(self.runtime.dtype_of(embedded))
        held = self.ranks.held
        self.residual = residual if held == 1 else residual.expand(held, *residual.shape)

    def select_last(self, last: Tensor) -> None:
        """Keep only position `last` [B] of each sequence, from the last attention's output on."""
        self.last = last

    def read(self, n: int) -> Any:
        """The input of sublayer n: the normed residual after the plan's landings before it.

        Also starts the landing of read n + 1, if the plan lets it overlap with sublayer n.
        """
        landing, self.landing = self.landing or self._begin(n), None
        self.residual, normed = landing.wait()
        if not self.plan.base_needed[n]:
            self.base = None
        elif self.plan.equal_reads[n]:
            self.base = self.residual
        if n == len(self.plan.sublayers):
            self.residual = None  # its memory is free for the head's product
            return self._final(normed)
        if self.plan.early[n + 1] and not self._narrows(n):
            self.landing = self._begin(n + 1)
        return normed

    def write(self, n: int, partial: Any) -> None:
        """Take the output of sublayer n and start its reduce, without waiting."""
        if self._narrows(n):
            assert self.last is not None
            kept = not isinstance(partial, Tensor) or partial.shape[-2] == 1
            assert kept, f"sublayer {n} returns every position: see Sublayer.wanted"
            self.narrow(self.last)
        if isinstance(partial, Summed):  # the operator knows no residual and no group
            assert self.plan.sublayers[n].reduce == "output", self.plan.sublayers[n]
            self.outputs[n] = Output(partial.total, partial.own)
        else:
            self.outputs[n] = self.reduce(n, partial)

    def logits(self, head: nn.Module) -> Tensor:
        """The head's logits, from the last read: [B, S, V_local]."""
        last = len(self.plan.sublayers)
        (logits,) = self.operators(last).column(self.read(last), (head,))
        return logits

    def hidden(self) -> Tensor:
        """The head's input, from the last read: [B, S, D]."""
        hidden: Tensor = self.read(len(self.plan.sublayers))
        return hidden

    # -- methods that other passes override ------------------------------------------------------

    def sum_embedded(self, embedded: Tensor) -> Tensor:
        return self.reducer.sum(embedded)

    def reduce(self, n: int, partial: Any) -> Output:
        """Start the sum over all ranks of sublayer n's partial, [B, S, D] or [held, B, S, D]."""
        record = self.plan.sublayers[n]
        own = partial if self.plan.own_needed[n] else None
        if self.plan.group_begins[n] is not None:
            partial = partial if self.group is None else self.group + partial
            self.group = partial if record.reduce == "none" else None
        if record.reduce == "none":
            return Output(None, own)
        if record.reduce == "residual":
            partial = torch.add(partial, self.residual, alpha=1 / self.ranks.degree)
        elif own is not None and partial is own and self.ranks.held == 1:
            partial = partial.clone()  # the reduce may overwrite its input
        total = self.reducer.reduce(self.sum_held(partial), self.plan.blocking[n])
        return Output(total, own)

    def land(
        self, n: int, arrivals: Sequence[tuple[Landing, Output]], norm: Norm
    ) -> InFlight[Landed]:
        """Start to add the `arrivals` of read n to the residual, and to norm it.

        It is called as early as the plan allows: with a lag, before the sublayer with which the
        reduces of the arrivals overlap. This implementation does all the work in `wait`.
        """

        def finish(_: Landed) -> Landed:
            residual = self.residual
            addends: list[tuple[Tensor, float]] = []  # not list[...](), which no compiler traces
            for i, (landing, output) in enumerate(arrivals):
                if landing.summed:
                    assert output.total is not None
                    total, output.total = output.total.wait(), None  # `own` may land later
                    if landing.on_base and i + 1 < len(arrivals):
                        residual = self.base = self.base + total
                        addends = []
                    elif landing.on_base:  # the result is the base, too
                        residual, addends = self.base, [(total, 1.0)]
                    elif landing.replaces:
                        residual, addends = total.expand_as(residual), []
                    else:
                        addends.append((total, 1.0))
                if landing.own:
                    assert output.own is not None
                    addends.append((output.own, landing.own))
            return self.runtime.add_norm(residual, addends, norm)

        return InFlight((), finish)

    def narrow(self, last: Tensor) -> None:
        """Drop all positions but `last` [B] of each sequence, which no later read needs.

        Waits for all outputs in flight.
        """
        self.residual = select_positions(self.residual, last)
        for output in self.outputs.values():
            if output.total is not None:
                output.total = InFlight(select_positions(output.total.wait(), last))
            if output.own is not None:
                output.own = select_positions(output.own, last)
        if self.base is not None:
            self.base = select_positions(self.base, last)
        if self.group is not None:
            self.group = select_positions(self.group, last)

    # -- shared ----------------------------------------------------------------------------------

    def sum_held(self, partial: Tensor) -> Tensor:
        """Sum over the virtual ranks held here: [held, B, S, D] -> [B, S, D]."""
        return partial.sum(0) if self.ranks.held > 1 else partial

    def _narrows(self, n: int) -> bool:
        return self.last is not None and n == self.plan.last_attention

    def _begin(self, n: int) -> InFlight[Landed]:
        """Start the landing of read n."""
        arrivals = [(each, self.outputs[each.output]) for each in self.plan.landings[n]]
        for output in self.plan.done[n]:  # frees its memory after the landing
            del self.outputs[output]
        # If virtual ranks' residuals are equal at the end, `_final` norms only one of them.
        once = n == len(self.plan.sublayers) and self._equal_at_the_end
        return self.land(n, arrivals, (lambda x: x) if once else self.norms[n])

    @property
    def _equal_at_the_end(self) -> bool:
        return self.ranks.held > 1 and self.plan.equal_reads[-1]

    def _final(self, normed: Any) -> Any:
        """The head's input: the common value of all ranks, or the mean if their values differ."""
        if self.plan.final_mean:
            return self.reducer.sum(self.sum_held(normed)) / self.ranks.degree
        if self._equal_at_the_end:
            return self.norms[-1](normed[0])
        return normed if self.ranks.held == 1 else normed[0]
