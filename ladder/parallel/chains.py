"""The two streams of a decode step in a CUDA graph, on which sublayers run beside each other.

The kernels of one token are short. Between two dependent kernels the memory is idle, while one
ends, and the next starts and waits for its input. Where a plan lags, sublayer n needs nothing of
sublayer n - 1, so its kernels fill these gaps. Attention, which reads little, runs beside an MLP,
which reads the most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ladder.models.plan import Plan

# The most sequences for which attention and MLP of one sublayer run beside each other. On one H200,
# steps of 16 sequences then took 2 % (bfloat16) and 8 % (fp8) less time, and steps of 64 took 0.5 %
# and 3 % more (benchmarks/results). Sizes between were not measured, but from 33 on the tiles are
# those of 64.
MOST_BRANCHED = 32

End = tuple[int, Any]  # the stream that some work is on, and the event of its end


def overlaps(plan: Plan, rows: int) -> tuple[bool, ...]:
    """For each sublayer of a step of `rows` sequences: whether it runs beside another sublayer, or
    its parts run beside each other."""
    after = (*plan.beside[1:], False)
    kinds = (record.kind for record in plan.sublayers)
    return tuple(
        here or then or ("+" in kind and rows <= MOST_BRANCHED)
        for here, then, kind in zip(plan.beside, after, kinds, strict=True)
    )


class Stream(Protocol):
    """What is needed of a stream: torch's, or one of predictions, which run without torch."""

    def record_event(self) -> Any: ...

    def wait_event(self, event: Any) -> None: ...


class Chains:
    """Which stream each sublayer of a pass runs on, and what streams wait for.

    At most two sublayers run at once: before sublayer n begins, n - 2 has ended, and n - 1 has read
    its input. The caller must hold what both streams read (residuals, partials of a group) until
    two more sublayers are launched. From then on the stream that allocated it waits for all its
    readers before it can use that memory again.

    streams: the current one, and another; empty: all runs on the current one. switch: makes one of
    them current.
    """

    def __init__(
        self, streams: Sequence[Stream] = (), switch: Callable[[Any], object] = lambda stream: None
    ) -> None:
        self.streams, self.switch = streams, switch
        self.place = self.home = 0  # indices of the current stream, and of the sublayer's
        self.landed: list[End] = []  # the end of the newest read
        self.ends: list[End] = []  # the end of each sublayer

    def turn(self, beside: bool) -> None:
        """Begin the next sublayer. beside: it needs nothing of the newest sublayer."""
        if not self.streams:
            return
        self._go(1 - self.home if beside else self.home)
        self.home = self.place
        self._wait(self.landed + self.ends[-2:-1])

    def read(self) -> None:
        """Note that the input of the sublayer is ready."""
        if self.streams:
            self.landed = [self._now()]

    def branch(self) -> None:
        """Begin a part of the sublayer that needs no other part."""
        if self.streams:
            self._go(1 - self.home)
            self._wait(self.landed)

    def merge(self) -> None:
        """Continue when both parts have ended."""
        if self.place != self.home:
            end = self._now()
            self._go(self.home)
            self._wait([end])

    def wait_for_newest(self) -> None:
        """Wait for the sublayer before."""
        self._wait(self.ends[-1:])

    def end(self) -> None:
        """Note that the sublayer has ended."""
        assert self.place == self.home, "a part has not been merged"
        if self.streams:
            self.ends.append(self._now())

    def join(self) -> None:
        """Continue on the first stream when all sublayers have ended."""
        if self.streams:
            self._go(0)
            self.home = 0
            self._wait(self.ends[-2:])

    def _go(self, place: int) -> None:
        if place != self.place:
            self.place = place
            self.switch(self.streams[place])

    def _now(self) -> End:
        return self.place, self.streams[self.place].record_event()

    def _wait(self, ends: Sequence[End]) -> None:
        """Make the current stream wait for ends on the other one. Ends on its own are left out:
        they are in order anyway, and a kernel in a graph starts some 2 microseconds later if it
        waits for two others."""
        for place, event in ends:
            if place != self.place:
                self.streams[self.place].wait_event(event)
