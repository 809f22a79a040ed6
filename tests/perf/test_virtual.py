"""Inference with several ranks of T in a process, against its records and the code that runs."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.results import read_results
from ladder.cli import main
from ladder.infer.engine import Engine
from ladder.models import ModelConfig, Transformer, UserError, resolve_plan
from ladder.parallel.sharding import initialise
from ladder.perf import phases
from ladder.perf.machine_files import load
from ladder.perf.prediction.records import context_of, quantile
from ladder.perf.virtual import KERNELS

RECORDS = Path(__file__).parents[2] / "benchmarks/results/2026-11-22-virtual-ranks-h200x2.jsonl"
FITTED = ("desync-4x", 1, 1)  # plan, TP, batch of the decode step that KERNEL_US explains


def errors(phase: str) -> dict[tuple[str, int, int], list[float]]:
    """predicted / measured - 1, by plan, TP and batch."""
    names = {each.name for each in fields(InferencePoint)}
    found: dict[tuple[str, int, int], list[float]] = {}
    for line in read_results(RECORDS):
        data = line["point"]
        point = InferencePoint(**{key: data[key] for key in data if key in names})
        if point.degree <= point.tp or point.no_comm or not line.get("result"):
            continue
        context = context_of(point) if phase == "decode" else point.prompt
        us = phases.PHASES[phase](
            resolve(point), load("h200x2"), point.tp, point.reducer, point.batch, context
        ).us
        error = us / 1e3 / line["result"][f"{phase}_ms"] - 1
        found.setdefault((point.plan, point.tp, point.batch), []).append(error)
    return found


def test_predictions_are_near_the_records() -> None:
    """One decode step is fitted, all else held out: 15 steps, and 16 prompts."""
    for phase, mean, most in (("decode", 0.062, 0.16), ("prefill", 0.045, 0.085)):
        found = errors(phase)
        if phase == "decode":
            assert found.pop(FITTED) == [pytest.approx(0.0, abs=0.005)]
        each = [abs(error) for some in found.values() for error in some]
        assert len(each) >= 15
        assert statistics.mean(each) < mean
        assert quantile(each, 1.0) < most


def test_as_many_products_as_the_model_multiplies() -> None:
    """Of a step of the engine with four virtual ranks: products of each matrix for all ranks at
    once, and attention as often."""

    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: Counter[str] = Counter()

        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            self.seen[f.overloadpacket.__name__] += 1
            return f(*args, **(kw or {}))

    plan = resolve_plan("desync-2x", 2, 4)
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=8,
        num_kv_heads=4, plan=plan, tp_degree=4,
    )  # fmt: skip
    model = Transformer(config)
    initialise(model, seed=0)
    engine, counts = Engine(model), []
    for new in (2, 3):
        with Counts() as mode, torch.no_grad():
            engine.generate([[5, 8, 13]], max_new_tokens=new)
            counts.append(mode.seen)
    step = counts[1] - counts[0]
    products = sum(KERNELS[part] for part in ("qkv", "output", "gate-up", "down"))
    assert step["einsum"] == config.num_layers * products
    assert step["scaled_dot_product_attention"] == config.num_layers


def test_the_planner_compares_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "llama-3-8b", "--plans", "dtp-1", "--tp", "1", "2", "--tp-degree", "4"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["tp"] for row in found["rows"]] == [2, 2, 1]
    assert {(row["basis"], row["low_us"]) for row in found["rows"]} == {("extrapolated", None)}
    assert " --tp 2 --batch 1 --tp-degree 4 " in found["command"]
    assert main([*words, "--trace", str(tmp_path / "trace.json")]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {each["name"] for each in trace if each.get("cat") == "kernel"}
    assert "_push_all_reduce" in names  # of TP 2; the rest are torch's
    assert not names & {"_project_kernel", "_land_kernel", "_attention_kernel"}
    capsys.readouterr()
    assert main([*words, "--prefill", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3
    assert main(["predict", "llama-3-8b", "--tp", "4", "--tp-degree", "2"]) == 2
    assert "give a multiple of --tp" in capsys.readouterr().err
    assert main([*words, "--weights", "fp8"]) == 2
    assert "virtual ranks are predicted with --weights bf16" in capsys.readouterr().err
    config = resolve(InferencePoint("llama-3-8b", "dtp-1", "push", 2, 1, 8, 2, 2, degree=4))
    with pytest.raises(UserError, match="2 virtual ranks each"):
        phases.prefill(config, load("h200x2"), 2, "fused", 1, 8)
