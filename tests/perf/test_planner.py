"""`ladder predict MODEL`: what fits, the ranking, intervals, and the command that it ends with."""

from __future__ import annotations

import html
import json
import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ladder.bench.inference.measure import chunks
from ladder.bench.inference.points import InferencePoint
from ladder.bench.trace import kernels_of, overlap, read_trace
from ladder.bench.training.points import points, shape_of
from ladder.cli import main, make_parser
from ladder.config import model_config
from ladder.costs import head_bytes, layer_weight_bytes
from ladder.files import write_text
from ladder.perf import memory
from ladder.perf.machine import COLLECTIVES
from ladder.perf.machine_files import load, write
from tests.perf.asking import SMALL, Out, asked, with_memory

SHAPE = model_config("llama-3-8b")


def test_a_70b_over_all_plans_and_degrees_takes_under_two_seconds(capsys: Out) -> None:
    start = time.process_time()
    found = asked(capsys, "llama-3-70b", "--decode")
    assert time.process_time() - start < 4  # on a busy machine
    rows = found["rows"]
    assert {row["tp"] for row in rows} == {2, 4}
    assert all(sum(row["bases"].values()) == pytest.approx(1.0) for row in rows)
    assert all(row["bases"][row["basis"]] > 0 for row in rows)
    assert len({row["plan"] for row in rows}) == 10
    assert [row["us"] for row in rows] == sorted(row["us"] for row in rows)
    (line,) = found["left_out"]  # 131 GiB of weights
    assert line.endswith("hybrid at TP 1 with batch 1: does not fit")


def test_nothing_is_recommended_that_does_not_fit(tmp_path: Path, capsys: Out) -> None:
    """An 8B takes 15 GiB of weights on one GPU and 3.7 on four: where 8 fit, TP 4 alone."""
    machine = with_memory(tmp_path / "small.json", 8.0)
    words = ("llama-3-8b", "--machine", machine, "--plans", "standard", "none", "--objective")
    for objective in ("latency", "throughput", "memory"):
        best = asked(capsys, *words, objective)["recommended"]
        assert (best["tp"], best["memory_gib"] < 8.0 * 0.92) == (4, True)
    assert main(["predict", "llama-3-70b", *words[1:], "latency"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "nothing fits 7.4 GiB of a GPU; weights and reserve alone take 35.9: give --machine more "
        "GPUs"
    )  # nor in fp8
    assert (
        main(["predict", "llama-3-70b", "--machine", with_memory(tmp_path / "less.json", 36.0)])
        == 0
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "nothing fits 33.1 GiB of a GPU; weights and reserve alone take 35.9: take --weights fp8, "
        "or give --machine more GPUs"
    )
    assert main(["predict", *words[:3], "--batch", "64", "--context", "8000"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("nothing fits 7.4 GiB of a GPU: take --batch 1, or give --machine more GPUs")
    words = ("llama-3-8b", "--train", "--machine", "h200x1", "--batch", "1", "--context", "128")
    assert main(["predict", *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert "weights, optimiser, gradients and reserve alone take 13" in last
    assert last.endswith(": take --nodes 2, or give --machine more GPUs")


def test_the_most_sequences_that_fit_are_the_most(capsys: Out) -> None:
    (fits,) = asked(capsys, "llama-3-70b", "--tp", "2")["fits"]
    most = int(fits["at most"])
    shape, machine = model_config("llama-3-70b"), load("h200x2")
    held = [memory.inference(shape, 2, most + more, 1024, 1024) for more in (0, 1)]
    assert [memory.fits(each, machine) for each in held] == [True, False]


def test_objectives_choose_differently(capsys: Out) -> None:
    """An 8B is fastest on four GPUs; four copies give more tokens a second; TP 4 takes least."""
    words = ("llama-3-8b", "--plans", "standard", "--batch", "1", "16", "--objective")
    found = {name: asked(capsys, *words, name)["recommended"] for name in ("latency", "throughput")}
    assert (found["latency"]["tp"], found["latency"]["batch"]) == (4, 1)
    assert (found["throughput"]["tp"], found["throughput"]["batch"]) == (1, 16)
    everything = asked(capsys, "llama-3-8b", "--plans", "standard", "--objective", "throughput")
    assert {row["batch"] for row in everything["rows"]} == {1, 4, 16, 64}
    one, two = (asked(capsys, *words, "throughput", "--nodes", n)["rows"][0] for n in ("1", "2"))
    assert two["tokens_s"] == pytest.approx(2 * one["tokens_s"])


def test_what_computes_no_model_is_never_recommended(capsys: Out) -> None:
    found = asked(capsys, "llama-3-8b", "--plans", "standard", "none", "--reducers", "push")
    bound = [row for row in found["rows"] if row["bound"]]
    assert bound[0]["us"] < found["recommended"]["us"]
    assert found["recommended"]["plan"] == "standard"


@pytest.mark.parametrize("batch", ["1", "64"])
@pytest.mark.parametrize("context", ["1", "2", "40", "1024", "8190", "8191", "8192"])
def test_the_last_line_is_a_command_that_parses(context: str, batch: str, capsys: Out) -> None:
    words = ["predict", "llama-3-8b", "--plans", "ladder", "--context", context, "--batch", batch]
    assert main(words) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("next: ladder bench inference --model llama-3-8b --plans ladder")
    options = make_parser().parse_args(shlex.split(line.removeprefix("next: ladder ")))
    assert options.prompt >= 1
    assert options.new_tokens >= 2
    assert options.prompt + options.new_tokens <= 8192
    assert abs(options.prompt + options.new_tokens // 2 - int(context)) <= 1
    assert options.ranks == options.tp[0]


@pytest.mark.parametrize(
    "words",
    [
        "llama-3-70b --machine h200x1 --weights fp8 --batch 16",
        "llama-3-8b --machine h200x1 --batch 48 --context 8192",  # only with the last at 8192
        "llama-3-8b --machine h200x1 --batch 64 --context 6144",
        "llama-3-8b --machine h200x1 --prefill --batch 470",
        "llama-3-70b --machine h200x2 --batch 48 --context 4096",
    ],
)
def test_the_benchmark_does_not_refuse_the_command(words: str, capsys: Out) -> None:
    found = asked(capsys, *shlex.split(words), "--plans", "standard")
    options = make_parser().parse_args(shlex.split(found["command"].removeprefix("ladder ")))
    config = model_config(options.model)
    point = InferencePoint(
        options.model, "standard", *getattr(options, "reducers", ["async"]), options.tp[0],
        options.batch[0], options.prompt, options.new_tokens, config.num_layers,
        weights=getattr(options, "weights", "bf16"),
    )  # fmt: skip
    assert chunks([point], 2**30 * load("h200x1").value("memory_gib")) == ([[point]], [])


def test_what_the_benchmark_would_refuse_has_no_command(tmp_path: Path, capsys: Out) -> None:
    words = ("llama-3-70b", "--machine", "h200x1", "--weights", "fp8", "--plans", "standard")
    assert asked(capsys, *words, "--context", "8192")["command"] == ""
    page = tmp_path / "page.html"
    assert main(["predict", *words, "--context", "8192", "--page", str(page)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no command times it: `ladder bench inference`, which checks")
    assert last.endswith("of which 128.6 can be used; there is one with --context 4096")
    assert html.escape("; there is one with --context 4096") in page.read_text(encoding="utf-8")
    assert asked(capsys, *words, "--context", "4096")["command"]


def test_training_has_the_collectives_of_all_given_machines(tmp_path: Path, capsys: Out) -> None:
    """Before shipped ones; a layout of groups of which no file is, is left out."""
    for gpu, gpus in (("NVIDIA H200", 4), ("other", 8)):
        write(replace(load("h200x4"), name="own", gpu=gpu, gpus=gpus), tmp_path / f"{gpus}.json")
    two = load("h200x2")
    slow = tuple(
        replace(each, points=tuple((x, 10 * us) for x, us in each.points))
        if each.name in COLLECTIVES else each
        for each in two.curves
    )  # fmt: skip
    write(replace(two, name="slow", curves=slow), tmp_path / "slow.json")
    write(replace(two, name="two", gpu="other"), tmp_path / "two.json")
    words = ("llama-3-8b", "--train", "--plans", "standard", "--batch", "1", "--machine")
    own, more = str(tmp_path / "4.json"), str(tmp_path / "slow.json")
    layout = ("--layouts", "tp2+sp")
    usual, slower = (
        asked(capsys, *words, *names, *layout)["rows"][0]["us"] for names in ([own], [own, more])
    )
    assert slower > 2 * usual
    eight, other = str(tmp_path / "8.json"), str(tmp_path / "two.json")
    missing = (
        "no file has the collectives of its groups of 4 GPUs; ladder bench machine --nproc 4 "
        "--out FILE, and --machine own FILE"
    )
    found = asked(capsys, *words, eight, other)
    assert {row["way"] for row in found["rows"]} == {"fsdp", "tp8+sp"}
    assert f"all plans at tp2+sp, tp2+sp+fsdp: {missing}" in found["left_out"]
    assert main(["predict", *words, eight, *layout]) == 2
    assert "nothing is left to predict: all plans at tp2+sp: no file" in capsys.readouterr().err


def test_a_machine_without_peer_access_is_asked_about_nccl(tmp_path: Path, capsys: Out) -> None:
    """Its file has no curve of push: that is left out, or refused where the user asks for it."""
    machine = load("h200x4")
    kept = tuple(each for each in machine.curves if each.where.get("algorithm") != "push")
    write(replace(machine, name="pcie", gpu="other", curves=kept), tmp_path / "pcie.json")
    words = ("llama-3-8b", "--machine", str(tmp_path / "pcie.json"))
    found = asked(capsys, *words)
    assert {row["way"] for row in found["rows"]} == {"", "async"}
    assert found["left_out"] == ["push at TP 4: machine 'pcie' has no curve of it"]
    assert main(["predict", *words, "--reducers", "push"]) == 2
    assert "machine 'pcie' has no 'all-reduce algorithm=push'" in capsys.readouterr().err


def test_a_plan_of_ones_own(tmp_path: Path, capsys: Out) -> None:
    """A YAML plan is ranked and recommended by its path; one of other layers is refused."""
    plan = tmp_path / "mine.yaml"
    write_text(plan, "layers: [{layers: 0-15, preset: ladder}, {layers: 16-31, preset: parallel}]")
    found = asked(capsys, "llama-3-8b", "--plans", str(plan), "standard", "--tp", "4")
    assert found["recommended"]["plan"] == str(plan)
    assert str(plan) in shlex.split(found["command"])
    assert main(["predict", "llama-3-70b", "--plans", str(plan)]) == 2
    assert "layers" in capsys.readouterr().err
    write_text(plan, "")
    assert main(["predict", "llama-3-8b", "--plans", str(plan)]) == 2
    assert f"the plan {plan} is empty" in capsys.readouterr().err


def test_a_bound_alone_is_not_recommended(capsys: Out) -> None:
    assert main(["predict", "llama-3-8b", "--plans", "none", "--tp", "4"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("nothing is recommended: a plan without communication is a bound")


def test_a_trace_is_read_as_a_measured_one(tmp_path: Path, capsys: Out) -> None:
    """One kernel for each launch, the span of the prediction, and what NCCL hides."""
    words = ("llama-3-8b", "--plans", "ladder", "--tp", "4", "--reducers")
    for reducer in ("push", "async"):
        file = tmp_path / f"{reducer}.json"
        best = asked(capsys, *words, reducer, "--trace", str(file))["recommended"]
        kernels = kernels_of(read_trace(file), "decode")
        found = overlap(kernels)
        assert len(kernels) == best["launches"]
        assert found.span == pytest.approx(best["us"], rel=1e-6)
        if reducer == "async":
            reduces = [each for each in kernels if "AllReduce" in each.name]
            assert len(reduces) == best["collectives"] + 1  # and the embedding's
            assert found.hidden > 0.5
            assert {each.stream for each in kernels} == {7, 8, 9}
        else:
            assert {each.stream for each in kernels} == {7, 8}  # what is pushed is on neither
            assert {"_project_kernel", "_attention_kernel"} <= {each.name for each in kernels}


def test_a_prompt_is_predicted_traced_and_drawn(tmp_path: Path, capsys: Out) -> None:
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    words = ("llama-3-8b", "--prefill", "--batch", "4", "--plans", "standard", "ladder")
    found = asked(capsys, *words, "--tp", "4", "--trace", str(trace), "--page", str(page))
    best = found["recommended"]
    assert (best["plan"], best["way"]) == ("ladder", "push")
    assert best["tokens_s"] == pytest.approx(4 * 1024 / best["us"] * 1e6)
    assert shlex.split(found["command"])[-4:] == ["--new-tokens", "2", "--nproc", "4"]
    kernels = kernels_of(read_trace(trace), "prefill")
    assert overlap(kernels).span == pytest.approx(best["us"], rel=1e-6)
    names = {each.name for each in kernels}
    assert {"_swiglu_kernel", "_land_rows_kernel", "nvjet_sm90"} <= names
    assert "_project_kernel" not in names
    assert page.read_text(encoding="utf-8").count("<svg") == 2


def test_training_is_ranked_by_tokens(tmp_path: Path, capsys: Out) -> None:
    """A ladder keeps sequence parallelism, desync has its layouts without; ddp does not fit."""
    trace = tmp_path / "trace.json"
    words = ("llama-3-8b", "--train", "--context", "4096", "--plans", "standard", "ladder")
    found = asked(capsys, *words, "desync-4x", "--batch", "2", "--trace", str(trace))
    rows = {(row["plan"], row["way"]): row for row in found["rows"]}
    assert {way for plan, way in rows if plan == "ladder"} == {
        "fsdp", "tp2+sp", "tp2+sp+fsdp", "tp4+sp"
    }  # fmt: skip
    assert ("desync-4x", "tp4") in rows
    assert "standard, ladder at ddp with batch 2: does not fit" in found["left_out"]
    best = found["recommended"]
    assert best["tokens_s"] == max(row["tokens_s"] for row in rows.values())
    assert rows["ladder", "tp4+sp"]["us"] < rows["standard", "tp4+sp"]["us"]
    options = make_parser().parse_args(shlex.split(found["command"])[1:])
    for point in points(options):
        shape_of(point, options.tp_degree)
    assert overlap(kernels_of(read_trace(trace), "train")).span == pytest.approx(best["us"], 1e-6)


def test_checkpointing_makes_larger_batches_fit(capsys: Out) -> None:
    words = ("llama-3-8b", "--train", "--context", "4096", "--batch", "8", "--plans", "standard")
    held = [
        asked(capsys, *words, "--layouts", "fsdp", "--activation-checkpointing", kept)
        for kept in ("none", "full")
    ]
    assert [bool(each["recommended"]) for each in held] == [False, True]
    assert [each["fits"][0]["fits"] for each in held] == [False, True]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--layouts", "tp8+sp"), "--layouts tp8+sp: 8 does not divide the 4 GPUs"),
        (("--layouts", "tp2+ps"), "'ps' of 'tp2+ps' is unknown"),
        (("--layouts", "tp4+sp", "--plans", "desync-4x"), "desync-4x at tp4+sp: not for sequence"),
        (("--tp", "4"), "--tp is of inference"),
        (("--reducers", "push"), "--reducers is of inference"),
        (("--batch", "3", "--micro-batch", "2"), "--micro-batch=2 does not divide --batch=3"),
        (("--activation-checkpointing", "most"), "'most'"),
    ],
)
def test_bad_training_is_one_line(words: tuple[str, ...], said: str, capsys: Out) -> None:
    assert main(["predict", "llama-3-8b", "--train", *words]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_the_table_says_what_it_means(capsys: Out) -> None:
    assert main(["predict", "llama-3-8b", "--nodes", "2"]) == 0
    found = capsys.readouterr().out
    assert "on 2 x h200x4 (8 x NVIDIA H200)" in found
    for word in (
        "What fits",
        "80 % interval",
        "limited by",
        "extrapolated",
        "fitted to records",
        "?: ",
    ):
        assert word in found
    assert "Recommended for latency: ladder, TP 4, push, batch 1" in found


def test_the_page_has_its_figures_and_the_command(tmp_path: Path, capsys: Out) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    found = asked(capsys, "llama-3-8b", "--plans", "ladder", "standard", "--page", str(page))
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 2
    assert html.escape(found["command"]) in text
    for words in ("ladder, TP 4, batch 64", "qkv of sublayer 32", "80 % interval", "What fits"):
        assert words in text, words


def test_a_verdict_says_where_no_other_plan_pays(capsys: Out) -> None:
    """On one GPU a prompt has nothing to hide: all plans take about the same."""
    assert main(["predict", "llama-3-8b", "--prefill", "--tp", "1"]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert "no other plan gains 3%, so that none pays here" in found
    assert "next: ladder bench inference --model llama-3-8b --plans standard --tp 1" in found
    assert main(["predict", "llama-3-8b", "--tp", "4", "--reducers", "async"]) == 0
    found = " ".join(capsys.readouterr().out.split())
    assert "pays here" not in found
    assert "tokens/s: of all 4 GPUs" not in found


def test_each_batch_has_its_recommendation(capsys: Out) -> None:
    """The least time of all is always that of the smallest batch, which answers nothing."""
    words = ("llama-3-70b", "--batch", "1", "64", "--plans", "standard", "accumulate-8x-lag4")
    found = asked(capsys, *words)
    each = found["recommended_by_batch"]
    assert [each["1"]["batch"], each["64"]["batch"]] == [1, 64]
    assert each["1"] == found["recommended"]
    plan = found["recommended"]["plan"]  # beside what it is said to be faster than
    assert f" --plans standard {plan} --reducers push " in found["command"]
    assert each["64"]["us"] == min(row["us"] for row in found["rows"] if row["batch"] == 64)
    assert found["fits"][0]["at most"] == 0
    assert isinstance(found["fits"][0]["TP"], int)
    assert main(["predict", *words]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("Recommended for latency: ") == 2
    assert "batch 64, " in text.split("Recommended for latency: ")[2]
    assert main(["predict", *words, "--objective", "throughput"]) == 0
    assert capsys.readouterr().out.count("Recommended for ") == 1


def test_what_reduces_nothing_exposes_nothing(capsys: Out) -> None:
    words = ("llama-3-8b", "--prefill", "--batch", "4", "--plans", "none", "--tp", "2")
    assert {row["exposed_us"] for row in asked(capsys, *words)["rows"]} == {0.0}


def test_words_below_the_table_say_what_is_counted(capsys: Out) -> None:
    assert main(["predict", "llama-3-8b", "--tp", "1", "4"]) == 0
    assert "of all 4 GPUs, which hold copies of the model (TP 1: 4, TP 4: 1)" in " ".join(
        capsys.readouterr().out.split()
    )
    words = ["--plans", "ladder", "standard", "--layouts", "tp4+sp", "--batch", "1"]
    assert main(["predict", "llama-3-8b", "--train", *words]) == 0
    assert "activations: at the start of the backward pass" in capsys.readouterr().out


def old(path: Path) -> str:
    write_text(path, json.dumps({**load("h200x4").to_dict(), "version": 0}))
    return str(path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--machine", "h100x1", "--tp", "2"), "machine 'h100x1' has one GPU; give 1, or another"),
        (("--tp", "3"), "--tp=3: machine 'h200x4' has the collectives of 1, 2, 4 GPUs; give 1, 2"),
        (("--tp", "0"), "--tp=0"),
        (("--machine", "h100x4", "--tp", "8"), "give 1, 2, 4, or another --machine"),
        (("--machine", "h100x3"), "unknown machine 'h100x3'"),
        (("--machine", "OLD"), "has version 0, and this ladder reads"),
        (("--batch", "1", "65"), "--batch=65 must be 1 to 64, as fused decode steps have"),
        (("--batch", "0"), "--batch=0 must be 1"),
        (("--context", "9999"), "--context=9999 must be 1 to the model's context, 8192"),
        (("--nodes", "0"), "--nodes=0 must be 1 to 65,536"),
        (("--tp-degree", "0"), "--tp-degree=0 must be 1 or more"),
        (("--reducers", "ring"), "unknown reducer of --reducers 'ring'"),
        (("--plans", "desync-4x", "--tp-degree", "2", "--tp", "4"), "--tp-degree=2 with --tp=4"),
        (("--plans", "laddder"), "laddder"),
        (("--plans", "dtp-2", "--tp", "1"), "dtp-2 at TP 1: with T = 1 it is another plan"),
        (("--plans", "checkpoint"), "needs MODEL to be a folder"),
        (("--trace", "nowhere/trace.json"), "--trace=nowhere/trace.json: name a file"),
        (("--page", "."), "--page=.: name a file"),
        (("--layouts", "ddp"), "--layouts is of training; give --train"),
        (("--machine", "h200x4-no-p2p", "--reducers", "push"), "give --reducers async"),
        (("--machine", "h200x4-no-p2p", "--prefill", "--reducers", "fused"), "have no access to"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: Out
) -> None:
    given = [old(tmp_path / "old.json") if each == "OLD" else each for each in words]
    assert main(["predict", "llama-3-8b", *given]) == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1


def test_shapes_that_do_not_divide(tmp_path: Path, capsys: Out) -> None:
    """Asked for, a degree is refused by name; otherwise it is not there."""
    path = tmp_path / "odd.yaml"
    write_text(path, json.dumps({**SMALL, "num_heads": 6, "num_kv_heads": 6, "hidden_size": 96}))
    assert main(["predict", str(path), "--context", "64", "--tp", "4"]) == 2
    assert "--tp=4 does not divide num_heads=6" in capsys.readouterr().err
    rows = asked(capsys, str(path), "--context", "64")["rows"]
    assert {row["tp"] for row in rows} == {1, 2}


def test_words_beside_a_model(capsys: Out) -> None:
    """`predict validate` and `predict t3` are commands of their own; both are listed."""
    assert main(["predict", "validate", "nowhere.jsonl"]) == 2
    assert "nowhere.jsonl does not exist" in capsys.readouterr().err
    assert main(["predict", "decode"]) == 2
    assert "unknown model config 'decode'" in capsys.readouterr().err
    assert {"predict", "predict validate", "predict t3"} <= set(
        make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    )


def test_jitter_costs_a_ladder_less_than_standard(capsys: Out) -> None:
    """What waiting adds is a column and part of the time, also with NCCL and in training."""
    words = ("llama-3-8b", "--tp", "4", "--plans", "standard", "ladder", "--jitter")
    for phase in ("--decode", "--prefill"):
        none, some = (asked(capsys, *words, n, phase)["rows"] for n in ("0", "5"))
        plain = {(row["plan"], row["way"]): row["us"] for row in none}
        assert {row["waiting_us"] for row in none} == {0.0}
        waited = {(row["plan"], row["way"]): row["waiting_us"] for row in some}
        for row in some:
            key = row["plan"], row["way"]
            assert row["us"] == pytest.approx(plain[key] + waited[key])
            assert sum(row["limits"].values()) == pytest.approx(row["us"])
        for way in ("push", "async"):
            assert 0 < 1.5 * waited["ladder", way] < waited["standard", way]
    training = ("llama-3-8b", "--train", "--plans", "standard", "--layouts", "tp2+sp+fsdp")
    (row,) = asked(capsys, *training, "--batch", "2", "--micro-batch", "1", "--jitter", "5")["rows"]
    assert 0 < row["waiting_us"] < 0.1 * row["us"]
    assert sum(row["limits"].values()) == pytest.approx(row["us"])
    assert main(["predict", *words, "5"]) == 0
    shown = capsys.readouterr().out
    assert "waiting ms" in shown
    assert "vary by 5 % of their time" in shown
    assert main(["predict", *words, "26"]) == 2
    assert "--jitter=26 must be 0 to 25" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fp8", "fp8-block", "int8"])
def test_weights_in_8_bits_are_read_as_stored(kind: str, capsys: Out) -> None:
    """Matrices take half, with their scales; products of a step as much less; prompts convert them
    first, and take longer. Nothing of it is called measured."""
    words = ("llama-3-8b", "--tp", "4", "--plans", "standard", "none", "--reducers", "push")
    wide, narrow = (asked(capsys, *words, "--weights", each) for each in ("bf16", kind))
    elements = [row["memory"]["weights"] * 2**30 for row in (wide["rows"][0], narrow["rows"][0])]
    saved = layer_weight_bytes(SHAPE, 4) + head_bytes(SHAPE, 4)
    saved -= layer_weight_bytes(SHAPE, 4, kind) + head_bytes(SHAPE, 4, kind)
    assert elements[0] - elements[1] == pytest.approx(saved)
    for one, other in zip(wide["rows"], narrow["rows"], strict=True):
        assert one["plan"] == other["plan"]
        most = 0.9 if kind == "int8" else 0.75  # as recorded
        assert 0.5 < other["limits"]["products"] / one["limits"]["products"] < most
        assert (other["basis"], other["far"]) == ("extrapolated", True)
        assert other["bases"]["extrapolated"] > 0.5
    words = (*words, "--prefill", "--weights")
    one, other = (asked(capsys, *words, each)["rows"][0]["us"] for each in ("bf16", kind))
    assert 1.1 * one < other < 1.3 * one
    assert asked(capsys, *words, kind)["command"].endswith(
        f"--weights {kind} --prompt 1024 --new-tokens 2 --nproc 4"
    )
