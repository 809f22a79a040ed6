"""Prompts with the residual stream sharded by tokens: reduce-scatter, add, norm, all-gather.

Each of T ranks keeps 1/T of the stream's rows (tokens). A partial is reduce-scattered as soon as it
is there; landing adds a rank's pieces to its own rows, norms those, and gathers the normed rows:

    side stream   | scatter n-1 | add, norm | gather |
    main stream   | sublayer n: matrix products, one after another ... | sublayer n+1

With a lag all of it runs beneath a sublayer; without one the main stream waits. Adding and norming
cost 1/T of what they cost where every rank does all rows. Inference only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.transports import TRANSPORTS
from ladder.kernels.prefill import land_rows
from ladder.models.errors import UserError, unknown
from ladder.models.layers import RMSNorm, local
from ladder.models.plan import Landing, Plan, Sublayer
from ladder.models.reducer import Arrived, Norm, Pending, Ranks, Reducer
from ladder.parallel.reducers import AsyncReducer


def sharded_refusal(plan: Plan, ranks: Ranks) -> str | None:
    """Why the stream of this plan cannot be sharded by tokens over these ranks, or None."""
    if ranks.held > 1:
        return f"{ranks.held} virtual ranks in one process keep their streams whole"
    if ranks.processes == 1:
        return "there is one process, and nothing to shard over"
    for n, record in enumerate(plan.sublayers):
        if record.reduce != "output":
            return f"sublayer {n} has reduce={record.reduce!r}, and only 'output' will do"
        if record.own_lag != record.peer_lag or record.own_scale != 1:
            return (
                f"sublayer {n} has own_lag={record.own_lag}, peer_lag={record.peer_lag}, "
                f"own_scale={record.own_scale}: the ranks' streams differ"
            )
    return None


@dataclass
class Shard:
    """This rank's rows [R, D] of a stream of `shape` [B, S, D]."""

    rows: Tensor
    shape: torch.Size


@dataclass
class Arrival:
    """An output on its way: this rank's pieces, and the partial that they are taken from."""

    pieces: list[Tensor]
    source: Tensor
    blocking: bool


@dataclass
class Begun:
    """A landing that was begun; `norm` where it is all to be done when it is finished."""

    stream: Tensor | Shard
    source: Tensor | None = None  # what it reads, to stay alive until then
    normed: Tensor | None = None
    norm: Norm | None = None
    done: torch.cuda.Event | None = None
    arrivals: list[Arrival] = field(default_factory=list)


class ShardedReducer(AsyncReducer):
    """For prompts, with plans whose streams are equal on all ranks (`sharded_refusal`).

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
                f"plan {plan.name!r} cannot run with its stream sharded by tokens: {refusal}; use "
                f"reducer=async"
            )
        if transport not in TRANSPORTS:
            raise unknown("transport", transport, TRANSPORTS)
        sets = 1 + max(record.own_lag for record in plan.sublayers)
        self.transport = TRANSPORTS[transport](group, sets)
        self.plain = AsyncReducer(ranks, group)  # for the few rows that a pass ends with
        self.side: torch.cuda.Stream | None = None
        self.newest: object = None  # on the side stream, unless the main one has waited for it
        self.lent: Tensor | None = None

    def buffer(self, shape: tuple[int, int, int], like: Tensor) -> Tensor | None:
        """Where the next partial [B, S, D] may be written by who computes it, once; or None.

        like: a tensor of its dtype and device. The partial must then be handed to `output` as it
        is, or as part of a sum in a tensor of its own; or the pass narrows, and sends none of it.
        """
        if self.lent is not None:  # the first of two sublayers that share a reduce has it
            return None
        flat = self.transport.partial_buffer(shape[0] * shape[1], like.new_empty(0, shape[2]))
        if flat is not None:
            self.lent = flat = flat.view(shape)
        return flat

    def output(self, partial: Tensor, stream: Tensor, record: Sublayer, keep_own: bool,
               blocking: bool) -> Pending:  # fmt: skip
        assert record.reduce == "output", record
        assert not keep_own, record
        assert not partial.requires_grad, "the sharded reducer has no backward"
        self.lent = None
        rows = partial.flatten(0, 1).contiguous()
        with self._place(rows, here=blocking):
            pieces = self.transport.scatter(rows, self._share(len(rows)))
        arrival = Arrival(pieces, rows, blocking)
        if not blocking:
            self.newest = arrival
        return Pending(arrival, None)

    def begin_landing(
        self, stream: Tensor | Shard, arrivals: Sequence[tuple[Landing, Pending]], norm: Norm
    ) -> Any:
        """As in Reducer. The stream is whole until the first output lands, a Shard from then on."""
        landed: list[Arrival] = [pending.handle for _, pending in arrivals]
        if isinstance(stream, Tensor) and not landed:  # all rows are here: nothing to gather
            return Begun(stream, norm=norm)
        assert isinstance(norm, RMSNorm), norm
        if isinstance(stream, Tensor):
            shape, source = stream.shape, self._own_rows(stream.flatten(0, 1))
            rows = torch.empty_like(source)
        else:
            shape, source, rows = stream.shape, stream.rows, stream.rows
        # Made here, on the main stream, which reads the normed rows: then they are free for others
        # once it has. The side stream waits for all that the main one did before.
        full = self.transport.gather_buffer(len(rows), rows)
        mine = full.narrow(0, self.ranks.process * len(rows), len(rows))
        normed = full[: shape[0] * shape[1]].view(shape)
        begun = Begun(Shard(rows, shape), source, normed, arrivals=landed)
        here = any(arrival.blocking for arrival in landed)
        with self._place(rows, here):
            weight = local(norm.weight).to(rows.dtype).flatten()
            everything = [arrival.pieces for arrival in landed] or [[]]
            for n, pieces in enumerate(everything):
                last = n == len(everything) - 1
                copies = self.transport.copies(full) if last else []
                land_rows(pieces, source, weight, norm.eps, (rows, mine), copies)
                source = rows
            self.transport.gather(full)
            if rows.is_cuda and not here:
                begun.done = torch.cuda.Event()
                begun.done.record()
                self.newest = begun
        return begun

    def finish_landing(self, begun: Begun) -> tuple[Any, Tensor]:
        if begun.norm is not None:
            assert isinstance(begun.stream, Tensor)
            return self.add_norm(begun.stream, [], begun.norm)
        if begun.done is not None:
            torch.cuda.current_stream().wait_event(begun.done)
        if self.newest is begun:
            self.newest = None
        assert begun.normed is not None
        return begun.stream, begun.normed

    def narrow(
        self, stream: Tensor | Shard, pending: Mapping[int, Pending], last: Tensor
    ) -> tuple[Tensor, dict[int, Pending], Reducer]:
        """As in Reducer: each rank takes what it has of those rows, and an all-reduce joins them.

        That stands in for the last landing's meeting: whoever has passed it knows that all ranks
        have read what their peers left for them in this pass.
        """
        self.lent = None  # an attention that wrote to it is not sent
        shape = stream.shape
        flat = torch.arange(len(last), device=last.device) * shape[1] + last
        share = self._share(shape[0] * shape[1])
        mine = flat - self.ranks.process * share
        here = ((mine >= 0) & (mine < share)).unsqueeze(1)
        mine = mine.clamp(0, share - 1)
        rows = stream.rows if isinstance(stream, Shard) else self._own_rows(stream.flatten(0, 1))
        with self._place(rows, here=True):
            owned = [rows[mine]]
            for each in pending.values():
                pieces = [piece[mine].float() for piece in each.handle.pieces]
                owned.append(torch.stack(pieces).sum(0).to(rows.dtype))
            joined = self.sum_(torch.where(here, torch.stack(owned), 0)).unsqueeze(2)
        self.plain.add_norm = self.add_norm
        arrived = {
            n: Pending(Arrived(each), None) for n, each in zip(pending, joined[1:], strict=True)
        }
        return joined[0], arrived, self.plain

    def _share(self, rows: int) -> int:
        """Rows of a rank, the last ones padded."""
        return -(-rows // self.ranks.processes)

    def _own_rows(self, whole: Tensor) -> Tensor:
        share = self._share(len(whole))
        mine = whole[self.ranks.process * share : (self.ranks.process + 1) * share]
        return F.pad(mine, (0, 0, 0, share - len(mine))) if len(mine) < share else mine

    def _place(self, like: Tensor, here: bool) -> AbstractContextManager:
        """The stream to launch on, after all that was launched so far on either of the two.

        here: on the current one, since nothing would run there meanwhile.
        """
        if not like.is_cuda:
            return contextlib.nullcontext()
        main = torch.cuda.current_stream()
        if here:
            if self.newest is not None:
                assert self.side is not None
                main.wait_stream(self.side)
                self.newest = None
            return contextlib.nullcontext()
        if self.side is None:
            self.side = torch.cuda.Stream(like.device, priority=-1)
        self.side.wait_stream(main)
        return torch.cuda.stream(self.side)
