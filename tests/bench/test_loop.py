"""The loop of `ladder bench inference` without a GPU: what is measured, kept, and tried again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.inference import command as bench
from ladder.bench.inference.points import InferencePoint, Settings
from ladder.comm import access
from ladder.models import UserError
from ladder.parallel import launch
from tests.bench.records import POINT, record

CPU = torch.device("cpu")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[InferencePoint]]]:
    """The loop without a GPU; yields what it measures, chunk by chunk."""
    found: list[list[InferencePoint]] = []

    def fake(points: list[InferencePoint], *rest: Any) -> tuple[list[Any], list[str]]:
        found.append(list(points))
        good = [point for point in points if point.plan != "dtp-1"]
        result = [record(p) for p in good], ["dtp-1: wrong"] * (len(good) < len(points))
        rest[-1](*result)
        return result

    monkeypatch.setattr(bench, "measure", fake)
    monkeypatch.setattr(launch, "join", lambda device: CPU)
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e12)
    monkeypatch.setattr(bench, "matrix_rate", lambda device: 1e12)
    monkeypatch.setattr(bench, "free_bytes", lambda device: 1e12)
    monkeypatch.setattr(bench, "machine", lambda device, speed, rate: {"gpu": "none"})
    return found  # type: ignore[return-value]


def job(out: Path, **changes: Any) -> bench.InferenceRun:
    settings = Settings("tiny", plans=("standard", "ladder"), batch=(1, 2), prompt=8, new_tokens=4)
    return bench.InferenceRun((replace(settings, **changes),), out, True, float("inf"))


def test_finished_points_are_skipped(tmp_path: Path, measured: list[list[InferencePoint]]) -> None:
    old = {"point": asdict(POINT), "result": {"prefill_ms": 1.0}}  # of an older form
    (tmp_path / bench.RESULTS).write_text(json.dumps(old) + "\n")
    assert bench.run_job(job(tmp_path, batch=(1,))) == 0
    assert [[(p.plan, p.batch) for p in part] for part in measured] == [
        [("standard", 1), ("ladder", 1)]
    ]
    assert bench.run_job(job(tmp_path)) == 0  # goes on with what is new
    assert [(p.plan, p.batch) for p in measured[1]] == [("standard", 2), ("ladder", 2)]
    assert bench.run_job(job(tmp_path)) == 0
    assert len(measured) == 2
    assert len((tmp_path / bench.RESULTS).read_text().splitlines()) == 5
    assert len(json.loads((tmp_path / bench.SUMMARY).read_text())) == 4
    assert "<table>" in (tmp_path / bench.PAGE).read_text()


def test_other_code_is_not_compared(
    tmp_path: Path, measured: list[list[InferencePoint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a case; a case of its own, and one that is finished, may be of any commit."""
    assert bench.run_job(job(tmp_path, batch=(1,))) == 0
    monkeypatch.setattr(bench, "machine", lambda *_: {"gpu": "none", "commit": "abc"})
    assert bench.run_job(job(tmp_path, batch=(1, 2))) == 0
    wanted = r"holds standard, .* measured with commit None, which now is abc"
    with pytest.raises(UserError, match=wanted):
        bench.run_job(job(tmp_path, plans=("standard", "ladder", "parallel")))
    assert len(measured) == 2


def test_other_code_is_not_compared_with_points_that_this_call_has_not(
    tmp_path: Path, measured: list[list[InferencePoint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of other plans, or reducers: they are compared with all points of their case."""
    assert bench.run_job(job(tmp_path, batch=(1,), reducers=("async",))) == 0
    monkeypatch.setattr(bench, "machine", lambda *_: {"gpu": "H200"})
    others = job(tmp_path, batch=(1,), plans=("parallel",), reducers=("async",))
    with pytest.raises(UserError, match=r"holds standard.* gpu none, which now is H200: .* --out"):
        bench.run_job(others)
    (tmp_path / "other").mkdir()
    assert bench.run_job(replace(others, out=tmp_path / "other")) == 0
    assert len(measured) == 2


def test_a_name_that_means_something_else_now_is_not_skipped(
    tmp_path: Path, measured: list[list[InferencePoint]]
) -> None:
    """A plan's file that was written anew: its finished points are of the plan before."""
    file = tmp_path / "mine.yaml"
    layers = "layers:\n- {{layers: 0-{}, preset: {}}}\n"
    file.write_text(layers.format(3, "ladder"))
    again = job(tmp_path, plans=("standard", str(file)), batch=(1,))
    assert bench.run_job(again) == 0
    assert bench.run_job(again) == 0
    file.write_text(layers.format(3, "parallel"))
    with pytest.raises(UserError, match=r"holds .*mine.yaml.* whose model or plan has changed"):
        bench.run_job(again)
    assert len(measured) == 1


def test_tables_of_the_users_own_are_among_the_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another table may choose other all-reduces and operators."""
    monkeypatch.delenv("LADDER_DISPATCH", raising=False)
    monkeypatch.delenv("LADDER_OPS_TABLE", raising=False)
    assert bench.own_tables() is None
    found = []
    for content in ("[]", "[ ]"):
        (tmp_path / "t.json").write_text(content)
        monkeypatch.setenv("LADDER_DISPATCH", str(tmp_path / "t.json"))
        found.append(bench.own_tables())
    assert [{*each} for each in found if each] == [{"LADDER_DISPATCH"}] * 2
    assert found[0] != found[1]
    monkeypatch.setenv("LADDER_OPS_TABLE", str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"LADDER_OPS_TABLE=.*none .*; unset LADDER_OPS_TABLE"):
        bench.own_tables()


def test_a_trace_that_fails_costs_no_figures(
    tmp_path: Path, measured: list[list[InferencePoint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = bench.measure

    def fails(*arguments: Any) -> Any:
        fake(*arguments)
        raise UserError("the profiler is busy")

    monkeypatch.setattr(bench, "measure", fails)
    with pytest.raises(UserError, match="busy"):
        bench.run_job(job(tmp_path))
    assert [(p.plan, p.batch) for p in bench.finished(tmp_path / bench.RESULTS)] == [
        ("standard", 1),
        ("ladder", 1),
    ]


def test_a_half_written_result_is_named(tmp_path: Path) -> None:
    file = tmp_path / bench.RESULTS
    file.write_text(json.dumps(record(POINT)) + '\n{"point": {"mo')
    with pytest.raises(UserError, match=r"line 2 of .*inference.jsonl.*remove the line"):
        bench.finished(file)


def test_a_spent_budget_starts_nothing(
    tmp_path: Path, measured: list[list[InferencePoint]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run_job(replace(job(tmp_path), deadline=0.0)) == 0
    assert measured == []
    said = capsys.readouterr().out
    assert said.count("the budget is spent: standard, reducer async, tiny") == 2
    assert not (tmp_path / bench.RESULTS).exists()


def test_a_wrong_engine_is_not_recorded(
    tmp_path: Path, measured: list[list[InferencePoint]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run_job(job(tmp_path, plans=("standard", "dtp-1"), batch=(1,))) == 1
    assert "error: dtp-1: wrong" in capsys.readouterr().err
    assert [p.plan for p in bench.finished(tmp_path / bench.RESULTS)] == ["standard"]
    bench.run_job(job(tmp_path, plans=("standard", "dtp-1"), batch=(1,)))
    assert [p.plan for p in measured[-1]] == ["dtp-1"]  # tried again


@pytest.mark.parametrize(("value", "off"), [("", False), ("0", False), ("1", True), ("true", True)])
def test_the_push_kernel_and_the_benchmark_agree_on_p2p(
    tmp_path: Path,
    measured: list[list[InferencePoint]],
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    off: bool,
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(access, "triton", object())
    assert ("NCCL_P2P_DISABLE" in str(access.push_refusal(2))) == off
    if off:
        with pytest.raises(UserError, match=f"NCCL_P2P_DISABLE={value} .*--p2p off"):
            bench.run_job(job(tmp_path))
    else:
        assert bench.run_job(job(tmp_path)) == 0


def test_p2p_off_is_set_before_ranks_join(
    tmp_path: Path, measured: list[list[InferencePoint]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    with pytest.raises(UserError, match="--p2p off"):
        bench.run_job(job(tmp_path))
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    seen: list[str | None] = []

    def join(device: str) -> torch.device:
        seen.append(bench.os.environ.get("NCCL_P2P_DISABLE"))
        return CPU

    monkeypatch.setattr(launch, "join", join)
    bench.run_job(replace(job(tmp_path, p2p=(False,)), p2p=False))
    assert seen == ["1"]
    assert all(not p.p2p for part in measured for p in part)
    monkeypatch.delenv("NCCL_P2P_DISABLE")
