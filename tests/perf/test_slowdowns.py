"""How fast operations are beside others: what a machine's file has, or else what is declared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ladder.cli import main
from ladder.config import model_config
from ladder.models.config import ModelConfig
from ladder.models.presets import resolve_plan
from ladder.perf import phases
from ladder.perf.graph import Operation
from ladder.perf.machine import DECLARED, SPEEDS, TURNS, Curve, Machine, Value
from ladder.perf.machine_files import load, write
from ladder.perf.slowdowns import Slowdowns

MEASURED = {
    "product_beside_nccl": 0.9,
    "nccl_beside_product": 0.8,
    "product_beside_push": 0.7,
    "push_beside_product": 0.6,
    "product_beside_copies": 0.5,
    "copies_beside_product": 0.4,
}


def with_slowdowns(machine: Machine, values: dict[str, float]) -> Machine:
    new = {name: Value(value, "measured: here") for name, value in values.items()}
    return replace(machine, values={**machine.values, **new})


def ladder() -> ModelConfig:
    shape = model_config("llama-3-8b")
    return replace(shape, plan=resolve_plan("ladder", shape.num_layers, 4))


@pytest.mark.parametrize(
    ("one", "two", "speed"),
    [
        ("all", "nccl", 0.9),
        ("nccl", "all", 0.8),
        ("all", "push", 0.7),
        ("push", "all", 0.6),
        ("all", "all", 0.5),
        ("nccl", "push", 0.5),
        ("all", "wait", 1.0),
        ("link", "nccl", 1.0),
    ],
)
def test_a_speed_is_that_of_the_pair(one: str, two: str, speed: float) -> None:
    found = Slowdowns(with_slowdowns(Machine("m", "a GPU", 2, {}), MEASURED))
    assert found.together(one, two) == speed
    assert found.unmeasured == ()


def test_an_operation_takes_what_its_algorithm_does() -> None:
    for algorithm, taken in (
        ("nccl", "nccl"),
        ("", "nccl"),
        ("push", "push"),
        ("two-shot", "push"),
    ):
        assert Operation(0, "all-reduce", "main", (), algorithm=algorithm).resource == taken
    assert Operation(0, "product", "main", ()).resource == "all"
    assert Operation(0, "peers", "side", ()).resource == "direct"


def test_landings_over_links_are_as_all_reduces_where_nobody_measured_them() -> None:
    known = Machine("m", "a GPU", 2, {"product_beside_push": Value(0.5, "measured: here")})
    own = with_slowdowns(known, {"product_beside_direct": 0.9, "direct_beside_product": 0.6})
    for machine, product, landing in ((known, 0.5, 0.75), (own, 0.9, 0.6)):
        found = Slowdowns(machine)
        assert found.together("all", "direct") == product
        assert found.together("direct", "all") == landing


def test_what_is_read_and_was_not_measured_is_named() -> None:
    by_hand = {"product_beside_nccl": Value(0.6, "measured by hand: a sketch")}
    found = Slowdowns(Machine("m", "a GPU", 2, by_hand))
    assert found.unmeasured == ()  # nothing was read
    found.together("all", "nccl")
    found.together("push", "all")
    declared = DECLARED["push_beside_product"]
    assert found.unmeasured == (
        "product_beside_nccl 0.6 (measured by hand)",
        f"push_beside_product {declared:g} (declared)",
    )


def test_decode_steps_take_their_own_curves() -> None:
    """At 64 rows of 4096 the message has 512 KiB: the speeds are those of the curves there."""
    points = ((8192.0, 1.0), (2.0**19, 0.5))
    curves = tuple(Curve(name, {}, points, "measured: here") for name in SPEEDS)
    plain = load("h200x4")
    machine = replace(plain, curves=(*plain.curves, *curves))
    declared, found = (
        phases.decode(ladder(), each, 4, "async", 64, 1024) for each in (plain, machine)
    )
    assert found.unmeasured == ()
    assert len(declared.unmeasured) == 2
    assert found.us > declared.us  # 0.5 of the speed, for 0.64 and 0.75
    full = tuple(replace(each, points=((8192.0, 1.2),)) for each in curves)
    fast = phases.decode(
        ladder(), replace(plain, curves=(*plain.curves, *full)), 4, "async", 64, 1024
    )
    assert fast.us < declared.us
    assert Slowdowns(replace(plain, curves=full)).curve(SPEEDS[0], 1.0) == 1.0  # and no more


def test_changes_of_streams_take_what_was_measured() -> None:
    """What an all-reduce adds to a step that waits for it, or that hides it: each of the 64 as much
    more; or at each of a ladder's 63 landings of sums, one after another, what is beyond the other
    stream's kernels. Of the latter, products lose 4 us of 10 beside it, which is no change of
    streams."""
    plain = load("h200x4")
    curves = tuple(each for each in plain.curves if str(each) != "all-reduce (algorithm=nccl)")
    curves += (Curve("all-reduce", {"algorithm": "nccl"}, ((8.0, 10.0),), "measured: here"),)
    curves += tuple(
        Curve(name, {}, ((8.0, speed),), "measured: here")
        for name, speed in zip(SPEEDS, (0.6, 1.0), strict=True)
    )

    def step(plan: str, added: float) -> float:
        shape = replace(model_config("llama-3-8b"), plan=resolve_plan(plan, 32, 4))
        turns = tuple(Curve(name, {}, ((8.0, added),), "measured: here") for name in TURNS)
        found = phases.decode(shape, replace(plain, curves=(*curves, *turns)), 4, "async", 16, 1024)
        return found.us

    assert step("standard", 15.0) - step("standard", 10.0) == pytest.approx(64 * 5.0)
    assert step("standard", 10.0) == step("standard", 6.0)  # no less than its own time
    assert 0.0 < step("ladder", 9.0) - step("ladder", 4.0) < 63 * 5.0
    assert step("ladder", 109.0) - step("ladder", 104.0) == pytest.approx(63 * 5.0)
    assert step("ladder", 4.0) == step("ladder", 3.0)


@pytest.mark.parametrize(("reducer", "name"), [("async", "nccl"), ("push", "copies")])
def test_prompts_are_slower_where_more_is_lost(reducer: str, name: str) -> None:
    plain = load("h200x4")
    for each in (f"product_beside_{name}", f"{name}_beside_product"):
        fast, slow = (
            phases.prefill(ladder(), with_slowdowns(plain, {each: speed}), 4, reducer, 16, 1024)
            for speed in (1.0, 0.3)
        )
        assert slow.us > 1.01 * fast.us
        assert not any(said.startswith(each) for said in fast.unmeasured)


def test_predict_says_which_slowdowns_are_declared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "llama-3-8b", "--prefill", "--plans", "ladder", "--tp", "4", "--reducers"]
    assert main([*words, "async"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Not measured by `ladder bench machine`, as shares of the speed alone: " in said
    assert "alone: nccl_beside_product 0.75 (declared), product_beside_nccl" in said
    assert main([*words, "async", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["unmeasured"][0] == "nccl_beside_product 0.75 (declared)"
    path = tmp_path / "m.json"
    write(with_slowdowns(load("h200x4"), MEASURED), path)
    assert main([*words, "async", "--machine", str(path)]) == 0
    assert "Not measured by" not in " ".join(capsys.readouterr().out.split())
