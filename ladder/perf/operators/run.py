"""The schedules of `ladder.ops.schedules` executed on all ranks, step by step and tile by tile.

Each rank has its streams and its multiprocessors. A product consists of tiles, each of which takes
one multiprocessor for a time. Tiles of the product that began first come first; tiles of another
stream's product get the multiprocessors that are left. Beside them run kernels that move bytes, and
copies to peers, one at a time on each rank. The rate of each depends on what else runs on its GPU.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from ladder.ops.steps import Await, Follow, Put, Record, Schedule, Step, Stream, Word, Work
from ladder.perf.engine import Engine

MICROSECOND = 10**6  # in picoseconds


@dataclass(frozen=True)
class Tiles:
    """A product. us: of one tile. needs, counts: for each tile, in the order of computation, the
    word that it waits for, and the word to which it then adds 1; (): none."""

    tiles: int
    us: float
    needs: Sequence[Word | None] = ()
    counts: Sequence[Word] = ()


@dataclass(frozen=True)
class Moves:
    """A kernel that reads and writes this GPU's memory."""

    us: float


@dataclass(frozen=True)
class Copies:
    """A copy to a peer, by a copy engine."""

    us: float


Task = Tiles | Moves | Copies
Tasks = Callable[[int, Work], Task]  # of a rank and its step


@dataclass(frozen=True)
class Rates:
    """Speeds as shares of the speed alone, and gaps between steps.

    product: the speed of tiles under the power limit, at any time. gap_us: before a kernel or a
    copy, and after a wait that was not over when the stream came to it. interleaved: whether
    products of two streams share the multiprocessors, as in graphs; if not, the older comes first.
    """

    multiprocessors: int
    gap_us: float = 0.0
    product: float = 1.0
    product_beside_copies: float = 1.0
    copies_beside_product: float = 1.0
    moves_beside_copies: float = 1.0
    beside_moves: float = 0.5  # of both a product and a kernel that moves bytes beside each other
    interleaved: bool = False


@dataclass(frozen=True)
class Outcome:
    """us: until the last step of the last rank. busy_us: the part of it in which rank 0 computes or
    moves bytes in its own memory."""

    us: float
    busy_us: float


@dataclass
class _Kernel:
    task: Tiles
    done: Callable[[], None]
    next: int = 0
    left: int = 0  # tiles that have not ended


@dataclass
class _Clock:
    """The running work of one kind, with the times of its ends on a clock that goes at `rate`."""

    at: float = 0.0
    rate: float = 1.0
    ends: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)


class _Rank:
    def __init__(self, run: _Run, number: int, schedule: Schedule) -> None:
        self.run, self.number = run, number
        self.steps: dict[Stream, list[Step]] = {}
        for step in schedule:
            self.steps.setdefault(step.stream, []).append(step)
        self.place = dict.fromkeys(self.steps, 0)
        self.held: set[Stream] = set()  # streams that run something
        self.blocked: set[Stream] = set()  # streams that came to a wait before it was over
        self.events: set[str] = set()
        self.free = run.rates.multiprocessors
        self.kernels: list[_Kernel] = []
        self.waiting: dict[Word, list[tuple[_Kernel, list[int]]]] = {}  # tiles that hold a place
        self.clocks = {kind: _Clock() for kind in (Tiles, Moves, Copies)}
        self.queued: deque[tuple[float, Callable[[], None]]] = deque()  # copies: one engine's
        self.since, self.version, self.count = 0, 0, 0
        self.busy = 0.0

    # ---- streams

    def step(self, stream: Stream) -> bool:
        """Do what can be done at once on a stream. Returns whether anything was done."""
        moved = False
        while stream not in self.held and self.place[stream] < len(self.steps[stream]):
            step = self.steps[stream][self.place[stream]]
            if isinstance(step, Follow | Await):
                if not self._over(step):
                    self.blocked.add(stream)
                    return moved
                if stream in self.blocked:
                    self.blocked.remove(stream)
                    self._hold(stream)
                    return True
            elif isinstance(step, Record):
                self.events.add(step.event)
            elif isinstance(step, Put):
                self.run.put(step.word, step.value)
            elif any(not self.run.is_set(word) for word in _own_waits(step)):
                return moved
            else:
                self.held.add(stream)
                self.after(self.run.rates.gap_us, partial(self._begin, stream, step))
                return True
            self.place[stream] += 1
            moved = True
        return moved

    def _over(self, step: Follow | Await) -> bool:
        if isinstance(step, Follow):
            return step.event in self.events
        return self.run.words.get(step.word, int(step.word.kind == "free")) == step.value

    def _hold(self, stream: Stream) -> None:
        """A wait is over; the stream goes on after a gap."""
        self.held.add(stream)
        self.after(self.run.rates.gap_us, lambda: self._ended(stream))

    def _begin(self, stream: Stream, step: Work) -> None:
        task = self.run.tasks(self.number, step)
        done = partial(self._ended, stream)
        if isinstance(task, Tiles):
            if task.tiles == 0:
                done()
                return
            self.kernels.append(_Kernel(task, done, 0, task.tiles))
            self.fill()
        else:
            self.start(type(task), task.us, done)

    def _ended(self, stream: Stream) -> None:
        self.place[stream] += 1
        self.held.remove(stream)
        self.run.end = self.run.engine.now
        self.run.go()

    def after(self, us: float, call: Callable[[], None]) -> None:
        self.run.engine.after(round(us * MICROSECOND), call)

    # ---- multiprocessors

    def fill(self) -> None:
        """Give free multiprocessors to tiles: see `Rates.interleaved`."""
        ready = [each for each in self.kernels if each.next < each.task.tiles]
        if self.run.rates.interleaved:
            for before, kernel in enumerate(ready):
                self._give(kernel, self.free // (len(ready) - before))
        for kernel in ready:
            self._give(kernel, self.free)

    def _give(self, kernel: _Kernel, most: int) -> None:
        while most and kernel.next < kernel.task.tiles:
            needs = kernel.task.needs
            need = needs[kernel.next] if needs else None
            last = min(kernel.next + most, kernel.task.tiles)
            if needs:  # a batch: as many tiles as wait for the same word
                same = (n for n in range(kernel.next, last) if needs[n] != need)
                last = next(same, last)
            batch = list(range(kernel.next, last))
            kernel.next = last
            self.free, most = self.free - len(batch), most - len(batch)
            if need is None or self.run.is_set(need):
                self._compute(kernel, batch)
            else:
                self.waiting.setdefault(need, []).append((kernel, batch))

    def arrived(self, word: Word) -> None:
        for kernel, batch in self.waiting.pop(word, []):
            self._compute(kernel, batch)

    def _compute(self, kernel: _Kernel, batch: list[int]) -> None:
        self.start(Tiles, kernel.task.us, lambda: self._computed(kernel, batch))

    def _computed(self, kernel: _Kernel, batch: list[int]) -> None:
        self.free += len(batch)
        kernel.left -= len(batch)
        if kernel.task.counts:
            for tile in batch:
                word = kernel.task.counts[tile]
                self.run.put(word, self.run.words.get(word, 0) + 1)
        if kernel.left == 0:
            self.kernels.remove(kernel)
            kernel.done()
        self.fill()
        self.run.go()

    # ---- what runs at the same time

    def start(self, kind: type[Task], us: float, done: Callable[[], None]) -> None:
        if kind is Copies:
            if self.clocks[Copies].ends:
                self.queued.append((us, done))
                return
            done = partial(self._copied, done)
        self._advance()
        self.count += 1
        clock = self.clocks[kind]
        heappush(clock.ends, (clock.at + us, self.count, done))
        self._plan()

    def _copied(self, done: Callable[[], None]) -> None:
        if self.queued:
            self.start(Copies, *self.queued.popleft())
        done()

    def _advance(self) -> None:
        passed = (self.run.engine.now - self.since) / MICROSECOND
        self.since = self.run.engine.now
        if self.clocks[Tiles].ends or self.clocks[Moves].ends:
            self.busy += passed
        for clock in self.clocks.values():
            clock.at += passed * clock.rate

    def _plan(self) -> None:
        """Set the rates, and the next event."""
        rates = self.run.rates
        tiles, moves, copies = (self.clocks[kind] for kind in (Tiles, Moves, Copies))
        tiles.rate, moves.rate, copies.rate = rates.product, 1.0, 1.0
        if moves.ends:
            tiles.rate *= rates.beside_moves
            moves.rate /= len(moves.ends)
        if tiles.ends:
            moves.rate *= rates.beside_moves
            copies.rate = rates.copies_beside_product
        if copies.ends:
            tiles.rate *= rates.product_beside_copies
            moves.rate *= rates.moves_beside_copies
        self.version += 1
        version = self.version
        waits = [(c.ends[0][0] - c.at) / c.rate for c in self.clocks.values() if c.ends]
        if waits:
            delay = max(0, math.ceil(min(waits) * MICROSECOND - 1e-3))
            self.run.engine.after(delay, lambda: self._tick(version))

    def _tick(self, version: int) -> None:
        if version != self.version:  # the rates have changed since
            return
        self._advance()
        ended = []
        for clock in self.clocks.values():
            while clock.ends and clock.ends[0][0] <= clock.at + 1e-6:
                ended.append(heappop(clock.ends)[2])
        self._plan()
        for done in ended:
            done()


class _Run:
    def __init__(self, schedules: Sequence[Schedule], tasks: Tasks, rates: Rates) -> None:
        self.engine, self.tasks, self.rates = Engine(), tasks, rates
        self.words: dict[Word, int] = {}
        self.end = 0  # picoseconds at the end of the last step that takes time
        self.ranks = [_Rank(self, n, schedule) for n, schedule in enumerate(schedules)]

    def put(self, word: Word, value: int) -> None:
        self.words[word] = value
        if self.is_set(word):
            self.ranks[word.rank].arrived(word)

    def is_set(self, word: Word) -> bool:
        return self.words.get(word, 0) == 1

    def go(self) -> None:
        """Let all streams do what they can."""
        while any(rank.step(stream) for rank in self.ranks for stream in rank.steps):
            pass


def _own_waits(step: Work) -> Iterable[Word]:
    """The words that a kernel waits for as a whole; a product's tiles wait one by one."""
    return () if step.action == "product" else step.waits


def run(schedules: Sequence[Schedule], tasks: Tasks, rates: Rates) -> Outcome:
    """Run one call on all ranks, which begin together, until it has ended on all of them."""
    found = _Run(schedules, tasks, rates)
    found.go()
    found.engine.run()
    for rank in found.ranks:
        for stream, steps in rank.steps.items():
            assert rank.place[stream] == len(steps), "streams wait for each other"
    return Outcome(found.end / MICROSECOND, found.ranks[0].busy)
