"""Losses and gradients that are not finite: the run ends, names the cause, and loses no step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder.checkpoint import checkpoints, newest
from ladder.config import build
from ladder.convert.command import convert
from ladder.data.mix import open_sources
from ladder.models import UserError
from ladder.train import shards, step
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools
from tests.train.runs import go_on, losses, recipe, steps_of, untimed, weights


def poisoned(rank: int, world: int, settings: dict[str, Any]) -> tuple[str, list[int]]:
    """Rank 1's loss is not a number in the third step; returns the error, and what rank 1 read."""
    backward, calls, drawn = step.backward, [], []

    def spoilt(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        loss = backward(*arguments)
        return loss * float("nan") if len(calls) == 3 and rank == 1 else loss

    config = build(TrainConfig, settings, "test recipe")
    drawn = open_sources(config.data).windows("train", 16).order(2, 4, config.seed, 1, 2)
    step.backward = spoilt  # type: ignore[assignment]
    try:
        with pytest.raises(UserError) as caught:
            train(config, device="cpu")
    finally:
        step.backward = backward
    return str(caught.value), drawn


def test_a_loss_that_is_not_finite_names_its_rank_and_windows(
    corpus: Path, tmp_path: Path, pools: Pools
) -> None:
    config = recipe(corpus, tmp_path / "run", checkpoint_interval=1)
    for message, drawn in pools(2).run(poisoned, config.to_dict()):
        assert "step 3: loss=nan" in message
        assert f"first on rank 1, whose loss was nan, of the windows {drawn}" in message
    assert steps_of(tmp_path / "run") == [1, 2]


@pytest.mark.parametrize(
    ("nproc", "behind"), [(1, 0), (1, 1), (2, 0), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_a_loss_that_is_not_finite_costs_no_step(
    corpus: Path, tmp_path: Path, pools: Pools, nproc: int, behind: int
) -> None:
    """The steps before it are saved, whatever the interval, and no older checkpoint goes; the run
    that goes on from there is the one that never stopped. The plan changes with the bad step, or
    with the next, which is launched already where the host is ahead, and must change no weight."""
    settings = recipe(
        corpus, tmp_path / "run", steps=8, checkpoint_interval=4, keep_checkpoints=1
    ).to_dict()
    plans = [{"step": 2, "plan": "ladder@1"}, {"step": 5 + behind, "plan": "ladder"}]
    settings |= {"convert_layers": plans}
    arguments = settings, 6, behind
    messages = [spoilt_at(0, 1, *arguments)] if nproc == 1 else pools(2).run(spoilt_at, *arguments)
    for message in messages:
        assert "step 6: " in message
        assert "The run up to step 5 is saved" in message
    assert steps_of(tmp_path / "run") == [4, 5]
    whole = settings | {"out": str(tmp_path / "whole")}
    if nproc == 1:
        go_on(0, 1, settings, True, behind)
        go_on(0, 1, whole, False)
    else:
        pools(2).run(go_on, settings, True, behind)
        pools(2).run(go_on, whole, False)
    assert steps_of(tmp_path / "run") == [8]
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name


@pytest.mark.parametrize("what", ["loss", "norm"])
def test_a_checkpoint_of_a_step_that_is_not_finite_is_never_made(
    corpus: Path, tmp_path: Path, what: str
) -> None:
    """Where the host is ahead, and the bad step is one to be saved after: it is waited for. Whether
    it shows in the loss or in the norm, it changes no weight."""
    settings = recipe(corpus, tmp_path / "run", steps=8, checkpoint_interval=4).to_dict()
    assert "The run up to step 3 is saved" in spoilt_at(0, 1, settings, 4, 1, what)
    assert steps_of(tmp_path / "run") == [3]
    whole = recipe(corpus, tmp_path / "whole", steps=8)
    train(whole, device="cpu", stop_after=3)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name


def test_a_loss_that_is_not_finite_on_a_full_disk_claims_no_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for the save that it asks for, nor for one that is still being written."""

    def full(*arguments: Any) -> None:
        time.sleep(0.2)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "write_file", full)
    for name, interval in (("none", 0), ("writing", 2)):
        settings = recipe(corpus, tmp_path / name, checkpoint_interval=interval).to_dict()
        message = spoilt_at(0, 1, settings, 3)
        assert "step 3: " in message
        assert "could not all be saved: " in message
        assert "step-000002 cannot be written" in message
        assert not steps_of(tmp_path / name)


@pytest.mark.parametrize(("step", "said"), [(4, "saving step-000003 in its place"),
                                            (3, "trying again")])  # fmt: skip
def test_a_save_that_failed_costs_no_step_before_a_loss_that_is_not_finite(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], step: int, said: str,
) -> None:  # fmt: skip
    """The disk is full once, at step 2: the steps before the one that is not finite are saved."""
    write, calls = shards.write_file, []

    def full_once(path: Path, *arguments: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    monkeypatch.setattr(shards, "write_file", full_once)
    settings = recipe(corpus, tmp_path / "run", checkpoint_interval=2).to_dict()
    assert f"The run up to step {step - 1} is saved" in spoilt_at(0, 1, settings, step)
    assert steps_of(tmp_path / "run") == [step - 1]
    warning = capsys.readouterr().err
    assert "step-000002 could not be written ([Errno 28] No space left on device)" in warning
    assert said in warning


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "a lower lr=0.01"),
        ({"dtype": "bfloat16"}, "a lower lr=0.01, or dtype=float32"),
        (
            {"weight_decay": 1e3},
            "a lower lr=0.01 or weight_decay=1000.0 (their product must be below 1)",
        ),
    ],
)
def test_the_remedy_names_what_may_have_diverged(
    corpus: Path, tmp_path: Path, changes: dict[str, Any], remedy: str
) -> None:
    """Weights are suggested only if a loss as low as at the beginning was recorded with them."""
    settings = recipe(corpus, tmp_path / "run", checkpoint_interval=1, **changes).to_dict()
    message = spoilt_at(0, 1, settings, 4)
    recorded = losses(tmp_path / "run")
    found = f"; start another run with {remedy}"
    if "weight_decay" in changes:
        assert recorded[1] > recorded[0]
    else:
        assert recorded[2] < recorded[0]
        found += f", perhaps from init={tmp_path / 'run' / 'checkpoints' / 'step-000002'}"
    assert message.endswith(found)


def spoilt_at(
    rank: int, world: int, settings: dict[str, Any], at: int, behind: int = 0, what: str = "norm"
) -> str:
    """The loss or the gradients' norm is not finite in that step; returns the error.

    behind: 1 is as on a GPU.
    """
    name = {"loss": "backward", "norm": "clip_gradients"}[what]
    real, calls = getattr(step, name), []

    def spoilt(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        value: torch.Tensor = real(*arguments)
        return value + float("inf") if len(calls) == at else value

    setattr(step, name, spoilt)
    try:
        with pytest.raises(UserError) as caught:
            go_on(rank, world, settings, False, behind)
    finally:
        setattr(step, name, real)
    return str(caught.value)


def test_not_finite_stops_and_loses_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(corpus, tmp_path / "run")
    train(config, device="cpu", stop_after=3)
    before = weights(tmp_path / "run")
    nan = torch.tensor(float("nan"))
    monkeypatch.setattr("ladder.train.step.clip_gradients", lambda model, limit, mesh: nan)
    with pytest.raises(UserError, match=r"step 4: .*not finite"):
        train(config, device="cpu", resume=True)
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [3]
    for name, value in before.items():
        assert torch.equal(value, weights(tmp_path / "run")[name])


def test_a_first_step_that_is_not_finite_blames_the_weights_of_init(
    corpus: Path, tmp_path: Path
) -> None:
    """A lower lr would not help; `ladder convert` names the tensor."""
    train(recipe(corpus, tmp_path / "run"), device="cpu", stop_after=1)
    plain = tmp_path / "plain"
    convert(newest(tmp_path / "run"), plain)
    tensors = load_file(plain / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, plain / "model.safetensors")
    config = recipe(corpus, tmp_path / "tuned", init=str(plain), model=None, plan=None)
    with pytest.raises(UserError, match=rf"step 1: .*; init={plain} may hold NaN, as `ladder conv"):
        train(config, device="cpu")
    with pytest.raises(UserError, match=r"model\.safetensors: tensor 'model\.norm\.weight' holds"):
        convert(plain, tmp_path / "again")
