"""How much records of the same point differ."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ladder.cli import main
from ladder.perf.machine_files import load
from ladder.perf.prediction.ranking import rankings
from ladder.perf.prediction.records import scores
from ladder.perf.prediction.repeats import repeats
from tests import ROOT


def line(plan: str, ms: float, run: str, **point: Any) -> str:
    about = {"gpu": "NVIDIA H200", "ranks": 4, "commit": run, "command": "ladder bench inference"}
    made = {"model": "llama-3-8b", "plan": plan, "reducer": "push", "tp": 4, "batch": 1,
            "prompt": 1024, "new_tokens": 64, "layers": 32, **point}  # fmt: skip
    result = {"decode_ms": ms, "prefill_ms": 7.0}
    return json.dumps({"machine": about, "point": made, "result": result})


def test_records_of_one_point_and_speedups_of_one_run(tmp_path: Path) -> None:
    """A speedup is of two times of one run: 1.2 and 1.4, and not 1.2 / 1.0 of different ones."""
    file = tmp_path / "records.jsonl"
    lines = [line("standard", 1.2, "a"), line("ladder", 1.0, "a"), line("parallel", 1.0, "a")]
    lines += [line("standard", 2.8, "b", new_tokens=128), line("ladder", 2.0, "b")]
    file.write_text("\n".join(lines), encoding="utf-8")
    times, gains = repeats([file], load("h200x4"), "decode")
    # 1.2 and 2.8 are 40 % from 2, 1 and 2 are a third from 1.5.
    assert "with more than one record: 2, which are 36.7 %" in times
    assert "at most 40.0 %" in times
    assert "with more than one run: 1, which are 10.0 points" in gains
    file.write_text(lines[0], encoding="utf-8")
    assert repeats([file], load("h200x4"), "decode") == []


def test_speedups_of_prompts_that_ran_by_operators_in_part(tmp_path: Path) -> None:
    """`standard`'s prompt by operators, the ladder's by copies, of one run."""
    lines = []
    for run, ms in (("a", 1.2), ("b", 1.4)):
        for plan, chosen, each in (("standard", "fused, copy", ms), ("ladder", "sharded, copy", 1)):
            record = json.loads(line(plan, 1.0, run, batch=64))
            record["result"] |= {"prefill_ms": each, "chosen": {"prefill": chosen}}
            lines.append(json.dumps(record))
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    (_, gains) = repeats([file], load("h200x4"), "prefill")
    assert "with more than one run: 1, which are 10.0 points" in gains


def test_records_of_other_kernels_are_no_repeats(tmp_path: Path) -> None:
    """And are cases of their own."""
    file = tmp_path / "records.jsonl"
    lines = []
    for commit, date, ms in (
        ("e", "2026-11-29", 1.0), ("d", "2026-11-28", 1.0), ("9900fd3", "2026-11-29", 1.0),
        ("a", "2026-11-27", 1.0), ("64ebca59", "2026-11-27", 1.0),
        ("41aaacd", "2026-11-27", 1.0), ("a6535fa", "2026-11-27", 1.1), ("b", "2026-11-26", 1.2),
        ("c", "2026-11-20", 1.3),
    ):  # fmt: skip
        for plan, more in (("ladder", 0.0), ("standard", 0.2)):
            record = json.loads(line(plan, ms + more, commit))
            record["machine"]["date"] = date
            lines.append(json.dumps(record))
    file.write_text("\n".join(lines), encoding="utf-8")
    (said,) = repeats([file], load("h200x4"), "decode")[:1]
    # d's and 9900fd3's, a6535fa's and b's; of two plans each
    assert "with more than one record: 4," in said
    found = [each.case for each in rankings(scores([file], load("h200x4"), "decode"))]
    assert [each.partition("prompt 1024")[2] for each in found] == [
        "", ", smaller tiles beside other kernels", ", riding beside tiles",
        ", keys read after the wait", ", riding inside tiles", ", riding behind tiles",
        ", older kernels",
    ]  # fmt: skip


def test_validate_says_how_much_records_differ(capsys: pytest.CaptureFixture[str]) -> None:
    results = ROOT / "benchmarks/results"
    files = [str(results / f"2026-11-22-frame-{when}-h200x4.jsonl") for when in ("before", "after")]
    assert main(["predict", "validate", *files]) == 0
    assert capsys.readouterr().out.count("points with more than one record") == 2
