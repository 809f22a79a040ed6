"""The memory that overlapped operators share between the ranks, and how their schedules run.

A workspace belongs to one group, operator and CUDA stream, since two calls at once must not share
memory. All ranks make it together, at the first call, and make it larger together when a call needs
more; both are errors within the capture of a CUDA graph, since they allocate. Former memory is
kept, for graphs that use it. `ladder.ops.schedules` says why its sets may be used in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm import capture, driver, symmetric
from ladder.comm.driver import MemoryOperation
from ladder.comm.symmetric import SymmetricTensor
from ladder.models.errors import UserError
from ladder.ops.replay import Replays, memory_of, recorder, settings
from ladder.ops.steps import KINDS, Await, Follow, Kind, Record, Schedule, Stream, Word, Work, jobs
from ladder.ops.streams import CudaStreams

SETS = 2
MAX_WORDS = 256  # of each kind and set
MIN_WORDS = 1 << 18  # of a slot, 1 MiB
NOTHING = -1  # the bits of a NaN, in words and in 16-bit halves of them

Actions = Mapping[str, Callable[[int], object]]
Memory = Sequence[Tensor | None]
Job = tuple[str | None, Any]  # an action and its chunk; or None, and what to call


def _single(memory: Memory) -> bool:
    return any(each is not None and each.dtype == torch.float32 for each in memory)


class Workspace:
    """Slots and words on every rank of a group, for one operator on one stream."""

    def __init__(self, group: dist.ProcessGroup, op: str, device: torch.device) -> None:
        self._group = ref(group)  # workspaces end with their group
        self.op, self.device = op, device
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.calls = 0
        self.streams = CudaStreams(device)
        # What is made once for a shape: tables for kernels. They are made outside captures, too.
        self.made: dict[Hashable, Any] = {}
        # By the ids of schedule and streams, and the set; keeping the schedule keeps its id unique.
        self._plans: dict[Hashable, tuple[Schedule, list[tuple[Stream, list[Job]]]]] = {}
        self._slots: list[SymmetricTensor] = []
        self._views: dict[Hashable, Tensor] = {}  # of the newest slots
        cuda = device.type == "cuda"
        record = recorder(device, driver.current_stream(device)) if cuda else None
        self.replays = None if record is None else Replays(record)
        self.words = self._allocate(SETS, len(KINDS), MAX_WORDS, bits=0)
        # Every peer's slots are free, and no peer looks at its words before all have said so.
        self.words.own[:, KINDS.index("free")] = 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier(group)

    def _allocate(self, *shape: int, bits: int) -> SymmetricTensor:
        self.check_capture(f"{shape[0] * shape[1] * shape[2] * 4 / 2**20:.0f} MiB for each rank")
        group = self._group()
        assert group is not None
        with torch.inference_mode(False):  # it is also written outside inference mode
            return symmetric.allocate(shape, torch.int32, group, self.device, bits)

    def check_capture(self, what: str) -> None:
        """Raise UserError in a capture, where `what` cannot be made."""
        if capture.capturing():
            raise UserError(
                f"{self.op} needs new memory ({what}), which a CUDA graph capture cannot make; run "
                f"it once with these shapes on the capture's stream before, within "
                f"ladder.ops.as_captured()"
            )

    def once(self, key: Hashable, make: Callable[[], Any], what: str = "tables of tiles") -> Any:
        """What `make` returns, made at the first call with this key; what: for an error."""
        if key not in self.made:
            self.check_capture(what)
            self.made[key] = make()
        return self.made[key]

    def next(self) -> int:
        """The set of a new call."""
        self.calls += 1
        return self.calls % SETS

    def reserve(self, size: int) -> None:
        """Let a slot hold `size` bytes; all ranks call it with the same size."""
        words = -(-size // 4)
        if self._slots and self._slots[-1].own.shape[2] >= words:
            return
        step = max(MIN_WORDS, 1 << max(0, words.bit_length() - 3))  # at most a quarter more
        words = -(-words // step) * step
        self._slots.append(self._allocate(SETS, self.world, words, bits=NOTHING))
        self._views.clear()

    def slots(
        self, rank: int, chosen: int, shape: tuple[int, int], dtype: torch.dtype,
        dense: bool = False,
    ) -> Tensor:  # fmt: skip
        """The slots [T, *shape] of a rank, by sender.

        Each slot begins at a multiple of 16 bytes, or with `dense` right behind the one before.
        """
        key = rank, chosen, shape, dtype, dense
        if key not in self._views:  # views take the host tens of microseconds
            with torch.inference_mode(False):  # they are also written outside inference mode
                memory = self._slots[-1].by_rank[rank][chosen].view(dtype)  # [T, elements]
                size = shape[0] * shape[1]
                if dense:
                    found = memory.view(-1)[: self.world * size].view(self.world, *shape)
                else:
                    found = memory[:, :size].unflatten(1, shape)
            self._views[key] = found
        return self._views[key]

    def begin(
        self, shape: tuple[int, int], dtype: torch.dtype, dense: bool = False
    ) -> tuple[int, list[Tensor]]:
        """The set of a new call, and each rank's slots [T, *shape] in it, made larger if needed.

        All ranks call it with the same shape and type. dense: see `slots`.
        """
        self.reserve(shape[0] * shape[1] * dtype.itemsize)
        chosen = self.next()
        return chosen, [self.slots(q, chosen, shape, dtype, dense) for q in range(self.world)]

    def address(self, word: Word, chosen: int) -> int:
        assert 0 <= word.index < MAX_WORDS, word
        memory = self.words.by_rank[word.rank]
        return memory[chosen, KINDS.index(word.kind), word.index].data_ptr()

    def tables(self, kind: Kind) -> tuple[tuple[Tensor, Tensor], ...]:
        """For each set, for kernels: the addresses of the ranks' slots, and of their words of a
        kind."""
        place, slots = KINDS.index(kind), self._slots[-1]

        def table(memory: list[Tensor]) -> Tensor:
            return torch.tensor([each.data_ptr() for each in memory], device=self.device)

        def make() -> tuple[tuple[Tensor, Tensor], ...]:
            return tuple(
                (
                    table([each[chosen] for each in slots.by_rank]),
                    table([each[chosen, place] for each in self.words.by_rank]),
                )
                for chosen in range(SETS)
            )

        return self.once((kind, len(self._slots)), make)

    def own_words(self, kind: Kind, chosen: int) -> Tensor:
        return self.words.own[chosen, KINDS.index(kind)]

    def run(
        self, schedule: Schedule, chosen: int, actions: Actions, memory: Memory,
        numbers: Hashable = (),
    ) -> None:  # fmt: skip
        """Enqueue a call. Words that follow each other in a stream are one memory operation.

        memory, numbers: all that the actions use beside slots and words; a call that comes again
        with the same is launched as a CUDA graph (`ladder.ops.replay`). Two kinds are always
        enqueued: products in float32, since not every torch can say how precise they are, and runs
        before a capture, which come once or twice.
        """
        enqueue, replays = partial(self._enqueue, schedule, chosen, actions), self.replays
        if replays is None or capture.mode() == "captured" or _single(memory):
            enqueue(self.streams)
            return
        about = settings(), memory_of(memory), numbers
        replays.run((id(schedule), chosen, len(self._slots), about), enqueue, self.streams)

    def _enqueue(
        self, schedule: Schedule, chosen: int, actions: Actions, streams: CudaStreams
    ) -> None:
        key = id(schedule), chosen, id(streams)  # to hash a schedule takes longer
        if key not in self._plans:
            self._plans[key] = schedule, self._plan(streams, schedule, chosen)
        streams.begin()
        try:
            for stream, some in self._plans[key][1]:
                streams.enter(stream)
                for action, what in some:
                    if action is None:
                        what()
                    else:
                        actions[action](what)
        finally:
            streams.end()

    def _plan(
        self, streams: CudaStreams, schedule: Schedule, chosen: int
    ) -> list[tuple[Stream, list[Job]]]:
        """The host's work for a call, stream by stream."""

        planned: list[tuple[Stream, Job]] = []
        for steps in jobs(schedule):
            first = steps[0]
            if isinstance(first, Work):
                job: Job = first.action, first.chunk
            elif isinstance(first, Record):
                job = None, partial(streams.record, first.event)
            elif isinstance(first, Follow):
                job = None, partial(streams.follow, first.event)
            else:
                job = None, partial(streams.enqueue, self._batch(steps, chosen))
            planned.append((first.stream, job))
        by_stream = groupby(planned, lambda each: each[0])
        return [(stream, [job for _, job in each]) for stream, each in by_stream]

    def _batch(self, steps: tuple[Any, ...], chosen: int) -> Any:
        return driver.batch(
            [
                (MemoryOperation.wait if isinstance(step, Await) else MemoryOperation.write)(
                    self.address(step.word, chosen), step.value
                )
                for step in steps
            ]
        )


_workspaces: WeakKeyDictionary[Any, dict[Hashable, Workspace]] = WeakKeyDictionary()


def workspace(group: dist.ProcessGroup, op: str, device: torch.device) -> Workspace:
    """The workspace of this group and operator on the current stream; all ranks ask for it."""
    of_group = _workspaces.setdefault(group, {})
    stream = driver.current_stream(device) if device.type == "cuda" else 0
    key = op, device, stream
    if key not in of_group:
        of_group[key] = Workspace(group, op, device)
    return of_group[key]
