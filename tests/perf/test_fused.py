"""Exchanges inside of products: where they are, what the operators' table says, and the records."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder.bench.results import read_results
from ladder.cli import main
from ladder.config import model_config
from ladder.files import write_text
from ladder.models import resolve_plan
from ladder.ops.registry import SERIAL, bucket
from ladder.ops.table import VARIABLE
from ladder.perf.fused import OPERATORS, STAGED, Inside, picked
from ladder.perf.graph import FUSED, training
from ladder.perf.lower_prefill import Way, prefill
from ladder.perf.machine import Value
from ladder.perf.machine_files import load, write

RECORDS = Path(__file__).parents[2] / "benchmarks/results/2026-11-22-ops-h200x2.jsonl"
Out = pytest.CaptureFixture[str]


def inside(graph: Any) -> list[tuple[str, int, bool]]:
    return [
        (each.kind, each.sublayer, each.backward)
        for each in graph.operations
        if each.algorithm == FUSED
    ]


def test_prompts_exchange_in_products_where_the_plan_blocks() -> None:
    """Scatters of every sublayer of `standard` but those of one position, gathers of all that read
    them; in `parallel` gathers alone; nothing that a ladder keeps in flight."""
    way = Way(4, "copy", fused=True)
    found = inside(prefill(resolve_plan("standard", 4), way))
    assert found == [
        entry
        for n in range(7)
        for entry in ([("all-gather", n, False)] if n else [])
        + ([("reduce-scatter", n, False)] if n < 6 else [])
    ]
    found = inside(prefill(resolve_plan("parallel", 4), way))
    assert found == [("all-gather", n, False) for n in (1, 2)]
    assert inside(prefill(resolve_plan("ladder", 4), way)) == []
    half = inside(prefill(resolve_plan("hybrid", 4), way))
    assert {n for kind, n, _ in half if kind == "reduce-scatter"} == {0, 1, 2}
    sums = inside(prefill(resolve_plan("desync-2x", 4, 4), Way(4, fused=True)))
    assert sums == [("all-reduce", n, False) for n in (1, 3, 5)]
    for name in ("standard", "parallel", "ladder"):
        graph = prefill(resolve_plan(name, 4), Way(4, "copy", fused=True))
        apart = prefill(resolve_plan(name, 4), Way(4, "copy"))
        summed = [sorted(each.output or 0 for each in one.reduces) for one in (graph, apart)]
        assert summed[0] == summed[1]


def test_training_steps_have_them_in_both_directions() -> None:
    found = inside(training(resolve_plan("standard", 2), "sharded", fused=True))
    forward = [entry for entry in found if not entry[2]]
    back = [entry for entry in found if entry[2]]
    assert forward == [
        entry
        for n in range(4)
        for entry in ([("all-gather", n, False)] if n else []) + [("reduce-scatter", n, False)]
    ]
    mirrored = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}
    assert back == [(mirrored[kind], n, True) for kind, n, _ in reversed(forward)]
    assert inside(training(resolve_plan("ladder", 2), "sharded", fused=True)) == [
        entry for entry in inside(training(resolve_plan("ladder", 2), "sharded", fused=True))
        if entry[1] in (0, 3)
    ]  # fmt: skip
    assert inside(training(resolve_plan("standard", 2), "sharded")) == []


def recorded() -> dict[tuple[str, tuple[int, ...]], dict[str, dict[str, float]]]:
    """Captured times of the operators that exchange, by what ran; sizes as the table has them."""
    found: dict[tuple[str, tuple[int, ...]], dict[str, dict[str, float]]] = {}
    for line in read_results(RECORDS):
        point, result = line["point"], line.get("result")
        if result and point["mode"] == "captured":
            m, n, k = point["m"], point["n"], point["k"]
            sizes = (m, n // 2, k) if point["op"] == "all_gather_matmul" else (m, n, k // 2)
            case = point["op"], sizes
            found.setdefault(case, {})[point["way"]] = result
    return found


def test_staged_sums_take_the_median_of_the_records() -> None:
    staged = []
    for (op, _), found in recorded().items():
        if op == "matmul_all_reduce":
            staged.append(1 - found["staged"]["efficiency"])
    assert {"matmul_all_reduce": pytest.approx(statistics.median(staged), abs=0.01)} == STAGED


def test_what_exchanges_take_is_near_the_records() -> None:
    """A product alone, as recorded, and what the picked implementation is predicted to add."""
    machine, kinds = load("h200x2"), {op: kind for kind, op in OPERATORS.items()}
    inside = Inside(machine, 2)
    errors = []
    for (op, (m, n, k)), found in recorded().items():
        if op not in kinds:
            continue
        kind = kinds[op]
        name, _ = picked(op, machine.gpu, 2, (m, n, k), False, "captured")
        assert name not in SERIAL
        hidden = k if kind == "all-gather" else n
        us = machine.nccl(kind, 2.0 * m * hidden).us
        alone = min(found["alone"]["us"], found["alone, B contiguous"]["us"])
        exposed = inside(kind, (m, n, k), False, us, "captured")
        errors.append((alone + exposed) / found[name]["us"] - 1)
    assert len(errors) == 11
    assert max(map(abs, errors)) < 0.045  # one was recorded as faster than its product alone
    assert statistics.mean(map(abs, errors)) < 0.02


def test_a_table_of_ones_own_changes_the_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """The packaged table has no such shape of a 70B: nothing overlaps there. Without a power limit,
    which is nearer the less a prompt waits."""
    limited = load("h200x4")
    machine = replace(limited, values=limited.values | {"power_limit": Value(1.0, "none")})
    file = tmp_path / "machine.json"
    write(machine, file)

    def us() -> dict[str, float]:
        words = ["llama-3-70b", "--prefill", "--batch", "4", "--tp", "4", "--plans", "standard"]
        words += ["--machine", str(file), "--reducers", "fused", "push", "--json"]
        assert main(["predict", *words]) == 0
        found = json.loads(capsys.readouterr().out)
        return {row["way"]: row["us"] for row in found["rows"]}

    shape, before = model_config("llama-3-70b"), us()
    hidden, inner = shape.hidden_size, shape.intermediate_size // 4
    sizes = bucket((4096, 2 * inner, hidden))
    call = "all_gather_matmul", "NVIDIA H200", 4, sizes, False, "captured"
    assert picked(*call) == ("staged", ())
    entry = {
        "op": "all_gather_matmul", "device": "NVIDIA H200", "dtype": "bfloat16", "ranks": 4,
        "sizes": list(sizes), "mode": "captured", "implementation": "chunked",
        "options": {"streams": 2}, "source": "made up",
    }  # fmt: skip
    write_text(tmp_path / "table.json", json.dumps([entry]))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "table.json"))
    picked.cache_clear()
    after = us()
    assert picked(*call) == ("chunked", (("streams", 2),))
    exchange = machine.nccl("all-gather", 2.0 * 4096 * hidden).us
    exchange += machine.value("prompt_gap_us")
    left = Inside(machine, 4)("all-gather", (4096, 2 * inner, hidden), False, exchange, "captured")
    monkeypatch.delenv(VARIABLE)
    picked.cache_clear()
    assert 0 < left < exchange
    gathers = shape.num_layers  # of every MLP
    assert before["fused"] - after["fused"] == pytest.approx(gathers * (exchange - left), rel=0.1)
    assert after["push"] == before["push"]


def test_what_fused_operators_cannot_do_is_said(capsys: Out) -> None:
    words = ["predict", "llama-3-8b", "--reducers", "fused"]
    assert main(words) == 2
    assert "--reducers fused is of prompts" in capsys.readouterr().err
    assert main([*words, "--prefill", "--weights", "fp8"]) == 2
    assert "matrices of 16 bits" in capsys.readouterr().err
    plans = ["--plans", "standard", "dtp-1", "none", "--tp", "4"]
    assert main([*words, "--prefill", *plans, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["plan"] for row in found["rows"]} == {"standard", "none"}
    assert found["left_out"][0].startswith("dtp-1 at TP 4: not by fused operators (")
    best = found["recommended"]
    assert (best["way"], best["basis"], best["far"]) == ("fused", "extrapolated", True)
    train = ["llama-3-8b", "--train", "--plans", "standard", "--batch", "1", "--layouts"]
    assert main(["predict", *train, "tp4+sp", "tp4+sp+fused", "--json"]) == 0
    one, other = json.loads(capsys.readouterr().out)["rows"]
    assert other["us"] == pytest.approx(
        one["us"], rel=0.02
    )  # the table picks nothing that overlaps
