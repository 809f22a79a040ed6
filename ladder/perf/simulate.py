"""The times of a graph's operations: streams in order, what is waited for, what slows what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ladder.perf.graph import Graph, Operation

# The speed of the first operation while the second runs, of its speed alone.
Beside = Callable[[Operation, Operation], float]
NOTHING = -1


@dataclass(frozen=True)
class Times:
    """Microseconds at which each operation starts and ends, by its index.

    because: the operation whose end let each one start, or NOTHING.
    """

    starts: tuple[float, ...]
    ends: tuple[float, ...]
    because: tuple[int, ...]

    @property
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


def simulate(
    graph: Graph, cost: Callable[[Operation], float], beside: Beside | None = None
) -> Times:
    """Run the operations, each of `cost` microseconds alone once it has begun.

    What rides begins with its launch, or when all that it waits for is there; the launch ends with
    the last of its parts, and what needs one of them waits for that. beside: how fast operations of
    different launches run at the same time; without it, all as fast as alone.
    """
    operations = graph.operations
    count = len(operations)
    launch = [each.index if each.rides is None else each.rides for each in operations]
    parts: list[list[int]] = [[] for _ in operations]
    users: list[list[int]] = [[] for _ in operations]  # what waits for the end of each
    waiting = [0] * count  # for how many
    newest: dict[str, int] = {}
    for each in operations:
        index = each.index
        mine = launch[index]
        parts[mine].append(index)
        for need in each.needs:
            if launch[need] != mine:
                users[need].append(index)
                waiting[index] += 1
        if each.rides is not None:
            waiting[index] += 1  # its launch has begun
        else:
            if each.stream in newest:
                users[newest[each.stream]].append(index)
                waiting[index] += 1
            newest[each.stream] = index
    starts, ends = [0.0] * count, [-1.0] * count
    because = [NOTHING] * count
    left = [0.0] * count
    unended = [len(each) for each in parts]
    ready = [index for index in range(count) if not waiting[index]]
    running: list[int] = []
    now = 0.0
    while ready or running:
        for index in ready:  # grows with what rides on them
            starts[index], left[index] = now, cost(operations[index])
            running.append(index)
            if launch[index] == index:
                for rider in parts[index][1:]:
                    waiting[rider] -= 1
                    if not waiting[rider]:
                        because[rider] = index
                        ready.append(rider)
        ready = []
        if len(running) == 1:
            first = running[0]
            now += left[first]
            left[first] = 0.0
        else:
            speeds = _speeds(operations, launch, running, beside)
            spans = [left[index] / speed for index, speed in zip(running, speeds, strict=True)]
            step = min(spans)
            now += step
            for index, speed, span in zip(running, speeds, spans, strict=True):
                left[index] = 0.0 if span == step else left[index] - step * speed
        for index in [index for index in running if left[index] <= 0.0]:
            running.remove(index)
            mine = launch[index]
            unended[mine] -= 1
            if unended[mine]:
                continue
            for part in parts[mine]:
                ends[part] = now
                for user in users[part]:
                    waiting[user] -= 1
                    if not waiting[user]:
                        because[user] = index
                        ready.append(user)
    assert min(ends, default=0.0) >= 0.0, "operations wait for each other"
    return Times(tuple(starts), tuple(ends), tuple(because))


def _speeds(
    operations: list[Operation], launch: list[int], running: list[int], beside: Beside | None
) -> list[float]:
    found = [1.0] * len(running)
    if beside is None:
        return found
    for n, index in enumerate(running):
        for other in running:
            if launch[other] != launch[index]:
                found[n] *= beside(operations[index], operations[other])
    return found
