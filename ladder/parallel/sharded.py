"""Prompts with the residual sharded by tokens: reduce-scatter, add, norm, all-gather.

Each of T ranks keeps 1/T of the residual's rows (tokens). A partial is reduce-scattered as soon as
it is there; landing adds a rank's pieces to its own rows, norms those, and gathers the normed rows:

    side stream   | scatter n-1 | add, norm | gather |
    main stream   | sublayer n: matrix products, one after another ... | sublayer n+1

With a lag all of it runs beneath a sublayer; without one the main stream waits. Adding and norming
cost 1/T of what they cost where every rank does all rows. Inference only.
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
from ladder.models.reducer import Ranks
from ladder.parallel.reducers import AsyncReducer

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime


def sharded_refusal(plan: Plan, ranks: Ranks) -> str | None:
    """Why the residual of this plan cannot be sharded by tokens over these ranks, or None."""
    if ranks.held > 1:
        return f"{ranks.held} virtual ranks in one process keep their residuals whole"
    if ranks.processes == 1:
        return "there is one process, and nothing to shard over"
    for n, record in enumerate(plan.sublayers):
        if record.reduce != "output":
            return f"sublayer {n} has reduce={record.reduce!r}, and only 'output' will do"
        if record.own_lag != record.peer_lag or record.own_scale != 1:
            return (
                f"sublayer {n} has own_lag={record.own_lag}, peer_lag={record.peer_lag}, "
                f"own_scale={record.own_scale}: the ranks' residuals differ"
            )
    return None


class ShardedReducer(AsyncReducer):
    """For prompts, with plans whose residuals are equal on all ranks (`sharded_refusal`).

    transport: a name in TRANSPORTS. What no sublayer waits for at once runs on a stream of its own,
    of high priority, and in one order with what runs on the main stream. Embeddings, logits and
    the few rows that are left after `narrow` are communicated as by AsyncReducer.
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
    """A pass whose residual is whole, [B, S, D], until the first output lands.

    From then on it is this rank's rows of it, [rows, D], until the pass narrows. An output on its
    way is (pieces, source): this rank's pieces, and the partial that they are taken from.
    """

    reducer: ShardedReducer

    def __init__(
        self, runtime: Runtime, reducer: ShardedReducer, plan: Plan, norms: Sequence[Norm]
    ) -> None:
        super().__init__(runtime, reducer, plan, norms)
        self.transport = reducer.transport
        self.shape: torch.Size | None = None  # [B, S, D], where the residual is sharded
        self.narrowed = False
        self.newest: object = None  # on the side stream, unless the main one has waited for it
        self.next_partial: Tensor | None = None  # the buffer that was handed out for it

    @property
    def operators(self) -> Operators:
        return self

    def column(self, x: Tensor, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        return MATRIX_PRODUCTS.column(x, weights)

    def row(self, x: Tensor, weight: nn.Module) -> Tensor:
        """As `MatrixProducts.row`, written where the transport sends it from, if that is free."""
        # A single position is what a prefill ends with: it is not sent.
        if x.shape[1] == 1 or getattr(weight, "bias", None) is not None:
            return MATRIX_PRODUCTS.row(x, weight)
        matrix = local(weight.weight).to(x.dtype)
        out = self.partial_buffer((x.shape[0], x.shape[1], matrix.shape[0]), x)
        if out is None:
            return MATRIX_PRODUCTS.row(x, weight)
        torch.mm(x.flatten(0, 1), matrix.t(), out=out.flatten(0, 1))
        return out

    def partial_buffer(self, shape: tuple[int, int, int], like: Tensor) -> Tensor | None:
        """Where the next partial [B, S, D] may be written, once; or None.

        like: a tensor of its dtype and device. The partial must then be handed to `write` as it
        is, or as part of a sum in a tensor of its own.
        """
        if self.next_partial is not None:  # the first of two sublayers that share a reduce has it
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

    def land(self, arrivals: Sequence[tuple[Landing, Output]], norm: Norm) -> InFlight[Landed]:
        if self.narrowed or (self.shape is None and not arrivals):  # all rows are here
            return super().land(arrivals, norm)
        assert isinstance(norm, RMSNorm), norm
        if self.shape is None:
            self.shape = self.residual.shape
            source = self._own_rows(self.residual.flatten(0, 1))
            rows = torch.empty_like(source)
        else:
            source = rows = self.residual
        # Made here, on the main stream, which reads the normed rows: then they are free for others
        # once it has. The side stream waits for all that the main one did before.
        full = self.transport.gather_buffer(len(rows), rows)
        mine = full.narrow(0, self.ranks.process * len(rows), len(rows))
        normed = full[: self.shape[0] * self.shape[1]].view(self.shape)
        here = any(self.plan.blocking[landing.output] for landing, _ in arrivals)
        # What the landing reads, to stay alive until it is done.
        landing = InFlight[Landed]((rows, normed))
        landed = [output.total.value for _, output in arrivals if output.total is not None]
        with self._stream(rows, here):
            weight = local(norm.weight).to(rows.dtype).flatten()
            everything = [pieces for pieces, _ in landed] or [[]]
            reads = source
            for n, pieces in enumerate(everything):
                last = n == len(everything) - 1
                copies = self.transport.copies(full) if last else []
                land_rows(pieces, reads, weight, norm.eps, (rows, mine), copies)
                reads = rows
            self.transport.gather(full)
            if rows.is_cuda and not here:
                done = torch.cuda.Event()
                done.record()
                self.newest = landing
                landing.arrive = functools.partial(self._arrive, landing, done, (landed, source))
        return landing

    def _arrive(
        self, landing: InFlight[Landed], done: torch.cuda.Event, read: object, value: Landed
    ) -> Landed:
        """Wait for a landing on the side stream; `read` is what it has read, alive until here."""
        torch.cuda.current_stream().wait_event(done)
        if self.newest is landing:
            self.newest = None
        return value

    def narrow(self, last: Tensor) -> None:
        """As in Pass: each rank takes what it has of those rows, and an all-reduce joins them.

        That stands in for the last landing's meeting: whoever has passed it knows that all ranks
        have read what their peers left for them in this pass.
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
        """Rows of a rank, the last ones padded."""
        return -(-rows // self.ranks.processes)

    def _own_rows(self, whole: Tensor) -> Tensor:
        share = self._share(len(whole))
        mine = whole[self.ranks.process * share : (self.ranks.process + 1) * share]
        return F.pad(mine, (0, 0, 0, share - len(mine))) if len(mine) < share else mine

    def _stream(self, like: Tensor, here: bool) -> AbstractContextManager:
        """The CUDA stream to launch on, after all that was launched so far on either of the two.

        here: on the current one, since nothing would run there meanwhile.
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
