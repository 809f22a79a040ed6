"""benchmarks/adapt.py: its points, what it measures, what it skips, its table, its errors."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ladder.checkpoint import load_model, newest, read_config
from ladder.cli import main as ladder
from ladder.convert.sensitivity import measure_sensitivity as sensitivity
from ladder.data.prepared import open_data
from ladder.train import metrics
from ladder.train.config import load_train_config
from ladder.train.loop import train
from tests import ROOT
from tests.train.runs import recipe

sys.path.insert(0, str(ROOT / "benchmarks"))
import adapt
import adapt_points
import adapt_report

LAYERS = 4


@pytest.fixture(scope="module")
def standard(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("standard") / "run"
    shape = {"name": "tiny", "hidden_size": 32, "num_layers": LAYERS, "num_heads": 4,
             "num_kv_heads": 4, "head_dim": 8, "intermediate_size": 48}  # fmt: skip
    settings = {"plan": "standard", "model": shape, "steps": 40, "batch_size": 8, "lr": 1e-2}
    train(recipe(corpus, run, **settings), device="cpu")
    return run


def in_this_process(
    waiting: list[adapt.Point], gpus: Any, until: Any, expected_s: Any, finished: Callable[..., str]
) -> list[adapt.Point]:
    """A replacement of the queue, which tests/benchmarks/test_quality.py tests."""
    for point in waiting:
        point.prepare()
        point.folder.with_name(f"{point.name}.ran").touch()
        words = point.command[1:]
        assert (adapt.main(words) if point.measured else ladder(words[1:])) == 0
        finished(SimpleNamespace(job=point, wall_s=1.0))
    waiting.clear()
    return []


def call(standard: Path, out: Path, *options: str) -> int:
    where = ["--standard", str(standard), "--out", str(out), "--no-tasks", "--windows", "6"]
    return adapt.main(["run", *where, *options])


def test_points_are_made_measured_and_skipped(
    standard: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The zero-shot figures are those of the sensitivity; progressive ends with the whole plan."""
    monkeypatch.setattr(adapt, "run_all", in_this_process)
    monkeypatch.setattr(adapt_points, "STEPS", 70)
    out = tmp_path / "out"
    wanted = ["--share", "0.5", "--only", "original", "*-2-zero-shot", "*-2-progressive-distil"]
    assert call(standard, out, *wanted) == 0
    records = {record["name"]: record for record in adapt_report.read(out / adapt.RESULTS)}
    found = sensitivity(load_model(newest(standard)), open_data(corpus), 2, 16, 6, 3)
    suffix = "both" if found.chosen.layers == (2, 3) else "last"
    original, before = records["original"], records[f"{suffix}-2-zero-shot"]
    assert original["bits_per_byte"] == pytest.approx(found.original, rel=1e-6)
    assert original["divergence"] == pytest.approx(0, abs=1e-6)
    assert before["bits_per_byte"] == pytest.approx(found.suffix.bits_per_byte, rel=1e-6)
    assert before["divergence"] == pytest.approx(found.suffix.divergence, rel=1e-4)
    after = records[f"{suffix}-2-progressive-distil"]
    run = out / after["name"] / "model"
    config = load_train_config(str(run / "recipe.json"), [])
    trained = load_train_config(str(standard / "recipe.json"), [])
    assert (config.batch_size, config.steps) == (trained.batch_size // 4, 80)
    assert after["tokens"] == config.steps * config.batch_size * config.seq_len
    assert after["tokens"] == 0.5 * trained.steps * trained.batch_size * trained.seq_len
    assert config.teacher == config.init == str(standard)
    assert config.lr == after["lr"] == pytest.approx(adapt.RATE * trained.lr)
    assert load_model(newest(run)).config.plan.name == after["plan"] == "ladder@2-3"
    assert config.convert_layers == {"start_step": 0, "every": config.steps // 4}
    assert [len(each) for each in after["curve"]] == [4] * config.steps
    assert after["machine"]["command"].startswith(f"ladder finetune {standard}/recipe.json init=")
    assert [e for e in metrics.read_metrics(run) if "heldout_loss" in e]

    for mark in out.glob("*.ran"):
        mark.unlink()
    table = capsys.readouterr().out
    assert call(standard, out, *wanted) == 0
    assert not list(out.glob("*.ran"))
    assert capsys.readouterr().out.split("trained on")[1] == table.split("trained on")[1]
    assert call(standard, out, "seq_len=8", *wanted) == 2
    assert "another recipe" in capsys.readouterr().err


def options(standard: Path, *more: str) -> Any:
    return adapt.parse(["run", "--standard", str(standard), "--out", "o", *more])


def test_the_points(standard: Path) -> None:
    """A choice that is the suffix is measured once; rates are those of the first choice alone."""
    singles = [{"layers": [layer]} for layer in (6, 4, 7, 5, 1, 0, 2, 3)]
    chosen = adapt.choices({"singles": singles})
    assert chosen == [
        ("both", (4, 5, 6, 7)), ("last", (3, 4, 5, 6, 7)), ("cheapest", (1, 4, 5, 6, 7)),
    ]  # fmt: skip
    assert [len(layers) for _, layers in adapt.choices({"singles": singles + [
        {"layers": [layer]} for layer in range(8, 12)
    ]})][::2] == [6, 8]  # fmt: skip
    given = options(standard, "--rates", "3", "--share", "1")
    eight = replace(read_config(newest(standard)), num_layers=8, plan="standard")
    points = adapt.points(given, adapt.recovery(given), chosen, eight)
    names = [point.name for point in points]
    assert len(names) == len(set(names)) == 1 + 3 + 1 + 4 * 3 + 3
    assert names[-3:] == ["both-4-plain-x3", "both-4-distil-x3", "trained-on-x3"]
    words = {point.name: " ".join(point.words) for point in points}
    assert words["original"] == ""
    assert "--plan ladder@1,ladder@4-7 " in words["cheapest-5-zero-shot"]
    assert "plan=" not in words["trained-on"]
    for name in names:
        assert ("teacher=" in words[name]) == ("distil" in name)
        assert ("convert_layers=" in words[name]) == ("progressive" in name)
    rates = {point.name: point.about["lr"] for point in points}
    assert rates["both-4-plain-x3"] == pytest.approx(3 * rates["both-4-plain"])


WIRED = ("ladder", "desync-4x-sqrt", "accumulate-4x", "accumulate-4x-one")


@pytest.mark.slow  # seven points; the test of two points above is in `make test`
def test_other_plans_on_the_last_half(
    standard: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are made, recovered and told apart by name, beside the ladder, and no layer's cost is
    measured. The model that is trained is the one that is measured before."""
    monkeypatch.setattr(adapt, "run_all", in_this_process)
    wanted = [
        "--wiring",
        *WIRED,
        "--share",
        "0.2",
        "--only",
        "original",
        "*-zero-shot",
        "*sqrt-distil",
    ]
    assert call(standard, tmp_path / "out", *wanted) == 0
    records = {
        record["name"]: record for record in adapt_report.read(tmp_path / "out" / adapt.RESULTS)
    }
    names = [f"last-2{'' if each == 'ladder' else f'-{each}'}-zero-shot" for each in WIRED]
    assert [*records] == ["original", *names, "last-2-desync-4x-sqrt-distil"]
    plans = {
        name: read_config(newest(tmp_path / "out" / name / "model")) for name in [*records][1:]
    }
    scales = {name: {r.own_scale for r in each.plan.sublayers} for name, each in plans.items()}
    assert [*scales.values()] == [{1}, {1, 2}, {1, 2}, {1}, {1, 2}]
    for name, config in plans.items():
        assert {record.reduce for record in config.plan.sublayers[:4]} == {"output"}
        assert config.tp_degree == records[name]["tp_degree"] == (None if name == names[0] else 4)
        assert config.plan.name == records[name]["plan"]
        assert records[name]["reduces"] == (8 if name == names[0] else 5)
        assert records[name]["divergence"] > 1e-5  # rounding: 1e-7
    assert len({records[name]["bits_per_byte"] for name in names}) == 4
    trained = records["last-2-desync-4x-sqrt-distil"]
    assert plans[trained["name"]] == plans[names[1]]
    first = trained["curve"][0]
    assert first[3] == pytest.approx(records[names[1]]["divergence"], rel=0.5)
    table = capsys.readouterr().out
    assert re.search(r"desync-4x-sqrt@2-3 +5 +\+\d\.\d{4} +[+-]\d\.\d{4} \(-?\d+ %\)\n", table)


def test_the_points_of_other_plans(standard: Path) -> None:
    """Of plans that depend on T none that converts layer by layer; another T is in the name."""
    config = read_config(newest(standard))

    def names(*more: str) -> list[str]:
        given = options(standard, "--share", "1", "--wiring", "desync-4x", "ladder", *more)
        found = adapt.points(given, adapt.recovery(given), [("last", (2, 3))], config)
        return [point.name for point in found]

    assert names("--tp-degree", "2") == [
        "original", "last-2-desync-4x-T2-zero-shot", "last-2-zero-shot", "trained-on",
        "last-2-desync-4x-T2-distil", "last-2-distil", "last-2-desync-4x-T2-plain", "last-2-plain",
    ]  # fmt: skip
    more = names("--choices", "all", "--rates")
    assert [name for name in more if "progressive" in name] == [
        "last-2-progressive", "last-2-progressive-distil",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--wiring", "desync-4x-squared"], ["--wiring=desync-4x-squared", "desync-Nx"]),
        (["--wiring", "parallel"], ["--wiring=parallel", "merges"]),
        (["--wiring", "desync-4x-one"], ["--wiring=desync-4x-one", "no scale"]),
        (["--wiring", "desync-4x", "--tp-degree", "3"], ["--wiring=desync-4x", "tp_degree=3"]),
        (["--wiring", "desync-4x", "--only", "*-progressive"], ["last-2-desync-4x-distil"]),
        (["plan=ladder"], ["'plan=ladder'", "set by the benchmark"]),
        (["stepz=4"], ["stepz", "steps"]),
        (["--share", "0.001"], ["--share=0.001", "0 steps"]),
        (["--share", "nan"], ["--share=nan must be above 0"]),
        (["--rates", "0.5", "0"], ["--rates=0 must be above 0"]),
        (["--windows", "-1"], ["--windows=-1 must be 0 (all) or more"]),
        (["--limit", "0"], ["--limit=0 must be 1 or more"]),
        (["--budget", "0"], ["--budget=0"]),
        (["--data", "nowhere"], ["nowhere", "prepare"]),
        (["--standard", "nowhere"], ["--standard=nowhere", "recipe.json"]),
        (["--only", "latest-*"], ["--only=latest-*", "last-2-zero-shot", "cheapest-2-distil"]),
    ],
)
def test_a_mistake_is_one_line(
    more: list[str], words: list[str], standard: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert call(standard, tmp_path / "out", "--share", "1", *more) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not (tmp_path / "out").exists()


# ---- table ----------------------------------------------------------------------------------


def made_up(way: str, layers: list[int], bits: float, **more: Any) -> dict[str, Any]:
    trained = way not in ("original", "zero-shot")
    return {
        "name": f"{way}{len(layers)}", "chosen": "last", "layers": layers, "way": way,
        "lr": 1e-3 if trained else None, "tokens": 50 if trained else 0,
        "plan": f"ladder@{layers[0]}-3" if layers else "standard",
        "bits_per_byte": bits, "divergence": 0.1, "heldout_tokens": 9, "make_s": 3.0,
        "tasks": {"local_cloze acc": [0.5, 0.1]}, "data": {"heldout": {"tokens": 99}},
        "standard": {"recipe": {"steps": 10, "batch_size": 10, "seq_len": 10}},
        "settings": {"recovery": ["batch_size=2"]},
    } | more  # fmt: skip


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Recovered is a share of what the same layers cost, not of another choice's."""
    records = [
        {"name": "sensitivity", "singles": []},
        made_up("original", [], 1.0), made_up("trained-on", [], 0.98),
        made_up("zero-shot", [1, 2, 3], 2.0), made_up("zero-shot", [2, 3], 1.5),
        made_up("distil", [2, 3], 1.05), made_up("plain", [1, 2, 3], 1.2, tasks={}),
    ]  # fmt: skip
    file = tmp_path / "adapt.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    assert adapt.main(["report", str(file)]) == 0
    text = capsys.readouterr().out
    assert "trained on 1,000 tokens; recovered with 50 (5.0%)" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[2:5] == [
        "| none, trained as long | - | -0.0200 | - |",
        "| ladder@2-3 | +0.5000 | - | +0.0500 (90 %) |",
        "| ladder@1-3 | +1.0000 | +0.2000 (80 %) | - |",
    ]
    lines = lines[7:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [(row[2], row[5], row[7], row[8]) for row in cells] == [
        ("original", "-", "-", "0.500"),
        ("trained-on", "-0.0200", "-", "0.500"),
        ("zero-shot", "+0.5000", "-", "0.500"),
        ("distil", "+0.0500", "90 %", "0.500"),
        ("zero-shot", "+1.0000", "-", "0.500"),
        ("plain", "+0.2000", "80 %", "-"),
    ]
    records.append(made_up("plain", [2, 3], 1.01, plan="desync-4x@2-3"))
    assert adapt_report.recovered(records[-1], records) is None  # the ladder's cost is another
    assert "recovers 90 %" in adapt_report.write_page(records[:-1])[0]
    machine = {"gpu": "none", "date": "d", "commit": "c"}
    finding, text = adapt_report.write_page([each | {"machine": machine} for each in records])
    assert finding == "desync-4x@2-3 plain is nearest to the original: +0.0100 bits per byte."
    assert "<td>desync-4x@2-3</td>" in text
    assert adapt.main(["report", str(tmp_path / "none.jsonl")]) == 2
    assert "adapt.py run" in capsys.readouterr().err
