"""Operations and times of prompts: counts by the plan's schedule, closed forms and properties."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from ladder.config import model_config
from ladder.costs import prefill_flops
from ladder.models import ModelConfig, Plan, Ranks, UserError, resolve_plan
from ladder.parallel.refusals import sharded_refusal
from ladder.perf import phases
from ladder.perf.cost_prefill import PromptCost
from ladder.perf.graph import MAIN, SIDE
from ladder.perf.lower_prefill import Way, prefill
from ladder.perf.machine import Curve, Machine, Value
from ladder.perf.machine_files import load
from ladder.perf.power import power_share
from ladder.perf.simulate import simulate
from tests.samples import FUSED_PLANS, random_plan

PLANS = {name: resolve_plan(each, 4, 4) for name, each in FUSED_PLANS.items()}
PLANS |= {f"random {seed}": random_plan(random.Random(seed), 1 + seed % 6) for seed in range(20)}
WHOLE = [Way(4), Way(4, "", "two-shot", "push")]
SHARDED = [Way(4, "direct"), Way(4, "copy")]
PATHS = [
    (name, way)
    for name, plan in PLANS.items()
    for way in (WHOLE if sharded_refusal(plan, Ranks(4)) else WHOLE + SHARDED)
]


def model(plan: str | Plan, layers: int = 32) -> ModelConfig:
    found = resolve_plan(plan, layers, 4) if isinstance(plan, str) else plan
    shape = replace(model_config("llama-3-8b"), plan=resolve_plan("standard", 32, 1))
    return replace(
        shape, num_layers=layers, plan=found, tp_degree=4 if found.depends_on_tp else None
    )


@pytest.mark.parametrize(("name", "way"), PATHS, ids=str)
def test_a_prefill_sums_what_the_plan_sums(name: str, way: Way) -> None:
    """Each output's sum starts once and lands where the plan says; nothing waits for itself."""
    plan = PLANS[name]
    graph = prefill(plan, way)
    reduced = [n for n, each in enumerate(plan.sublayers) if each.reduce != "none"]
    assert [each.output for each in graph.reduces] == reduced
    assert graph.launches["attention"] == plan.num_layers
    assert simulate(graph, lambda each: 1.0).total >= 3 * plan.num_layers
    few = [each.sublayer for each in graph.operations if each.few and each.sublayer is not None]
    assert min(few) == plan.last_attention


@pytest.mark.parametrize("name", ["standard", "ladder", "hybrid"])
def test_what_does_not_block_is_on_the_side_stream(name: str) -> None:
    plan = PLANS[name]
    graph = prefill(plan, Way(4, "copy"))
    scatters = {each.output: each.stream for each in graph.reduces if each.kind == "barrier"}
    for n, stream in scatters.items():
        assert stream == (MAIN if plan.blocking[n] else SIDE)


@pytest.mark.parametrize(("compute", "reduce"), [(10.0, 4.0), (4.0, 10.0)])
def test_closed_forms(compute: float, reduce: float) -> None:
    """15 sublayers of all tokens; the last MLP, and what follows, takes nothing here."""

    def cost(each: object) -> float:
        if each.few:  # type: ignore[attr-defined]
            return 0.0
        if each.part in ("output", "down") or each.kind == "attention":  # type: ignore[attr-defined]
            return compute / (2 if each.kind == "attention" else 1)  # type: ignore[attr-defined]
        return reduce if each.output is not None else 0.0  # type: ignore[attr-defined]

    def products(name: str) -> float:
        return simulate(prefill(resolve_plan(name, 8, 4), Way(4)), cost).total

    alone = products("none")
    assert alone == pytest.approx(14 * compute + 8 * compute / 2)
    assert products("standard") == pytest.approx(alone + 14 * reduce)
    assert alone <= products("ladder") <= alone + 14 * max(0, reduce - compute) + reduce


@pytest.mark.parametrize("reducer", ["push", "async"])
@pytest.mark.parametrize("plan", ["standard", "ladder", "desync-4x", "dtp-1", "accumulate-4x-lag2"])
@pytest.mark.parametrize("batch", [1, 16])
def test_no_prefill_is_below_its_floor(plan: str, reducer: str, batch: int) -> None:
    machine, config = load("h200x4"), model(plan)
    found = phases.prefill(config, machine, 4, reducer, batch, 1024)
    floor = prefill_flops(config, 4, batch, 1024) / machine.value("matrix_tflop_s") / 1e6
    assert found.us > floor
    assert sum(us for _, us in found.limits) == pytest.approx(found.us)
    assert 0 <= found.exposed_us < found.us
    assert found.collectives == config.plan.collectives


def slower(machine: Machine, name: str, factor: float) -> Machine:
    curves = tuple(
        replace(each, points=tuple((x, factor * us) for x, us in each.points))
        if each.name == name
        else each
        for each in machine.curves
    )
    return replace(machine, curves=curves)


@pytest.mark.parametrize("plan", ["standard", "ladder", "hybrid", "desync-2x"])
def test_slower_links_and_memory_never_make_a_prefill_faster(plan: str) -> None:
    """But for 1 %, by what they then run beside. Without the power limit, under which waiting makes
    what follows faster, and with products that copies do not slow."""
    machine, config = load("h200x4"), model(plan)
    one = dict.fromkeys(("power_limit", "product_beside_copies"), Value(1.0, "declared"))
    free = machine.values | one
    machine = replace(machine, values=free)
    for reducer, batch in (("push", 1), ("push", 4), ("async", 4)):
        now = phases.prefill(config, machine, 4, reducer, batch, 1024).us
        for name in ("all-reduce", "peer copy")[: 1 if batch == 1 else 2]:  # small ones: no copies
            later = phases.prefill(config, slower(machine, name, 3), 4, reducer, batch, 1024)
            assert later.us >= 0.99 * now
        half = replace(machine, values={**machine.values, "copy_tb_s": Value(2.0, "declared")})
        assert phases.prefill(config, half, 4, reducer, batch, 1024).us > now


def test_one_rank_reduces_nothing_and_takes_longer() -> None:
    config = model("standard")
    one = phases.prefill(config, load("h200x4"), 1, "push", 1, 1024)
    two = phases.prefill(config, load("h200x4"), 2, "push", 1, 1024)
    assert (one.collectives, one.exposed_us) == (0, 0.0)
    assert not [each for each in one.graph.operations if each.kind == "all-reduce"]
    assert one.us > 1.2 * two.us


def test_products_beside_a_collective_are_slower() -> None:
    """With NCCL the ladder's products lose what the machine says; without that it is faster."""
    machine, config = load("h200x4"), model("ladder")
    alone = {"product_beside_nccl": 1.0, "nccl_beside_product": 1.0}
    values = {name: Value(value, "declared") for name, value in alone.items()}
    free = replace(machine, values={**machine.values, **values})
    now = phases.prefill(config, machine, 4, "async", 16, 1024).us
    assert phases.prefill(config, free, 4, "async", 16, 1024).us < 0.95 * now


def test_the_power_limit() -> None:
    """No limit takes nothing; a long pass has the cube root of the limit, a short one more."""
    free, limited, idle = (
        Machine("m", "a GPU", 1, {name: Value(value, "") for name, value in values.items()})
        for values in ({}, {"power_limit": 0.512}, {"power_limit": 0.512, "idle_power": 0.024})
    )
    assert power_share(free, 10.0, 1e5, 1e5) == 1.0
    assert power_share(limited, 10.0, 1e9, 1e9) == pytest.approx(0.8, abs=1e-3)
    assert power_share(limited, 10.0, 1e4, 1e4) > 0.85
    assert power_share(limited, 10.0, 5e8, 1e9) > 0.8  # half of it waits
    assert power_share(idle, 10.0, 5e8, 1e9) == 1.0


def test_products_by_weights_in_fp8_take_less_power() -> None:
    """But not in int8, whose values times their scales have all bits."""
    shares = {}
    for weights in ("bf16", "int8", "fp8", "fp8-block"):
        cost = PromptCost(model("none"), load("h200x4"), 4, 64, 1024, weights)
        cost.limit(3e5, 3e5)
        shares[weights] = cost.share
    assert shares["bf16"] == shares["int8"] < 0.9
    assert shares["fp8"] == shares["fp8-block"] > 1.05 * shares["bf16"]


def test_attention_of_few_blocks_leaves_multiprocessors_idle() -> None:
    cost = PromptCost(model("none"), load("h200x4"), 4, 1, 1024)
    more = PromptCost(model("none"), load("h200x4"), 4, 16, 1024)
    assert cost.attention(1024) > more.attention(1024) / 16


def test_products_take_what_the_curve_of_the_nearest_shape_says() -> None:
    """Gate and up of an 8B at TP 4 are 7168 x 4096: of the two, 8192 x 4096 is nearer."""
    machine, config = load("h200x4"), model("none")
    shapes = (((8192, 4096), 80.0), ((1024, 1024), 5.0))
    curves = tuple(
        Curve("matrix", {"outputs": a, "inputs": b}, ((1024.0, us), (2048.0, 2 * us)), "measured")
        for (a, b), us in shapes
    )
    more = replace(machine, curves=(*machine.curves, *curves))
    cost = PromptCost(config, more, 4, 1, 1024)
    assert cost.product("gate-up", 1024) == pytest.approx(80 * 7168 / 8192 + cost.gap)
    assert cost.product("gate-up", 2048) == pytest.approx(160 * 7168 / 8192 + cost.gap)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tp": 3}, "--tp=3"),
        ({"reducer": "ring"}, "unknown reducer of --reducers 'ring'"),
        ({"batch": 0}, "--batch=0 must be 1 or more"),
        ({"prompt": 8193}, "--context=8193 must be 1 to the model's context, 8192"),
    ],
)
def test_prompts_that_cannot_be(given: dict[str, object], said: str) -> None:
    asked = {"tp": 4, "reducer": "push", "batch": 1, "prompt": 1024} | given
    with pytest.raises(UserError, match=re.escape(said)):
        phases.prefill(model("ladder"), load("h200x4"), **asked)  # type: ignore[arg-type]


def test_a_transport_that_is_unknown_is_refused() -> None:
    with pytest.raises(UserError, match="unknown transport 'pigeon'"):
        Way(4, "pigeon")


@pytest.mark.parametrize(("batch", "transport"), [(1, "direct"), (4, "copy-kernels")])
def test_an_exchange_takes_what_was_measured(batch: int, transport: str) -> None:
    """All of one that blocks: its barriers, its landing and what moves the rows between them."""
    machine = load("h200x4")
    sized = 2.0 * 4096 * 1024 * batch
    curve = Curve("exchange", {"transport": transport}, ((sized, 321.0),), "measured: a test")
    others = [each for each in machine.curves if each.name != "exchange"]
    machine = replace(machine, curves=(*others, curve))
    config = model("standard")
    cost = PromptCost(config, machine, 4, batch, 1024)
    graph = prefill(config.plan, phases.prompt_way(
        config, config.plan, machine.gpu, 4, "push", (batch, 1024), inside=False
    ))  # fmt: skip
    kinds = ("barrier", "copies", "peers", "landing")
    landed = next(
        each for each in graph.operations
        if each.kind == "landing" and any(one.output == 2 for one in each.landings)
    )  # fmt: skip
    found = [each for each in graph.operations if each.sublayer == 2 and each.kind == "barrier"][-1]
    until = next(each.index for each in graph.operations[landed.index :] if each.kind == "product")
    one = [each for each in graph.operations[found.index : until] if each.kind in kinds]
    assert sum(cost(each) for each in one) == pytest.approx(321.0)
    assert any(each.kind in ("copies", "peers") for each in one)


def test_an_eager_prompt_takes_as_long_as_its_launches() -> None:
    """With a slow host a prompt that is too long for a CUDA graph waits for it, with reduces or
    without; one in a graph does not. What the longest path is made of adds up."""
    machine = load("h200x4")
    us = 2000.0
    slow = replace(machine, values={**machine.values, "host_launch_us": Value(us, "measured")})
    captured, eager = (
        [phases.prefill(model("ladder"), each, 4, "push", batch, 1024) for each in (machine, slow)]
        for batch in (16, 17)
    )
    assert captured[0].us == captured[1].us
    assert eager[0].us < eager[1].us == pytest.approx(us * eager[1].launches)
    assert sum(us for _, us in eager[1].limits) == pytest.approx(eager[1].us)
    assert dict(eager[1].limits)["launches"] > dict(eager[0].limits).get("launches", 0.0)
    alone = phases.prefill(model("none"), slow, 4, "push", 17, 1024)
    assert alone.exposed_us == pytest.approx(0.0)
    assert alone.us >= us * alone.launches
