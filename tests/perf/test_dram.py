"""The queue of a DRAM: closed forms of its two arbiters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from ladder.perf.engine import Engine, picoseconds
from ladder.perf.t3.dram import Dram, Stream
from ladder.perf.t3.system import System

SYSTEM = replace(System(), entry=1000, burst=1e12, queue=8, switch=0.0)  # an entry: 1,000 ps
ENTRY = 1000


def served(
    requests: list[tuple[int, Stream, int, float]], threshold: int | None, system: System = SYSTEM
) -> list[int]:
    """When each request (time, stream, entries, cost) has been served."""
    engine = Engine()
    dram, found = Dram(engine, system, threshold), [0] * len(requests)

    def ask(n: int, stream: Stream, entries: int, cost: float) -> None:
        dram.add(stream, "", entries * ENTRY, cost, lambda: found.__setitem__(n, engine.now))

    for n, (time, stream, entries, cost) in enumerate(requests):
        engine.after(time, partial(ask, n, stream, entries, cost))
    engine.run()
    busy = sum(entries * cost for _, _, entries, cost in requests) * picoseconds(1e-9)
    assert sum(dram.served.values()) == busy
    return found


@pytest.mark.parametrize("threshold", [None, 2])
def test_one_stream_alone_has_the_whole_memory(threshold: int | None) -> None:
    assert served([(0, "product", 20, 1)], threshold) == [20_000]
    assert served([(0, "communication", 20, 2)], threshold) == [40_000]
    assert served([(0, "communication", 20, 1.25)], threshold) == [25_000]


def test_round_robin_gives_both_streams_half() -> None:
    both: list[tuple[int, Stream, int, float]] = [
        (0, "communication", 100, 1),
        (1, "product", 20, 1),
    ]
    # the 8 entries that fill the queue, then its own 20 with one of the other between two of them
    assert served(both, None)[1] == (8 + 20 + 19) * ENTRY
    # MCA: at most 2 entries wait before it
    assert served(both, 2)[1] == (2 + 20) * ENTRY


def test_mca_keeps_the_memory_busy_and_serves_all() -> None:
    both: list[tuple[int, Stream, int, float]] = [
        (0, "product", 10, 1),
        (0, "communication", 10, 1),
        (50_000, "communication", 5, 1),
    ]
    assert served(both, 1) == [10_000, 20_000, 55_000]


def test_turning_from_one_stream_to_the_other_costs() -> None:
    system = replace(SYSTEM, switch=1e-9)
    both: list[tuple[int, Stream, int, float]] = [
        (0, "product", 12, 1),
        (0, "communication", 12, 1),
    ]
    assert max(served(both, 8, system)) == 25_000  # once
    assert max(served(both, None, system)) == 31_000  # 7 times, for the 4 that are left
