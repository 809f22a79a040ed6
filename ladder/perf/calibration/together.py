"""The speed of work while other work runs on another stream, as a share of its speed alone."""

from __future__ import annotations

import functools
import math
import threading
import time
from dataclasses import dataclass

import torch

from ladder.parallel import launch
from ladder.perf.calibration.timing import REPEATS, REST, Work, align, cooled, slowest_median

COVER = 4  # at first the other work runs this many times as long as the timed work takes alone
# If it ends too early, it runs longer by the factor that the timed work asked for, times MARGIN,
# and at least twice as long. LONGEST (microseconds) is the limit: a few hundred turns of either.
MARGIN, LONGEST = 1.5, 5e5
THREADED = 4  # turns on a CPU
CLOCKED = 3  # turns that are timed to find the length of a turn


@dataclass(frozen=True)
class Turn:
    """A turn of some work (`timing.turn_of`). priority: of the stream on which it runs beside other
    work, as it runs in a model."""

    run: Work
    priority: int = 0


def speed_beside(timed: Turn, other: Turn, device: torch.device) -> float:
    """The speed of `timed` while `other` runs all the time: the same on every rank, at most 1.

    As with times alone, the slowest rank and the median turn count. Turns alone and beside `other`
    alternate, so that drift of the machine affects both. Raises RuntimeError if `other` ends too
    early, however often it runs.
    """
    mine, others = (_length(each, device) for each in (timed, other))
    pieces = math.ceil(2 * COVER * mine / others)
    while True:
        alone, together, asked = _turns(timed, other, pieces, device)
        if asked <= 1.0:
            return min(1.0, alone / together)
        longer = math.ceil(pieces * max(2.0, MARGIN * asked))
        if longer * others > LONGEST:
            raise RuntimeError(
                f"work of {mine:.0f} us beside other work is not done when this ends: {pieces} "
                f"times {others:.0f} us, of at most {LONGEST:.0f}; its speed is less than "
                f"{2 * mine / (pieces * others):.2g} of that alone"
            )
        pieces = longer


def _turns(
    timed: Turn, other: Turn, pieces: int, device: torch.device
) -> tuple[float, float, float]:
    """Microseconds of `timed` alone and beside `pieces` turns of `other`; and how many times as
    long `other` would have to last. If that is above 1, the first two say nothing."""
    beside = _beside_on_gpu if device.type == "cuda" else _beside_in_thread
    alone, together = [], []
    for number in range(REPEATS + 1):
        us = cooled(timed.run, device)
        slowed, asked = beside(timed, other, pieces)
        most = max(launch.gathered(asked))
        if most > 1.0:
            return us, slowed, most
        if number:  # the first warms up
            alone.append(us)
            together.append(slowed)
    own, slow = (slowest_median(launch.gathered(each)) for each in (alone, together))
    return own, slow, 1.0


def _length(turn: Turn, device: torch.device) -> float:
    """Microseconds of a turn alone, the same on every rank."""
    times = [cooled(turn.run, device) for _ in range(CLOCKED)]
    return max(slowest_median(launch.gathered(times)), 1e-3)


def _beside_on_gpu(timed: Turn, other: Turn, pieces: int) -> tuple[float, float]:
    """Microseconds of `timed`; and the time until its end, as a share of that of `other`.

    `timed` begins when the first turn of `other` has ended. Its first turn is not timed: it hides
    the host's launch of the second.
    """
    align()
    time.sleep(REST)
    begin, start, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(4))
    begun = torch.cuda.Event()
    begin.record()
    front, back = _stream(0, timed.priority), _stream(1, other.priority)
    for stream in (front, back):
        stream.wait_event(begin)
    with torch.cuda.stream(back):
        other.run()
        begun.record()
        for _ in range(pieces):
            other.run()
        last.record()
    with torch.cuda.stream(front):
        front.wait_event(begun)
        timed.run()
        start.record()
        timed.run()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3, begin.elapsed_time(end) / begin.elapsed_time(last)


@functools.cache
def _stream(number: int, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=priority)


def _beside_in_thread(timed: Turn, other: Turn, pieces: int) -> tuple[float, float]:
    """The same on a CPU, only to show that the code runs: `other` may end before `timed`."""

    @torch.inference_mode()
    def run() -> None:
        for _ in range(min(pieces, THREADED)):
            other.run()

    align()
    thread = threading.Thread(target=run)
    thread.start()
    timed.run()
    start = time.perf_counter()
    timed.run()
    us = (time.perf_counter() - start) * 1e6
    thread.join()
    return us, 1.0
