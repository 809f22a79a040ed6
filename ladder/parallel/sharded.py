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
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels.prefill import land_rows
from ladder.models.errors import UserError, unknown
from ladder.models.layers import RMSNorm, local
from ladder.models.plan import Landing, Plan, Sublayer
from ladder.models.reducer import Arrived, Norm, Pending, Ranks, Reducer
from ladder.parallel.reducers import AsyncReducer, all_gather, push_refusal, reduce_scatter

SMALLEST = 1024  # rows that symmetric buffers are made for, at least


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


# -- peer memory -----------------------------------------------------------------------------


def symmetric(
    shape: tuple[int, int], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """A new tensor on every rank, which all ranks of `group` must ask for alike: all, by rank."""
    import torch.distributed._symmetric_memory as symmetric_memory

    own = symmetric_memory.empty(*shape, dtype=dtype, device=device)
    handle = symmetric_memory.rendezvous(own, group.group_name)
    everywhere = [handle.get_buffer(q, shape, dtype) for q in range(dist.get_world_size(group))]
    assert everywhere[dist.get_rank(group)].data_ptr() == own.data_ptr()
    everywhere[dist.get_rank(group)] = own  # it keeps the memory alive
    return everywhere


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of the CUDA driver: a 32-bit word to be waited for, or written."""

    WAIT, WRITE = 1, 2
    EQUAL = 1
    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    )


@functools.cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class Flags:
    """`count` places where ranks meet by memory operations of their streams: without a kernel.

    Matrix products may hold every SM until they end, and a kernel would wait for that. To meet, a
    rank writes 1 to its flag on every peer, waits until its own flags are 1, and clears them.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        self.flags = symmetric((count, world), group, dtype=torch.int32, device=device)
        self.flags[rank].zero_()
        self.operations = []
        make = MemoryOperation
        for place in range(count):
            peers = [q for q in range(world) if q != rank]
            theirs = [self.flags[q][place, rank].data_ptr() for q in peers]
            mine = [self.flags[rank][place, q].data_ptr() for q in peers]
            batch = [make(make.WRITE, address, 1) for address in theirs]
            batch += [make(make.WAIT, address, 1, make.EQUAL) for address in mine]
            batch += [make(make.WRITE, address, 0) for address in mine]
            self.operations.append((make * len(batch))(*batch))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)  # no flag is set before every rank's are clear

    def meet(self, place: int) -> None:
        """Have the current stream go on when every rank's has come here and done what is before."""
        batch = self.operations[place]
        stream = torch.cuda.current_stream().cuda_stream
        code = driver().cuStreamBatchMemOp_v2(ctypes.c_void_p(stream), len(batch), batch, 0)
        if code:
            raise RuntimeError(
                f"cuStreamBatchMemOp failed with CUDA driver error {code}; transport=copy-kernels "
                f"does without it"
            )


class Kernels:
    """As Flags, by torch's barrier kernel: it needs one SM for a moment."""

    def __init__(self, group: dist.ProcessGroup, count: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.own = symmetric_memory.empty(count, dtype=torch.int32, device=device)
        self.handle = symmetric_memory.rendezvous(self.own, group.group_name)

    def meet(self, place: int) -> None:
        self.handle.barrier(channel=place)


# -- transports ------------------------------------------------------------------------------


class Transport(Protocol):
    """How rows travel. All calls of a forward pass are in one order, the same on every rank."""

    def lend(self, rows: int, like: Tensor) -> Tensor | None:
        """[rows, D] for the next partial to be written into, where that saves a copy."""

    def scatter(self, partial: Tensor, shard: int) -> list[Tensor]:
        """Of all ranks' partials [rows, D] this rank's `shard` rows: pieces to be summed."""

    def room(self, shard: int, like: Tensor) -> Tensor:
        """[T x shard, D], in which this rank is to write its own rows before `gather`."""

    def copies(self, full: Tensor) -> list[Tensor]:
        """Where whoever writes this rank's rows of `full` is to write them too."""

    def gather(self, full: Tensor) -> None:
        """Fill the other ranks' rows of what `room` gave, once its and its copies' are written."""


class Collectives:
    """Reduce-scatter and all-gather of torch.distributed; on gloo an all-to-all for the former."""

    def __init__(self, group: dist.ProcessGroup, sets: int) -> None:
        self.group, self.rank, self.world = group, dist.get_rank(group), dist.get_world_size(group)

    def lend(self, rows: int, like: Tensor) -> Tensor | None:
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

    def room(self, shard: int, like: Tensor) -> Tensor:
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
    meeting: Flags | Kernels


class Copies:
    """Copies between the GPUs' memories, which their copy engines make: no SM works on them.

    A rank pulls its rows of the peers' partials, lands them, and pushes its normed rows to the
    peers. The ranks meet twice in between: READY, before the pulls, and FULL, after the pushes.
    direct: the landing's kernel itself reads the partials, and writes the normed rows, where they
    are; sooner done with few rows, but it takes SMs from what runs meanwhile.

    Why `sets` = 1 + the largest lag of the plan, used in turn, are enough, L being that lag. Every
    call below is in one order on its rank (ShardedReducer sees to it), and whoever passes a meeting
    knows what all ranks did before it.
    - Partial n is written by sublayer n, which follows landing n of its rank, thus that landing's
      FULL meeting. By landing n all outputs up to n - L - 1 have landed, so every rank had pulled
      partial n - sets, or it would not have come to that meeting.
    - Staging n is written after landing n - L - 1 or a later one has read staging n - sets.
    - Normed rows of read n are pushed after the READY meeting of output n - L - 1, to which a rank
      comes after its sublayer n - L - 1 = n - sets, the last reader of that buffer. Landings that
      bring no output (a lag that grows within a plan) follow one that brought it.
    - The last landing of a pass brings all outputs, and the first READY meeting of the next pass
      comes after all that the main stream did in this one: whatever the sets with which a pass, or
      a graph's replay, begins, they are free. A pass that narrows ends in an all-reduce instead,
      which is passed when every rank's main stream, after its side stream, has come to it.
    - A flag of a meeting is set again only by a rank that has since passed a meeting of the other
      kind, or that all-reduce, to which this rank came after it had cleared the flag: the same
      argument.
    """

    def __init__(self, group: dist.ProcessGroup, sets: int, *, kernels: bool, direct: bool) -> None:
        self.group, self.sets = group, sets
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        refusal = push_refusal(self.world)
        if refusal:
            raise UserError(f"transport=copy cannot run here: {refusal}; use transport=collective")
        self.meetings = Kernels if kernels else Flags
        self.direct = direct
        # Outgrown ones stay: graphs that were recorded with them may be replayed.
        self.spaces: dict[tuple[int, torch.dtype], list[Workspace]] = {}
        self.posted = self.landed = 0

    def lend(self, rows: int, like: Tensor) -> Tensor | None:
        space = self._space(rows, like)
        return space.partials[self.posted % self.sets][self.rank][:rows]

    def scatter(self, partial: Tensor, shard: int) -> list[Tensor]:
        space, chosen = self._space(len(partial), partial), self.posted % self.sets
        self.posted += 1
        buffers, staging = space.partials[chosen], space.staging[chosen]
        if partial.data_ptr() != buffers[self.rank].data_ptr():
            buffers[self.rank][: len(partial)].copy_(partial)
        space.meeting.meet(chosen)
        mine = slice(self.rank * shard, (self.rank + 1) * shard)
        pieces = [buffer[mine] for buffer in buffers]
        # One after another: all at once, on streams of their own, a prefill of 1024 tokens took
        # 8.7 ms in place of 8.3 (Llama-3 8B, ladder, 4 H200s).
        if not self.direct:
            for step, peer in enumerate(self._peers()):
                pieces[peer] = staging[step, :shard].copy_(pieces[peer])
        return pieces

    def room(self, shard: int, like: Tensor) -> Tensor:
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
        space.meeting.meet(self.sets + chosen)

    def _peers_rows(self, full: Tensor) -> list[Tensor]:
        """This rank's rows of the newest `room`, in every peer's memory."""
        space, chosen = self._space(len(full), full), (self.landed - 1) % self.sets
        assert full.data_ptr() == space.normed[chosen][self.rank].data_ptr()
        shard = len(full) // self.world
        mine = slice(self.rank * shard, (self.rank + 1) * shard)
        return [space.normed[chosen][peer][mine] for peer in self._peers()]

    def _peers(self) -> list[int]:
        """The other ranks, each rank beginning with another, so that all links are in use."""
        return [(self.rank + step) % self.world for step in range(1, self.world)]

    def _space(self, rows: int, like: Tensor) -> Workspace:
        """One with room for `rows`; made when first asked for, by all ranks alike."""
        spaces = self.spaces.setdefault((like.shape[-1], like.dtype), [])
        rows += -rows % self.world
        if not spaces or spaces[-1].rows < rows:
            spaces.append(self._make(rows, like))
        return spaces[-1]

    def _make(self, rows: int, like: Tensor) -> Workspace:
        if like.is_cuda:
            assert not torch.cuda.is_current_stream_capturing(), "run it once before a capture"
        rows = max(SMALLEST, 2 ** (rows - 1).bit_length())  # twice the last one, or more
        rows += -rows % self.world
        size, make = like.shape[-1], {"dtype": like.dtype, "device": like.device}
        with torch.inference_mode(False):  # they outlive the mode, and are written outside it too
            buffers = [symmetric((rows, size), self.group, **make) for _ in range(2 * self.sets)]
            staging = [
                torch.empty(self.world - 1, rows // self.world, size, **make)
                for _ in range(0 if self.direct else self.sets)
            ]
            meeting = self.meetings(self.group, 2 * self.sets, like.device)
        staging = staging or [torch.empty(0, **make)] * self.sets
        return Workspace(rows, buffers[: self.sets], buffers[self.sets :], staging, meeting)


TRANSPORTS: dict[str, Callable[[dist.ProcessGroup, int], Transport]] = {
    "collective": Collectives,
    "copy": functools.partial(Copies, kernels=False, direct=False),
    "copy-kernels": functools.partial(Copies, kernels=True, direct=False),  # they meet by kernels
    "direct": functools.partial(Copies, kernels=True, direct=True),
}


# -- the reducer -----------------------------------------------------------------------------


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
        flat = self.transport.lend(shape[0] * shape[1], like.new_empty(0, shape[2]))
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
        full = self.transport.room(len(rows), rows)
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
