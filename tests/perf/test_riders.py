"""What rode on a product of a decode step: where, how late, and beside how many thread blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ladder.config import model_config
from ladder.models import resolve_plan
from ladder.perf.cost import DecodeCost
from ladder.perf.graph import MAIN
from ladder.perf.lower_decode import WAYS
from ladder.perf.lower_riders import riding
from ladder.perf.machine_files import load
from ladder.perf.riders import Kernels, late, rides, room
from tests.samples import FUSED_PLANS, random_plan

BESIDE = Kernels("beside")
PLANS = {name: resolve_plan(each, 4, 2) for name, each in FUSED_PLANS.items()}
PLANS |= {f"random {seed}": random_plan(random.Random(seed), 1 + seed % 6) for seed in range(40)}


@pytest.mark.parametrize("name", PLANS)
def test_what_rides_needs_nothing_of_its_launch(name: str) -> None:
    """A kernel that waited for its own result would never end. Each read lands its parts once and
    in order."""
    plan = PLANS[name]
    for graph in (riding(plan, way) for way in WAYS):
        before = graph.before()
        found: list[list] = [[] for _ in plan.landings]
        for each in graph.operations:
            assert all(need < each.index for need in before[each.index])  # no cycle
            assert each.stream == MAIN or each.kind == "all-reduce"
            if each.kind == "landing":
                found[each.sublayer or 0] += each.landings
                assert each.rides not in each.needs
        assert found == [list(each) for each in plan.landings]


def test_a_ladders_layer_was_five_kernels() -> None:
    """And two landings where nothing lags."""
    for name, count in (("ladder", 5), ("none", 7)):
        few, more = (
            sum(riding(resolve_plan(name, layers, 4), "push").launches.values())
            for layers in (4, 5)
        )
        assert more - few == count


def blocks_of(
    kernels: Kernels, rows: int, outputs: int, inputs: int, gated: bool, **weight: Any
) -> tuple[int, int]:
    """How many thread blocks of a product run at once, and how many it has, with a landing of 4
    chunks."""
    shape = rows, outputs, inputs, gated
    own = rides(kernels, False, 4, *shape, **weight).own
    return room(kernels, *shape, **weight), -(-outputs // own)


def test_what_rides_on_tiles_runs_when_they_leave_room() -> None:
    """64 rows of 4096 are 256 thread blocks of a landing, beside 128 of a product that has a
    multiprocessor each: 4 run at a time, and as the product ends 132. Inside of the tiles, two
    chunks at once, it waits for a part of the time in which the memory brings the first weights;
    beside larger tiles, 16 rows end before these."""
    assert blocks_of(BESIDE, 64, 4096, 3584, False) == (132, 128)
    config = replace(model_config("llama-3-8b"), plan=resolve_plan("ladder", 32, 4))
    machine = load("h200x4")
    early = 2 * 2 * 128 * 4096 / (1e6 * machine.value("copy_tb_s"))  # two steps of 128 columns
    behind = Kernels("behind")
    for batch, kernels, found in (
        (4, BESIDE, 0.0), (16, BESIDE, 0.0), (16, behind, 1.2), (64, behind, 2 * 1.2),
        (64, BESIDE, 1.2 - early),
    ):  # fmt: skip
        cost = DecodeCost(config, machine, 4, "push", batch, 1024, kernels=kernels)
        operations = cost.lowered(config.plan).operations
        down = next(o for o in operations if o.part == "down")
        rider = next(o for o in operations if o.rides == down.index)
        assert late(cost, rider, down) == pytest.approx(found)


def test_sends_one_after_the_other_may_outlast_their_product() -> None:
    """16 programs beside gate and up have 4 of 64 rows each."""
    config = replace(model_config("llama-3-8b"), plan=resolve_plan("ladder", 32, 4))
    cost = DecodeCost(config, load("h200x4"), 4, "push", 64, 1024, kernels=BESIDE)
    operations = cost.lowered(config.plan).operations
    product = next(o for o in operations if o.part == "gate-up")
    rider = next(o for o in operations if o.rides == product.index)
    assert rider.kind == "send"
    assert late(cost, rider, product) == 0.0
    cost.small = 5.0
    assert late(cost, rider, product) == pytest.approx(20.0 - cost.alone(product).us)


@pytest.mark.parametrize(
    ("sends", "rows", "outputs", "stored", "found"),
    [
        (True, 16, 4096, "bf16", (1, 0)), (True, 8, 4096, "bf16", (1, 32)),
        (True, 17, 4096, "bf16", (1, 68)), (True, 16, 1024, "bf16", (1, 64)),  # 64 tiles
        (True, 16, 4096, "fp8", (1, 64)), (False, 64, 4096, "bf16", (2, 0)),
        (False, 33, 4096, "bf16", (1, 132)), (False, 48, 1536, "bf16", (2, 0)),
        (False, 49, 1536, "bf16", (1, 196)), (False, 64, 1520, "bf16", (1, 256)),
    ],
)  # fmt: skip
def test_where_riders_rode_before(
    sends: bool, rows: int, outputs: int, stored: str, found: tuple[int, int]
) -> None:
    """In the kernels of 41aaacd, where some were inside of tiles, and in those where none was."""
    shape = sends, 4, rows, outputs, 4096, False, stored, False
    assert rides(Kernels("inside"), *shape)[:2] == found
    assert rides(Kernels("behind"), *shape)[:2] == (1, 4 * rows)


def test_thread_blocks_of_other_kernels() -> None:
    """Gate and up of an 8B's rank are 3584 rows: by 28 and, as they were, by 32. In fp8 gate and up
    have 6 stages of 24 KiB of weights and x; O of 4 rows had no tiles, and room for what rides. QKV
    of 4 rows had tiles of 32 of its rows, now of 16."""
    gate = 16, 3584, 4096, True
    assert blocks_of(Kernels("behind"), *gate) == (132, 128)
    assert blocks_of(Kernels("behind", even=False), *gate) == (132, 112)
    assert blocks_of(Kernels("behind"), *gate, stored="fp8", pieces=True) == (132, 128)
    qkv = 16, 1536, 4096, False
    assert blocks_of(Kernels("behind"), *qkv, stored="fp8", pieces=True) == (132, 48)
    o = 4, 4096, 1024, False
    then = Kernels("behind", long=False)
    at_once, found = blocks_of(then, *o, stored="fp8")
    assert at_once == 132 + found
    assert blocks_of(BESIDE, *o, stored="fp8") == (396, 128)  # of 64 KiB
    qkv = 4, 1536, 4096, False
    assert (blocks_of(then, *qkv), blocks_of(BESIDE, *qkv)) == ((132, 48), (132, 96))
