"""Reducers without the sublayers' reduces, for a plan's computation without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ladder.models.forward_pass import Norm
from ladder.models.in_flight import InFlight
from ladder.models.plan import Plan
from ladder.models.runtime import Runtime
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sequence import SequencePass, SequenceReducer


class NoCommReducer(AsyncReducer):
    """A reducer that omits the sublayers' reduces."""

    def reduce(self, partial: Tensor, blocking: bool = False) -> InFlight[Tensor]:
        return InFlight(partial)

    def sum(self, partial: Tensor) -> Tensor:
        return super().reduce(partial).wait()


class NoCommSequencePass(SequencePass):
    def sum_embedded(self, embedded: Tensor) -> Tensor:
        rows = self.reducer.sum(embedded).flatten(0, 1)
        return rows.chunk(self.ranks.processes)[self.ranks.process]


class NoCommSequenceReducer(SequenceReducer):
    """A reducer that keeps its own rows, instead of scattering, and repeats them to gather.

    The embedding is still summed: most of its rows are zero on one rank, and the norms of zeros
    would overflow.
    """

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> SequencePass:
        return NoCommSequencePass(runtime, self, plan, norms, shape)

    def scatter(self, rows: Tensor) -> tuple[Tensor, Any]:
        mine = rows.chunk(self.ranks.processes)[self.ranks.process].clone()
        return mine, _launched(mine)

    def collect(self, rows: Tensor) -> tuple[Tensor, Any]:
        whole = rows.repeat(self.ranks.processes, 1)
        return whole, _launched(whole)


def _launched(value: Tensor) -> Any:
    """The event that another CUDA stream waits for before it reads `value`, as for a collective."""
    return torch.cuda.current_stream().record_event() if value.is_cuda else None
