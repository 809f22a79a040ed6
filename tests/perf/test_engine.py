"""The simulator of events: closed forms, and properties that any sharing of resources has."""

from __future__ import annotations

import random

import pytest

from ladder.perf.engine import SECOND, Engine, Fluid, Line


def ends(
    capacities: dict[str, float], tasks: list[tuple[int, int, dict[str, float]]]
) -> tuple[int, ...]:
    """When each task ends: (start, work, demands)."""
    engine = Engine()
    fluid, found = Fluid(engine, capacities), dict.fromkeys(range(len(tasks)), -1)

    def begin(n: int, work: int, demands: dict[str, float]) -> None:
        fluid.start(work, demands, lambda: found.update({n: engine.now}))

    for n, (start, work, demands) in enumerate(tasks):
        engine.after(start, lambda n=n, work=work, demands=demands: begin(n, work, demands))
    engine.run()
    return tuple(found.values())


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


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ([(0, 100, {"memory": 1.0})], (100,)),
        ([(0, 100, {"memory": 2.0})], (200,)),  # more than there is
        ([(0, 100, {"memory": 1.0}), (0, 100, {"memory": 1.0})], (200, 200)),
        ([(0, 100, {"memory": 0.5}), (0, 100, {"link": 1.0})], (100, 100)),
        # alone for 50, then at half speed until the first one ends at 150; 25 of the other is left
        ([(0, 100, {"memory": 1.0}), (50, 75, {"memory": 1.0})], (150, 175)),
        # the memory is shared alike; what waits for the link alone is not slowed
        ([(0, 60, {"memory": 1.0}), (0, 60, {"memory": 1.0, "link": 0.1}), (0, 60, {"link": 0.5})],
         (120, 120, 60)),
        # a task that the link holds at half speed leaves the memory to the other one
        ([(0, 100, {"memory": 0.5, "link": 2.0}), (0, 100, {"memory": 0.75})], (200, 100)),
    ],
)  # fmt: skip
def test_shared_resources_take_what_closed_forms_say(
    tasks: list[tuple[int, int, dict[str, float]]], expected: tuple[int, ...]
) -> None:
    assert ends({"memory": 1.0, "link": 1.0}, tasks) == expected


@pytest.mark.parametrize("seed", range(8))
def test_any_tasks_keep_the_bounds_of_what_they_share(seed: int) -> None:
    """Never below the floor, never idle with work left, no slower with more capacity for all, and
    equal tasks end together."""
    rng = random.Random(seed)
    tasks = [
        (rng.randrange(1000), rng.randrange(1, 5000),
         {name: rng.uniform(0.05, 1.5) for name in ("a", "b", "c") if rng.random() < 0.6})
        for _ in range(12)
    ]  # fmt: skip
    tasks.append(tasks[0])
    capacities = {"a": 1.0, "b": 0.8, "c": 1.3}
    found = ends(capacities, tasks)
    for (start, work, demands), end in zip(tasks, found, strict=True):
        needed = max([1.0, *(demands[name] / capacities[name] for name in demands)])
        assert end - start >= work * needed - 1
    for name, capacity in capacities.items():
        load = sum(work * demands.get(name, 0.0) for _, work, demands in tasks)
        assert max(found) >= load / capacity - 1
    serial = sum(
        work * max([1.0, *(d / capacities[name] for name, d in demands.items())])
        for _, work, demands in tasks
    )
    assert max(found) <= max(start for start, _, _ in tasks) + serial + len(tasks)
    assert found[-1] == found[0]
    wider = ends({name: 2 * capacity for name, capacity in capacities.items()}, tasks)
    assert max(wider) <= max(found) + 1


def test_an_unknown_resource_is_refused() -> None:
    with pytest.raises(ValueError, match="no resource 'disk'; known: memory"):
        ends({"memory": 1.0}, [(0, 1, {"disk": 1.0})])
