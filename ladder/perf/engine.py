"""A simulator of events: a heap of callbacks in time order, and a resource that they share.

Time is in integer picoseconds, so that sums are exact and two runs give the same. `Line` serves one
thing after the other, as a link does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

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

    def passed(self, delay: int) -> bool:
        """Whether nothing else happens for `delay` picoseconds. If so, the time advances by them.

        The caller is an event. It can then do at once what it would have called `after` for.
        """
        end = self.now + delay
        if self._heap and self._heap[0][0] <= end:
            return False
        self.now = end
        return True

    def run(self) -> int:
        """Run all events, and those that they add. Returns the time of the last one."""
        heap, pop = self._heap, heapq.heappop
        while heap:
            self.now, _, call = pop(heap)
            call()
        return self.now


class Line:
    """A resource that serves one thing after the other at a fixed rate, and delivers each after a
    latency.

    rate: units a second. The next thing does not wait for the latency of the one before.
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
