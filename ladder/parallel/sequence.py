"""Training with the residual sharded by tokens: sequence parallelism, together with TP.

Each of T ranks holds 1/T of the residual's rows (tokens), and of the activations that norms save
for backward. A partial is reduce-scattered; a landing adds the rank's rows to its own, norms them,
and gathers the normed rows. If the plan lags, all of that overlaps with a sublayer, on a side
stream:

    side stream   | scatter n-1 | add, norm | gather for n+1 |
    main stream   | sublayer n ......................................... | sublayer n+1

The backward pass is the same in reverse: a scatter's gradient is gathered, a gather's is scattered,
and the gradient of sublayer n-1's output is in flight while sublayer n's gradients are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.collectives import all_gather, reduce_scatter
from ladder.models.errors import UserError
from ladder.models.forward_pass import Landed, Norm, Output, Pass
from ladder.models.in_flight import InFlight
from ladder.models.plan import Landing, Plan
from ladder.models.ranks import Ranks
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.refusals import rows_refusal

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime

# Starts a collective on rows [M, D]; returns its future result, and the handle to wait for.
Collective = Callable[[Tensor], tuple[Tensor, Any]]


class Transfer:
    """A collective in flight, and the collective of its gradient."""

    def __init__(self, forward: Collective, backward: Collective) -> None:
        self.forward, self.backward = forward, backward
        self.work: Any = None
        self.held: tuple[Tensor, ...] = ()

    def start(self, collective: Collective, value: Tensor) -> Tensor:
        result, self.work = collective(value)
        self.held = value, result
        return result

    def finish(self) -> Tensor:
        """Make the current stream wait; returns the result."""
        if self.work is not None:
            self.work.wait()
        if self.held[0].is_cuda:
            # Another stream may have allocated them; it must not reuse their memory before this
            # stream, which has now waited for the collective, is done with them.
            here = _current_stream(self.held[0])
            for each in self.held:
                each.record_stream(here)
        result, self.work, self.held = self.held[1], None, ()
        return result


def _current_stream(like: Tensor) -> torch.cuda.Stream:
    """The current stream of `like`'s device. Without a device, torch takes 20 times as long."""
    return torch.cuda.current_stream(like.device.index)


class _Begin(torch.autograd.Function):
    """Forward: start the transfer. Backward: wait for the gradient's, which `_End` started."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start(transfer.forward, value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.finish(), None


class _End(torch.autograd.Function):
    """Forward: wait for the transfer. Backward: start the gradient's, without waiting."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish().view_as(started)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(ctx.transfer.backward, grads[0].contiguous())
        return grads[0], None  # has the right shape; its values are not used


def begin_transfer(value: Tensor, forward: Collective, backward: Collective) -> InFlight[Tensor]:
    """Start the collective `forward` on rows [M, D]; `backward` is the gradient's."""
    transfer = Transfer(forward, backward)
    started = _Begin.apply(value.contiguous(), transfer)
    return InFlight(started, lambda started: _End.apply(started, transfer))


def check_rows(sequences: int, length: int, tp: int, of: str = "") -> None:
    """Raise UserError unless tp divides the tokens of a pass; of: as `TrainConfig.check_rows`."""
    if refusal := rows_refusal(sequences, length, tp):
        which = f" in the last batch of {of}" if of else ""
        other = f", or another {of}" if of else ""
        raise UserError(
            f"sequence_parallel=true {refusal}{which}; choose a seq_len that tp divides{other}"
        )


class SequenceReducer(AsyncReducer):
    """The reducer of sequence parallelism, for plans with equal residuals (`sharded_refusal`)."""

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, group)
        self.side_stream: torch.cuda.Stream | None = None

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> SequencePass:
        check_rows(shape[0], shape[1], self.ranks.processes)
        return SequencePass(runtime, self, plan, norms, shape)

    def scatter(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Start to sum [M, D] over the ranks; each rank keeps its [M / T, D]."""
        mine = rows.new_empty(len(rows) // self.ranks.processes, *rows.shape[1:])
        return mine, reduce_scatter(mine, rows, group=self.group, async_op=True)

    def collect(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Start to gather every rank's [M / T, D] into [M, D]."""
        whole = rows.new_empty(len(rows) * self.ranks.processes, *rows.shape[1:])
        return whole, all_gather(whole, rows, group=self.group, async_op=True)


class SequencePass(Pass):
    """A pass whose residual is [B * S / T, D], this rank's rows of all B * S."""

    reducer: SequenceReducer

    def __init__(
        self, runtime: Runtime, reducer: SequenceReducer, plan: Plan, norms: Sequence[Norm],
        shape: torch.Size,
    ) -> None:  # fmt: skip
        super().__init__(runtime, reducer, plan, norms)
        self.shape = shape

    def select_last(self, last: Tensor) -> None:
        raise UserError(
            "sequence_parallel=true is for training, which needs every position: leave out `last`, "
            "or use reducer=async"
        )

    def scatter(self, partial: Tensor) -> InFlight[Tensor]:
        rows = partial.flatten(0, 1)
        return begin_transfer(rows, self.reducer.scatter, self.reducer.collect)

    def sum_embedded(self, embedded: Tensor) -> Tensor:
        return self.scatter(embedded).wait()

    def reduce(self, n: int, partial: Tensor) -> Output:
        assert self.plan.sublayers[n].reduce == "output", self.plan.sublayers[n]
        assert not self.plan.own_needed[n], self.plan.sublayers[n]
        return Output(self.scatter(partial))

    def land(
        self, n: int, arrivals: Sequence[tuple[Landing, Output]], norm: Norm
    ) -> InFlight[Landed]:
        here = any(self.plan.blocking[landing.output] for landing, _ in arrivals)
        with self._stream(here):
            residual, normed = self._add_norm(arrivals, norm)
            gather = begin_transfer(normed, self.reducer.collect, self.reducer.scatter)
        return InFlight((residual, gather), lambda landed: (landed[0], self._whole(landed[1])))

    def _add_norm(self, arrivals: Sequence[tuple[Landing, Output]], norm: Norm) -> Landed:
        addends = []
        for _, output in arrivals:
            assert output.total is not None
            addends.append((output.total.wait(), 1.0))
        return self.runtime.add_norm(self.residual, addends, norm)

    def _whole(self, gather: InFlight[Tensor]) -> Tensor:
        return gather.wait().unflatten(0, self.shape)

    def _stream(self, here: bool) -> AbstractContextManager:
        """The CUDA stream for a landing, after all earlier work on the main and side streams.

        here: use the current stream, since it has no other work meanwhile.
        """
        if not self.residual.is_cuda:
            return contextlib.nullcontext()
        main, reducer = _current_stream(self.residual), self.reducer
        if here:
            if reducer.side_stream is not None:
                main.wait_stream(reducer.side_stream)
                self.residual.record_stream(main)
            return contextlib.nullcontext()
        if reducer.side_stream is None:
            reducer.side_stream = torch.cuda.Stream(self.residual.device, priority=-1)
        reducer.side_stream.wait_stream(main)
        self.residual.record_stream(reducer.side_stream)
        return torch.cuda.stream(reducer.side_stream)
