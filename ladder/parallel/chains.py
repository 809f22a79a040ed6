"""The two streams of a decode step in a CUDA graph, on which sublayers run beside each other.

The kernels of one token are short, and between two that need each other the memory has nothing to
do: a kernel starts, waits for its input, and ends. Where a plan lags, sublayer n needs nothing of
sublayer n - 1, so its kernels fill these gaps. Attention, which reads little, runs beside an MLP,
which reads the most.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

End = tuple[int, torch.cuda.Event]  # of something, and the stream it is on


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The second stream of all steps."""
    return torch.cuda.Stream(device)


def rejoin(stream: torch.cuda.Stream) -> None:
    """After an error in the middle of a captured step: make `stream`, whose capture it is, current
    again, and the side stream a part of it that has ended, so that the capture can end."""
    torch.cuda.set_stream(side_stream(stream.device_index))
    captured = torch.cuda.is_current_stream_capturing()
    torch.cuda.set_stream(stream)
    if captured:
        stream.wait_event(side_stream(stream.device_index).record_event())


class Chains:
    """Which stream each sublayer of a pass runs on, and what streams wait for.

    At most two sublayers run at once: before sublayer n begins, n - 2 has ended, and n - 1 has read
    its input. What both streams read (residuals, partials of a group) is to be held until two more
    sublayers are launched: then the stream that has allocated it waits for all its readers before
    it can use that memory again.

    streams: the current one, and another; empty: all runs on the current one.
    """

    def __init__(self, streams: Sequence[torch.cuda.Stream] = ()) -> None:
        self.streams = streams
        self.place = self.home = 0  # the current stream, and that of the sublayer
        self.landed: list[End] = []  # that of the newest read
        self.ends: list[End] = []  # of each sublayer

    def turn(self, beside: bool) -> None:
        """Begin the next sublayer. beside: it needs nothing of the newest one."""
        if not self.streams:
            return
        self._go(1 - self.home if beside else self.home)
        self.home = self.place
        self._wait(self.landed + self.ends[-2:-1])

    def read(self) -> None:
        """The input of the sublayer is there."""
        if self.streams:
            self.landed = [self._now()]

    def branch(self) -> None:
        """Begin a part of the sublayer that needs no other part."""
        if self.streams:
            self._go(1 - self.home)
            self._wait(self.landed)

    def merge(self) -> None:
        """Go on when both parts have ended."""
        if self.place != self.home:
            end = self._now()
            self._go(self.home)
            self._wait([end])

    def wait_for_newest(self) -> None:
        """Wait for the sublayer before."""
        self._wait(self.ends[-1:])

    def end(self) -> None:
        """The sublayer has ended."""
        assert self.place == self.home, "a part has not been merged"
        if self.streams:
            self.ends.append(self._now())

    def join(self) -> None:
        """Go on, on the first stream, when all sublayers have ended."""
        if self.streams:
            self._go(0)
            self.home = 0
            self._wait(self.ends[-2:])

    def _go(self, place: int) -> None:
        if place != self.place:
            self.place = place
            torch.cuda.set_stream(self.streams[place])

    def _now(self) -> End:
        return self.place, self.streams[self.place].record_event()

    def _wait(self, ends: Sequence[End]) -> None:
        """Not for those of its own stream, though they are in order: a kernel of a graph that
        waits for two others starts some 2 microseconds later."""
        for place, event in ends:
            if place != self.place:
                self.streams[self.place].wait_event(event)
