"""Faults of a run: killed at any moment, told to stop, a full disk."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import newest
from ladder.models.errors import UserError
from ladder.train import checkpointer, loop, metrics, shards
from ladder.train.interruption import Interruption
from ladder.train.loop import train
from tests.commands import Start
from tests.train.runs import losses, recipe, steps_of, stored, training, untimed, weights

STEPS = 30
SAVING = {"steps": STEPS, "checkpoint_interval": 1, "keep_checkpoints": 3}


@pytest.mark.slow  # test_async_checkpoint.py has one that is killed once, while it writes
@pytest.mark.parametrize("nproc", [1, 2])
def test_killed_at_random_moments_a_run_ends_as_if_it_never_was(
    corpus: Path, tmp_path: Path, start: Start, nproc: int
) -> None:
    """SIGKILL of any process, mostly while it saves, for it saves after every step. Catches a
    checkpoint that is seen before it is whole, partial folders that stay, metrics that are doubled
    or lost, state that a resumed run lacks, and a lock or a traceback that a death leaves."""
    whole = recipe(corpus, tmp_path / "whole", tp=nproc, **SAVING)
    assert training(start, whole, "--nproc", str(nproc)).wait() == 0
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    run = tmp_path / "run"
    config = recipe(corpus, run, tp=nproc, **SAVING)
    kills = 0
    for _ in range(20):
        before = steps_of(run)
        resume = ["--resume"] if run.exists() else []
        process = training(start, config, "--nproc", str(nproc), *resume)
        process.until(lambda before=before: steps_of(run)[-1:] > before[-1:])
        time.sleep(moments.random() * 0.1)
        if kills < 3 and process.poll() is None:
            victims = process.ranks() if nproc > 1 else [process.pid]
            os.kill(moments.choice(victims or [process.pid]), signal.SIGKILL)
            kills += 1
        code, err = process.wait(), process.err
        if code == 0:
            break
        assert err.count("error: rank") == (nproc > 1), err
        assert "Traceback" not in err
    assert kills > 0
    assert code == 0, err
    assert untimed(run) == untimed(tmp_path / "whole")
    for stem in ("model", "optimizer"):
        expected = stored(newest(tmp_path / "whole"), stem)
        for key, value in stored(newest(run), stem).items():
            assert torch.equal(value, expected[key]), key
    assert steps_of(run) == [STEPS - 2, STEPS - 1, STEPS]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        f"step-{step:06d}" for step in steps_of(run)
    ]


@pytest.mark.parametrize("nproc", [1, 2])
def test_sigterm_saves_and_ends_in_order(
    corpus: Path, tmp_path: Path, start: Start, nproc: int
) -> None:
    """To the launcher, or to one rank alone. Catches a step that is lost or done twice, ranks that
    stop at different steps, and a launcher that dies and leaves its ranks."""
    whole = recipe(corpus, tmp_path / "whole", tp=nproc, steps=400)
    run = tmp_path / "run"
    config = recipe(corpus, run, tp=nproc, steps=400)
    process = training(start, config, "--nproc", str(nproc))
    process.until(lambda: (run / metrics.FILE).exists() and len(losses(run)) > 3)
    target = process.pid if nproc == 1 else process.ranks()[1]
    os.kill(target, signal.SIGTERM)
    assert process.wait() == 0, process.err
    (step,) = steps_of(run)
    assert 3 < step < 400
    words = f"told to stop (SIGTERM): saved step {step} of 400; continue with --resume"
    assert words in process.out
    assert len(losses(run)) == step
    process = training(start, config, "--nproc", str(nproc), "--resume")
    process.until(lambda: len(losses(run)) > step + 3)
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.err
    assert "told to stop" in process.out
    last = steps_of(run)[-1]
    if nproc == 1:
        train(whole, device="cpu", stop_after=last)
        assert losses(run) == losses(tmp_path / "whole")
        for name, value in weights(tmp_path / "whole").items():
            assert torch.equal(value, weights(run)[name]), name


def test_sigterm_spares_the_compilers_of_a_step() -> None:
    """Sent to the whole process group, it would end them, and the step with a traceback."""
    compiler = ["sh", "-c", "kill -TERM $$; exit 3"]
    codes: list[int] = []
    with Interruption() as interruption:
        thread = threading.Thread(target=lambda: codes.append(subprocess.call(compiler)))
        thread.start()  # as torch.compile does
        thread.join()
        assert not interruption.noted
        signal.raise_signal(signal.SIGTERM)
        assert interruption.noted
    assert interruption.noted
    assert [*codes, subprocess.call(compiler)] == [3, -signal.SIGTERM]


def test_a_full_disk_loses_no_checkpoint(corpus: Path, tmp_path: Path, start: Start) -> None:
    """A file may not grow beyond 50 kB: the second save fails. Catches a half-written folder that
    takes the name, and a traceback in place of an error."""
    run = tmp_path / "run"
    train(recipe(corpus, run), device="cpu", stop_after=2)
    before = weights(run)

    process = training(start, recipe(corpus, run), "--resume", file_size=50_000)
    code, err = process.wait(), process.err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2, err
    assert len(errors) == 1
    assert "step-000006 cannot be written" in errors[0]
    assert "make room" in errors[0]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    train(recipe(corpus, run), device="cpu", resume=True)
    train(recipe(corpus, tmp_path / "whole"), device="cpu")
    assert untimed(run) == untimed(tmp_path / "whole")
    assert not all(torch.equal(value, weights(run)[name]) for name, value in before.items())


def full_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The disk is full for the checkpoints of these steps."""
    write = shards.write_file

    def full(path: Path, *arguments: Any) -> None:
        if int(path.parent.name.split("-")[1].split(".")[0]) in steps:
            raise OSError(28, "No space left on device")
        write(path, *arguments)

    monkeypatch.setattr(shards, "write_file", full)


@pytest.mark.parametrize("where", ["tensors", "record"])
def test_a_save_that_failed_once_is_made_up_for_by_the_next(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    where: str,
) -> None:
    """Catches newer weights that are dropped for the failure of older ones."""
    full_at(monkeypatch, *([2] if where == "tensors" else []))
    write = checkpointer.write_text

    def no_record(path: Path, text: str) -> None:
        if where == "record" and path.parent.name == ".step-000002.partial":
            path = tmp_path / "gone" / path.name  # files.write_text gives a UserError
        write(path, text)

    monkeypatch.setattr(checkpointer, "write_text", no_record)
    train(recipe(corpus, tmp_path / "run", checkpoint_interval=2), device="cpu")
    assert steps_of(tmp_path / "run") == [4, 6]
    (warning,) = (x for x in capsys.readouterr().err.splitlines() if x.startswith("warning: "))
    assert "step-000002 could not be written ([Errno " in warning
    assert warning.endswith("; saving step-000004 in its place")


def test_a_save_that_failed_costs_no_step_when_told_to_stop(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full_at(monkeypatch, 2)
    take, taken = loop.take_step, []

    def told(*arguments: Any) -> Any:
        taken.append(arguments)
        if len(taken) == 3:
            signal.raise_signal(signal.SIGTERM)
        return take(*arguments)

    monkeypatch.setattr(loop, "take_step", told)
    assert train(recipe(corpus, tmp_path / "run", checkpoint_interval=2), device="cpu") is None
    assert steps_of(tmp_path / "run") == [3]
    assert "told to stop (SIGTERM): saved step 3 of 6" in capsys.readouterr().out


def test_two_saves_that_fail_end_the_run_at_the_second(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full_at(monkeypatch, 2, 4)
    with pytest.raises(UserError, match=r"step-000004 cannot be written .*make room"):
        train(recipe(corpus, tmp_path / "run", checkpoint_interval=2, steps=8), device="cpu")
    assert losses(tmp_path / "run")[4:] == []


def test_only_the_newest_checkpoints_are_kept(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches one that is removed before the next is whole: at no time are there fewer."""
    run = tmp_path / "run"
    seen: list[list[int]] = []
    write = shards.write_file

    def watched(*arguments: Any) -> None:
        write(*arguments)
        seen.append(steps_of(run))

    monkeypatch.setattr(shards, "write_file", watched)
    train(recipe(corpus, run, checkpoint_interval=1, keep_checkpoints=2), device="cpu")
    assert seen[::2] == seen[1::2] == [[], [1], [1, 2], [2, 3], [3, 4], [4, 5]]
    assert steps_of(run) == [5, 6]
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_fewer_checkpoints_free_a_full_disk_before_the_first_save(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a disk that stays full since a save must succeed first; and, with the number that
    the run had, older checkpoints that go, though a step that was not finite kept them."""
    run = tmp_path / "run"
    train(recipe(corpus, run, checkpoint_interval=1), device="cpu", stop_after=3)
    shutil.copytree(run, tmp_path / "other")
    seen: list[list[int]] = []
    write = shards.write_file

    def watched(path: Path, *arguments: Any) -> None:
        seen.append(steps_of(path.parents[2]))
        write(path, *arguments)

    monkeypatch.setattr(shards, "write_file", watched)
    train(recipe(corpus, run, keep_checkpoints=1), device="cpu", resume=True)
    train(recipe(corpus, tmp_path / "other"), device="cpu", resume=True)
    assert seen[::2] == seen[1::2] == [[3], [1, 2, 3]]
    assert steps_of(run) == [6]


def test_metrics_on_a_full_disk_end_the_run_with_a_remedy(
    corpus: Path, tmp_path: Path, start: Start
) -> None:
    """A file may not grow beyond 12 kB, which metrics are the first to need. Catches a traceback,
    and a torn line that a resumed run stumbles over."""
    run = tmp_path / "run"
    config = recipe(corpus, run, steps=STEPS * 2)

    process = training(start, config, file_size=12_000)
    code, err = process.wait(), process.err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2, err
    assert len(errors) == 1
    assert "Traceback" not in err
    assert "metrics" in errors[0]
    assert "make room, and continue with --resume" in errors[0]
    train(config, device="cpu", resume=True)
    assert len(losses(run)) == STEPS * 2


def test_tensorboards_full_disk_is_told_as_ours(tmp_path: Path) -> None:
    """When it writes, and when it is closed; but not in place of what ended the run."""

    class Full:
        def add_scalar(self, *arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        close = add_scalar

    def closed() -> None:
        with metrics.Metrics(tmp_path, False, 0, True) as found:
            found.board = Full()

    def broken() -> None:
        with metrics.Metrics(tmp_path, False, 0, True) as found:
            found.board = Full()
            raise RuntimeError("of training")

    with metrics.Metrics(tmp_path, False, 0, True) as found:
        found.board = Full()
        with pytest.raises(UserError, match=r"cannot be written .No space.*make room"):
            found.write(1, loss=2.0)
        found.board = None
    with pytest.raises(UserError, match=r"cannot be written .No space.*make room"):
        closed()
    with pytest.raises(RuntimeError, match="of training"):
        broken()
