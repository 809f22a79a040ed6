"""The metrics of a run besides its loss: its speed, and metrics sent elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ladder.config import build
from ladder.models.errors import UserError
from ladder.train.config import TrainConfig
from ladder.train.efficiency import peak_flops
from ladder.train.loop import train
from ladder.train.metrics import Metrics, connect, read_metrics
from tests.distributed import Pools


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H20", None),
    ],
)
def test_the_peak_is_that_of_the_gpus_form(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    """Catches the peak of SXM for cards with fewer and slower multiprocessors."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak


def test_metrics_go_to_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values with their steps; a failed run is marked as failed; other ranks send nothing."""
    calls: list[tuple[Any, ...]] = []
    remote = SimpleNamespace(
        log=lambda values, step: calls.append(("log", values, step)),
        finish=lambda exit_code: calls.append(("finish", exit_code)),
    )

    def init(**options: Any) -> Any:
        calls.append(("init", options["project"], options["config"]))
        return remote

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    begun = connect(tmp_path, "mine", {"lr": 1.0}, False)
    with Metrics(tmp_path, False, 0, True, begun) as metrics:
        metrics.write(3, loss=2.5)
    again = connect(tmp_path, "mine", {}, True)
    with pytest.raises(RuntimeError), Metrics(tmp_path, False, 3, True, again):
        raise RuntimeError
    with Metrics(tmp_path, False, 3, enabled=False, remote=remote) as metrics:
        metrics.write(4, loss=2.0)
    assert [call[0] for call in calls] == ["init", "log", "finish", "init", "finish"]
    assert calls[0][1:] == ("mine", {"lr": 1.0})
    assert calls[1][1:] == ({"loss": 2.5}, 3)
    assert (calls[2][1], calls[4][1]) == (0, 1)


def test_a_run_has_its_own_id_at_weights_and_biases(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which --resume alone takes up. Catches an id that another run in a folder of the same path
    has, on another machine or before this one was made."""
    seen: list[tuple[str, str | None]] = []
    remote = SimpleNamespace(log=lambda values, step: None, finish=lambda exit_code: None)

    def init(**options: Any) -> Any:
        seen.append((options["id"], options["resume"]))
        return remote

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = tmp_path / "run"
    settings = {**SETTINGS, "data": str(corpus), "out": str(run), "wandb": "mine"}

    def trained(**more: Any) -> tuple[str, str | None]:
        train(build(TrainConfig, settings, "test recipe"), device="cpu", **more)
        return seen[-1]

    begun = trained(stop_after=1)
    kept = json.loads((run / "wandb.json").read_text())
    assert begun == (kept["id"], None)
    assert trained(resume=True) == (kept["id"], "allow")

    shutil.rmtree(run)
    again = trained(stop_after=1)
    assert again[0] != begun[0]
    assert again[1] is None

    (run / "wandb.json").write_text('{"id": 5}')
    with pytest.raises(UserError, match=r"wandb\.json has id=5, no run's id; .*remove the file"):
        trained(resume=True)
    (run / "wandb.json").unlink()  # as of a run that was begun before ids were kept
    of_path = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    assert trained(resume=True) == (of_path, "allow")

    shutil.rmtree(run)
    settings["wandb"] = ""
    train(build(TrainConfig, settings, "test recipe"), device="cpu", stop_after=1)
    assert not (run / "wandb.json").exists()
    settings["wandb"] = "mine"
    late = trained(resume=True)  # sent there from its second part on
    assert late == (json.loads((run / "wandb.json").read_text())["id"], None)
    assert late[0] != of_path


SHARE = "tokens_per_second_per_gpu"
SETTINGS = {
    "steps": 2, "seq_len": 16, "batch_size": 2, "warmup_steps": 1, "log_interval": 1,
    "eval_windows": 2, "tensorboard": False,
}  # fmt: skip


def refused(rank: int, world: int, settings: dict[str, Any], module: Any) -> str:
    """The error of a run with this module as wandb."""
    config = build(TrainConfig, settings, "test recipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", module)
        with pytest.raises(UserError) as caught:
            train(config, device="cpu")
    return str(caught.value)


class NoKey:
    """A wandb without a login."""

    def init(self, **options: Any) -> Any:
        raise PermissionError("No API key\nconfigured.")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, "wandb='mine' needs the package wandb"),
        (NoKey(), r"wandb='mine' cannot be reached \(No API key configured.\): .*`wandb login`"),
    ],
)
def test_what_weights_and_biases_lacks_is_told_before_the_folder_is_taken(
    corpus: Path, tmp_path: Path, pools: Pools, module: Any, words: str
) -> None:
    """Alike on every rank, and the same command starts the run when that is mended."""
    run = tmp_path / "run"
    settings = {**SETTINGS, "data": str(corpus), "out": str(run), "wandb": "mine"}
    for message in pools(2).run(refused, settings, module):
        assert re.match(words, message)
    assert not run.exists()
    train(build(TrainConfig, {**settings, "wandb": ""}, "test recipe"), device="cpu")


def test_a_run_sends_its_metrics(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each logged step, and the resolved recipe as the run's config."""
    seen: dict[str, Any] = {"steps": []}
    remote = SimpleNamespace(
        log=lambda values, step: seen["steps"].append((step, "loss" in values)),
        finish=lambda exit_code: seen.update(code=exit_code),
    )
    module = SimpleNamespace(init=lambda **options: seen.update(options) or remote)
    monkeypatch.setitem(sys.modules, "wandb", module)
    settings = {**SETTINGS, "data": str(corpus), "out": str(tmp_path / "run"), "wandb": "mine"}
    train(build(TrainConfig, settings, "test recipe"), device="cpu")
    assert (seen["project"], seen["code"]) == ("mine", 0)
    assert seen["config"]["steps"] == 2
    assert [step for step, is_loss in seen["steps"] if is_loss] == [1, 2]


def recorded_everywhere(rank: int, world: int, settings: dict[str, Any]) -> list[Any]:
    """On rank 0: what a run of two ranks sends to Weights & Biases and writes to TensorBoard."""
    sent: list[Any] = []
    remote = SimpleNamespace(
        log=lambda values, step: sent.append(values), finish=lambda exit_code: None
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: remote))
        train(build(TrainConfig, settings, "test recipe"), device="cpu")
    return sent


def test_the_speed_of_a_rank_is_recorded_everywhere(
    corpus: Path, tmp_path: Path, pools: Pools
) -> None:
    """Its share of all ranks' tokens a second, whatever they share: here a batch, then TP."""
    for tp in (1, 2):
        run = tmp_path / f"tp{tp}"
        settings = {**SETTINGS, "data": str(corpus), "out": str(run), "tp": tp, "wandb": "mine",
                    "tensorboard": True}  # fmt: skip
        sent, _ = pools(2).run(recorded_everywhere, settings)
        found = [record for record in read_metrics(run) if "loss" in record]
        assert len(found) == 2
        shares = [record[SHARE] for record in found]
        assert shares == [record["tokens_per_second"] / 2 for record in found]
        assert [each[SHARE] for each in sent if SHARE in each] == shares
        board = EventAccumulator(str(run / "tensorboard")).Reload()
        assert [event.value for event in board.Scalars(SHARE)] == pytest.approx(shares)
