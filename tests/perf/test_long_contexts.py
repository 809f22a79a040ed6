"""Steps after long contexts, and over a cache in fp8."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from ladder.cli import main
from ladder.config import model_config
from ladder.models.errors import UserError
from ladder.perf import phases
from ladder.perf.cost import DecodeCost
from ladder.perf.machine import ATTENTION
from ladder.perf.machine_files import load
from ladder.perf.nodes import names, shipped
from ladder.perf.planner.subject import Subject
from ladder.perf.prediction.records import inference_runs
from tests import ROOT
from tests.perf.asking import Out, asked

RECORD = ROOT / "benchmarks/results/2026-11-30-attention-rounds-h200.txt"
LAYERS, MOST_ROWS = 8, 64  # of the recorded steps, and of a predicted one


def recorded_steps() -> list[list[Any]]:
    """[plan, weights, cache, sequences, tokens, microseconds by cut, cuts] of 4,000 tokens and more
    by the cuts that were kept."""
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines if line.startswith(('["ladder"', '["standard"'))]
    return [each for each in found if each[4] >= 4000 and each[3] <= MOST_ROWS]


def test_long_steps_are_predicted() -> None:
    """None of them was fitted to."""
    shape = replace(model_config("quarter-8b"), num_layers=LAYERS, plan="standard",  # type: ignore[arg-type]
                    max_seq_len=131072)  # fmt: skip
    machine, subject = load("h200x1"), Subject("quarter-8b", shape)
    errors = []
    for plan, _, kind, batch, tokens, us, _ in recorded_steps():
        config, cache = subject.config(plan, 1, None), "fp8" if kind == "fp8" else "bf16"
        found = phases.decode(config, machine, 1, "async", batch, tokens, cache=cache)
        errors.append(abs(found.us / us["new"] - 1))
    assert len(errors) == 32
    assert fmean(errors) < 0.037
    assert max(errors) < 0.087


def test_a_cache_in_fp8_is_read_and_held_as_stored(capsys: Out) -> None:
    words = ("llama-3-8b", "--context", "4096", "--batch", "32", "--tp", "4", "--plans", "standard")
    wide, narrow = (asked(capsys, *words, "--cache", each) for each in ("bf16", "fp8"))
    assert (wide["cache"], narrow["cache"]) == ("bf16", "fp8")
    held = [dict(each["rows"][0]["memory"]) for each in (wide, narrow)]
    assert held[1]["cache"] == pytest.approx(held[0]["cache"] * 129 / 256)
    assert {**held[1], "cache": 0, "total": 0} == {**held[0], "cache": 0, "total": 0}
    times = [each["rows"][0]["us"] for each in (wide, narrow)]
    assert 0.8 * times[0] < times[1] < 0.95 * times[0]
    assert "--cache" not in wide["command"]
    assert "--cache fp8 --prompt" in narrow["command"]
    assert narrow["rows"][0]["far"]
    prompts = [
        asked(capsys, *words, "--prefill", "--cache", each)["rows"][0] for each in ("bf16", "fp8")
    ]
    assert prompts[0]["us"] == prompts[1]["us"]
    assert prompts[0]["memory"]["cache"] > prompts[1]["memory"]["cache"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("llama-3-8b --train", "--cache=fp8 is of inference; leave it out of --train"),
        ("llama-3-8b --tp 1 --tp-degree 4 --plans desync-4x", "virtual ranks are predicted with "
         "weights and a cache in bf16"),
    ],
)  # fmt: skip
def test_where_a_cache_in_fp8_is_not_predicted(words: str, said: str, capsys: Out) -> None:
    assert main(["predict", *words.split(), "--cache", "fp8"]) != 0
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [*shipped(), *names()])
def test_every_machine_times_a_cache_in_fp8(name: str, capsys: Out) -> None:
    words = ("llama-3-8b", "--plans", "standard", "--cache", "fp8", "--context", "1024")
    found = asked(capsys, *words, "--machine", name)["rows"]
    assert found
    assert all(row["us"] > 0 for row in found)


def test_without_its_curve_a_cache_in_fp8_counts_as_half_the_heads() -> None:
    config = Subject("llama-3-8b", model_config("llama-3-8b")).config("standard", 1, None)
    machine = load("h200x4")
    curves = tuple(each for each in machine.curves if each.name != ATTENTION["fp8"])
    for batch, tokens, off in ((16, 1024, 0.15), (16, 8192, 0.14), (64, 1024, 0.22),
                               (64, 8192, 0.14)):  # fmt: skip
        asked = (1, "push", batch, tokens)
        estimates = [
            DecodeCost(config, each, *asked, cache="fp8")._attention()
            for each in (machine, replace(machine, curves=curves))
        ]
        assert estimates[1].basis == "extrapolated"
        assert 1 - off < estimates[1].us / estimates[0].us < 1  # e4m3 is converted, too
    assert estimates[1].us < 0.51 * DecodeCost(config, machine, *asked)._attention().us


def test_virtual_ranks_have_a_cache_in_bf16() -> None:
    config = Subject("llama-3-8b", model_config("llama-3-8b")).config("desync-4x", 1, 4)
    with pytest.raises(UserError, match="--cache=fp8 is not predicted for virtual ranks"):
        phases.decode(config, load("h200x1"), 1, "async", 1, 1024, cache="fp8")


def test_records_of_a_cache_in_fp8_are_of_todays_kernels(tmp_path: Path) -> None:
    source = ROOT / "benchmarks/results/2026-11-30-fp8-cache-quarter-8b-h200.jsonl"
    record = json.loads(source.read_text(encoding="utf-8").splitlines()[0])
    record["point"] |= {"model": "quarter-8b", "prompt": 1024, "cache": "fp8"}
    file, counts = tmp_path / "inference.jsonl", []
    for commit, date in (("c887266", "2026-11-30"), ("12383da", "2026-11-30"), ("1", "2026-11-29")):
        record["machine"] |= {"commit": commit, "date": date}
        file.write_text(json.dumps(record) + "\n", encoding="utf-8")
        counts.append(len(list(inference_runs([file], load("h200x1"), "decode"))))
    assert counts == [1, 0, 0]
    record["machine"] |= {"commit": "c887266", "date": "2026-11-30", "gpu": load("h100x1").gpu}
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    assert not list(inference_runs([file], load("h100x1"), "decode"))
