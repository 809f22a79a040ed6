"""The times of a graph's operations: streams in order, what is waited for, what slows what; on one
rank that stands for all, or on every rank, where ranks are not alike."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import pairwise

from ladder.models.errors import UserError
from ladder.perf.graph import COPIES, DATA, Graph, Operation
from ladder.perf.machine import COLLECTIVES

Cost = Callable[[Operation], float]  # microseconds alone
# The speed of the first operation while the second runs, of its speed alone.
Beside = Callable[[Operation, Operation], float]
NOTHING = -1
ALONE = [1.0]
MOST_JITTER = 0.25  # above 1 / sqrt(12) an operation could take less than nothing
# Over so many the time that jitter adds is averaged; of many operations, whose mean differs by
# little, over one.
SEEDS, MANY = 3, 20_000
SPREAD = math.sqrt(3)  # of a uniform number between -SPREAD and SPREAD the standard deviation is 1


@dataclass(frozen=True)
class Skew:
    """By how much ranks differ.

    ranks: how many. tp: of a group that sums partials (0: all of them); ranks of the same place in
    their groups share gradients and weights. offsets: microseconds by which each begins late (():
    none does). jitter: the standard deviation of what an operation takes, of its cost.

    Each operation of each rank takes its cost times 1 + jitter x a number of its own, uniform, by
    `seed`. The numbers of an operation add up to 0 over the ranks: no work is added, so that all
    that jitter costs is waiting. What ranks do together (collectives, barriers) has none.
    """

    ranks: int
    tp: int = 0
    offsets: tuple[float, ...] = ()
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_jitter(self.jitter)
        assert len(self.offsets) in (0, self.ranks)
        assert self.ranks % (self.tp or self.ranks) == 0

    def peers(self, rank: int, operation: Operation) -> Sequence[int]:
        """The ranks that an operation of a rank communicates with, itself among them."""
        tp = self.tp or self.ranks
        if operation.stream in (DATA, COPIES):
            return range(rank % tp, self.ranks, tp)
        return range(rank - rank % tp, rank - rank % tp + tp)

    def factors(self, operations: Sequence[Operation]) -> list[list[float]]:
        """What each operation's cost is multiplied by, on each rank."""
        draw = random.Random(self.seed).random
        found = [[1.0] * len(operations) for _ in range(self.ranks)]
        for each in operations:
            numbers = [SPREAD * (2 * draw() - 1) for _ in found]
            if meets(each):
                continue
            middle = sum(numbers) / self.ranks
            for factors, number in zip(found, numbers, strict=True):
                factors[each.index] += self.jitter * (number - middle)
        return found


def check_jitter(jitter: float) -> None:
    """Raise UserError unless operations can vary by so much."""
    if not 0 <= jitter <= MOST_JITTER:
        raise UserError(
            f"--jitter={100 * jitter:g} must be 0 to {100 * MOST_JITTER:g}, in % of what an "
            f"operation takes"
        )


ALIKE = Skew(1)  # one rank, which stands for all


def meets(operation: Operation) -> bool:
    """Whether it ends on no rank before it has begun on all."""
    if operation.kind == "choice":
        return operation.part in ("choose", "gather")
    return operation.kind in (*COLLECTIVES, "barrier")


def sends(operation: Operation) -> bool:
    """Whether it writes to the others' slots, and waits for nobody: who lands it does."""
    return operation.output is not None and (operation.pushes or operation.kind == "send")


@dataclass(frozen=True)
class Times:
    """Microseconds at which each operation starts and ends, by its index; of several ranks one
    after the other.

    because: the operation whose end let each one start, or NOTHING.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    because: tuple[int, ...]

    @cached_property
    def total(self) -> float:
        return max(self.ends)

    def longest_path(self) -> list[tuple[int, float]]:
        """The operations that the last one waited for, one after another from the end, each with
        its share of the total; the shares add up to it."""
        at, until = self.ends.index(max(self.ends)), self.total
        found = []
        while at != NOTHING:
            found.append((at, until - self.starts[at]))
            at, until = self.because[at], self.starts[at]
        return found


def _launch(operation: Operation) -> int:
    """The index of the operation whose launch it is part of."""
    return operation.index if operation.rides is None else operation.rides


class _Order:
    """What an operation waits for, on any rank. launch: that each is part of. parts: of each
    launch, itself first. users: what waits for the end of each on the same rank, and `landers` on
    all peers. waiting: for how many ends each waits, of `peers` ranks."""

    def __init__(self, operations: Sequence[Operation], peers: int) -> None:
        count = len(operations)
        self.launch = [_launch(each) for each in operations]
        self.parts: list[list[int]] = [[] for _ in operations]
        self.users: list[list[int]] = [[] for _ in operations]
        self.landers: dict[int, list[int]] = {}
        self.waiting = [0] * count
        newest: dict[str, int] = {}
        for each in operations:
            index = each.index
            mine = self.launch[index]
            self.parts[mine].append(index)
            for need in each.needs:
                if self.launch[need] == mine:
                    continue
                if peers > 1 and _lands(each, operations[need]):
                    self.landers.setdefault(need, []).append(index)
                    self.waiting[index] += peers
                else:
                    self.users[need].append(index)
                    self.waiting[index] += 1
            if each.rides is not None:
                self.waiting[index] += 1  # its launch has begun
            else:
                if each.stream in newest:
                    self.users[newest[each.stream]].append(index)
                    self.waiting[index] += 1
                newest[each.stream] = index


def _lands(operation: Operation, need: Operation) -> bool:
    """Whether it needs the sum of what all ranks have sent, and not a rank's own partial alone."""
    return sends(need) and any(
        each.summed and each.output == need.output for each in operation.landings
    )


class _Rank:
    """What runs on one rank. now: until when `left` is right; next: when the first of `running`
    ends, by `speeds`, after `step`."""

    def __init__(self, order: _Order, begin: float) -> None:
        count = len(order.launch)
        self.now = self.next = begin
        self.step = 0.0
        self.running: list[int] = []
        self.speeds: list[float] = []
        self.spans: list[float] = []
        self.left = [0.0] * count
        self.waiting = order.waiting.copy()
        self.unended = [len(each) for each in order.parts]
        self.ready = [index for index in range(count) if not self.waiting[index]]
        self.starts, self.ends = [0.0] * count, [-1.0] * count
        self.because = [NOTHING] * count

    def advance(self, time: float) -> None:
        """Count what has been done until then."""
        if time >= self.next:  # no sum of floats: what ends now has nothing left
            if len(self.running) == 1:
                self.left[self.running[0]] = 0.0
                self.now, self.next = self.next, math.inf
                return
            for index, speed, span in zip(self.running, self.speeds, self.spans, strict=True):
                done = span == self.step
                self.left[index] = 0.0 if done else self.left[index] - self.step * speed
            self.now, self.next = self.next, math.inf
        elif time > self.now:
            passed = time - self.now
            for index, speed in zip(self.running, self.speeds, strict=True):
                self.left[index] = max(0.0, self.left[index] - passed * speed)
            self.now = time

    def release(self, index: int, because: int) -> bool:
        """One of the ends that an operation waits for; whether it was the last."""
        self.waiting[index] -= 1
        if self.waiting[index]:
            return False
        self.because[index] = because
        self.ready.append(index)
        return True

    def plan(
        self, operations: Sequence[Operation], launch: list[int], beside: Beside | None
    ) -> None:
        """Set the speeds of what runs, and when the first of it ends."""
        running, left = self.running, self.left
        if len(running) == 1:
            self.speeds, self.step = ALONE, left[running[0]]
        elif running:
            running.sort()  # the product of several speeds must not depend on who came first
            self.speeds = _speeds(operations, launch, running, beside)
            self.spans = [left[n] / speed for n, speed in zip(running, self.speeds, strict=True)]
            self.step = min(self.spans)
        else:
            self.speeds, self.step = [], math.inf
        self.next = self.now + self.step


def simulate(graph: Graph, cost: Cost, beside: Beside | None = None, skew: Skew = ALIKE) -> Times:
    """Run the operations, each of `cost` microseconds alone once it has begun.

    What rides begins with its launch, or when all that it waits for is there; the launch ends with
    the last of its parts, and what needs one of them waits for that. beside: how fast operations of
    different launches run at the same time; without it, all as fast as alone.

    Of several ranks each has its own streams. A collective takes its cost from when the last of its
    ranks has begun it, and a rank that waits in it holds what it takes. What is pushed ends where
    it was sent from, and a rank lands it when that of all peers is there.
    """
    operations = graph.operations
    count, several = len(operations), skew.ranks > 1
    order = _Order(operations, skew.tp or skew.ranks)
    ranks = [_Rank(order, offset) for offset in skew.offsets or (0.0,) * skew.ranks]
    costs = [cost(each) for each in operations]
    factors = skew.factors(operations) if skew.jitter else None
    begun: dict[tuple[int, int], int] = {}  # by how many ranks a collective is, by its first one
    events = [(rank.next, number) for number, rank in enumerate(ranks)]
    heapify(events)
    while events:
        time, number = heappop(events)
        rank = ranks[number]
        if time != rank.next:  # something else has begun or ended there since
            continue
        rank.advance(time)
        touched = [number]
        for index in [index for index in rank.running if rank.left[index] <= 0.0]:
            rank.running.remove(index)
            mine = order.launch[index]
            rank.unended[mine] -= 1
            if rank.unended[mine]:
                continue
            because = number * count + index
            for part in order.parts[mine]:
                rank.ends[part] = time
                for user in order.users[part]:
                    rank.release(user, because)
                for user in order.landers.get(part, ()):
                    for peer in skew.peers(number, operations[part]):
                        if ranks[peer].release(user, because) and peer not in touched:
                            touched.append(peer)
        for at in touched:  # grows with the peers of collectives that all have begun
            rank = ranks[at]
            rank.advance(time)
            for index in rank.ready:  # grows with what rides on them
                rank.starts[index] = time
                rank.left[index] = costs[index] * (factors[at][index] if factors else 1.0)
                rank.running.append(index)
                if order.launch[index] == index:
                    for rider in order.parts[index][1:]:
                        rank.release(rider, at * count + index)
                if several and meets(operations[index]):
                    peers = skew.peers(at, operations[index])
                    key = index, peers[0]
                    begun[key] = begun.get(key, 0) + 1
                    rank.left[index] = math.inf
                    if begun[key] == len(peers):
                        for peer in peers:
                            ranks[peer].advance(time)
                            ranks[peer].left[index] = costs[index]
                            if peer not in touched:
                                touched.append(peer)
            rank.ready.clear()
        for at in touched:
            ranks[at].plan(operations, order.launch, beside)
            if ranks[at].next < math.inf:
                heappush(events, (ranks[at].next, at))
    ends = [each for rank in ranks for each in rank.ends]
    assert min(ends, default=0.0) >= 0.0, "operations wait for each other"
    return Times(
        tuple(each for rank in ranks for each in rank.starts), tuple(ends),
        tuple(each for rank in ranks for each in rank.because),
    )  # fmt: skip


def _speeds(
    operations: Sequence[Operation], launch: list[int], running: list[int], beside: Beside | None
) -> list[float]:
    found = [1.0] * len(running)
    if beside is None:
        return found
    for n, index in enumerate(running):
        for other in running:
            if launch[other] != launch[index]:
                found[n] *= beside(operations[index], operations[other])
    return found


def spent(graph: Graph, times: Times, beside: Beside) -> dict[int, float]:
    """The microseconds of the longest path by operation; they add up to the total. What an
    operation of the path loses to those that run beside it is theirs: a product that hardly moves
    while attention runs is attention's time."""
    found: dict[int, float] = {}
    starts, ends = times.starts, times.ends
    operations = graph.operations
    later = sorted(operations, key=lambda each: -starts[each.index])
    running: list[Operation] = []
    path = [index for index, _ in reversed(times.longest_path())]
    for index, end in zip(path, [*(starts[n] for n in path[1:]), times.total], strict=True):
        mine, begin = operations[index], starts[index]
        found[index] = found.get(index, 0.0) + end - begin
        while later and starts[later[-1].index] < end:
            running.append(later.pop())
        running = [each for each in running if ends[each.index] > begin]
        slows = {}
        for each in running:
            if _launch(each) != _launch(mine) and (speed := beside(mine, each)) < 1.0:
                slows[each.index] = speed
        edges = [*(starts[n] for n in slows), *(ends[n] for n in slows)]
        within = {each for each in edges if begin < each < end}
        for low, high in pairwise(sorted({begin, end, *within}) if slows else ()):
            at_once = {n: slows[n] for n in slows if starts[n] <= low and high <= ends[n]}
            lost = (high - low) * (1.0 - math.prod(at_once.values()))
            losses = sum(1.0 - speed for speed in at_once.values())
            for n, speed in at_once.items():
                part = lost * (1.0 - speed) / losses
                found[index] -= part
                found[n] = found.get(n, 0.0) + part
    return found


def waiting(
    graph: Graph, cost: Cost, beside: Beside | None, alike: float, ranks: int, tp: int,
    jitter: float,
) -> float:  # fmt: skip
    """Microseconds that a jitter adds to the time of ranks that are `alike`."""
    if not jitter or ranks == 1:
        return 0.0
    found = [
        simulate(graph, cost, beside, Skew(ranks, tp, jitter=jitter, seed=seed)).total
        for seed in range(SEEDS if ranks * len(graph.operations) < MANY else 1)
    ]
    return sum(found) / len(found) - alike
