"""Times of training steps: closed forms, floors, and what a layout changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.config import model_config
from ladder.costs import training_flops_per_token
from ladder.models import ModelConfig, UserError, resolve_plan
from ladder.perf import training_phase
from ladder.perf.cost_training import ADAMW, TrainingCost
from ladder.perf.graph import COMM, forward, training
from ladder.perf.machine import Machine, Value
from ladder.perf.machine_files import load
from ladder.perf.simulate import simulate

SEQ = 4096


def model(plan: str, degree: int = 4, layers: int = 8) -> ModelConfig:
    found = resolve_plan(plan, layers, degree)
    shape = replace(model_config("llama-3-8b"), plan=resolve_plan("standard", 32, 1))
    tp_degree = degree if found.depends_on_tp else None
    return replace(shape, num_layers=layers, plan=found, tp_degree=tp_degree)


def step(plan: str, layout: str, machine: Machine | None = None, **more: int) -> float:
    options = {"batch": 1, "micro_batch": 0} | more
    config = model(plan, options.pop("degree", 4))
    found = training_phase.train(config, machine or load("h200x4"), layout, SEQ, **options)  # type: ignore[arg-type]
    assert sum(us for _, us in found.limits) == pytest.approx(found.us)
    return found.us


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp4", "tp4+sp", "tp2+fsdp", "hsdp2"])
def test_no_step_is_below_its_floor(layout: str) -> None:
    machine, config = load("h200x4"), model("standard")
    flops = training_flops_per_token(config, SEQ) * SEQ
    gpus = 4 if layout.startswith("tp4") else 2 if layout.startswith("tp2") else 1
    floor = flops / gpus / machine.value("matrix_tflop_s") / 1e6
    assert floor < step("standard", layout) < 3 * floor


def test_the_layers_of_a_ladder_hide_what_standard_waits_for() -> None:
    for layout in ("tp4", "tp4+sp"):
        machine = load("h200x4")
        waits = training_phase.train(model("standard"), machine, layout, SEQ, 1)
        hides = training_phase.train(model("ladder"), machine, layout, SEQ, 1)
        assert waits.us > hides.us
        assert waits.exposed_us > hides.exposed_us > 0
        assert waits.collectives == hides.collectives == 16


def test_without_reduces_all_plans_are_alike() -> None:
    machine = load("h200x4")
    found = {
        plan: training_phase.train(model(plan), machine, "tp4", SEQ, 1, no_comm=True)
        for plan in ("standard", "ladder")
    }
    assert found["ladder"].us == pytest.approx(found["standard"].us, rel=0.02)
    assert found["standard"].exposed_us == pytest.approx(0.0, abs=1.0)


def test_one_process_communicates_nothing() -> None:
    found = training_phase.train(model("standard"), load("h200x4"), "ddp", SEQ, 1, gpus=1)
    kinds = {each.kind for each in found.graph.operations}
    assert not kinds & {"all-reduce", "all-gather", "reduce-scatter"}
    assert COMM not in {each.stream for each in found.graph.operations}


def test_micro_batches_add_up() -> None:
    """Two of one sequence take twice what one does, but for one optimiser, one reduce of gradients,
    and the gradients that are added."""
    one = training_phase.train(model("standard"), load("h200x4"), "ddp", SEQ, 1)
    two = step("standard", "ddp", batch=2, micro_batch=1)
    machine, config = load("h200x4"), model("standard")
    shape = training_phase.training_shape(config, 4, "ddp", 1, SEQ, "none")
    cost = TrainingCost(config, machine, shape, False, False)
    adamw = cost(training(config.plan, "alone").operations[-1])
    assert two == pytest.approx(2 * one.us - adamw - one.exposed_us, rel=0.05)
    moved = (ADAMW + machine.value("training_bytes")) * cost.parameters
    assert adamw == pytest.approx(moved / cost.memory, rel=0.01)


def test_recomputing_takes_another_forward_pass() -> None:
    machine, config = load("h200x4"), model("standard")
    kept = training_phase.train(config, machine, "ddp", SEQ, 1)
    full = training_phase.train(config, machine, "ddp", SEQ, 1, activation_checkpointing="full")
    assert 1.15 < full.us / kept.us < 1.35


def test_virtual_ranks_move_more() -> None:
    """Four ranks in a process have four residuals to land and to keep apart."""
    config = model("desync-4x")
    found = training_phase.train(config, load("h200x4"), "ddp", SEQ, 1)
    one = training_phase.train(model("standard"), load("h200x4"), "ddp", SEQ, 1)
    assert dict(found.limits)["landings"] > 2 * dict(one.limits)["landings"]


def test_virtual_ranks_share_their_process_part_of_the_vocabulary() -> None:
    """Head and loss are those of a process, whatever ranks of T it holds."""
    machine, found = load("h200x4"), []
    for plan in ("standard", "desync-4x"):
        config = model(plan)
        shape = training_phase.training_shape(config, 1, "ddp", 1, SEQ, "none")
        cost = TrainingCost(config, machine, shape, False, False)
        graph = training(config.plan, "alone")
        found.append([cost(each) for each in graph.operations if each.kind in ("head", "loss")])
    assert found[0] == pytest.approx(found[1])
    assert len(found[0]) == 3


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "tp4", "tp4+sp"])
def test_slower_links_never_make_a_step_faster(layout: str) -> None:
    machine = load("h200x4")
    machine = replace(machine, values={**machine.values, "power_limit": Value(1.0, "declared")})
    slow = replace(
        machine,
        curves=tuple(
            replace(each, points=tuple((x, 3 * us) for x, us in each.points))
            if each.name == "all-reduce"
            else each
            for each in machine.curves
        ),
    )
    for plan in ("standard", "ladder", "hybrid"):
        assert step(plan, layout, slow) > step(plan, layout, machine)


def test_half_a_reduce_where_its_own_curve_is_missing() -> None:
    machine, config = load("h200x4"), model("standard")
    shape = training_phase.training_shape(config, 4, "tp4+sp", 1, SEQ, "none")
    cost = TrainingCost(config, machine, shape, False, False)
    graph = forward(config.plan, "sharded")
    (scatter, *_) = graph.of("reduce-scatter")
    nbytes = 2 * SEQ * config.hidden_size
    whole = machine.curve("all-reduce", algorithm="nccl").at(nbytes).us
    assert cost(scatter) == pytest.approx(whole / 2 + cost.gap)
    half = machine.curve("all-reduce", algorithm="nccl")
    own = replace(half, name="reduce-scatter", points=((1.0, 5.0), (1e9, 5.0)))
    more = replace(machine, curves=(*machine.curves, own))
    assert TrainingCost(config, more, shape, False, False)(scatter) == pytest.approx(5 + cost.gap)


def test_backward_is_the_forward_in_reverse() -> None:
    """Twice the products and as many reduces: standard's step of 10 and 4 without the rest."""
    plan = resolve_plan("standard", 4, 4)

    def cost(each: object) -> float:
        if each.kind == "product":  # type: ignore[attr-defined]
            return 20.0 if each.backward else 10.0  # type: ignore[attr-defined]
        return 4.0 if each.kind == "all-reduce" and each.output is not None else 0.0  # type: ignore[attr-defined]

    assert simulate(training(plan), cost).total == pytest.approx(16 * 30 + 2 * 8 * 4)


@pytest.mark.parametrize(
    ("layout", "plan", "said"),
    [
        ("tp3", "standard", "tp"),
        ("hsdp3", "standard", "3 shards do not divide 4 replicas"),
        ("tp4+sp", "desync-2x", "--layouts tp4\\+sp with plan 'desync-2x'"),
        ("tp8", "standard", "8 does not divide the 4 GPUs"),
    ],
)
def test_layouts_that_cannot_be(layout: str, plan: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        step(plan, layout)
    with pytest.raises(UserError, match="--micro-batch=2 does not divide --batch=3"):
        step("standard", "ddp", batch=3, micro_batch=2)
    with pytest.raises(UserError, match="--batch=0 must be 1 or more"):
        step("standard", "ddp", batch=0)
    with pytest.raises(UserError, match="--context=8193 must be 1 to the model's context, 8192"):
        training_phase.train(model("standard"), load("h200x4"), "ddp", 8193, 1)
