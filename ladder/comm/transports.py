"""Transports: rows of activations travel between ranks, by collectives or by copy engines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.access import push_refusal
from ladder.comm.barriers import KernelBarrier, StreamBarrier
from ladder.comm.collectives import all_gather, reduce_scatter
from ladder.models.errors import UserError

MIN_ROWS = 1024  # that symmetric buffers are made for


class Transport(Protocol):
    """How rows travel. Every rank makes the same calls in the same order."""

    def partial_buffer(self, rows: int, like: Tensor) -> Tensor | None:
        """A buffer [rows, D] to compute the next partial in, where that saves a copy."""

    def scatter(self, partial: Tensor, shard: int) -> list[Tensor]:
        """This rank's `shard` rows of every rank's partial [rows, D]: pieces to be summed."""

    def gather_buffer(self, shard: int, like: Tensor) -> Tensor:
        """A buffer [T x shard, D]: this rank writes its own rows there before `gather`."""

    def copies(self, full: Tensor) -> list[Tensor]:
        """Where else, on peers, to write this rank's rows of the gather buffer `full`."""

    def gather(self, full: Tensor) -> None:
        """Fill the other ranks' rows of the gather buffer, once this rank's are written."""


class CollectiveTransport:
    """Reduce-scatter and all-gather of torch.distributed; on gloo an all-to-all for the former."""

    def __init__(self, group: dist.ProcessGroup, sets: int) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)

    def partial_buffer(self, rows: int, like: Tensor) -> Tensor | None:
        return None

    def scatter(self, partial: Tensor, shard: int) -> list[Tensor]:
        missing = self.world * shard - len(partial)
        if missing:
            partial = F.pad(partial, (0, 0, 0, missing))
        if partial.is_cuda:
            piece = torch.empty_like(partial[:shard])
            reduce_scatter(piece, partial, group=self.group)
            return [piece]
        pieces = torch.empty_like(partial)
        dist.all_to_all_single(pieces, partial, group=self.group)
        return list(pieces.split(shard))

    def gather_buffer(self, shard: int, like: Tensor) -> Tensor:
        return torch.empty(self.world * shard, like.shape[-1], dtype=like.dtype, device=like.device)

    def copies(self, full: Tensor) -> list[Tensor]:
        return []

    def gather(self, full: Tensor) -> None:
        mine = full.chunk(self.world)[self.rank]
        mine = mine if full.is_cuda else mine.clone()  # NCCL knows this as in place
        all_gather(full, mine, group=self.group)


@dataclass
class Workspace:
    """Buffers of [rows, D] on every rank, `sets` for partials and as many for normed rows.

    partials, normed: of each set, every rank's, by rank. staging: of each set, what is pulled from
    the other ranks, [T - 1, rows / T, D].
    """

    rows: int
    partials: list[list[Tensor]]
    normed: list[list[Tensor]]
    staging: list[Tensor]
    barrier: StreamBarrier | KernelBarrier


class CopyEngineTransport:
    """Copies between the GPUs' memories by their copy engines: no SM works on them.

    A rank pulls its rows of the peers' partials, lands them, and pushes its normed rows to the
    peers. There are two barriers in between: READY, before the pulls, and FULL, after the pushes.
    kernels: the barriers are kernels. direct: the landing's kernel itself reads the partials, and
    writes the normed rows, where they are; sooner done with few rows, but it takes SMs from what
    runs meanwhile.

    Why `sets` = 1 + the largest lag of the plan, used in turn, are enough, L being that lag. Every
    call below is in one order on its rank (ShardedReducer sees to it), and whoever passes a barrier
    knows what all ranks did before it.
    - Partial n is written by sublayer n, which follows landing n of its rank, thus that landing's
      FULL barrier. By landing n all outputs up to n - L - 1 have landed, so every rank had pulled
      partial n - sets, or it would not have come to that barrier.
    - Staging n is written after landing n - L - 1 or a later one has read staging n - sets.
    - Normed rows of read n are pushed after the READY barrier of output n - L - 1, to which a rank
      comes after its sublayer n - L - 1 = n - sets, the last reader of that buffer. Landings that
      bring no output (a lag that grows within a plan) follow one that brought it.
    - The last landing of a pass brings all outputs, and the first READY barrier of the next pass
      comes after all that the main stream did in this one: whatever the sets with which a pass, or
      a graph's replay, begins, they are free. A pass that narrows ends in an all-reduce instead,
      which is passed when every rank's main stream, after its side stream, has come to it.
    - A flag of a barrier is set again only by a rank that has since passed a barrier of the other
      kind, or that all-reduce, to which this rank came after it had cleared the flag: the same
      argument.
    """

    def __init__(self, group: dist.ProcessGroup, sets: int, *, kernels: bool, direct: bool) -> None:
        self.group, self.sets = group, sets
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        refusal = push_refusal(self.world)
        if refusal:
            raise UserError(f"transport=copy cannot run here: {refusal}; use transport=collective")
        self.make_barrier = KernelBarrier if kernels else StreamBarrier
        self.direct = direct
        # Outgrown ones stay: graphs that were recorded with them may be replayed.
        self.spaces: dict[tuple[int, torch.dtype], list[Workspace]] = {}
        self.posted = self.landed = 0

    def partial_buffer(self, rows: int, like: Tensor) -> Tensor | None:
        space = self._space(rows, like)
        return space.partials[self.posted % self.sets][self.rank][:rows]

    def scatter(self, partial: Tensor, shard: int) -> list[Tensor]:
        space, chosen = self._space(len(partial), partial), self.posted % self.sets
        self.posted += 1
        buffers, staging = space.partials[chosen], space.staging[chosen]
        if partial.data_ptr() != buffers[self.rank].data_ptr():
            buffers[self.rank][: len(partial)].copy_(partial)
        space.barrier.wait(chosen)
        mine = slice(self.rank * shard, (self.rank + 1) * shard)
        pieces = [buffer[mine] for buffer in buffers]
        # One peer after another: concurrent copies on separate streams were slower.
        if not self.direct:
            for step, peer in enumerate(self._peers()):
                pieces[peer] = staging[step, :shard].copy_(pieces[peer])
        return pieces

    def gather_buffer(self, shard: int, like: Tensor) -> Tensor:
        rows = self.world * shard
        chosen = self.landed % self.sets
        self.landed += 1
        return self._space(rows, like).normed[chosen][self.rank][:rows]

    def copies(self, full: Tensor) -> list[Tensor]:
        return self._peers_rows(full) if self.direct else []

    def gather(self, full: Tensor) -> None:
        if not self.direct:
            mine = full.chunk(self.world)[self.rank]
            for theirs in self._peers_rows(full):
                theirs.copy_(mine)
        space, chosen = self._space(len(full), full), (self.landed - 1) % self.sets
        space.barrier.wait(self.sets + chosen)

    def _peers_rows(self, full: Tensor) -> list[Tensor]:
        """This rank's rows of the newest `gather_buffer`, in every peer's memory."""
        space, chosen = self._space(len(full), full), (self.landed - 1) % self.sets
        assert full.data_ptr() == space.normed[chosen][self.rank].data_ptr()
        shard = len(full) // self.world
        mine = slice(self.rank * shard, (self.rank + 1) * shard)
        return [space.normed[chosen][peer][mine] for peer in self._peers()]

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with another, so that all links are in use."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _space(self, rows: int, like: Tensor) -> Workspace:
        """The workspace for `rows`; made when first asked for, by all ranks alike."""
        spaces = self.spaces.setdefault((like.shape[-1], like.dtype), [])
        rows += -rows % self.world
        if not spaces or spaces[-1].rows < rows:
            spaces.append(self._make(rows, like))
        return spaces[-1]

    def _make(self, rows: int, like: Tensor) -> Workspace:
        rows = max(MIN_ROWS, 2 ** (rows - 1).bit_length())  # twice the last one, or more
        rows += -rows % self.world
        size, make = like.shape[-1], {"dtype": like.dtype, "device": like.device}
        with torch.inference_mode(False):  # they outlive the mode, and are written outside it too
            buffers = [
                symmetric.allocate((rows, size), like.dtype, self.group, like.device).by_rank
                for _ in range(2 * self.sets)
            ]
            staging = [
                torch.empty(self.world - 1, rows // self.world, size, **make)
                for _ in range(0 if self.direct else self.sets)
            ]
            barrier = self.make_barrier(self.group, 2 * self.sets, like.device)
        staging = staging or [torch.empty(0, **make)] * self.sets
        return Workspace(rows, buffers[: self.sets], buffers[self.sets :], staging, barrier)


TRANSPORTS: dict[str, Callable[[dist.ProcessGroup, int], Transport]] = {
    "collective": CollectiveTransport,
    "copy": functools.partial(CopyEngineTransport, kernels=False, direct=False),
    # As "copy", with barriers that are kernels.
    "copy-kernels": functools.partial(CopyEngineTransport, kernels=True, direct=False),
    "direct": functools.partial(CopyEngineTransport, kernels=True, direct=True),
}
