"""Training with the residual stream sharded by tokens: sequence parallelism, beside TP.

Each of T ranks keeps 1/T of the stream's rows (tokens), and of what its norms save for backward. A
partial is reduce-scattered; landing adds the rank's rows to its own, norms them, and gathers the
normed rows. Where the plan lags, all of that runs beneath a sublayer, on a stream of its own:

    side stream   | scatter n-1 | add, norm | gather for n+1 |
    main stream   | sublayer n ......................................... | sublayer n+1

Backward it is the same in reverse: a scatter's gradient is gathered, a gather's is scattered, and
the gradient of sublayer n-1's output is on its way while the gradients of sublayer n are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.collectives import all_gather, reduce_scatter
from ladder.models.errors import UserError
from ladder.models.plan import Landing, Sublayer
from ladder.models.reducer import Norm, Pending, Ranks, Reducer
from ladder.parallel.reducers import AsyncReducer

# Starts a collective on rows [M, D]: (what it will give, the handle to wait for).
Collective = Callable[[Tensor], tuple[Tensor, Any]]


class Transfer:
    """A collective under way; its gradient travels by the opposite one."""

    def __init__(self, forward: Collective, backward: Collective) -> None:
        self.forward, self.backward = forward, backward
        self.work: Any = None
        self.held: tuple[Tensor, ...] = ()

    def start(self, collective: Collective, value: Tensor) -> Tensor:
        result, self.work = collective(value)
        self.held = value, result
        return result

    def finish(self) -> Tensor:
        """Have the current stream wait; returns the result."""
        if self.work is not None:
            self.work.wait()
        for each in self.held if self.held[0].is_cuda else ():
            # They were made on another stream perhaps, which may use their memory again only when
            # this one, which has now waited for the collective, is done with it.
            each.record_stream(torch.cuda.current_stream())
        result, self.work, self.held = self.held[1], None, ()
        return result


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
    """Forward: wait for the transfer. Backward: start the gradient's, and return at once."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish().view_as(started)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start(ctx.transfer.backward, grads[0].contiguous())
        return grads[0], None  # of the right shape, and not looked at


class Arrival(NamedTuple):
    """An output on its way to this rank's rows."""

    started: Tensor
    transfer: Transfer
    blocking: bool


class Gathering(NamedTuple):
    """A landing that was begun: the stream's own rows, and all normed rows, on their way."""

    stream: Tensor
    started: Tensor
    transfer: Transfer


def check_rows(sequences: int, length: int, tp: int) -> None:
    """Raise UserError unless tp divides the tokens of a pass."""
    rows = sequences * length
    if rows % tp:
        raise UserError(
            f"sequence_parallel=true cannot share {rows} tokens ({sequences} sequences of "
            f"{length}) out over tp={tp} ranks; choose a seq_len that tp divides"
        )


class SequenceReducer(AsyncReducer):
    """For training, with plans whose streams are equal on all ranks (`sharded_refusal`).

    The stream is [B * S / T, D], this rank's rows of all B * S.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup) -> None:
        super().__init__(ranks, group)
        self.shape: torch.Size | None = None  # of this forward pass's tokens, [B, S]
        self.side: torch.cuda.Stream | None = None

    def pick(self, shape: torch.Size) -> Reducer:
        check_rows(shape[0], shape[1], self.ranks.processes)
        self.shape = shape
        return self

    def scatter(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Start to sum [M, D] over the ranks, each keeping its [M / T, D]."""
        mine = rows.new_empty(len(rows) // self.ranks.processes, *rows.shape[1:])
        return mine, reduce_scatter(mine, rows, group=self.group, async_op=True)

    def collect(self, rows: Tensor) -> tuple[Tensor, Any]:
        """Start to join every rank's [M / T, D] into [M, D]."""
        whole = rows.new_empty(len(rows) * self.ranks.processes, *rows.shape[1:])
        return whole, all_gather(whole, rows, group=self.group, async_op=True)

    def start_stream(self, partial: Tensor) -> Tensor:
        transfer = Transfer(self.scatter, self.collect)
        return _End.apply(_Begin.apply(partial.flatten(0, 1).contiguous(), transfer), transfer)

    def output(self, partial: Tensor, stream: Tensor, record: Sublayer, keep_own: bool,
               blocking: bool) -> Pending:  # fmt: skip
        assert record.reduce == "output", record
        assert not keep_own, record
        transfer = Transfer(self.scatter, self.collect)
        started = _Begin.apply(partial.flatten(0, 1).contiguous(), transfer)
        return Pending(Arrival(started, transfer, blocking), None)

    def begin_landing(
        self, stream: Tensor, arrivals: Sequence[tuple[Landing, Pending]], norm: Norm
    ) -> Gathering:
        landed: list[Arrival] = [pending.handle for _, pending in arrivals]
        with self._place(stream, here=any(each.blocking for each in landed)):
            addends = [(_End.apply(each.started, each.transfer), 1.0) for each in landed]
            stream, normed = self.add_norm(stream, addends, norm)
            transfer = Transfer(self.collect, self.scatter)
            return Gathering(stream, _Begin.apply(normed.contiguous(), transfer), transfer)

    def finish_landing(self, begun: Gathering) -> tuple[Tensor, Tensor]:
        assert self.shape is not None
        normed = _End.apply(begun.started, begun.transfer)
        return begun.stream, normed.unflatten(0, self.shape)

    def narrow(
        self, stream: Tensor, pending: Mapping[int, Pending], last: Tensor
    ) -> tuple[Tensor, dict[int, Pending], Reducer]:
        raise UserError(
            "sequence_parallel=true is for training, which wants every place: leave out `last`, or "
            "use reducer=async"
        )

    def _place(self, stream: Tensor, here: bool) -> AbstractContextManager:
        """The stream to land on, after all that was launched so far on either of the two.

        here: on the current one, since nothing would run there meanwhile.
        """
        if not stream.is_cuda:
            return contextlib.nullcontext()
        main = torch.cuda.current_stream()
        if here:
            if self.side is not None:
                main.wait_stream(self.side)
                stream.record_stream(main)
            return contextlib.nullcontext()
        if self.side is None:
            self.side = torch.cuda.Stream(stream.device, priority=-1)
        self.side.wait_stream(main)
        stream.record_stream(self.side)
        return torch.cuda.stream(self.side)
