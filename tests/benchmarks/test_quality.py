"""benchmarks/quality.py: its queue, what it skips, its table, its page, its errors."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
import time
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ladder.config import load_plan
from ladder.data.mix import open_sources
from ladder.data.prepared import open_data
from ladder.models import resolve_plan
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import jobs
import quality
import quality_data
import quality_report

SMALL = [
    "model=tiny", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4",
    "model.num_kv_heads=4", "model.head_dim=8", "model.intermediate_size=64", "dtype=float32",
    "steps=3", "warmup_steps=1", "seq_len=16", "batch_size=4", "micro_batch_size=2",
    "log_interval=1",
]  # fmt: skip
# What stands in for a training: it writes a run's metrics, and when and where it ran.
STAND_IN = """
import json, os, pathlib, sys, time
since, (out, value, code) = time.time(), sys.argv[1:]
time.sleep(0.3)
folder = pathlib.Path(out)
folder.mkdir()
(folder / "recipe.json").write_text("{}")
lines = [{"step": 1, "loss": 2.0, "tokens": 64, "tokens_per_second": 9.0},
         {"step": 1, "heldout_loss": 1.0, "heldout_bits_per_byte": float(value)}]
(folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
ran = {"since": since, "until": time.time(), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
(folder / "ran.json").write_text(json.dumps(ran))
print("the disk is full")
sys.exit(int(code))
"""


def call(corpus: Path, tmp_path: Path, *options: str) -> int:
    where = ["--data", str(corpus), "--out", str(tmp_path / "out"), "--runs", str(tmp_path / "on")]
    return quality.main(["run", *SMALL, *where, *options])


def resolved(corpus: Path, tmp_path: Path, *pairs: tuple[str, int]) -> list[quality.Run]:
    options = Namespace(overrides=SMALL, data=corpus, runs=tmp_path)
    data = open_sources(str(corpus))
    return [quality.resolve(plan, seed, options, data) for plan, seed in pairs]


def stand_in(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> None:
    def command(self: quality.Run) -> list[str]:
        return [
            "-c",
            STAND_IN,
            self.config.out,
            str(1 + self.seed),
            str(3 * (self.plan == failing)),
        ]

    monkeypatch.setattr(quality.Run, "command", property(command))


# ---- trainings ------------------------------------------------------------------------------


def test_a_plan_in_a_file_is_called_by_its_name(corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("layers: [{layers: 0-1, attention: {reduce: none}, mlp: {reduce: residual}}]")
    (run,) = resolved(corpus, tmp_path, (str(file), 3))
    assert (run.plan, run.name) == ("mine", "mine-seed3")
    assert run.folder == tmp_path / "mine-seed3"
    assert run.model.tp_degree == quality.T  # the plan depends on T


def test_the_plans_beside_the_benchmark_are_of_its_model() -> None:
    files = sorted((Path(quality.__file__).parent / "plans").glob("*.yaml"))
    assert len(files) >= 5
    for file in files:
        plan = resolve_plan(load_plan(str(file)), 12, quality.T)
        every = int(file.stem.split("-")[1].removesuffix("x"))
        assert plan.collectives == -(-24 // every)
        assert {r.own_scale for r in plan.sublayers if r.reduce == "none"} == {quality.T**0.5}


def test_two_plans_are_trained_once(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Really trained: desync on virtual ranks first, over what a broken-off run left."""
    left = tmp_path / "on" / "standard-seed0"
    left.mkdir(parents=True)
    (left / "recipe.json").write_text("{}")
    assert call(corpus, tmp_path, "--only", "standard:0", "desync-2x") == 0
    records = quality_report.read(tmp_path / "out" / quality.RESULTS)
    assert [(r["plan"], r["tp_degree"]) for r in records] == [("desync-2x", 4), ("standard", None)]
    for each in records:
        assert each["tokens"] == 3 * 4 * 16
        assert 1 < each["heldout_bits_per_byte"] < 8
        assert [step for step, _ in each["losses"]] == [1, 2, 3]
        assert each["machine"]["command"].startswith("python -m ladder train quality-100m model=")
        assert each["recipe"]["model"]["hidden_size"] == 32
    table = capsys.readouterr().out

    monkeypatch.setattr(jobs, "start", None)  # nothing may be started
    assert call(corpus, tmp_path, "--only", "standard:0", "desync-2x") == 0
    again = capsys.readouterr().out
    assert again.strip() == table[table.index("tiny,") :].strip()
    assert call(corpus, tmp_path, "steps=4", "--only", "standard:0") == 2  # not the same recipe
    assert "another recipe" in capsys.readouterr().err


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: Namespace) -> int:
        raise KeyboardInterrupt

    assert jobs.finish(Namespace(verb=interrupted)) == 130
    assert capsys.readouterr().err == "interrupted; what is finished is kept\n"


def test_each_gpu_has_one_run_at_a_time_and_the_longest_are_first(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A failure is named, and is no record; the rest goes on."""
    stand_in(monkeypatch, failing="parallel")
    monkeypatch.setattr(quality, "visible_gpus", lambda count: ["2", "5"])
    only = ["standard", "parallel", "desync-2x", "dtp-1"]
    assert call(corpus, tmp_path, "--only", *only) == 1
    assert "parallel-seed0 on GPU" in (err := capsys.readouterr().err)
    assert "the disk is full" in err
    ran = {
        folder.name: json.loads((folder / "ran.json").read_text())
        for folder in (tmp_path / "on").iterdir()
        if folder.is_dir()
    }
    assert len(ran) == 5
    order = sorted(ran, key=lambda name: ran[name]["since"])
    assert set(order[:2]) == {"desync-2x-seed0", "dtp-1-seed0"}
    assert order[-1] == "standard-seed1"
    for gpu in ("2", "5"):
        own = sorted((r["since"], r["until"]) for r in ran.values() if r["gpu"] == gpu)
        assert len(own) >= 2
        assert all(end < begin for (_, end), (begin, _) in pairwise(own))
    records = quality_report.read(tmp_path / "out" / quality.RESULTS)
    assert sorted(f"{r['plan']}:{r['seed']}" for r in records) == [
        "desync-2x:0", "dtp-1:0", "standard:0", "standard:1",
    ]  # fmt: skip


def test_what_would_end_after_the_budget_is_not_begun(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_in(monkeypatch)
    runs = resolved(corpus, tmp_path, ("ladder", 0), ("desync-2x", 0))
    records = [{"tp_degree": 4, "wall_s": 100.0}]  # of virtual ranks: says nothing about ladder
    deadline = time.monotonic() + 50
    file = tmp_path / "quality.jsonl"
    assert quality.train_all(runs, [None], deadline, records, file, {}) == []
    assert [each["plan"] for each in quality_report.read(file)] == ["ladder"]
    assert "left out, the budget is spent: desync-2x-seed0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "nowhere"], ["nowhere", "prepare"]),
        (["--only", "laddder"], ["'laddder'", "'ladder'"]),
        (["--only", "none"], ["'none'", "no_comm"]),
        (["--only", "ladder:x"], ["--only=ladder:x", "whole number"]),
        (["--only", "ladder", "--budget", "0"], ["--budget=0"]),
        (["--gpus", "99"], ["--gpus=99"]),
        (["plan=ladder"], ["'plan=ladder'", "set by the benchmark"]),
        (["stepz=4"], ["stepz", "steps"]),
        (["seq_len=4096"], ["seq_len=4096"]),
    ],
)
def test_a_mistake_is_one_line(
    options: list[str], words: list[str], corpus: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert call(corpus, tmp_path, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert not (tmp_path / "out").exists()


# ---- table and page -------------------------------------------------------------------------


def made_up(plan: str, seed: int, value: float) -> dict[str, Any]:
    split = {"tokens": 500, "bytes": 1500, "documents": 3}
    return {
        "plan": plan, "seed": seed, "tp_degree": None, "parameters": 97_000_000, "tokens": 1000,
        "heldout_bits_per_byte": value, "heldout_loss": 2.0, "wall_s": 180.0,
        "tokens_per_second": 5e5, "mfu": 0.31, "memory_gib": 40.0, "losses": [],
        "recipe": {"model": {"name": "quality-100m", "num_layers": 12}},
        "data": {"train": split, "heldout": split}, "machine": {"gpu": "H200", "command": "c"},
    }  # fmt: skip


def latency(plan: str, reducer: str, milliseconds: float, **point: Any) -> dict[str, Any]:
    names = {"model": "quality-100m", "plan": plan, "reducer": reducer, "tp": 4, "batch": 1,
             "prompt": 1024, "new_tokens": 128, "layers": 12}  # fmt: skip
    times = {"prefill_ms": 1.0, "decode_ms": milliseconds, "total_ms": 99.0, "decode_p99_ms": 1.0,
             "prefill_floor_ms": 0.5, "floor_ms": 0.1, "memory_gib": 1.0, "picked": {}}  # fmt: skip
    return {"point": names | point, "result": times, "check": {}, "without_reduces": None,
            "machine": {"gpu": "H200", "nccl": "2.28"}}  # fmt: skip


RECORDS = [
    made_up("dtp-1", 0, 1.31), made_up("ladder", 0, 1.20), made_up("standard", 1, 1.10),
    made_up("standard", 0, 1.14), made_up("ladder", 1, 1.22), made_up("parallel", 0, 1.25),
]  # fmt: skip
LATENCY = [
    latency("standard", "async", 3.0), latency("standard", "push", 2.0),
    latency("ladder", "push", 1.6), latency("dtp-1", "push", 1.8), latency("none", "push", 1.7),
    latency("ladder", "push", 9.0, batch=64), latency("ladder", "push", 9.0, model="tiny"),
]  # fmt: skip


def write(file: Path, records: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return str(file)


def test_the_table_has_means_spreads_and_differences() -> None:
    found = [row[:6] for row in quality_report.rows(RECORDS)]
    assert found == [
        ["standard", "-", "2", "1.1200", "0.0400", "-"],
        ["parallel", "-", "1", "1.2500", "-", "+0.1300"],
        ["ladder", "-", "2", "1.2100", "0.0200", "+0.0900"],
        ["dtp-1", "-", "1", "1.3100", "-", "+0.1900"],
    ]


def test_the_page_joins_quality_and_latency(tmp_path: Path) -> None:
    """The fastest reducer of each plan, of this shape at batch 1; dtp-1 is beaten by ladder."""
    found, times = write(tmp_path / "q.jsonl", RECORDS), write(tmp_path / "l.jsonl", LATENCY)
    out = tmp_path / "new" / "page.html"
    assert quality.main(["page", "--quality", found, "--latency", times, "--out", str(out)]) == 0
    page = out.read_text()
    assert page.count("<svg") == 1
    assert "<td>NCCL 2.28</td>" in page  # what the latency was measured with
    assert not any(word in page for word in ("<link", "src=", "@import"))  # it needs nothing else
    assert "No other plan is at once better and faster than standard, ladder." in page

    def row(*values: str) -> str:
        return "<tr>" + "".join(f"<td>{value}</td>" for value in values) + "</tr>"

    assert row("standard", "1.1200", "0.0400", "-", "2.000", "push", "1.000", "yes") in page
    assert row("ladder", "1.2100", "0.0200", "+0.0900", "1.600", "push", "1.250", "yes") in page
    assert row("dtp-1", "1.3100", "-", "+0.1900", "1.800", "push", "1.111", "no") in page
    assert row("parallel", "1.2500", "-", "+0.1300", "-", "-", "-", "-") in page


@pytest.mark.parametrize(
    ("records", "times", "words"),
    [
        (None, LATENCY, ["no results", "quality.py run"]),
        (RECORDS, None, ["no results", "ladder bench inference"]),
        (RECORDS, [latency("ladder", "push", 1.0, tp=2)], ["TP 4", "none"]),
        (
            RECORDS,
            [*LATENCY, latency("ladder", "push", 1.0, prompt=8)],
            ["prompt 1024", "prompt 8"],
        ),
        ([*RECORDS, {"no": "plan"}], LATENCY, ["line 7", "remove"]),
        ([*RECORDS, made_up("hybrid", 0, 1.0) | {"recipe": {}}], LATENCY, ["several recipes"]),
    ],
)
def test_a_page_of_what_does_not_fit_is_refused(
    records: Any, times: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "q.jsonl", tmp_path / "l.jsonl"]
    for file, content in zip(files, (records, times), strict=True):
        if content is not None:
            write(file, content)
    options = ["--quality", str(files[0]), "--latency", str(files[1])]
    assert quality.main(["page", *options, "--out", str(tmp_path / "p.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    for word in words:
        assert word in error


# ---- data -----------------------------------------------------------------------------------


def test_a_manual_page_loses_its_navigation_and_keeps_its_code() -> None:
    html = """<div class="sidebar"><p>Search</p></div><div class="body" role="main"><div><h1>Locks
      <a class="headerlink" href="#x">P</a></h1><p>Take <em>one</em>
      lock.</p><pre>a:\n    b &lt; 1\n</pre></div><p>End.</p></div><div><p>Footer</p></div>"""
    lines = [line for line in quality_data.Page.text(html).splitlines() if line]
    assert [" ".join(line.split()) for line in lines[:2]] == ["Locks", "Take one lock."]
    assert lines[2:] == ["a:", "    b < 1", "End."]


def test_the_archive_holds_prepared_data_and_follows_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page stands in for a source that quotes code; translations and pictures are left out."""
    monkeypatch.setattr(quality_data, "python", lambda: iter(["import os\n" * 9] * 9))
    call = ["--root", str(tmp_path), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    call += ["--heldout-fraction", "0.3", "--archive"]
    assert quality_data.main([*call, str(tmp_path / "none.tar.xz")]) == 2
    assert "install linux-doc-6.1" in capsys.readouterr().err

    linux = tmp_path / quality_data.LINUX
    for name, text in {
        "Documentation/api.rst.gz": ".. kernel-doc:: lib/list.c\n",
        "Documentation/plain.rst": "Plain words.\n",
        "Documentation/translations/it/plain.rst": "Parole.\n",
        "Documentation/picture.svg": "<svg/>\n",
        "html/api.html": '<div role="main"><p>A list is doubly linked.</p></div>',
    }.items():
        file = linux / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    entry = "Word\n   Its meaning, and more of it.\n"
    file = tmp_path / quality_data.GCIDE
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress((entry * 1000).encode() + b"\x92"))
    for name in ("a.tar.xz", "b.tar.xz"):
        assert quality_data.main([*call, str(tmp_path / name)]) == 0
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()

    lines = (tmp_path / "out/texts/linux.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].strip() for line in lines]
    assert texts == ["A list is doubly linked.", "Plain words."]
    lines = (tmp_path / "out/texts/gcide.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert all(json.loads(line)["text"].startswith(entry) for line in lines)
    with tarfile.open(tmp_path / "a.tar.xz") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    data = open_data(tmp_path / "unpacked" / "data")
    assert sum(split.documents for split in data.splits.values()) == 9 + 2 + 3
