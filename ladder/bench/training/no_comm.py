"""Reducers without the sublayers' reduces, for a plan's computation without communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sequence import SequenceReducer


class NoCommReducer(AsyncReducer):
    """A reducer that omits the sublayers' reduces."""

    def post(self, partial: Tensor, blocking: bool = False) -> Any:
        return self.sum_held(partial)

    def wait(self, handle: Any) -> Tensor:
        return handle if isinstance(handle, Tensor) else super().wait(handle)


class NoCommSequenceReducer(SequenceReducer):
    """A reducer that keeps its own rows, instead of scattering, and repeats them to gather.

    The embedding is still summed: most of its rows are zero on one rank, and the norms of zeros
    would overflow.
    """

    def start_stream(self, partial: Tensor) -> Tensor:
        rows = self.sum(partial).flatten(0, 1)
        return rows.chunk(self.ranks.processes)[self.ranks.process]

    def scatter(self, rows: Tensor) -> tuple[Tensor, Any]:
        mine = rows.chunk(self.ranks.processes)[self.ranks.process].clone()
        return mine, _launched(mine)

    def collect(self, rows: Tensor) -> tuple[Tensor, Any]:
        whole = rows.repeat(self.ranks.processes, 1)
        return whole, _launched(whole)


def _launched(value: Tensor) -> Any:
    """The event that another CUDA stream waits for before it reads `value`, as for a collective."""
    return torch.cuda.current_stream().record_event() if value.is_cuda else None
