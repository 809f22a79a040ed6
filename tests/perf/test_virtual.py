"""Inference with several ranks of T in a process, against its records and the code that runs."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.results import read_results
from ladder.cli import main
from ladder.config import model_config
from ladder.infer import fused
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling, draws
from ladder.models import ModelConfig, Transformer, UserError, resolve_plan
from ladder.parallel import matrix
from ladder.parallel.sharding import initialise
from ladder.perf import phases
from ladder.perf.graph import forward
from ladder.perf.machine_files import load
from ladder.perf.prediction.eras import as_then, era_of
from ladder.perf.prediction.records import context_of

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def errors(phase: str, record: str, gpus: int) -> list[float]:
    """predicted / measured - 1, of each model with virtual ranks."""
    names = {each.name for each in fields(InferencePoint)}
    found = []
    for line in read_results(RESULTS / f"2026-11-29-{record}.jsonl"):
        data = line["point"]
        point = InferencePoint(**{key: data[key] for key in data if key in names})
        if point.degree <= point.tp or point.no_comm or not line.get("result"):
            continue
        context = context_of(point) if phase == "decode" else point.prompt
        machine, kernels = as_then(load(f"h200x{gpus}"), era_of(line["machine"]))
        how = {"kernels": kernels} if phase == "decode" else {}
        us = getattr(phases, phase)(
            resolve(point), machine, point.tp, point.reducer, point.batch, context, **how
        ).us
        found.append(us / 1e3 / line["result"][f"{phase}_ms"] - 1)
    return found


@pytest.mark.parametrize(
    ("record", "gpus", "phase", "mean", "most"),
    [
        ("virtual-ranks-h200", 1, "decode", 0.026, 0.036),
        ("virtual-ranks-h200", 1, "prefill", 0.016, 0.037),
        ("virtual-ranks-push-h200x2", 2, "decode", 0.0225, 0.035),
        ("virtual-ranks-push-h200x2", 2, "prefill", 0.041, 0.057),
    ],
)
def test_predictions_are_near_the_records(
    record: str, gpus: int, phase: str, mean: float, most: float
) -> None:
    """Nothing is fitted to such models."""
    each = [abs(error) for error in errors(phase, record, gpus)]
    assert len(each) == 4
    assert statistics.mean(each) < mean
    assert max(each) < most


def test_more_sequences_take_longer() -> None:
    """Products of 17 to 63 rows are of the tiles of 16 and 64."""
    config = replace(model_config("llama-3-8b"), plan=resolve_plan("desync-4x", 32, 4), tp_degree=4)
    batches = 16, 17, 24, 32, 48, 63, 64
    us = [phases.decode(config, load("h200x1"), 1, "async", each, 1024).us for each in batches]
    assert us == sorted(us)
    assert us[1] - us[0] < 0.03 * us[0]


@pytest.mark.parametrize("plan", ["desync-2x", "dtp-1", "accumulate-2x-lag1"])
def test_as_many_kernels_as_the_engine_launches(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step with four virtual ranks: a product of each matrix and rank, and one kernel for the
    attention and for a landing of all ranks."""
    seen: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        run = getattr(module, name)

        def count(*args: Any, **options: Any) -> Any:
            seen[name] += 1
            return run(*args, **options)

        monkeypatch.setattr(module, name, count)

    counted(matrix, "project")
    counted(fused, "decode_attention")
    counted(fused, "add_norm")  # of the last landing, whose norm is of one rank's residual
    counted(fused, "add_rms_norm")
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=4, num_heads=8,
        num_kv_heads=4, plan=resolve_plan(plan, 4, 4), tp_degree=4,
    )  # fmt: skip
    model = Transformer(config)
    initialise(model, seed=0)
    session = Engine(model, fused=True).session(1, 12, Sampling())
    with torch.inference_mode():
        session.prefill([[5, 8, 13]], draws(Sampling(), 1, 4))
        seen.clear()
        session.step()
    graph = forward(config.plan, "alone")
    kinds = Counter(each.kind for each in graph.operations)
    assert seen["project"] == 4 * kinds["product"] + kinds["head"]
    assert seen["decode_attention"] == kinds["attention"]
    assert seen["add_rms_norm"] + seen["add_norm"] == kinds["landing"]


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
    assert "_push_all_reduce" in names  # of TP 2
    assert names >= {"_project_kernel", "_norm_kernel", "_attention_kernel"}
    assert "_land_kernel" not in names
    capsys.readouterr()
    assert main([*words, "--prefill", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3
    assert main(["predict", "llama-3-8b", "--tp", "4", "--tp-degree", "2"]) == 2
    assert "give a multiple of --tp" in capsys.readouterr().err
    assert main([*words, "--weights", "fp8"]) == 2
    assert "virtual ranks are predicted with weights and a cache in bf16" in capsys.readouterr().err
    config = resolve(InferencePoint("llama-3-8b", "dtp-1", "push", 2, 1, 8, 2, 2, degree=4))
    with pytest.raises(UserError, match="2 virtual ranks each"):
        phases.prefill(config, load("h200x2"), 2, "fused", 1, 8)
