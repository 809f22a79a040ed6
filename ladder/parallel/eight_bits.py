"""`EightBitReducer`: all-reduces of many tokens whose messages are in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.collectives import all_gather
from ladder.kernels import messages
from ladder.kernels.limits import MAX_ROWS
from ladder.models.errors import UserError
from ladder.models.forward_pass import Norm, Pass
from ladder.models.in_flight import InFlight
from ladder.models.plan import Plan
from ladder.models.ranks import Ranks
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.refusals import rounding_refusal

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime


class EightBitReducer(AsyncReducer):
    """All-reduces whose messages are in 8 bits, half the bytes of bfloat16. Inference only.

    Each token's partial is rounded, with a scale of its own; an all-to-all brings each rank the
    others' parts of its share of the tokens; it adds them to its own part in float32 and rank
    order, rounds the sums, and an all-gather brings these to all. So every rank has the same bits.
    A sum has the errors of two roundings: of the partials of the other ranks, and of the sum. With
    two ranks, each rank instead gathers both rounded partials and adds them: as many bytes, in one
    exchange.

    kind: fp8 or int8. Messages of up to MAX_ROWS tokens (decode steps) are summed exactly, by
    AsyncReducer, and so are embeddings and the logits of a final mean (`sum`).
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup, kind: str) -> None:
        super().__init__(ranks, group)
        self.kind = kind
        self.side_stream: torch.cuda.Stream | None = None

    def begin(self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size) -> Pass:
        if reason := rounding_refusal(plan):
            raise UserError(
                f"reducer=async-{self.kind} with plan {plan.name!r}: {reason}; use reducer=async"
            )
        return super().begin(runtime, plan, norms, shape)

    def sum(self, partial: Tensor) -> Tensor:
        return super().reduce(partial, blocking=True).wait()

    def reduce(self, partial: Tensor, blocking: bool = False) -> InFlight[Tensor]:
        partial = partial.contiguous()  # so that `rows` is a view of it; InFlight keeps it alive
        rows = partial.flatten(0, -2)
        if len(rows) <= MAX_ROWS:
            return super().reduce(partial, blocking)
        assert not partial.requires_grad, "reduces in 8 bits have no backward"
        if not partial.is_cuda:
            parts, arriving = self._exchange(rows, wait=False)

            def finish(partial: Tensor) -> Tensor:
                arriving.wait()
                return self._sum(rows, parts).view(partial.shape)

            return InFlight(partial, finish)
        if self.side_stream is None:
            self.side_stream = torch.cuda.Stream(partial.device, priority=-1)
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            total = self._sum(rows, self._exchange(rows, wait=True)[0]).view(partial.shape)
            done = torch.cuda.Event()
            done.record()

        def arrive(partial: Tensor) -> Tensor:
            torch.cuda.current_stream().wait_event(done)
            return total

        return InFlight(partial, arrive)  # keeps the partial alive until then

    def _exchange(self, rows: Tensor, wait: bool) -> tuple[Tensor, dist.Work]:
        """The ranks' messages for this rank's share of the rows, and the work to wait for.

        With two ranks, the messages are for all rows.
        """
        world = self.ranks.processes
        if world == 2:
            message = messages.pack(rows, self.kind, len(rows))
            parts = message.new_empty(2, *message.shape)
            whole = parts.flatten(0, 1)
            work = all_gather(whole, message, group=self.group, async_op=not wait)
            return parts, work
        share = -(-len(rows) // world)
        message = messages.pack(rows, self.kind, world * share)
        parts = torch.empty_like(message)
        work = dist.all_to_all_single(parts, message, group=self.group, async_op=not wait)
        return parts.unflatten(0, (world, share)), work

    def _sum(self, rows: Tensor, parts: Tensor) -> Tensor:
        """The sums of all rows [M, D], from this rank's rows and all ranks' parts of its share."""
        world, share, _ = parts.shape
        if world == 2:
            return messages.unpack(parts, self.kind, rows.shape[1], rows.dtype)
        rank = self.ranks.process
        own = rows[rank * share : (rank + 1) * share]
        mine = messages.sum_messages(own, parts, rank, self.kind)
        whole = torch.empty(world * share, mine.shape[1], dtype=mine.dtype, device=mine.device)
        all_gather(whole, mine, group=self.group)
        return messages.unpack(whole[None, : len(rows)], self.kind, rows.shape[1], rows.dtype)
