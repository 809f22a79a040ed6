"""`ladder bench inference` as far as a CPU goes: its options, its points, what fits in memory."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml

from ladder.bench.inference import measure
from ladder.bench.inference.build import build_model
from ladder.bench.inference.memory import point_bytes
from ladder.bench.inference.points import (
    InferencePoint,
    Settings,
    counterpart,
    expand,
    load_option_sets,
    resolve,
)
from ladder.checkpoint import write_config
from ladder.cli import main
from ladder.costs import WORKSPACES
from ladder.models import UserError, resolve_plan
from ladder.models.quantised import held_as
from tests import ROOT
from tests.bench.records import POINT

CPU = torch.device("cpu")
SUITES = sorted(path.stem for path in (ROOT / "configs" / "bench").glob("*.yaml"))


def anything(reducer: str, tp: int) -> None:
    """No reducer is refused."""


# ---- options and points ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch", "0"], ["--batch=0", "1 or more"]),
        (["--prompt", "0"], ["--prompt=0"]),
        (["--new-tokens", "1"], ["--new-tokens=1", "2 or more"]),
        (["--tp", "0"], ["--tp=0"]),
        (["--tp", "3"], ["--tp=3", "num_heads=32"]),
        (["--layers", "-1"], ["--layers=-1"]),
        (["--layers", "33"], ["--layers=33"]),
        (["--tp-degree", "-2"], ["--tp-degree=-2"]),
        (["--prompt", "8000"], ["--prompt=8000", "--new-tokens=512", "8192"]),
        (["--model", "llama-9"], ["'llama-9'", "llama-3-8b"]),
        (["--plans", "laddder"], ["'laddder'", "'ladder'"]),
        (["--plans", "checkpoint"], ["--plans checkpoint", "--model=FOLDER"]),
        (["--reducers", "pull"], ["'pull'", "push"]),
        (["--suite", "table9"], ["'table9'", "table1"]),
        (["--suite", "table1", "--new-tokens", "1"], ["--new-tokens=1", "set 1 of suite 'table1'"]),
        (["--budget", "0"], ["--budget=0"]),
        (["--cold", "--profile"], ["--profile", "--cold"]),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "inference", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "inference", "--out", str(tmp_path / "new")]) == 2
    assert "GPU" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_set_is_every_combination() -> None:
    settings = Settings.from_dict(
        {"model": "tiny", "plans": ["standard", "ladder"], "tp": [4, 2, 8, 3], "batch": [1, 2],
         "prompt": 8, "new_tokens": 4, "p2p": [True]} | {"tp": [4, 2, 8]}
    )  # fmt: skip
    cases, left_out = expand([settings], 4, True, anything)
    assert [(case[0].tp, case[0].batch) for case in cases] == [(4, 1), (4, 2), (2, 1), (2, 2)]
    assert left_out == ["tiny at TP 8: there are 4 ranks"]
    assert [(p.plan, p.reducer, p.no_comm) for p in cases[0]] == [
        ("standard", "push", False),
        ("standard", "async", False),
        ("none", "push", False),  # standard without its reduces
        ("ladder", "push", False),
        ("ladder", "async", False),
        ("ladder", "push", True),
    ]
    assert expand([settings], 4, False, anything) == ([], [])
    # the same set twice is measured once
    assert expand([settings, settings], 4, True, anything)[0] == cases


def test_one_process_has_one_reducer_and_nothing_to_drop() -> None:
    settings = Settings("tiny", plans=("ladder", "desync-2x"), tp=(1,), prompt=8, new_tokens=4)
    ((*points,),), _ = expand([settings], 2, True, anything)
    assert [(p.plan, p.reducer) for p in points] == [("ladder", "async"), ("desync-2x", "async")]


def test_plans_whose_reduces_cannot_be_rounded_are_left_out() -> None:
    settings = Settings("tiny", plans=("desync-2x", "ladder"), reducers=("async", "async-fp8"),
                        prompt=8, new_tokens=4)  # fmt: skip
    (points,), left_out = expand([settings], 4, True, anything)
    assert [line.partition(":")[0] for line in left_out] == ["desync-2x at TP 4, reducer async-fp8"]
    found = {(each.plan, each.reducer) for each in points if not each.no_comm}
    assert ("ladder", "async-fp8") in found
    assert ("desync-2x", "async") in found
    assert ("desync-2x", "async-fp8") not in found


def test_a_refused_reducer_is_left_out_with_the_reason() -> None:
    settings = Settings("tiny", prompt=8, new_tokens=4)

    def refusal(reducer: str, tp: int) -> str | None:
        return "P2P is off" if reducer == "push" else None

    cases, left_out = expand([settings], 4, True, refusal)
    assert left_out == ["reducer push at TP 4: P2P is off"]
    assert {point.reducer for point in cases[0]} == {"async"}
    only = replace(settings, reducers=("push",))
    assert expand([only], 4, True, refusal) == ([], left_out)


def test_virtual_ranks_are_for_plans_that_depend_on_them() -> None:
    settings = Settings("tiny", plans=("ladder", "desync-2x", "none"), tp=(2,), tp_degree=4,
                        reducers=("async",), prompt=8, new_tokens=4)  # fmt: skip
    ((*points,),), _ = expand([settings], 2, True, anything)
    degrees = {(p.plan, p.no_comm): p.degree for p in points}
    assert degrees == {
        ("ladder", False): 0,
        ("ladder", True): 0,
        ("desync-2x", False): 4,
        ("desync-2x", True): 4,  # its own computation: four residuals, which `none` has not
        ("none", False): 0,
    }
    assert resolve(points[2]).tp_degree == 4
    odd = replace(settings, tp=(4,), tp_degree=2)
    assert "does not divide tp_degree=2" in expand([odd], 4, True, anything)[1][0]


@pytest.mark.parametrize("plan", ["standard", "parallel", "ladder", "desync-4x", "dtp-1", "hybrid"])
def test_a_plan_without_reduces_keeps_its_own_lags(plan: str) -> None:
    whole = resolve_plan(plan, 4, 2)
    bare = whole.as_no_comm()
    assert bare.collectives == 0
    assert bare.no_comm
    for sublayer, other in zip(whole.sublayers, bare.sublayers, strict=True):
        assert (other.kind, other.own_lag, other.own_scale) == (
            sublayer.kind,
            sublayer.own_lag,
            sublayer.own_scale,
        )
        assert other.reduce == "none"
    point = InferencePoint("tiny", plan, "async", 2, 1, 8, 4, 4)
    with pytest.raises(UserError, match="for benchmarks"):
        resolve(replace(point, no_comm=True)).refuse_no_comm()
    found = counterpart(point, "push")
    expected = replace(point, reducer="push")
    if plan in ("standard", "desync-4x"):
        assert found == replace(expected, plan="none")
    else:
        assert found == replace(expected, no_comm=True)
    # it lands early where the plan does
    if plan == "ladder":
        assert bare.early == whole.early


def test_points_say_how_weights_are_stored(tmp_path: Path) -> None:
    """They are cases of their own; records without the key are of bf16."""
    each = Settings.from_dict({"model": "tiny", "weights": "fp8", "prompt": 8, "new_tokens": 4})
    (case,), _ = expand([each], 1, True, anything)
    assert {point.weights for point in case} == {"fp8"}
    assert "4 new tokens, fp8 weights" in str(case[0])
    old = asdict(replace(case[0], weights="bf16"))
    del old["weights"]
    assert InferencePoint(**old).case != case[0].case
    model = build_model(case[0], resolve(case[0]), "async", CPU)
    assert held_as(model) == "fp8"
    with pytest.raises(UserError, match="unknown type of --weights 'fp4'"):
        Settings(weights="fp4")
    with pytest.raises(UserError, match="unknown type of --cache 'int8'"):
        Settings(cache="int8")
    assert "4 new tokens, fp8 cache" in str(replace(case[0], weights="bf16", cache="fp8"))
    with pytest.raises(UserError, match="--activations=fp8 with --weights=bf16: products in fp8"):
        Settings(activations="fp8")
    write_config(tmp_path, resolve(case[0]), None, weights="int8")
    with pytest.raises(UserError, match=r"--weights=fp8: .* holds int8 weights; give --weights in"):
        Settings(str(tmp_path), prompt=8, new_tokens=4, weights="fp8")


@pytest.mark.parametrize("name", SUITES)
def test_suites_resolve(name: str) -> None:
    settings = load_option_sets(name)
    points = []
    for p2p in (True, False):
        for ranks in (1, 2, 4, 8, 16):
            cases, _ = expand(settings, ranks, p2p, anything)
            points += [point for case in cases for point in case]
    points = list(set(points))  # ranks share most
    wanted = {tp for each in settings for tp in each.tp}
    assert {point.tp for point in points} == wanted
    for point in points:
        config = resolve(point)
        assert config.plan.num_layers == point.layers
        assert point.prompt + point.new_tokens <= config.max_seq_len
        assert measure.estimated_bytes(config, point) > 0


def test_the_suites_are_the_papers() -> None:
    assert SUITES == ["figure2", "figure3", "figure4", "table1", "table2", "table6"]
    for name in SUITES:
        for each in load_option_sets(name):
            assert (each.prompt, each.new_tokens) == (1024, 512)
            assert "standard" in each.chosen_plans
    assert load_option_sets("table6")[0].batch == (64,)
    assert load_option_sets("figure3")[0].tp == (16,)
    assert load_option_sets("table2")[0].p2p == (True, False)


def test_a_suite_with_a_wrong_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump([{"model": "tiny", "batches": [1]}]))
    with pytest.raises(UserError, match=r"'batches'.*'batch'"):
        load_option_sets(str(file))
    file.write_text("model: tiny")
    with pytest.raises(UserError, match="list of option sets"):
        load_option_sets(str(file))
    short = {"model": "tiny", "prompt": 8, "new_tokens": 4}
    file.write_text(yaml.safe_dump([short, {"model": "tiny"}]))
    with pytest.raises(UserError, match=r"set 2 of suite .*max_seq_len|set 2 of suite .*context"):
        load_option_sets(str(file))
    assert [
        s.batch for s in load_option_sets(str(file), {"prompt": 4, "new_tokens": 4, "batch": 3})
    ] == [
        (3,),
        (3,),
    ]


# ---- memory -------------------------------------------------------------------------------


def test_a_large_model_does_not_fit_and_says_so() -> None:
    large = replace(POINT, model="llama-3-70b", layers=80)
    small = replace(POINT, model="llama-3-8b", layers=32)
    found, too_large = measure.chunks([large, small], 20e9)
    assert found == [[small]]
    assert too_large == [large]
    assert measure.estimated_bytes(resolve(large), large) > 70e9 * 2 / 4


def test_the_reference_counts_where_it_takes_most() -> None:
    """Its attention in float32 holds all scores of a prompt; short prompts take what engines do."""
    config = resolve(replace(POINT, model="llama-3-70b", layers=80))
    long, short = (point_bytes(config, 1, 1, n, 64, "async", "fp8") for n in (8000, 992))
    assert long - short > 13 * 64 * 8000**2
    assert short < 80 * 2**30  # weights in 8 bits, which were never there in 16


def test_what_this_process_holds_itself_is_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own memory and NCCL's are in the estimates: a GPU without other work has it all."""
    total = 140 * 2**30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    for free, room in ((total - 2**30, total), (total // 2, total // 2 + WORKSPACES)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, total))
        assert measure.free_bytes(CPU) == room


def test_chunks_keep_a_plan_with_its_counterpart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "estimated_bytes", lambda config, point: 10.0)
    monkeypatch.setattr(measure, "HEADROOM", 1.0)
    plans = ("standard", "none", "ladder")
    settings = Settings("tiny", plans=plans, reducers=("push",), prompt=8, new_tokens=4)
    ((*points,),), _ = expand([settings], 4, True, anything)
    standard, none, ladder, bare = points
    assert measure.chunks(points, 40.0) == ([points], [])
    assert measure.chunks(points, 30.0) == ([[standard, none], [ladder, bare]], [])
    assert measure.chunks(points, 10.0) == ([[p] for p in points], [])
    assert measure.chunks(points, 9.0) == ([], points)
