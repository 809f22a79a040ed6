"""The command that `ladder predict` ends with, and the machine files that it is given."""

from __future__ import annotations

import html
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ladder.bench.inference.measure import chunks
from ladder.bench.inference.points import InferencePoint
from ladder.bench.training.points import points, recipe_of
from ladder.cli import main, make_parser
from ladder.config import model_config
from ladder.perf.machine import COLLECTIVES
from ladder.perf.machine_files import load, write
from tests.perf.asking import Out, asked


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


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("--decode --plans standard ladder --batch 1 16", 1),
        ("--decode --plans standard ladder --batch 1 16 --objective throughput", 1),
        ("--decode --batch 1 64 --objective memory", 2),  # by push and by NCCL
        ("--train --batch 1 2 --plans standard --objective memory", 2),
    ],
)
def test_the_last_lines_run_each_recommendation(
    words: str, lines: int, tmp_path: Path, capsys: Out
) -> None:
    asks = ("llama-3-8b", *words.split())
    page = tmp_path / "page.html"
    assert main(["predict", *asks, "--page", str(page)]) == 0
    *_, text = capsys.readouterr().out.rpartition("Recommended for")
    said = [line.partition("next: ")[2] for line in text.splitlines() if "next: " in line]
    assert len(said) == lines
    parsed = [make_parser().parse_args(shlex.split(line)[1:]) for line in said]
    found = asked(capsys, *asks)
    named = found["recommended_by_batch"].values()
    for row in [found["recommended"]] if "throughput" in words else named:
        way = "layouts" if "--train" in words else "reducers"
        assert any(
            row["plan"] == each.plans[-1] and getattr(each, way, [""]) == [row["way"]]
            and (row["batch"] == each.batch if "--train" in words else row["batch"] in each.batch)
            for each in parsed
        ), row  # fmt: skip
    for row in named:
        assert f"--batch {row['batch']} " in row["command"]
    for line in said:
        assert html.escape(line) in page.read_text(encoding="utf-8")


def test_what_the_benchmark_would_refuse_has_no_command(tmp_path: Path, capsys: Out) -> None:
    words = ("llama-3-70b", "--machine", "h200x1", "--weights", "fp8", "--plans", "standard")
    assert asked(capsys, *words, "--context", "8192")["command"] == ""
    page = tmp_path / "page.html"
    assert main(["predict", *words, "--context", "8192", "--page", str(page)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("no command times batch 1: `ladder bench inference`, which checks")
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
        "--out FILE, and give --machine FILE, too"
    )
    found = asked(capsys, *words, eight, other)
    assert {row["way"] for row in found["rows"]} == {"fsdp", "tp8+sp"}
    assert f"all plans at tp2+sp, tp2+sp+fsdp: {missing}" in found["left_out"]
    assert main(["predict", *words, eight, *layout]) == 2
    assert "nothing is left to predict: all plans at tp2+sp: no file" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--batch 1", "--batch 1 4", "--batch 4 --micro-batch 2"])
@pytest.mark.parametrize("context", ["1001", "1002"])
def test_recommended_sequence_parallelism_divides_the_tokens(
    context: str, words: str, capsys: Out
) -> None:
    """`ladder bench train` refuses another layout; default ones are then without it."""
    asks = ("llama-3-8b", "--train", *words.split(), "--context", context, "--plans", "standard")
    for layouts in ((), ("--layouts", "tp4+sp", "tp2")):
        found = asked(capsys, *asks, *layouts)
        for row in found["rows"]:
            micro = 2 if "--micro-batch" in words else row["batch"]
            assert "+sp" not in row["way"] or micro * int(context) % row["tp"] == 0, row
        assert {row["layout"] for row in found["fits"]} >= {row["way"] for row in found["rows"]}
        options = make_parser().parse_args(shlex.split(found["command"].removeprefix("ladder ")))
        for point in points(options):
            recipe_of(point).check_rows(point.micro_batch)
    if words == "--batch 1":
        line = f"standard at tp4+sp: not for sequence parallelism (cannot divide {context} tokens"
        assert any(each.startswith(line) for each in found["left_out"])
        assert {row["layout"] for row in found["fits"]} == {"tp2"}


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
