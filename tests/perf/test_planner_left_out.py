"""`ladder predict MODEL`: what is not predicted, what not recommended, and what is said of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ladder.cli import main
from ladder.files import write_text
from tests.perf.asking import SMALL, Out, asked

WORDS = ("llama-3-8b", "--tp", "4")
APART = ("desync-2x", "desync-4x", "accumulate-4x", "accumulate-8x-lag4", "dtp-1")


def shape(path: Path, **changes: object) -> str:
    write_text(path, json.dumps({**SMALL, **changes}))
    return str(path)


@pytest.mark.parametrize("biases", ["attention_bias", "mlp_bias"])
def test_plans_that_a_model_cannot_have_are_left_out_of_the_default(
    biases: str, tmp_path: Path, capsys: Out
) -> None:
    """Named, such a plan is an error, and so is a T that divides no shape."""
    biased = shape(tmp_path / "biased.yaml", num_layers=4, **{biases: True})
    words = (biased, "--train", "--context", "64")
    found = asked(capsys, *words, "--batch", "4")
    assert {row["plan"] for row in found["rows"]} == {"standard", "parallel", "ladder", "hybrid"}
    said = [line for line in found["left_out"] if "bias of an output projection" in line]
    assert [line.split(" at ")[0] for line in said] == list(APART)
    assert main(["predict", *words, "--plans", "desync-2x"]) == 2
    assert "plan 'desync-2x' has residuals that differ" in capsys.readouterr().err
    assert main(["predict", *words, "--tp-degree", "3"]) == 2
    assert "--tp-degree=3 does not divide" in capsys.readouterr().err


@pytest.mark.parametrize("phase", ["--decode", "--prefill"])
def test_what_the_engine_does_not_fuse_is_not_predicted(
    phase: str, tmp_path: Path, capsys: Out
) -> None:
    """By the reasons of `fuse_refusal`; biases of queries, keys and values are fused."""
    biased = shape(tmp_path / "biased.yaml", attention_bias=True, mlp_bias=True)
    words = ("--context", "64", "--plans", "standard", "ladder", phase)
    assert main(["predict", biased, *words]) == 2
    said = capsys.readouterr().err
    assert "has biases of outputs (attention_bias), biases of MLPs (mlp_bias): its steps" in said
    assert "time them with `ladder bench inference`" in said
    qwen = shape(tmp_path / "qwen.yaml", qkv_bias=True)
    assert asked(capsys, qwen, *words)["recommended"]
    data = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
            "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128,
            "attention_bias": True}  # fmt: skip
    write_text(tmp_path / "config.json", json.dumps(data))
    assert main(["predict", str(tmp_path), *words]) == 2
    of_folder = capsys.readouterr().err
    assert "has biases of outputs (attention_bias): its steps" in of_folder
    assert main(["predict", biased, "--train", "--context", "64"]) == 0
    assert ("--train" in said, "--train" in of_folder) == (True, False)  # as it is refused there


def test_degrees_that_the_shape_refuses_are_named(tmp_path: Path, capsys: Out) -> None:
    """Not those that the user has not asked for; and all divide an 8B."""
    odd = shape(tmp_path / "odd.yaml", hidden_size=384, num_heads=24, num_kv_heads=6)
    line = "all plans at TP 4: TP=4 neither divides num_kv_heads=6 nor is a multiple of it"
    for words in (("--decode",), ("--prefill",), ("--train", "--batch", "1")):
        words = (odd, "--context", "64", "--plans", "standard", *words)
        assert asked(capsys, *words)["left_out"] == [line]
        chosen = ("--layouts", "tp2+sp") if "--train" in words else ("--tp", "2")
        assert asked(capsys, *words, *chosen)["left_out"] == []


def test_the_most_sequences_are_by_memory(capsys: Out) -> None:
    for phase, more in (("--decode", "; a step takes up to 64 of them\n"), ("--prefill", "\n")):
        assert main(["predict", *WORDS, "--plans", "standard", phase]) == 0
        said = f"at most: sequences of 1024 tokens, by memory{more}"
        assert said in capsys.readouterr().out


def test_another_plan_is_recommended_for_memory_only_if_it_saves_some(capsys: Out) -> None:
    """Plans take about the same, and a faster one with a little more is not the smaller one."""
    found = asked(capsys, *WORDS, "--objective", "memory")
    assert found["recommended"]["plan"] == "standard"
    assert found["recommended"]["way"] == "push"  # of alike ones the fastest
    assert main(["predict", *WORDS, "--objective", "memory"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no other plan takes 3% less, so that none pays here" in said
    # A prompt of `desync-4x` keeps none of the slots of fused operators.
    words = (*WORDS, "--batch", "64", "--plans", "standard", "desync-4x", "--reducers", "push")
    assert main(["predict", *words, "--objective", "memory"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Recommended for memory: desync-4x" in said
    assert "times as small as the best of standard" in said


def test_memory_of_operators_slots_is_that_of_the_reducer_that_has_them(capsys: Out) -> None:
    """64 prompts of 1024 tokens run by fused operators with push, not with NCCL or in fp8."""
    words = (*WORDS, "--batch", "64", "--plans", "standard")
    rows = {row["way"]: row["memory_gib"] for row in asked(capsys, *words)["rows"]}
    assert rows["push"] > rows["async"] + 1
    fp8 = asked(capsys, *words, "--weights", "fp8")["rows"]
    assert len({row["memory_gib"] for row in fp8}) == 1


def test_steps_of_different_work_are_not_ranked_by_their_time(capsys: Out) -> None:
    """tp4 of one sequence is over before fsdp of four."""
    assert main(["predict", "llama-3-8b", "--train", "--objective", "latency"]) == 2
    found = capsys.readouterr().err
    assert "--objective=latency with --train" in found
    assert "give throughput, or leave it out" in found
    words = ("--train", "--batch", "1", "--plans", "standard", "--objective")
    for objective in ("throughput", "memory"):
        assert asked(capsys, "llama-3-8b", *words, objective)["recommended"]


def test_what_runs_as_with_push_is_not_there_as_fused(capsys: Out) -> None:
    """Nothing of `ladder` blocks, so that no exchange is inside a product; alone it is kept."""
    words = (*WORDS, "--prefill", "--plans", "standard", "ladder", "--reducers")
    found = asked(capsys, *words, "fused", "push", "async")
    ways = {(row["plan"], row["way"]) for row in found["rows"]}
    assert ("standard", "fused") in ways
    assert ("ladder", "fused") not in ways
    assert {("ladder", "push"), ("ladder", "async")} <= ways
    assert (
        "ladder at TP 4 with batch 1: by fused operators, since it runs as with push"
        in (found["left_out"])
    )
    times = [row["us"] for row in found["rows"]]
    assert len(set(times)) == len(times)
    alone = asked(capsys, *words, "fused")
    assert {(row["plan"], row["way"]) for row in alone["rows"]} == {
        ("standard", "fused"), ("ladder", "fused")
    }  # fmt: skip


def test_a_plan_of_another_number_of_layers_is_named_by_its_file(
    tmp_path: Path, capsys: Out
) -> None:
    plan = tmp_path / "bare.yaml"
    write_text(plan, "[{kind: attention}, {kind: mlp}]")
    assert main(["predict", "llama-3-8b", "--plans", str(plan)]) == 2
    assert f"--plans {plan}: plan 'custom' has 1 layer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--plans none", "none at TP 1: without TP there is no reduce to leave out"),
        ("--plans dtp-1 none", "dtp-1 at TP 1: with T = 1 it is another plan"),
        (
            "--train --batch 1 --plans none standard",
            "none at ddp, fsdp: without TP there is no reduce to leave out",
        ),
        (
            "--train --batch 1 --plans none standard --tp-degree 4",
            "none at ddp, fsdp: without TP there is no reduce to leave out",
        ),
    ],
)
def test_why_a_plan_is_not_there(words: str, said: str, capsys: Out) -> None:
    assert said in asked(capsys, "llama-3-8b", *shlex.split(words))["left_out"]
