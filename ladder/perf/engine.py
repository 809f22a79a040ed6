"""A simulator of events: a heap of callbacks in time order, and two kinds of shared resources.

Time is in integer picoseconds, so that sums are exact and two runs give the same. `Line` serves one
thing after the other, as a link does. `Fluid` serves all that runs at once, each at the rate that
its share of the resources allows; the rates change whenever something starts or ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

SECOND = 10**12  # in picoseconds
Callback = Callable[[], None]


def picoseconds(seconds: float) -> int:
    return round(seconds * SECOND)


class Engine:
    """now: the time of the event that runs. Events at the same time run in the order of calls."""

    def __init__(self) -> None:
        self.now = 0
        self._heap: list[tuple[int, int, Callback]] = []
        self._calls = 0

    def after(self, delay: int, run: Callback) -> None:
        """Call `run` in `delay` picoseconds."""
        if delay < 0:
            raise ValueError(f"an event {-delay} ps in the past")
        self._calls += 1
        heapq.heappush(self._heap, (self.now + delay, self._calls, run))

    def run(self) -> int:
        """Run all events, and those that they add; the time of the last one."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, call = pop(heap)
            call()
        return self.now


class Line:
    """A resource that serves one thing after the other at a fixed rate, then waits a latency.

    rate: units a second. The latency of one thing is no obstacle to the next one.
    """

    def __init__(self, engine: Engine, rate: float, latency: int = 0) -> None:
        self.engine, self.rate, self.latency = engine, rate, latency
        self.busy = 0  # picoseconds served
        self._free = 0

    def send(self, amount: float, done: Callback) -> None:
        """Serve `amount` units after all that was sent before, and then call `done`."""
        taken = picoseconds(amount / self.rate)
        self._free = max(self._free, self.engine.now) + taken
        self.busy += taken
        self.engine.after(self._free + self.latency - self.engine.now, done)


@dataclass(eq=False)
class _Task:
    left: float  # picoseconds at full speed
    demands: Mapping[str, float]
    done: Callback
    speed: float = field(default=0.0)


class Fluid:
    """Resources that tasks share at the same time.

    capacities: what each resource gives a second. A task of `work` picoseconds that runs alone
    takes `demands` from the resources, at most its capacities' worth of speed; where tasks demand
    more than there is, all are slowed alike, max-min fair: no task is slowed for one that is
    faster already.
    """

    def __init__(self, engine: Engine, capacities: Mapping[str, float]) -> None:
        self.engine, self.capacities = engine, dict(capacities)
        self._tasks: list[_Task] = []
        self._since = 0
        self._version = 0

    def start(self, work: int, demands: Mapping[str, float], done: Callback) -> None:
        """Run `work` picoseconds of a task at full speed, or longer; then call `done`.

        demands: of each resource, what the task takes of it at full speed.
        """
        for name in demands:
            if name not in self.capacities:
                raise ValueError(f"no resource {name!r}; known: {', '.join(self.capacities)}")
        self._advance()
        self._tasks.append(_Task(work, demands, done))
        self._share()

    def _advance(self) -> None:
        """Count what all tasks have done since rates last changed."""
        passed = self.engine.now - self._since
        for task in self._tasks:
            task.left -= passed * task.speed
        self._since = self.engine.now

    def _share(self) -> None:
        """Set the speeds, by raising all of them until a resource is full, and so on."""
        left = dict(self.capacities)
        waiting = list(self._tasks)
        speed = 0.0
        while waiting:
            load = {name: sum(t.demands.get(name, 0.0) for t in waiting) for name in left}
            rise = min([1 - speed, *(left[n] / load[n] for n in left if load[n] > 0)])
            speed += rise
            for name in left:
                left[name] -= rise * load[name]
            full = {n for n in left if load[n] > 0 and left[n] <= 1e-12 * self.capacities[n]}
            rest = []
            for task in waiting:
                task.speed = speed
                if speed < 1 and not any(task.demands.get(name, 0.0) > 0 for name in full):
                    rest.append(task)
            waiting = rest
        self._version += 1
        if self._tasks:
            version = self._version
            wait = min(math.ceil(max(t.left, 0.0) / t.speed - 1e-6) for t in self._tasks)
            self.engine.after(max(wait, 0), lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:  # the rates have changed since
            return
        self._advance()
        ended = [task for task in self._tasks if task.left <= 1e-3]
        self._tasks = [task for task in self._tasks if task.left > 1e-3]
        self._share()
        for task in ended:
            task.done()
