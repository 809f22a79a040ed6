"""Simulated steps against closed forms, and predictions against recorded steps."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder.config import model_config
from ladder.models import Plan, UserError, resolve_plan
from ladder.perf import nodes, phases
from ladder.perf.cost import MOST_OF_SHARE, DecodeCost, most_of
from ladder.perf.graph import COMM, SECOND, Graph, Operation, forward
from ladder.perf.lower_decode import decode
from ladder.perf.machine import Curve, Machine, Value
from ladder.perf.machine_files import load
from ladder.perf.nodes import with_older_kernels
from ladder.perf.prediction.fitting import calibrated
from ladder.perf.prediction.records import scores
from ladder.perf.rows import product
from ladder.perf.simulate import simulate, spent
from tests import ROOT

RESULTS = ROOT / "benchmarks/results"
FILE = RESULTS / "2026-11-21-inference-h200x4.jsonl"


def cost(sublayer: float, reduce: float) -> Any:
    def of(each: Operation) -> float:
        if each.kind == "attention" or each.part in ("gate-up", "down"):
            return sublayer / (1 if each.kind == "attention" else 2)
        return reduce if each.output is not None else 0.0

    return of


@pytest.mark.parametrize(("compute", "reduce"), [(10.0, 4.0), (4.0, 10.0)])
def test_closed_forms(compute: float, reduce: float) -> None:
    """16 sublayers. Standard adds every reduce; a ladder the longer of both, and one reduce that
    nothing hides; without reduces the sublayers remain."""
    plans = {name: resolve_plan(name, 8, 4) for name in ("standard", "ladder", "none", "dtp-1")}
    times = {
        name: simulate(forward(plan), cost(compute, reduce)).total for name, plan in plans.items()
    }
    longer = max(compute, reduce)
    assert times["none"] == pytest.approx(16 * compute)
    assert times["standard"] == pytest.approx(16 * (compute + reduce))
    assert times["ladder"] == pytest.approx(compute + 15 * longer + reduce)


def test_a_launch_ends_with_what_rides_on_it() -> None:
    """A send of 5 that rides on a product of 2 holds its launch, and so the next kernel."""
    graph = Graph(resolve_plan("none", 1, 2))
    first = graph.add("product", ())
    graph.add("send", (), rides=first)
    last = graph.add("product", [first])
    times = simulate(graph, lambda each: 5.0 if each.kind == "send" else 2.0)
    assert (times.ends[first], times.starts[last], times.total) == (5.0, 5.0, 7.0)


def test_streams_run_side_by_side() -> None:
    graph = Graph(resolve_plan("none", 1, 2))
    first = graph.add("product", ())
    graph.add("all-reduce", [first], stream=COMM)
    graph.add("product", ())
    assert simulate(graph, lambda each: 3.0).total == 6.0


def test_the_longest_path_is_what_it_waited_for() -> None:
    """A product of 3 beside attention of 9, which leaves it a third, takes 9: of these 6 are
    attention's. An all-reduce beside it that costs it nothing is hidden, and is no part of it."""
    graph = Graph(resolve_plan("none", 1, 2))
    attention = graph.add("attention", ())
    graph.add("all-reduce", (), stream=COMM)
    product = graph.add("product", (), stream=SECOND)
    last = graph.add("product", [product], stream=SECOND)

    def beside(one: Operation, other: Operation) -> float:
        return 1 / 3 if (one.stream, other.index) == (SECOND, attention) else 1.0

    times = simulate(graph, lambda each: 9.0 if each.kind == "attention" else 3.0, beside)
    assert dict(times.longest_path()) == pytest.approx({product: 9.0, last: 3.0})
    found = spent(graph, times, beside)
    assert found == pytest.approx({product: 3.0, attention: 6.0, last: 3.0})
    draw = random.Random(0).random
    for plan in ("ladder", "parallel"):
        graph = decode(resolve_plan(plan, 4, 2), "nccl")
        costs = [10 * draw() for _ in graph.operations]
        speeds = [0.2 + 0.8 * draw() for _ in graph.operations]

        def slowed(one: Operation, other: Operation, speeds: list[float] = speeds) -> float:
            return speeds[other.index]

        times = simulate(graph, lambda one, costs=costs: costs[one.index], slowed)
        found = spent(graph, times, slowed)
        assert sum(found.values()) == pytest.approx(times.total)
        for index, _ in times.longest_path():
            # What it takes alone, and what others on the path lose to it.
            assert found[index] >= costs[index] - 1e-9


@pytest.mark.parametrize("name", ["standard", "ladder", "dtp-2", "desync-2x", "accumulate-4x-lag2"])
def test_no_step_is_below_its_parts_or_above_their_sum(name: str) -> None:
    plan = resolve_plan(name, 4, 2)
    for way in ("push", "nccl"):
        graph = decode(plan, way)
        each = [1.0 + n % 3 for n in range(len(graph.operations))]
        found = simulate(graph, lambda one, each=each: each[one.index])
        main_stream = sum(
            each[o.index] for o in graph.operations if o.rides is None and o.stream == "main"
        )
        assert main_stream <= found.total <= sum(each)
        faster = simulate(graph, lambda one, each=each: each[one.index] / 2)
        assert faster.total == pytest.approx(found.total / 2)


def test_the_calibration_reads_one_step_alone(tmp_path: Path) -> None:
    """Other records do not move it; without that one it is refused."""
    lines = FILE.read_text().splitlines()
    kept = [line for line in lines if '"plan": "none"' in line]
    (tmp_path / "none.jsonl").write_text("\n".join(kept))
    (tmp_path / "rest.jsonl").write_text("\n".join(line for line in lines if line not in kept))
    machine = load("h200x4")
    alone = calibrated(machine, tmp_path / "none.jsonl")
    assert alone.value("step_stretch") == calibrated(machine, FILE).value("step_stretch")
    assert alone.value("power_limit") == calibrated(machine, FILE).value("power_limit")
    with pytest.raises(UserError, match=r"no decode step of llama-3-8b, plan none.*measure it"):
        calibrated(machine, tmp_path / "rest.jsonl")


def step(plan: Plan | str, machine: Machine, batch: int = 1) -> float:
    config = model_config("llama-3-8b")
    found = resolve_plan(plan, 32, 4)
    made = replace(config, plan=found, tp_degree=4 if found.depends_on_tp else None)
    return phases.decode(made, machine, 4, "push", batch, 1024).us


def test_slower_links_never_make_a_step_faster() -> None:
    machine = load("h200x4")
    slow = replace(
        machine,
        curves=tuple(
            replace(each, points=tuple((x, 2 * us) for x, us in each.points))
            if each.name == "all-reduce"
            else each
            for each in machine.curves
        ),
    )
    for plan in ("standard", "parallel", "ladder", "hybrid"):
        assert step(plan, slow) >= step(plan, machine)


def test_landings_take_what_their_curve_says_where_there_is_one() -> None:
    """64, and the first one."""
    machine = load("h200x4")
    machine = replace(
        machine, curves=tuple(each for each in machine.curves if each.name != "landing")
    )
    curve = Curve("landing", {"hidden": 4096}, ((1.0, 2.0), (4.0, 2.5)), "measured")
    more = replace(machine, curves=(*machine.curves, curve))
    for plan, tensors in (("none", 4), ("standard", 7)):
        # Without one they take a launch, and the bytes of so many tensors of a row.
        longer = (
            machine.value("step_stretch") * 2.0
            - machine.value("launch_us")
            - tensors * 8192 / (1e6 * machine.value("copy_tb_s"))
        )
        assert step(plan, more) - step(plan, machine) == pytest.approx(longer * 65, abs=0.5)


def reducing(reducer: str, batch: int = 64, **values: float) -> float:
    machine = load("h200x4")
    more = {name: Value(value, "declared") for name, value in values.items()}
    machine = replace(machine, values={**machine.values, **more})
    shape = replace(model_config("llama-3-8b"), plan=resolve_plan("ladder", 32, 4))
    return phases.decode(shape, machine, 4, reducer, batch, 1024).us


def test_products_of_one_row_lose_multiprocessors_to_any_message() -> None:
    """Those of tiles leave some free: they lose none to a small one, whatever the sketches say."""
    assert reducing("async", 1, row_beside_nccl=1.0) < 0.95 * reducing("async", 1)
    assert reducing("async", 4, row_beside_nccl=1.0) == reducing("async", 4)


def test_what_does_not_block_is_launched_behind_the_one_before() -> None:
    """Changes of stream: a blocking reduce, and a landing of reduces, of which a ladder's last one
    takes two; and the first MLP of a ladder, which waits for the first landing alone."""
    for name, count in (("standard", 64 + 64), ("ladder", 1 + 63 + 1)):
        config = replace(model_config("llama-3-8b"), plan=resolve_plan(name, 32, 4))
        cost = DecodeCost(config, load("h200x4"), 4, "async", 1, 1024)
        cost.lowered(config.plan)
        assert len(cost.crossing) == count


def test_nccl_beside_products() -> None:
    """Products that lose multiprocessors, and reduces that wait for memory, are of async steps."""
    for name, value in (("product_beside_nccl", 1.0), ("nccl_beside_product", 1.0)):
        assert reducing("async", **{name: value}) < 0.99 * reducing("async")
        assert reducing("push", **{name: value}) == reducing("push")


def valued(plan: str, batch: int, **values: float) -> float:
    machine = load("h200x4")
    more = {name: Value(value, "declared") for name, value in values.items()}
    return step(plan, replace(machine, values={**machine.values, **more}), batch)


def test_what_blocks_waits_for_the_slowest_rank() -> None:
    """The expected slowest of four ranks, of all that is computed between sums; what has a
    sublayer's time to arrive does not wait."""
    assert most_of(4) == pytest.approx(1.029, abs=0.03)  # exactly, of four normal values
    assert most_of(2) == pytest.approx(0.564, abs=0.03)
    even, uneven = (valued("standard", 1, rank_spread=value) for value in (1e-9, 0.02))
    machine = load("h200x4")
    config = replace(model_config("llama-3-8b"), plan=resolve_plan("standard", 32, 4))
    cost = DecodeCost(config, machine, 4, "push", 1, 1024)
    products = [each for each in cost.lowered(config.plan).operations if each.sublayer is not None]
    computed = sum(cost.alone(o).us for o in products if o.kind in ("product", "attention"))
    assert uneven - even == pytest.approx(0.02 * most_of(4) * computed)
    first, last = (valued("ladder", 1, rank_spread=value) for value in (1e-9, 0.02))
    assert last - first < 0.05 * (uneven - even)


def test_while_ranks_wait_the_next_product_of_tiles_is_launched() -> None:
    """It has no room beside the product before it. A product of one row has: nothing is gained."""
    machine = load("h200x4")
    config = replace(model_config("llama-3-8b"), plan=resolve_plan("standard", 32, 4))
    for batch, hidden in ((1, 0.0), (4, machine.value("launch_us"))):
        cost = DecodeCost(config, machine, 4, "push", batch, 1024)
        operations = cost.lowered(config.plan).operations
        down = [each for each in operations if each.part == "down"][3]
        sent = operations[down.index + 1]
        waited = cost.waits[sent.index]
        push = machine.curve("all-reduce", algorithm="push").at(batch * 8192).us
        inside = push - machine.value("push_kernel_us")
        taken = cost.alone(down).us + inside + waited - hidden
        assert cost(down) + cost(sent) == pytest.approx(taken)


@pytest.mark.parametrize("name", ["h200x2", "h200x4", "h200x8", "h200x4-no-p2p"])
def test_one_gpu_of_several_decodes_as_one(name: str) -> None:
    config = model_config("llama-3-8b")
    alone, several = (
        phases.decode(config, machine, 1, "push", 4, 1024).us
        for machine in (load("h200x1"), nodes.load(name))
    )
    assert several == pytest.approx(alone, rel=0.01)  # of their copies' rates


@pytest.mark.parametrize(
    ("model", "part", "batch", "blocks"),
    [
        ("llama-3.2-1b", "down", 16, 64),  # 32 of 2048 outputs each: half of the multiprocessors
        ("llama-3.2-3b", "qkv", 16, 160),  # of 5120: two on the fullest
        ("llama-3-8b", "down", 16, 128),
        ("llama-3.2-1b", "gate-up", 16, 256),  # of 8192
        ("quarter-8b", "qkv", 4, 0),  # cut for few outputs
        ("llama-3.2-1b", "down", 1, 0),  # no tiles
    ],
)
def test_the_fullest_multiprocessor_takes_longest(
    model: str, part: str, batch: int, blocks: int
) -> None:
    config = model_config(model)
    config = replace(config, plan=resolve_plan("ladder", config.num_layers, 1))
    machine = load("h200x1")
    cost = DecodeCost(config, machine, 1, "async", batch, 1024)
    operation = next(o for o in cost.lowered(config.plan).operations if o.part == part)
    most = -(-blocks // 132) * 132 / blocks if blocks else 1.0
    times = max(1.0, most / MOST_OF_SHARE)
    us = product(machine, cost.weights[part] * times, batch, "bf16").us
    assert cost.alone(operation).us == pytest.approx(cost.stretch * us)
    assert (times > 1) == (blocks in (64, 160))
    former = replace(machine, curves=of_one_size().curves)
    cost = DecodeCost(config, former, 1, "async", batch, 1024)
    us = product(former, cost.weights[part], batch, "bf16").us
    assert cost.alone(operation).us == pytest.approx(cost.stretch * us), "curves of one size"


def of_one_size() -> Machine:
    """Its products of more rows than one, and its attention, were measured at one size alone."""
    found = with_older_kernels(load("h200x4"))
    assert found is not None
    return found


def test_a_step_stretches_with_its_kernels() -> None:
    """A longer context is as many more bytes for attention, and stretched as products are."""
    machine = of_one_size()
    shape = replace(model_config("llama-3-8b"), plan=resolve_plan("none", 32, 4), tp_degree=4)
    one, four = (
        phases.decode(shape, machine, 4, "push", 64, context).us for context in (1100, 4400)
    )
    curve = machine.family("attention")[0]
    more = machine.value("step_stretch") * (curve.at(4 * 128).us - curve.at(128).us)
    assert four - one == pytest.approx(32 * more)


def test_more_sequences_are_fitted_to_the_model_without_communication() -> None:
    """Both recorded steps of it are explained, and nothing else of the file is read."""
    machine = calibrated(load("h200x4"), FILE)
    found = [each for each in scores([FILE], machine, "decode") if each.calibrated]
    assert sorted(each.point.batch for each in found) == [1, 64]
    for each in found:
        assert each.predicted == pytest.approx(each.measured, rel=1e-3)


def test_two_sequences_take_a_third_of_what_four_take_more() -> None:
    """Between one sequence and the fewest that were fitted, as everywhere between points."""
    machine = of_one_size()
    one, two, four = (product(machine, 2e7, batch, "bf16").us for batch in (1, 2, 4))
    assert two - one == pytest.approx((four - one) / 3)
    assert four > one


def test_rows_between_those_that_were_fitted_follow_what_was_measured() -> None:
    """Of one size: with 64 alone fitted, 4 do not take a 20th of what 64 do."""
    machine = of_one_size()
    fitted = Curve("more rows", {}, ((64.0, 1.1),), "fitted: a test")
    curves = tuple(each for each in machine.curves if each.name != "more rows")
    machine = replace(machine, curves=(*curves, fitted))

    def more(batch: int) -> float:
        one, found = (product(machine, 2e7, rows, "bf16").us for rows in (1, batch))
        return found - one

    assert more(64) == pytest.approx(1.1)
    assert 2.0 < more(4) < 3.5


def test_products_of_more_rows_take_what_was_measured_of_their_size() -> None:
    """And besides what recorded steps of so many sequences ask for."""
    machine = load("h200x4")
    rows = Curve("product", {"rows": 64}, ((1e6, 2.0), (1e9, 260.0)), "measured")
    kept = [
        each
        for each in machine.curves
        if each.where.get("rows") in (None, 1) and each.name != "more rows"
    ]
    more = replace(machine, curves=(*kept, rows))
    shape = replace(model_config("llama-3-8b"), plan=resolve_plan("none", 32, 4), tp_degree=4)
    cost = DecodeCost(shape, more, 4, "push", 64, 1024)
    nbytes = cost.weights["down"]
    found = next(each for each in cost.lowered(shape.plan).operations if each.part == "down")
    alone = more.value("step_stretch") * (2 + 258 * (nbytes - 1e6) / (1e9 - 1e6))
    assert cost(found) == pytest.approx(alone)
    longer = calibrated(more, FILE)
    (points,) = (each.points for each in longer.family("more rows"))
    assert 64.0 in dict(points)
    for each in scores([FILE], longer, "decode"):
        if each.calibrated and each.point.batch == 64:
            assert each.predicted == pytest.approx(each.measured, rel=2e-2)  # of several records
