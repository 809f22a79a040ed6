"""`ladder bench inference` without a suite: what was asked for and cannot run is a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ladder.bench.inference import cold
from ladder.bench.inference import command as bench
from ladder.bench.inference.points import Settings, refuse_degree
from ladder.cli import main
from ladder.models import UserError
from ladder.parallel import launch

SMALL = ["bench", "inference", "--model", "tiny", "--prompt", "8", "--new-tokens", "4"]


def pushing(out: Path, asked: bool) -> bench.InferenceRun:
    settings = Settings("tiny", reducers=("push",), tp=(2,), prompt=8, new_tokens=4, p2p=(False,))
    return bench.InferenceRun((settings,), out, False, float("inf"), asked=asked)


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs, as far as options go."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launch, "join", lambda device: torch.device("cpu"))
    monkeypatch.setattr(launch, "agree", lambda values: None)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "")  # the benchmark sets it; this restores it


def test_nothing_to_measure_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A suite leaves out what cannot run, and what is left may be nothing."""
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    with pytest.raises(UserError, match=r"--p2p off: reducer push at TP 2: .*; choose"):
        bench.run_job(pushing(tmp_path, asked=True))
    assert bench.run_job(pushing(tmp_path, asked=False)) == 0
    assert "left out: reducer push at TP 2" in capsys.readouterr().out


def test_no_cold_start_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--cold", "--p2p", "off", "--reducers", "push", "--nproc", "2"]
    assert main([*SMALL, *options, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: nothing is left to measure with --p2p off: reducer push at")
    assert said.err.count("\n") == 1
    assert bench.cold_starts(pushing(tmp_path, asked=False), 2) == 0


def test_what_can_run_goes_on_without_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []
    monkeypatch.setattr(cold, "start", lambda point: started.append(point) or {"total_s": 1.0})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "none")
    monkeypatch.setattr(bench, "write_report", lambda out: None)
    options = ["--cold", "--p2p", "off", "--plans", "none", "--nproc", "2"]
    assert main([*SMALL, *options, "--out", str(tmp_path)]) == 0
    assert "left out: reducer push" in capsys.readouterr().out
    assert [point.reducer for point in started] == ["async"]


def test_cold_starts_are_checked_like_other_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repeat says what it skips; new points are not put beside those of other code."""
    parts = ("imports_s", "group_s", "weights_s", "capture_s", "prefill_s", "total_s")
    here = {"gpu": "H200", "commit": "a"}
    monkeypatch.setattr(cold, "start", lambda point: dict.fromkeys(parts, 1.0))
    monkeypatch.setattr(bench, "cold_machine", lambda: dict(here))
    file = tmp_path / "mine.yaml"
    file.write_text("layers:\n- {layers: 0-3, preset: ladder}\n")
    options = [*SMALL, "--cold", "--reducers", "async", "--nproc", "2", "--out", str(tmp_path)]
    plans = ["--plans", "standard", str(file)]
    assert main([*options, *plans]) == 0
    said = capsys.readouterr().out
    assert said.count("cold start of") == 3  # `none` too
    assert f"\n\n{tmp_path / bench.PAGE}\n" in said
    assert main([*options, *plans]) == 0
    said = capsys.readouterr().out
    assert said.count("already measured: ") == 3
    assert "cold start of" not in said
    here["commit"] = "b"
    assert main([*options, *plans]) == 0
    said = capsys.readouterr().out
    assert said.count("already measured, with commit a, which now is b: ") == 3
    assert main([*options, "--plans", "parallel"]) == 2
    error = capsys.readouterr().err
    assert "holds standard" in error
    assert "measured with commit a, which now is b" in error
    assert error.count("\n") == 1
    file.write_text("layers:\n- {layers: 0-3, preset: parallel}\n")
    assert main([*options, *plans]) == 2
    assert "whose model or plan has changed" in capsys.readouterr().err
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main([*options, *plans]) == 2
    assert capsys.readouterr().err.startswith("error: NCCL_P2P_DISABLE=1 turns P2P off, and --p2p")


@pytest.mark.parametrize("more", [[], ["--cold"], ["standard"]])
def test_a_degree_that_tp_does_not_divide_is_a_mistake(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even where other plans are left to measure: this one was asked for."""
    options = ["--tp-degree", "3", "--nproc", "2", "--plans", "desync-4x", *more]
    assert main([*SMALL, *options, "--out", str(tmp_path / "new")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --tp-degree=3 of plan 'desync-4x' cannot run at TP 2")
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_degree_is_for_plans_that_depend_on_it() -> None:
    each = Settings("tiny", plans=("standard", "ladder", "none"), tp_degree=3, prompt=8,
                    new_tokens=4)  # fmt: skip
    refuse_degree(each, 2)
