"""Resuming: bitwise after any step, on other ranks too, and never over an earlier run."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.checkpoint import newest
from ladder.config import build, load_plan
from ladder.data.prepared import open_data
from ladder.models import UserError, resolve_plan
from ladder.train import loop, metrics, shards
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from ladder.train.resuming import refuse_changes
from ladder.train.state import LOCK
from tests.distributed import Pools
from tests.train.runs import (
    DESYNC_THEN_LADDER,
    LAG_2,
    SHAPE,
    losses,
    recipe,
    recorded,
    run_on_ranks,
    seal,
    stored,
    untimed,
    weights,
)


@pytest.mark.parametrize(
    ("plan", "degree"),
    [("ladder", None), ("desync-2x", 2), (LAG_2, None), (DESYNC_THEN_LADDER, 2)],
)
def test_resume_is_bitwise(corpus: Path, tmp_path: Path, plan: Any, degree: int | None) -> None:
    """After any step; a lost moment, step count, batch position or learning rate fails this."""
    settings = {"plan": plan, "tp_degree": degree, "eval_interval": 3}
    train(recipe(corpus, tmp_path / "whole", **settings), device="cpu")
    for stop in (1, 4):
        run = tmp_path / f"stopped-{stop}"
        config = recipe(corpus, run, **settings)
        assert train(config, device="cpu", stop_after=stop) is None or stop > 3
        train(config, device="cpu", resume=True)
        assert losses(run) == losses(tmp_path / "whole")
        assert untimed(run) == untimed(tmp_path / "whole")
        for name, value in weights(tmp_path / "whole").items():
            assert torch.equal(value, weights(run)[name]), name
        first = stored(newest(run), "optimizer")
        for name, value in stored(newest(tmp_path / "whole"), "optimizer").items():
            assert torch.equal(value, first[name]), name


def test_a_torn_metrics_line_is_dropped_on_resume(corpus: Path, tmp_path: Path) -> None:
    """A killed run leaves half a line, and lines of steps that will be done again."""
    config = recipe(corpus, tmp_path / "run", checkpoint_interval=2)
    train(config, device="cpu", stop_after=3)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000003")
    with (tmp_path / "run" / metrics.FILE).open("a") as file:
        file.write('{"step": 4, "lo')
    train(config, device="cpu", resume=True)
    train(recipe(corpus, tmp_path / "whole"), device="cpu")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_runs_are_never_overwritten(corpus: Path, tmp_path: Path) -> None:
    config = recipe(corpus, tmp_path / "run")
    with pytest.raises(UserError, match="has no checkpoint to resume from"):
        train(config, device="cpu", resume=True)
    train(config, device="cpu", stop_after=2)
    before = weights(tmp_path / "run")
    with pytest.raises(UserError, match="holds a run already; add --resume"):
        train(config, device="cpu")
    for changes, message in (
        ({"plan": "standard"}, "plan='standard' differs"),
        ({"lr": 5e-3}, "lr=0.005 differs"),
        ({"seed": 1}, "seed=1 differs"),
    ):
        with pytest.raises(UserError, match=message):
            train(recipe(corpus, tmp_path / "run", **changes), device="cpu", resume=True)
    for name, value in before.items():
        assert torch.equal(value, weights(tmp_path / "run")[name])
    train(config, device="cpu", resume=True)
    with pytest.raises(UserError, match="has finished its steps=6"):
        train(config, device="cpu", resume=True)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "train.json"])
def test_truncated_checkpoints_are_refused(corpus: Path, tmp_path: Path, file: str) -> None:
    config = recipe(corpus, tmp_path / "run")
    train(config, device="cpu", stop_after=2)
    path = newest(tmp_path / "run") / file
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match=f"{file}.*damaged"):
        train(config, device="cpu", resume=True)


def test_a_plan_is_its_records_and_not_its_files_name(corpus: Path, tmp_path: Path) -> None:
    """A run goes on with a copy of its plan's file, and not with other records."""
    lags, run = "{own_lag: 1, peer_lag: 1}", tmp_path / "run"
    for name, text in (("a", lags), ("b", lags), ("c", "{own_lag: 2, peer_lag: 2}")):
        file = tmp_path / f"{name}.yaml"
        file.write_text(f"layers: [{{layers: 0-1, attention: {text}, mlp: {text}}}]\n")
    plans = {name: load_plan(tmp_path / f"{name}.yaml") for name in "abc"}
    train(recipe(corpus, run, plan=plans["a"]), device="cpu", stop_after=2)
    with pytest.raises(UserError, match=r"plan=c differs from the run in .*started with plan=a;"):
        train(recipe(corpus, run, plan=plans["c"]), device="cpu", resume=True)
    edited = {**plans["c"], "name": "a"}
    said = (
        rf"plan=a is not what it was when .*resume with .*ladder train {run}/recipe.json --resume"
    )
    with pytest.raises(UserError, match=said):
        train(recipe(corpus, run, plan=edited), device="cpu", resume=True)
    printed = tmp_path / "printed.json"
    records = resolve_plan(plans["a"], 2)
    printed.write_text(json.dumps([{**records.to_dict(), "reads": []}]))
    train(recipe(corpus, run, plan=load_plan(printed)), device="cpu", resume=True, stop_after=3)
    train(recipe(corpus, run, plan=plans["b"]), device="cpu", resume=True)
    of_init = recipe(corpus, tmp_path / "tuned", init=str(run), model=None, plan=None)
    train(of_init, device="cpu", stop_after=2)
    train(replace(of_init, plan=plans["b"]), device="cpu", resume=True)


def test_a_plan_that_states_its_t_may_be_resumed_with_it(tmp_path: Path) -> None:
    plan = {"tp_degree": 2, "layers": [{"layers": "0-3", "preset": "dtp-2"}]}
    old = TrainConfig(data="data", out="run", plan=plan)
    same, other = (replace(old, tp_degree=degree) for degree in (2, 4))
    refuse_changes(old.to_dict(), same, tmp_path)
    refuse_changes(same.to_dict(), old, tmp_path)
    with pytest.raises(UserError, match="tp_degree=4"):
        refuse_changes(old.to_dict(), other, tmp_path)


def test_a_checkpoint_of_another_plan_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Even where someone has edited the recipe to match."""
    train(recipe(corpus, tmp_path / "run"), device="cpu", stop_after=2)
    path = newest(tmp_path / "run") / "train.json"
    path.write_text(path.read_text().replace('"ladder"', '"standard"'))
    seal(path)
    with pytest.raises(UserError, match=r"of another plan \('ladder' there, 'standard' here\)"):
        train(recipe(corpus, tmp_path / "run", plan="standard"), device="cpu", resume=True)


def test_a_model_of_another_shape_is_named_with_its_value(corpus: Path, tmp_path: Path) -> None:
    """And not the plan, whose records depend on the number of layers, but which is the same."""
    run = tmp_path / "run"
    train(recipe(corpus, run), device="cpu", stop_after=2)
    message = f"^model.num_layers=3 differs from the run in {run}, .*with model.num_layers=2; "
    with pytest.raises(UserError, match=message):
        train(recipe(corpus, run, model={**SHAPE, "num_layers": 3}), device="cpu", resume=True)


def test_a_run_that_never_saved_can_be_resumed(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is begun, so it is not overwritten; it has no checkpoint, so it starts at step 0. Catches
    another run that takes its place, and a first save that was cut short taken for one lost."""
    run = tmp_path / "run"
    config = recipe(corpus, run)
    break_off(config, 3)
    assert len(losses(run)) == 2
    with pytest.raises(UserError, match="add --resume"):
        train(config, device="cpu")
    for changes, message in (
        ({"lr": 5e-3}, "lr=0.005 differs"),
        ({"model": {**SHAPE, "num_layers": 3}}, "model.num_layers=3 differs"),
    ):
        with pytest.raises(UserError, match=message):
            train(recipe(corpus, run, **changes), device="cpu", resume=True)
    assert len(losses(run)) == 2
    full = mock.patch.object(shards, "write_file", side_effect=OSError(28, "No space left"))
    with full, pytest.raises(UserError, match=r"step-000006 cannot be written .*with --resume"):
        train(config, device="cpu", resume=True)
    assert recorded(run, "checkpoint_seconds"), "which tells of no checkpoint"
    capsys.readouterr()
    train(config, device="cpu", resume=True)
    assert "ended before its first checkpoint: it starts again" in capsys.readouterr().out
    train(recipe(corpus, tmp_path / "whole"), device="cpu")
    assert untimed(run) == untimed(tmp_path / "whole")


def test_a_run_that_was_killed_before_its_first_write_can_be_resumed(
    corpus: Path, tmp_path: Path
) -> None:
    """Only its lock is there then. A folder that is not there may be a slip of the pen."""
    run = tmp_path / "run"
    config = recipe(corpus, run, steps=3)
    with pytest.raises(UserError, match="has no checkpoint to resume from"):
        train(config, device="cpu", resume=True)
    assert not run.exists()
    run.mkdir()
    (run / LOCK).touch()
    (run / "tokenizer.json").touch()
    with pytest.raises(UserError, match=r"holds something else, tokenizer\.json"):
        train(config, device="cpu", resume=True)
    (run / "tokenizer.json").unlink()
    (run / LOCK).touch()
    train(config, device="cpu", resume=True)
    assert len(losses(run)) == 3


def test_a_run_of_an_earlier_version_that_never_saved_can_be_resumed(
    corpus: Path, tmp_path: Path
) -> None:
    """A run of a version that had only Llama 3's rotary scaling, and did not name its type."""
    scaling = {"original_max_position_embeddings": 16}
    config = recipe(corpus, tmp_path / "run", model={**SHAPE, "rope_scaling": scaling})
    break_off(config, 1)
    path = tmp_path / "run/recipe.json"
    data = json.loads(path.read_text())
    assert data["model"]["rope_scaling"].pop("rope_type") == "llama3"
    path.write_text(json.dumps(data))
    train(config, device="cpu", resume=True, stop_after=1)


def test_a_run_of_epochs_names_what_was_changed(corpus: Path, tmp_path: Path) -> None:
    """Not the steps that its epochs come to, which change with the batches, the sequences and the
    data; the warm-up may no longer fit either. Catches a remedy that is refused in turn."""
    windows = len(open_data(corpus).windows("train", 16))
    begun = {"epochs": 24 / windows, "steps": 1000}  # 6 steps of 4 windows
    train(recipe(corpus, tmp_path / "run", **begun), device="cpu", stop_after=2)
    break_off(recipe(corpus, tmp_path / "broken", **begun), 3)
    for run in ("run", "broken"):
        for changes, message in (
            ({"batch_size": 2}, "batch_size=2 differs .* started with batch_size=4; resume with"),
            ({"seq_len": 8}, "seq_len=8 differs"),
            (
                {"epochs": 48 / windows},
                r"epochs=\S+ makes steps=12, .* started with steps=6; resume with steps=6 in place",
            ),
            ({"epochs": 0.0, "steps": 7}, "steps=7 differs .* started with steps=6"),
        ):
            with pytest.raises(UserError, match=f"^{message}"):
                train(recipe(corpus, tmp_path / run, **begun | changes), device="cpu", resume=True)
    shutil.copytree(corpus, tmp_path / "copy")
    twice = [{"path": str(path), "weight": 1} for path in (corpus, tmp_path / "copy")]
    for changes, message in (
        ({"batch_size": 24}, "batch_size=24 differs"),  # one step, of which two would be warm-up
        ({"data": twice}, "data=.* has changed since"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            train(recipe(corpus, tmp_path / "run", **begun | changes), device="cpu", resume=True)
    train(recipe(corpus, tmp_path / "run", steps=6), device="cpu", resume=True)
    train(recipe(corpus, tmp_path / "broken", **begun), device="cpu", resume=True)
    assert untimed(tmp_path / "run") == untimed(tmp_path / "broken")


def break_off(config: TrainConfig, step: int) -> None:
    """Begin a run that an error ends in that step."""
    take, taken = loop.take_step, []

    def broken(*arguments: Any) -> Any:
        taken.append(arguments)
        if len(taken) == step:
            raise RuntimeError("broken off")
        return take(*arguments)

    with mock.patch.object(loop, "take_step", broken), pytest.raises(RuntimeError, match="broken"):
        train(config, device="cpu")


@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/step-000002"])
def test_a_run_whose_checkpoints_are_gone_is_not_started_again(
    corpus: Path, tmp_path: Path, gone: str
) -> None:
    """They may have been moved: the metrics must not be truncated without the user's consent."""
    run = tmp_path / "run"
    config = recipe(corpus, run)
    train(config, device="cpu", stop_after=2)
    shutil.rmtree(run / gone)
    before = (run / metrics.FILE).read_text()
    with pytest.raises(
        UserError, match=r"has no checkpoint, but had one, .*put it back, or remove"
    ):
        train(config, device="cpu", resume=True)
    (run / "recipe.json").unlink()
    with pytest.raises(UserError, match=r"neither a checkpoint nor recipe\.json"):
        train(config, device="cpu", resume=True)
    assert (run / metrics.FILE).read_text() == before


def test_resuming_on_other_ranks_and_data_paths(
    corpus: Path, tmp_path: Path, pools: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints hold full tensors and data is known by content: neither needs a refusal."""
    run = tmp_path / "run"
    pools(2).run(run_on_ranks, recipe(corpus, run, tp=2, steps=6).to_dict(), 3)
    for folder in ("step-000006",):
        shutil.rmtree(run / "checkpoints" / folder)
    shutil.copytree(corpus, tmp_path / "elsewhere")
    train(recipe(tmp_path / "elsewhere", run), device="cpu", resume=True)
    assert "not bit for bit" in capsys.readouterr().out
    train(recipe(corpus, tmp_path / "whole"), device="cpu")
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


def resume_on_ranks(rank: int, world: int, settings: dict[str, Any]) -> None:
    train(build(TrainConfig, settings, "test recipe"), device="cpu", resume=True)


def test_resuming_with_other_micro_batches(
    corpus: Path, tmp_path: Path, pools: Pools, capsys: pytest.CaptureFixture[str]
) -> None:
    """More ranks have smaller shares, which the old micro-batches may not fit."""
    run = tmp_path / "run"
    train(recipe(corpus, run, micro_batch_size=4), device="cpu", stop_after=2)
    train(recipe(corpus, run), device="cpu", resume=True, stop_after=3)
    assert "not bit for bit" not in capsys.readouterr().out  # all of its share is the same 4
    train(recipe(corpus, run, micro_batch_size=1), device="cpu", resume=True, stop_after=4)
    said = capsys.readouterr().out
    assert "resuming from step 3 of 6" in said.splitlines()
    assert "'micro_batch_size': 1} a run of {'tp': 1" in said
    assert "not bit for bit" in said
    pools(2).run(resume_on_ranks, recipe(corpus, run, micro_batch_size=2).to_dict())
    train(recipe(corpus, tmp_path / "whole"), device="cpu")
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)
