"""`ladder predict MODEL`: what fits, the ranking, intervals, and the command that it ends with."""

from __future__ import annotations

import html
import json
import shlex
import time
from pathlib import Path

import pytest

from ladder.bench.trace import kernels_of, overlap, read_trace
from ladder.bench.training.points import points, shape_of
from ladder.cli import main, make_parser
from ladder.config import model_config
from ladder.costs import head_bytes, layer_weight_bytes
from ladder.files import write_text
from ladder.perf import memory
from ladder.perf.machine_files import load
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


def test_the_most_sequences_that_fit_are_the_most(tmp_path: Path, capsys: Out) -> None:
    (fits,) = asked(capsys, "llama-3-70b", "--tp", "2")["fits"]
    most = int(fits["at most"])
    shape, machine = model_config("llama-3-70b"), load("h200x2")
    held = [memory.inference(shape, 2, most + more, 1024, 1024) for more in (0, 1)]
    assert [memory.fits(each, machine) for each in held] == [True, False]
    words = ("--tp", "4", "--plans", "standard", "--machine")
    (fits,) = asked(capsys, "llama-3-8b", *words, with_memory(tmp_path / "m.json", 1e300))["fits"]
    assert fits["at most"] == 2**20  # the most prompts of a --batch


@pytest.mark.parametrize("words", ["", "--train", "--prefill --batch 4"])
def test_the_parts_of_what_fits_are_its_sum(words: str, capsys: Out) -> None:
    """In JSON nothing is rounded, also of a model whose parts are below 0.1 GiB."""
    for row in asked(capsys, "tiny", *words.split(), "--plans", "standard")["fits"]:
        parts = {key: row[key] for key in row if isinstance(row[key], float)}
        assert parts.pop("GiB") == pytest.approx(sum(parts.values()), rel=1e-12)
        assert 0 < parts["weights"] < 0.05
    assert main(["predict", "tiny", *words.split(), "--plans", "standard"]) == 0
    assert " 0.0 " in capsys.readouterr().out


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


def test_a_plan_that_states_its_t_has_it_at_every_tp_degree(tmp_path: Path, capsys: Out) -> None:
    """On fewer GPUs its other ranks are virtual."""
    plan = tmp_path / "mine.yaml"
    write_text(plan, "tp_degree: 4\nlayers: [{layers: 0-30, preset: standard}, "
                     "{layers: 31-31, preset: desync-4x}]")  # fmt: skip
    rows = asked(capsys, "llama-3-8b", "--plans", str(plan), "standard", "--batch", "4")["rows"]
    found = {row["tp"] for row in rows if row["plan"] == str(plan)}
    assert found == {row["tp"] for row in rows} == {1, 2, 4}


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
    assert each["1"] == {**found["recommended"], "command": found["command"]}
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
        (("--page", "one.html", "--trace", "./one.html"), "--page=one.html and --trace=one.html"),
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
    first, and take longer. No step as a whole is called measured."""
    words = ("llama-3-8b", "--tp", "4", "--plans", "standard", "none", "--reducers", "push")
    wide, narrow = (asked(capsys, *words, "--weights", each) for each in ("bf16", kind))
    elements = [row["memory"]["weights"] * 2**30 for row in (wide["rows"][0], narrow["rows"][0])]
    saved = layer_weight_bytes(SHAPE, 4) + head_bytes(SHAPE, 4)
    saved -= layer_weight_bytes(SHAPE, 4, kind) + head_bytes(SHAPE, 4, kind)
    assert elements[0] - elements[1] == pytest.approx(saved)
    for one, other in zip(wide["rows"], narrow["rows"], strict=True):
        assert one["plan"] == other["plan"]
        most = {"int8": 0.9, "fp8-block": 0.78}.get(kind, 0.75)  # as recorded
        assert 0.5 < other["limits"]["products"] / one["limits"]["products"] < most
        assert other["far"]
        assert other["bases"]["interpolated"] > 0.5
    words = (*words, "--prefill", "--weights")
    one, other = (asked(capsys, *words, each)["rows"][0]["us"] for each in ("bf16", kind))
    assert 1.1 * one < other < 1.3 * one
    assert asked(capsys, *words, kind)["command"].endswith(
        f"--weights {kind} --prompt 1024 --new-tokens 2 --nproc 4"
    )
