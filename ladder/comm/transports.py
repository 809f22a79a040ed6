"""Transports: the exchange of rows of activations, by collectives or by copy engines."""

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

MIN_ROWS = 1024  # of the smallest symmetric buffers


class Transport(Protocol):
    """The exchange of rows between ranks. Every rank must make the same calls in the same order."""

    def partial_buffer(self, rows: int, like: Tensor) -> Tensor | None:
        """A buffer [rows, D] for the next partial, if that saves a copy."""

    def scatter(self, partial: Tensor, shard: int) -> list[Tensor]:
        """This rank's `shard` rows of every rank's partial [rows, D]: pieces to be summed."""

    def gather_buffer(self, shard: int, like: Tensor) -> Tensor:
        """A buffer [T x shard, D]: this rank writes its own rows there before `gather`."""

    def copies(self, full: Tensor) -> list[Tensor]:
        """Further targets, on peers, for this rank's rows of the gather buffer `full`."""

    def gather(self, full: Tensor) -> None:
        """Fill the other ranks' rows of the gather buffer, after this rank's have been written."""


class CollectiveTransport:
    """Reduce-scatter (on gloo, all-to-all) and all-gather of torch.distributed."""

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
        mine = mine if full.is_cuda else mine.clone()  # NCCL supports this in place
        all_gather(full, mine, group=self.group)


@dataclass
class Workspace:
    """Buffers [rows, D] on every rank, `sets` for partials and as many for normed rows.

    partials, normed: for each set, the buffers of all ranks. staging: for each set, the rows pulled
    from the other ranks, [T - 1, rows / T, D].
    """

    rows: int
    partials: list[list[Tensor]]
    normed: list[list[Tensor]]
    staging: list[Tensor]
    barrier: StreamBarrier | KernelBarrier


class CopyEngineTransport:
    """Copies between the GPUs' memories by copy engines, which leave the SMs free.

    A rank pulls its rows of the peers' partials, lands them, and pushes its normed rows to the
    peers. There are two barriers: READY before the pulls, and FULL after the pushes. kernels: the
    barriers are kernels. direct: the landing's kernel itself reads the peers' partials and writes
    the normed rows to the peers; faster for few rows, but it takes SMs from other work.

    Why `sets` = 1 + L rotating sets are enough, with L the largest lag of the plan: every rank
    makes the calls below in the same order (ShardedReducer ensures it), and a rank that has passed
    a barrier knows that all ranks have finished their work before it.
    - Partial n is written by sublayer n, which follows landing n on its rank, and so that landing's
      FULL barrier. All outputs up to n - L - 1 land by landing n, so every rank pulled partial
      n - sets before it reached that barrier.
    - Staging n is written after landing n - L - 1 or a later one has read staging n - sets.
    - The normed rows of read n are pushed after the READY barrier of output n - L - 1, which a rank
      reaches after its sublayer n - L - 1 = n - sets, the last reader of that buffer. Landings
      without an output (a lag that grows within a plan) follow one with that output.
    - The last landing of a pass lands all outputs, and the first READY barrier of the next pass
      follows all work of the main stream in this pass. So all sets are free at the start of a pass
      or of a graph's replay. A pass that keeps only the last positions ends in an all-reduce
      instead, which every rank's main stream reaches after its side stream.
    - A barrier's flag is set again only by a rank that has since passed a barrier of the other
      kind, or that all-reduce, which this rank reached after it had cleared the flag.
    """

    def __init__(self, group: dist.ProcessGroup, sets: int, *, kernels: bool, direct: bool) -> None:
        self.group, self.sets = group, sets
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        refusal = push_refusal(self.world)
        if refusal:
            raise UserError(f"transport=copy cannot run here: {refusal}; use transport=collective")
        self.make_barrier = KernelBarrier if kernels else StreamBarrier
        self.direct = direct
        # Smaller workspaces are kept, since recorded graphs may use them.
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
        """The other ranks, from the next one on, so that all links are used."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _space(self, rows: int, like: Tensor) -> Workspace:
        """The workspace for `rows`, made on the first request, on all ranks at once."""
        spaces = self.spaces.setdefault((like.shape[-1], like.dtype), [])
        rows += -rows % self.world
        if not spaces or spaces[-1].rows < rows:
            spaces.append(self._make(rows, like))
        return spaces[-1]

    def _make(self, rows: int, like: Tensor) -> Workspace:
        rows = max(MIN_ROWS, 2 ** (rows - 1).bit_length())  # at least twice the previous size
        rows += -rows % self.world
        size, make = like.shape[-1], {"dtype": like.dtype, "device": like.device}
        with torch.inference_mode(False):  # the buffers are also written outside inference mode
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
    # "copy" with barriers that are kernels.
    "copy-kernels": functools.partial(CopyEngineTransport, kernels=True, direct=False),
    "direct": functools.partial(CopyEngineTransport, kernels=True, direct=True),
}
