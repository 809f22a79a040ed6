"""What a run reports beside its loss: FLOPs per token, and metrics sent elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ladder.config import build, model_config
from ladder.models import Transformer
from ladder.models.errors import UserError
from ladder.train.config import TrainConfig
from ladder.train.efficiency import flops_per_token, peak_flops
from ladder.train.loop import train
from ladder.train.metrics import Metrics


@pytest.mark.parametrize("name", ["paper-1b", "llama-3-8b", "2b-class"])
def test_flops_follow_the_models_parameters(name: str) -> None:
    """A matrix left out, the input embedding counted, or attention counted twice is off by more."""
    config = model_config(name)
    with torch.device("meta"):
        model = Transformer(config)
    counted = sum(
        parameter.numel()
        for key, parameter in model.named_parameters()
        if "embed_tokens" not in key and "norm" not in key
    )
    if config.tie_embeddings:
        counted += config.vocab_size * config.hidden_size
    attention = 6 * config.num_layers * 2048 * config.num_heads * config.head_dim
    assert flops_per_token(config, 2048) == 6 * counted + attention


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None


def test_metrics_go_to_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values with their steps; a resumed run has the same id; a failed one is marked as failed."""
    calls: list[tuple[Any, ...]] = []
    remote = SimpleNamespace(
        log=lambda values, step: calls.append(("log", values, step)),
        finish=lambda exit_code: calls.append(("finish", exit_code)),
    )

    def init(**options: Any) -> Any:
        calls.append(("init", options["project"], options["id"], options["config"]))
        return remote

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    with Metrics(tmp_path, False, 0, True, "mine", {"lr": 1.0}) as metrics:
        metrics.write(3, loss=2.5)
    with pytest.raises(RuntimeError), Metrics(tmp_path, False, 3, True, "mine"):
        raise RuntimeError
    with Metrics(tmp_path, False, 3, enabled=False, wandb="mine") as metrics:
        metrics.write(4, loss=2.0)
    assert [call[0] for call in calls] == ["init", "log", "finish", "init", "finish"]
    assert calls[0][1] == "mine"
    assert calls[0][3] == {"lr": 1.0}
    assert calls[0][2] == calls[3][2]
    assert calls[1][1:] == ({"loss": 2.5}, 3)
    assert (calls[2][1], calls[4][1]) == (0, 1)


def test_without_the_package_the_option_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="wandb='mine' needs the package wandb"):
        Metrics(tmp_path, False, 0, True, "mine")


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
    settings = {
        "data": str(corpus), "out": str(tmp_path / "run"), "steps": 2, "seq_len": 16,
        "batch_size": 2, "warmup_steps": 1, "log_interval": 1, "eval_windows": 2,
        "tensorboard": False, "wandb": "mine",
    }  # fmt: skip
    train(build(TrainConfig, settings, "test recipe"), device="cpu")
    assert (seen["project"], seen["code"]) == ("mine", 0)
    assert seen["config"]["steps"] == 2
    assert [step for step, is_loss in seen["steps"] if is_loss] == [1, 2]
