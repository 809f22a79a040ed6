"""The times of a graph's operations, from the order of streams, from what each operation waits for
and from what slows it. One rank stands for all, or every rank is simulated if ranks differ."""

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
# The time that jitter adds is averaged over SEEDS runs. From MANY operations on, counted over all
# ranks, one run is enough: their mean varies little.
SEEDS, MANY = 3, 20_000
SPREAD = math.sqrt(3)  # a uniform number between -SPREAD and SPREAD has standard deviation 1


@dataclass(frozen=True)
class Skew:
    """By how much ranks differ.

    ranks: their number. tp: the ranks of a group that sums partials (0: all ranks); ranks with the
    same place in their groups share gradients and weights. offsets: microseconds by which each rank
    begins late; (): none does. jitter: the standard deviation of an operation's time, as a share of
    its cost.

    An operation on a rank takes its cost times 1 + jitter x a uniform random number (`seed`). An
    operation's numbers add up to 0 over the ranks: no work is added, so jitter only costs waiting.
    Operations that ranks do together (collectives, barriers) have no jitter.
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
        """The ranks with which an operation of `rank` communicates, including `rank`."""
        tp = self.tp or self.ranks
        if operation.stream in (DATA, COPIES):
            return range(rank % tp, self.ranks, tp)
        return range(rank - rank % tp, rank - rank % tp + tp)

    def factors(self, operations: Sequence[Operation]) -> list[list[float]]:
        """The factors on the operations' costs: a list for each rank."""
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
    """Raise UserError unless operations can vary by `jitter`."""
    if not 0 <= jitter <= MOST_JITTER:
        raise UserError(
            f"--jitter={100 * jitter:g} must be 0 to {100 * MOST_JITTER:g}, in % of what an "
            f"operation takes"
        )


ALIKE = Skew(1)  # one rank, which stands for all


def meets(operation: Operation) -> bool:
    """Whether an operation can end on a rank only after it has begun on all ranks."""
    if operation.kind == "choice":
        return operation.part in ("choose", "gather")
    return operation.kind in (*COLLECTIVES, "barrier")


def sends(operation: Operation) -> bool:
    """Whether an operation writes to the peers' slots without waiting (its landing waits)."""
    return operation.output is not None and (operation.pushes or operation.kind == "send")


@dataclass(frozen=True)
class Times:
    """Microseconds at which each operation starts and ends, by its index. With several ranks, the
    lists of all ranks follow one another.

    because: the operation whose end (of a launch that it rides on: whose start) let each operation
    start, or NOTHING.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    because: tuple[int, ...]

    @cached_property
    def total(self) -> float:
        return max(self.ends)

    def longest_path(self) -> list[tuple[int, float]]:
        """The chain of operations that the last one waited for, from the end, each with its part of
        the total in microseconds."""
        at, until = self.ends.index(max(self.ends)), self.total
        found = []
        while at != NOTHING:
            found.append((at, until - self.starts[at]))
            at, until = self.because[at], self.starts[at]
        return found


def _launch(operation: Operation) -> int:
    """The index of the operation in whose launch this one is."""
    return operation.index if operation.rides is None else operation.rides


class _Order:
    """What operations wait for, the same on all ranks; lists are by operation. launch: the launch
    that it is part of. parts: the operations in its launch, itself first. users: the operations
    that wait for its end on the same rank. landers: those that do on all peers. waiting: the number
    of ends that it waits for, counted over `peers` ranks."""

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


def _order(graph: Graph, peers: int) -> _Order:
    """The order of a graph, made once."""
    key = peers, len(graph.operations)
    if key not in graph.orders:
        graph.orders[key] = _Order(graph.operations, peers)
    found = graph.orders[key]
    assert isinstance(found, _Order)
    return found


def _lands(operation: Operation, need: Operation) -> bool:
    """Whether an operation needs the sum of all ranks' parts sent in `need`, not just its own."""
    return sends(need) and any(
        each.summed and each.output == need.output for each in operation.landings
    )


class _Rank:
    """The state of one rank. left: microseconds of work (alone) that each operation has left at
    `now`. By `speeds`, the first of the operations in `running` ends after `step`, at `next`."""

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
        """Subtract from `left` the work that is done until `time`."""
        if time >= self.next:  # what ends now has exactly nothing left, whatever floats add up to
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
        """Note one of the ends that operation `index` waits for; return whether it was the last."""
        self.waiting[index] -= 1
        if self.waiting[index]:
            return False
        self.because[index] = because
        self.ready.append(index)
        return True

    def plan(
        self, operations: Sequence[Operation], launch: list[int], beside: Beside | None
    ) -> None:
        """Set the speeds of the running operations, and when the first of them ends."""
        running, left = self.running, self.left
        if len(running) == 1:
            self.speeds, self.step = ALONE, left[running[0]]
        elif running:
            running.sort()  # the product of several speeds must not depend on the order of starts
            self.speeds = _speeds(operations, launch, running, beside)
            self.spans = [left[n] / speed for n, speed in zip(running, self.speeds, strict=True)]
            self.step = min(self.spans)
        else:
            self.speeds, self.step = [], math.inf
        self.next = self.now + self.step


def simulate(graph: Graph, cost: Cost, beside: Beside | None = None, skew: Skew = ALIKE) -> Times:
    """Run the operations; each takes `cost` microseconds alone once it has begun.

    An operation that rides begins with its launch, or when all that it waits for has ended. A
    launch ends with the last of its parts, and users of any part wait for that. beside: the speed
    of operations while those of other launches run; without it, all run as fast as alone.

    Each rank has its own streams. A collective's cost counts from when the last of its ranks has
    begun it; a rank that waits in it holds its resources. A push ends on the rank that sends it; a
    rank lands it when the pushes of all peers have ended.
    """
    operations = graph.operations
    count, several = len(operations), skew.ranks > 1
    order = _order(graph, skew.tp or skew.ranks)
    ranks = [_Rank(order, offset) for offset in skew.offsets or (0.0,) * skew.ranks]
    costs = [cost(each) for each in operations]
    factors = skew.factors(operations) if skew.jitter else None
    begun: dict[tuple[int, int], int] = {}  # (collective, first rank): how many ranks began it
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
    operation of the path loses to others beside it counts for the others: while attention all but
    stops a product, the time is attention's."""
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
    """Microseconds that a jitter adds to `alike`, the time of equal ranks."""
    if not jitter or ranks == 1:
        return 0.0
    found = [
        simulate(graph, cost, beside, Skew(ranks, tp, jitter=jitter, seed=seed)).total
        for seed in range(SEEDS if ranks * len(graph.operations) < MANY else 1)
    ]
    return sum(found) / len(found) - alike
