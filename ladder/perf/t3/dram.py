"""The queue of a DRAM, which two streams of requests fill: a product's, and communication's.

The arbiter moves requests into the queue while it has room, and the memory serves the queue in
order. Round-robin takes requests from both streams in turn. MCA (4.5) takes communication only if
the product asks for nothing and the queue is short, so that the product's next request waits less.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from ladder.perf.engine import Callback, Engine, picoseconds
from ladder.perf.t3.system import System

Stream = Literal["product", "communication"]


class Dram:
    """threshold: MCA lets communication in below this occupancy of the queue; None: round-robin.

    served: each stream's picoseconds of service; trace, if a list: (time, kind, bytes) served.
    """

    def __init__(
        self, engine: Engine, system: System, threshold: int | None = None, trace: bool = False
    ) -> None:
        self.engine, self.entry, self.room = engine, system.entry, system.queue
        self.threshold = threshold
        self.service = picoseconds(system.entry / system.burst)
        self.switch = picoseconds(system.switch)
        self.served = {"product": 0, "communication": 0}
        self.trace: list[tuple[int, str, int]] | None = [] if trace else None
        # a request: [entries left, service time of one, when all are served, its kind]
        self._product: deque[list] = deque()
        self._communication: deque[list] = deque()
        self._queue: deque[tuple[int, Callback | None, bool, str]] = deque()
        self._turn = self._busy = False
        self._last = True  # whether the last entry served was the product's

    def add(self, stream: Stream, kind: str, size: float, cost: float, done: Callback) -> None:
        """Ask for `size` bytes at `cost` times the service of a read; `done` when all is served."""
        entries = max(1, round(size / self.entry))
        waiting = self._product if stream == "product" else self._communication
        waiting.append([entries, round(cost * self.service), done, kind])
        self._fill()
        if not self._busy:
            self._busy = True
            self.engine.after(self._begin(), self._serve)

    def _fill(self) -> None:
        product, communication, queue = self._product, self._communication, self._queue
        room, threshold = self.room, self.threshold
        while len(queue) < room and (product or communication):
            if threshold is None:
                own = bool(product) and (not communication or not self._turn)
                if product and communication:
                    self._turn = not self._turn
            elif product:
                own = True
            elif len(queue) < threshold:
                own = False
            else:
                break
            stream = product if own else communication
            request = stream[0]
            request[0] -= 1
            if request[0]:
                queue.append((request[1], None, own, request[3]))
            else:
                stream.popleft()
                queue.append((request[1], request[2], own, request[3]))

    def _begin(self) -> int:
        """Begin to serve the first entry of the queue. Returns the picoseconds that it takes."""
        time, _, own, _ = self._queue[0]
        self.served["product" if own else "communication"] += time
        if own != self._last:
            time += self.switch
            self._last = own
        return time

    def _serve(self) -> None:
        """End the first entry's service, and serve those behind it until another event is due."""
        while True:
            _, done, _, kind = self._queue.popleft()
            if self.trace is not None:
                self.trace.append((self.engine.now, kind, self.entry))
            if done is not None:
                done()
            self._fill()
            if not self._queue:
                self._busy = False
                return
            time = self._begin()
            if not self.engine.passed(time):
                self.engine.after(time, self._serve)
                return
