"""Evaluations that fail, or that a signal cuts short, cost no step, and --resume makes them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ladder.config import build
from ladder.models import UserError
from ladder.train import evaluate, loop, shards
from ladder.train.config import TrainConfig
from ladder.train.evaluate import bits_per_byte
from ladder.train.loop import train
from tests.distributed import Pools
from tests.train.runs import go_on, losses, recipe, recorded, steps_of, untimed

# Many batches an evaluation, after steps 3 and 6 of 6.
OFTEN = {"eval_interval": 3, "eval_windows": 0, "micro_batch_size": 1}


def terminate(*arguments: Any) -> None:
    signal.raise_signal(signal.SIGTERM)  # to this thread, which knows of it at once


def heldout(run: Path) -> list[float]:
    return recorded(run, "heldout_bits_per_byte")


@pytest.mark.parametrize("fails", [1, 2])
def test_an_evaluation_that_fails_costs_no_step(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: int
) -> None:
    """One in the middle, and the last one, which --resume makes alone. Catches an evaluation before
    the save that is due, and one that is left out, or made twice, when the run goes on."""
    config = recipe(corpus, tmp_path / "run", eval_interval=3, checkpoint_interval=3)
    calls: list[int] = []

    def failing(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == fails:
            raise RuntimeError("out of memory")
        return bits_per_byte(*arguments)

    with (
        mock.patch.object(loop, "bits_per_byte", failing),
        pytest.raises(RuntimeError, match="out of memory"),
    ):
        train(config, device="cpu")
    assert steps_of(tmp_path / "run") == [3, 6][:fails]
    assert len(heldout(tmp_path / "run")) == fails - 1
    capsys.readouterr()
    result = train(config, device="cpu", resume=True)
    assert result is not None
    step = 3 * fails
    words = f"resuming from step {step} of 6, which is evaluated first"
    assert words in capsys.readouterr().out.splitlines()
    assert heldout(tmp_path / "run")[-1] == result.bits_per_byte
    train(recipe(corpus, tmp_path / "whole", eval_interval=3), device="cpu")
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")
    with pytest.raises(UserError, match="has finished its steps=6"):
        train(config, device="cpu", resume=True)


def test_an_evaluation_does_not_wait_for_the_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one, too. Catches a device that is idle while a checkpoint is written."""
    evaluated, write = threading.Event(), shards.write_file

    def writing(*arguments: Any) -> None:
        assert evaluated.wait(10), "the evaluation waits for the save"
        write(*arguments)

    def evaluating(*arguments: Any) -> Any:
        evaluated.set()
        return bits_per_byte(*arguments)

    monkeypatch.setattr(shards, "write_file", writing)
    monkeypatch.setattr(loop, "bits_per_byte", evaluating)
    assert train(recipe(corpus, tmp_path / "run"), device="cpu") is not None
    assert steps_of(tmp_path / "run") == [6]


@pytest.mark.parametrize("step", [3, 6])
def test_a_run_that_was_told_to_stop_does_not_evaluate(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
) -> None:
    """SIGTERM in a step with an evaluation after it. Catches one that is made before the save, and
    one that is lost."""
    config = recipe(corpus, tmp_path / "run", **OFTEN)
    train(recipe(corpus, tmp_path / "whole", **OFTEN), device="cpu")
    take, taken = loop.take_step, []

    def told(*arguments: Any) -> Any:
        taken.append(arguments)
        if len(taken) == step:
            terminate()
        return take(*arguments)

    passes = mock.Mock(side_effect=bits_per_byte)
    monkeypatch.setattr(loop, "take_step", told)
    monkeypatch.setattr(loop, "bits_per_byte", passes)
    assert train(config, device="cpu") is None
    assert passes.call_count == step // 3 - 1
    assert steps_of(tmp_path / "run") == [step]
    words = f"told to stop (SIGTERM): saved step {step} of 6, not evaluated; continue with --resume"
    assert words in capsys.readouterr().out.splitlines()
    assert train(config, device="cpu", resume=True) is not None
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")


@pytest.mark.parametrize("step", [3, 6])
def test_an_evaluation_ends_when_told_to_stop(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
) -> None:
    """Within two batches, in the middle, where no save was due, and at the end. Catches a figure of
    some of the windows, and an evaluation that is lost."""
    config = recipe(corpus, tmp_path / "run", **OFTEN)
    train(recipe(corpus, tmp_path / "whole", **OFTEN), device="cpu")
    batches, count = [], evaluate.text_bytes  # the steps that are done at each of them

    def counting(*arguments: Any) -> Any:
        batches.append(len(losses(tmp_path / "run")))
        if batches[-1] == step:
            terminate()
        return count(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "text_bytes", counting)
        assert train(config, device="cpu") is None
    assert batches.count(step) == 2
    assert step == 3 or batches.count(3) > 10, "which is a whole evaluation"
    assert len(heldout(tmp_path / "run")) == step // 3 - 1
    assert steps_of(tmp_path / "run") == [step]
    words = f"told to stop (SIGTERM): saved step {step} of 6, not evaluated; continue with --resume"
    assert words in capsys.readouterr().out.splitlines()
    assert train(config, device="cpu", resume=True) is not None
    assert untimed(tmp_path / "run") == untimed(tmp_path / "whole")


def told_on_a_rank(rank: int, world: int, settings: dict[str, Any]) -> int:
    """A run whose last rank gets SIGTERM in its first evaluation; returns the batches of that."""
    batches, count = [], evaluate.text_bytes

    def counting(*arguments: Any) -> Any:
        batches.append(1)
        if rank == world - 1:
            terminate()
        return count(*arguments)

    with mock.patch.object(evaluate, "text_bytes", counting):
        config = build(TrainConfig, settings, "test recipe")
        assert train(config, device="cpu") is None
    return len(batches)


@pytest.mark.parametrize(("tp", "dp_shard"), [(2, 1), (1, 0)])
def test_all_ranks_end_an_evaluation_together(
    corpus: Path, tmp_path: Path, pools: Pools, tp: int, dp_shard: int
) -> None:
    """Where one of them is told. Catches ranks that wait for each other, and shards that the
    evaluation has gathered and the save takes for a rank's own."""
    run = tmp_path / "run"
    settings = recipe(corpus, run, tp=tp, dp_shard=dp_shard, **OFTEN).to_dict()
    assert pools(2).run(told_on_a_rank, settings) == [2, 2]
    assert (steps_of(run), heldout(run)) == ([3], [])
    pools(2).run(go_on, settings, True)
    train(recipe(corpus, tmp_path / "whole", **OFTEN), device="cpu")
    assert losses(run) == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)
    assert heldout(run) == pytest.approx(heldout(tmp_path / "whole"), abs=1e-4)
