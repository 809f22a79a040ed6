"""Prefill with the residual sharded by tokens: reduce-scatter, add, norm, all-gather.

Each of T ranks holds 1/T of the residual's rows (tokens). A partial is reduce-scattered as soon as
it is computed; a landing adds a rank's pieces to its rows, norms them, and gathers the normed rows:

    side stream   | scatter n-1 | add, norm | gather |
    main stream   | sublayer n: matrix products, one after another ... | sublayer n+1

With a lag, all of that overlaps with a sublayer; without one, the main stream waits. Adding and
norming cost 1/T of the work on all rows. Inference only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ladder.comm.transports import TRANSPORTS
from ladder.kernels.prefill import land_rows
from ladder.models.errors import UserError, unknown
from ladder.models.forward_pass import MATRIX_PRODUCTS, Landed, Norm, Operators, Output, Pass
from ladder.models.in_flight import InFlight
from ladder.models.layers import RMSNorm, local
from ladder.models.plan import Landing, Plan
from ladder.models.ranks import Ranks
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.refusals import sharded_refusal

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime


class ShardedReducer(AsyncReducer):
    """The reducer of prefill, for plans with equal residuals on all ranks (`sharded_refusal`).

    transport: a name in TRANSPORTS. Work that does not block a sublayer runs on a side stream of
    high priority, in a fixed order with that of the main stream. Embeddings, logits and the few
    rows left after `narrow` are communicated as by AsyncReducer.
    """

    def __init__(
        self, ranks: Ranks, group: dist.ProcessGroup, plan: Plan, transport: str = "collective"
    ) -> None:
        super().__init__(ranks, group)
        refusal = sharded_refusal(plan, ranks)
        if refusal:
            raise UserError(
                f"plan {plan.name!r} cannot run with its residual sharded by tokens: {refusal}; "
                f"use reducer=async"
            )
        if transport not in TRANSPORTS:
            raise unknown("transport", transport, TRANSPORTS)
        self.transport = TRANSPORTS[transport](group, 1 + plan.longest_flight)
        self.side_stream: torch.cuda.Stream | None = None

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> ShardedPass:
        return ShardedPass(runtime, self, plan, norms)


class ShardedPass(Pass):
    """A pass whose residual is sharded from the first landing on.

    Before that it is whole, [B, S, D]; then it is this rank's rows, [rows, D], until the pass
    narrows. An output in flight is (pieces, source): this rank's pieces and their partial.
    """

    reducer: ShardedReducer

    def __init__(
        self, runtime: Runtime, reducer: ShardedReducer, plan: Plan, norms: Sequence[Norm]
    ) -> None:
        super().__init__(runtime, reducer, plan, norms)
        self.transport = reducer.transport
        self.shape: torch.Size | None = None  # [B, S, D], if the residual is sharded
        self.narrowed = False
        self.newest: object = None  # newest work on the side stream, until the main one has waited
        self.next_partial: Tensor | None = None  # the buffer given out for the next partial

    def operators(self, n: int) -> Operators:
        return self

    def column(self, x: Tensor, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        return MATRIX_PRODUCTS.column(x, weights)

    def row(self, x: Tensor, weight: nn.Module) -> Tensor:
        """`MatrixProducts.row`, written to the transport's buffer if that is free."""
        # The single position at the end of a prefill is not sent by the transport.
        if x.shape[1] == 1 or getattr(weight, "bias", None) is not None:
            return MATRIX_PRODUCTS.row(x, weight)
        size = self.residual.shape[-1]
        out = self.partial_buffer((x.shape[0], x.shape[1], size), x)
        if out is None:
            return MATRIX_PRODUCTS.row(x, weight)
        product: Tensor = weight.product(x, out)
        return product

    def partial_buffer(self, shape: tuple[int, int, int], like: Tensor) -> Tensor | None:
        """A buffer for the next partial [B, S, D], given out once; or None.

        like: a tensor of its dtype and device. `write` must then get the partial itself, or a sum
        with it in another tensor.
        """
        if self.next_partial is not None:  # in use by the first of two sublayers with one reduce
            return None
        flat = self.transport.partial_buffer(shape[0] * shape[1], like.new_empty(0, shape[2]))
        if flat is not None:
            self.next_partial = flat = flat.view(shape)
        return flat

    def reduce(self, n: int, partial: Tensor) -> Output:
        if self.narrowed:
            return super().reduce(n, partial)
        assert self.plan.sublayers[n].reduce == "output", self.plan.sublayers[n]
        assert not self.plan.own_needed[n], self.plan.sublayers[n]
        assert not partial.requires_grad, "the sharded reducer has no backward"
        self.next_partial, blocking = None, self.plan.blocking[n]
        rows = partial.flatten(0, 1).contiguous()
        with self._stream(rows, here=blocking):
            pieces = self.transport.scatter(rows, self._share(len(rows)))
        output = Output(InFlight((pieces, rows)))
        if not blocking:
            self.newest = output
        return output

    def land(
        self, n: int, arrivals: Sequence[tuple[Landing, Output]], norm: Norm
    ) -> InFlight[Landed]:
        if self.narrowed or (self.shape is None and not arrivals):  # this rank has all rows
            return super().land(n, arrivals, norm)
        assert isinstance(norm, RMSNorm), norm
        if self.shape is None:
            self.shape = self.residual.shape
            source = self._own_rows(self.residual.flatten(0, 1))
            rows = torch.empty_like(source)
        else:
            source = rows = self.residual
        if not self.gathers(n):
            normed = torch.empty_like(rows)
            with self._stream(rows, here=True):
                self._land_rows(arrivals, source, norm, (rows, normed), [])
            return InFlight((rows, normed))
        # Allocated on the main stream, which reads the normed rows, so that their memory is reused
        # only after that. The side stream waits for all earlier work of the main stream.
        full = self.transport.gather_buffer(len(rows), rows)
        mine = full.narrow(0, self.ranks.process * len(rows), len(rows))
        normed = full[: self.shape[0] * self.shape[1]].view(self.shape)
        here = any(self.plan.blocking[landing.output] for landing, _ in arrivals)
        # The landing's inputs, kept alive until it is done.
        landing = InFlight[Landed]((rows, normed))
        landed = [output.total.value for _, output in arrivals if output.total is not None]
        with self._stream(rows, here):
            self._land_rows(arrivals, source, norm, (rows, mine), self.transport.copies(full))
            self.transport.gather(full)
            if rows.is_cuda and not here:
                done = torch.cuda.Event()
                done.record()
                self.newest = landing
                landing.arrive = functools.partial(self._arrive, landing, done, (landed, source))
        return landing

    def gathers(self, n: int) -> bool:
        """Whether read n gathers the normed rows; else the read returns this rank's rows."""
        return True

    def _land_rows(
        self, arrivals: Sequence[tuple[Landing, Output]], source: Tensor, norm: RMSNorm,
        out: tuple[Tensor, Tensor], copies: list[Tensor],
    ) -> None:  # fmt: skip
        """Land and norm this rank's rows. copies: further targets of the normed rows."""
        weight = local(norm.weight).to(source.dtype).flatten()
        values = [output.total.value for _, output in arrivals if output.total is not None]
        everything = [pieces for pieces, _ in values] or [[]]
        for i, pieces in enumerate(everything):
            last = i == len(everything) - 1
            land_rows(pieces, source, weight, norm.eps, out, copies if last else [])
            source = out[0]

    def _arrive(
        self, landing: InFlight[Landed], done: torch.cuda.Event, read: object, value: Landed
    ) -> Landed:
        """Wait for a landing on the side stream. read: its inputs, kept alive until here."""
        torch.cuda.current_stream().wait_event(done)
        if self.newest is landing:
            self.newest = None
        return value

    def narrow(self, last: Tensor) -> None:
        """`Pass.narrow`: an all-reduce collects the rows from the ranks that hold them.

        It replaces the barrier of the last landing: after it, all ranks have read the data that
        their peers wrote for them in this pass.
        """
        shape = self.residual.shape if self.shape is None else self.shape
        flat = torch.arange(len(last), device=last.device) * shape[1] + last
        share = self._share(shape[0] * shape[1])
        mine = flat - self.ranks.process * share
        here = ((mine >= 0) & (mine < share)).unsqueeze(1)
        mine = mine.clamp(0, share - 1)
        whole = self.shape is None
        rows = self._own_rows(self.residual.flatten(0, 1)) if whole else self.residual
        with self._stream(rows, here=True):
            owned = [rows[mine]]
            for output in self.outputs.values():
                assert output.total is not None
                pieces = [piece[mine].float() for piece in output.total.value[0]]
                owned.append(torch.stack(pieces).sum(0).to(rows.dtype))
            joined = self.reducer.sum_(torch.where(here, torch.stack(owned), 0)).unsqueeze(2)
        self.narrowed, self.residual = True, joined[0]
        for output, total in zip(self.outputs.values(), joined[1:], strict=True):
            output.total = InFlight(total)

    def _share(self, rows: int) -> int:
        """The rows per rank; the last rank's rows are padded to as many."""
        return -(-rows // self.ranks.processes)

    def _own_rows(self, whole: Tensor) -> Tensor:
        share = self._share(len(whole))
        mine = whole[self.ranks.process * share : (self.ranks.process + 1) * share]
        return F.pad(mine, (0, 0, 0, share - len(mine))) if len(mine) < share else mine

    def _stream(self, like: Tensor, here: bool) -> AbstractContextManager:
        """The CUDA stream to launch on, after all earlier work on the main and side streams.

        here: use the current stream, since it has no other work meanwhile.
        """
        if not like.is_cuda:
            return contextlib.nullcontext()
        main, reducer = torch.cuda.current_stream(), self.reducer
        if here:
            if self.newest is not None:
                assert reducer.side_stream is not None
                main.wait_stream(reducer.side_stream)
                self.newest = None
            return contextlib.nullcontext()
        if reducer.side_stream is None:
            reducer.side_stream = torch.cuda.Stream(like.device, priority=-1)
        reducer.side_stream.wait_stream(main)
        return torch.cuda.stream(reducer.side_stream)
