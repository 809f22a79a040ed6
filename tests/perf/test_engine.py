"""The simulator of events: orders of events, and closed forms."""

from __future__ import annotations

import functools

import pytest

from ladder.perf.engine import SECOND, Engine, Line


def test_events_run_in_time_order_and_equal_times_in_the_order_of_calls() -> None:
    engine, seen = Engine(), []
    for delay, name in ((5, "a"), (3, "b"), (5, "c")):
        engine.after(delay, lambda name=name: seen.append((engine.now, name)))
    engine.after(3, lambda: engine.after(1, lambda: seen.append((engine.now, "d"))))
    assert engine.run() == 5
    assert seen == [(3, "b"), (4, "d"), (5, "a"), (5, "c")]
    with pytest.raises(ValueError, match="in the past"):
        engine.after(-1, lambda: None)


def test_a_line_serves_one_after_the_other_and_latencies_overlap() -> None:
    engine, seen = Engine(), []
    line = Line(engine, rate=100, latency=7)
    for amount in (200, 100):
        line.send(amount, lambda: seen.append(engine.now))
    engine.after(10 * SECOND, lambda: line.send(100, lambda: seen.append(engine.now)))
    engine.run()
    assert seen == [2 * SECOND + 7, 3 * SECOND + 7, 11 * SECOND + 7]
    assert line.busy == 4 * SECOND


def test_time_passes_at_once_only_while_nothing_else_happens() -> None:
    engine, seen = Engine(), []

    def step(left: int) -> None:
        while left:
            seen.append(engine.now)
            left -= 1
            if not engine.passed(4):
                engine.after(4, functools.partial(step, left))
                return

    engine.after(0, lambda: step(6))
    for delay in (9, 16):  # within a step, and at the end of one, before it
        engine.after(delay, lambda: seen.append(-engine.now))
    assert engine.run() == 24
    assert seen == [0, 4, 8, -9, 12, -16, 16, 20]
