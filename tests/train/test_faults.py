"""Faults of a run: killed at any moment, told to stop, a full disk, damaged files."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import CHECKSUMS, digest, newest, read_checksums
from ladder.config import build
from ladder.data.mix import open_sources
from ladder.models.errors import UserError
from ladder.train import metrics, shards, step
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.commands import Start
from tests.distributed import Pools
from tests.train.runs import (
    fail_on_ranks,
    flip,
    go_on,
    losses,
    recipe,
    seal,
    steps_of,
    stored,
    training,
    untimed,
    weights,
)

STEPS = 50
SAVING = {"steps": STEPS, "checkpoint_interval": 1, "keep_checkpoints": 3}


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


@pytest.mark.parametrize("damage", [flip, Path.unlink])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "tokenizer.json"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(
    corpus: Path, tmp_path: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """One bit of a weight changes no shape: only its checksum tells."""
    run = tmp_path / "run"
    config = recipe(corpus, run, checkpoint_interval=2)
    train(config, device="cpu", stop_after=5)
    damage(newest(run) / file)
    with pytest.raises(
        UserError, match=rf"{file} .*remove .*step-000005 to resume from step-000004"
    ):
        train(config, device="cpu", resume=True)
    for path in newest(run).iterdir():
        path.unlink()
    newest_folder = run / "checkpoints" / "step-000005"
    newest_folder.rmdir()
    train(config, device="cpu", resume=True)
    train(recipe(corpus, tmp_path / "whole"), device="cpu")
    assert losses(run) == losses(tmp_path / "whole")


def test_damage_is_told_on_every_rank(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    run = tmp_path / "run"
    config = recipe(corpus, run, tp=2)
    pools(2).run(stop_at_two, config.to_dict())
    shard = newest(run) / "shard-00002-model-00001-of-00001.safetensors"
    flip(shard)
    for message in pools(2).run(fail_on_ranks, config.to_dict(), True):
        assert f"{shard.name} is damaged" in message
        assert "start again, without --resume" in message


def stop_at_two(rank: int, world: int, settings: dict[str, Any]) -> None:
    train(build(TrainConfig, settings, "test recipe"), device="cpu", stop_after=2)


def test_a_missing_shard_stops_a_resumed_run(corpus: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    train(recipe(data, tmp_path / "run"), device="cpu", stop_after=2)
    next(data.glob("train-*.bin")).unlink()
    with pytest.raises(UserError, match=r"shard .*train-00000\.bin cannot be read"):
        train(recipe(data, tmp_path / "run"), device="cpu", resume=True)
    assert steps_of(tmp_path / "run") == [2]


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


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("nproc", [1, 2])
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


def swap(old: str, new: str) -> Callable[[str], str]:
    return lambda text: text.replace(old, new, 1)


def without(name: str) -> Callable[[str], str]:
    """Checksums that never told of a file, and agree with themselves."""

    def left(text: str) -> str:
        sums = {
            key: value for key, value in json.loads(text).items() if key not in (name, CHECKSUMS)
        }
        return json.dumps({**sums, CHECKSUMS: digest(sums)})

    return left


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "{",
        lambda text: "\x00" * 9,
        lambda text: "{}",
        lambda text: '{"optimizer.safetensors": 5}',
        swap('safetensors": "', 'safetensors": "0'),
        lambda text: re.sub(
            r'(optimizer.safetensors": ")(.)', lambda m: m[1] + "fe"[m[2] == "f"], text
        ),
        without("model.safetensors"),
        without("train.json"),
        None,
    ],
    ids=[
        "cut",
        "zeros",
        "empty",
        "numbers",
        "longer",
        "flipped",
        "no weights",
        "no record",
        "gone",
    ],
)
def test_checksums_that_are_damaged(
    corpus: Path, tmp_path: Path, damage: Callable[[str], str] | None
) -> None:
    """The error names checksums.json, not the files listed in it, and says what to do. Catches
    weights that are taken because nothing tells of them."""
    config = recipe(corpus, tmp_path / "run", checkpoint_interval=2)
    train(config, device="cpu", stop_after=5)
    flip(newest(tmp_path / "run") / "model.safetensors")
    path = newest(tmp_path / "run") / CHECKSUMS
    text = path.read_text()
    path.unlink()
    if damage is not None:
        path.write_text(damage(text))
    found = r"; copy it again, or remove .*step-000005 to resume from step-000004"
    with pytest.raises(UserError, match=found) as caught:
        train(config, device="cpu", resume=True)
    assert str(caught.value).removeprefix("cannot read ").startswith(str(path))
    if damage is not None:
        start = recipe(corpus, tmp_path / "on", init=str(path.parent), model=None, plan=None)
        with pytest.raises(UserError, match="start from another checkpoint"):
            train(start, device="cpu")


def test_checkpoints_from_before_checksums_had_their_own(corpus: Path, tmp_path: Path) -> None:
    config = recipe(corpus, tmp_path / "run")
    train(config, device="cpu", stop_after=2)
    path = newest(tmp_path / "run") / CHECKSUMS
    path.write_text(json.dumps(read_checksums(path.parent)))
    train(config, device="cpu", resume=True)
    assert len(losses(tmp_path / "run")) == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": -5}, "step=-5 in the checkpoint of step 4"),
        ({"step": "4"}, "step='4'"),
        ({"step": 3}, "step=3"),
        ({"layout": 5}, "layout=5"),
        ({"layout": {"dp": 0}}, "layout={'dp': 0}"),
        ({"layout": [1]}, "layout=\\[1\\]"),
        ({"config": 5}, "config=5"),
        ({"first_plan": 5}, "first_plan=5"),
    ],
)
def test_a_record_that_is_wrong_is_named(
    corpus: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """With checksums that fit, as where somebody edited it."""
    plans = [{"step": 1, "plan": "ladder"}]
    config = recipe(corpus, tmp_path / "run", checkpoint_interval=2, convert_layers=plans)
    train(config, device="cpu", stop_after=4)
    path = newest(tmp_path / "run") / "train.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    seal(path)
    found = rf"train\.json has {words}.*; copy it again, or remove .* to resume from step-000002"
    with pytest.raises(UserError, match=found):
        train(config, device="cpu", resume=True)
