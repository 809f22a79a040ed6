"""The times of a graph's operations: streams in order, and what is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ladder.perf.engine import Engine
from ladder.perf.graph import Graph, Operation

MICROSECOND = 10**6  # in picoseconds


@dataclass(frozen=True)
class Times:
    """Microseconds at which each operation starts and ends, by its index."""

    starts: tuple[float, ...]
    ends: tuple[float, ...]

    @property
    def total(self) -> float:
        return max(self.ends)


def simulate(graph: Graph, cost: Callable[[Operation], float]) -> Times:
    """Run the operations, each of `cost` microseconds once it has begun.

    What rides begins with its launch, or when all that it waits for is there; the launch ends with
    the last of its parts, and what needs one of them waits for that.
    """
    engine, operations = Engine(), graph.operations
    streams: dict[str, list[Operation]] = {}
    riders: dict[int, list[Operation]] = {}
    for each in operations:
        if each.rides is None:
            streams.setdefault(each.stream, []).append(each)
        else:
            riders.setdefault(each.rides, []).append(each)
    starts: dict[int, int] = {}
    ends: dict[int, int] = {}
    left = {each.index: 1 + len(riders.get(each.index, ())) for each in operations}
    turn = dict.fromkeys(streams, 0)

    def ready(each: Operation) -> bool:
        inside = each.index if each.rides is None else each.rides
        return all(
            need in ends or need == inside or operations[need].rides == inside
            for need in each.needs
        )

    def begin(each: Operation, launch: Operation) -> None:
        starts[each.index] = engine.now
        engine.after(round(cost(each) * MICROSECOND), lambda: part_ended(launch))

    def part_ended(launch: Operation) -> None:
        left[launch.index] -= 1
        if left[launch.index]:
            return
        for each in (launch, *riders.get(launch.index, ())):
            ends[each.index] = engine.now
        turn[launch.stream] += 1
        begin_all()

    def begin_all() -> None:
        for stream, queue in streams.items():
            if turn[stream] < len(queue):
                launch = queue[turn[stream]]
                if launch.index not in starts and ready(launch):
                    begin(launch, launch)
                for each in riders.get(launch.index, ()) if launch.index in starts else ():
                    if each.index not in starts and ready(each):
                        begin(each, launch)

    begin_all()
    engine.run()
    assert len(ends) == len(operations), "operations wait for each other"
    return Times(
        tuple(starts[n] / MICROSECOND for n in range(len(operations))),
        tuple(ends[n] / MICROSECOND for n in range(len(operations))),
    )
