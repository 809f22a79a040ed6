"""Checkpoints that are written while training goes on, by every rank its own shards."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from ladder.checkpoint import load_model, newest
from ladder.config import build
from ladder.models.errors import UserError
from ladder.train import checkpointer, metrics, shards, step
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools, RankError
from tests.train.runs import go_on, losses, recipe, steps_of, stored, untimed, weights


@contextmanager
def hooks(
    on_write: Callable[[Path], object], on_step: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Within: `on_write(path)` runs before each file of tensors is written, `on_step()` after each
    backward pass."""
    write, backward = shards.write_file, step.backward

    def writing(path: Path, *arguments: Any) -> None:
        on_write(path)
        write(path, *arguments)

    def stepping(*arguments: Any) -> torch.Tensor:
        loss = backward(*arguments)
        on_step()
        return loss

    shards.write_file, step.backward = writing, stepping
    try:
        yield
    finally:
        shards.write_file, step.backward = write, backward


def saved_step(path: Path) -> int:
    return int(path.parent.name.removeprefix(".step-").removesuffix(".partial"))


def test_training_goes_on_while_a_checkpoint_is_written(corpus: Path, tmp_path: Path) -> None:
    """The first save does not end before two more steps have run; the second begins after its end.
    Catches a save that is waited for, two at once, and one that writes what training has since
    changed."""
    run = tmp_path / "run"
    events: list[tuple[str, int]] = []
    went_on = threading.Event()

    def on_write(path: Path) -> None:
        events.append(("writes", saved_step(path)))
        if saved_step(path) == 2 and "optimizer" in path.name:
            assert went_on.wait(10), "training waits for the save"
            time.sleep(0.5)

    def on_step() -> None:
        events.append(("step", 1 + sum(kind == "step" for kind, _ in events)))
        if events[-1] == ("step", 4):
            went_on.set()

    with hooks(on_write, on_step):
        train(recipe(corpus, run, checkpoint_interval=2, steps=4), device="cpu")
    assert steps_of(run) == [2, 4]
    assert [each for each in events if each[0] == "step"] == [("step", n) for n in range(1, 5)]
    writes = [("writes", 2), ("writes", 2), ("writes", 4), ("writes", 4)]
    assert [each for each in events if each[0] == "writes"] == writes
    found = {r["step"]: r["checkpoint_seconds"] for r in metrics.read_metrics(run) if len(r) == 2}
    assert list(found) == [2, 4]
    assert found[4] > 0.2, "the second save did not wait"
    train(recipe(corpus, tmp_path / "short", steps=4), device="cpu", stop_after=2)
    for stem in ("model", "optimizer"):
        early = stored(run / "checkpoints" / "step-000002", stem)
        for name, value in stored(newest(tmp_path / "short"), stem).items():
            assert torch.equal(value, early[name]), name


def test_an_exception_waits_for_the_save_under_way(corpus: Path, tmp_path: Path) -> None:
    """It is the error that is raised; where the save fails too, that is told beside it."""
    steps: list[int] = []

    def on_step() -> None:
        steps.append(1)
        if len(steps) == 3:
            raise UserError("the third step")

    slow = hooks(lambda path: time.sleep(0.2), on_step)
    with slow, pytest.raises(UserError, match="third") as caught:
        train(recipe(corpus, tmp_path / "run", checkpoint_interval=2), device="cpu")
    assert steps_of(tmp_path / "run") == [2]
    assert not hasattr(caught.value, "__notes__")

    def full(path: Path) -> None:
        time.sleep(0.2)
        raise OSError(28, "No space left on device")

    steps.clear()
    with hooks(full, on_step), pytest.raises(UserError, match="the third step") as caught:
        train(recipe(corpus, tmp_path / "other", checkpoint_interval=2), device="cpu")
    assert not list((tmp_path / "other" / "checkpoints").iterdir())
    (note,) = caught.value.__notes__
    assert note.startswith("also: ")
    assert "step-000002 cannot be written ([Errno 28] No space left on device)" in note


def fail_on_rank_1(rank: int, world: int, settings: dict[str, Any]) -> tuple[str, int]:
    """The disk is full for rank 1 after the first save; returns the error and the steps done."""
    steps: list[int] = []

    def on_write(path: Path) -> None:
        if rank == 1 and saved_step(path) > 2:
            raise OSError(28, "No space left on device")

    config = build(TrainConfig, settings, "test recipe")
    with hooks(on_write, lambda: steps.append(1)), pytest.raises(UserError) as caught:
        train(config, device="cpu")
    return str(caught.value), len(steps)


def test_a_save_that_fails_on_one_rank_fails_on_all(
    corpus: Path, tmp_path: Path, pools: Pools
) -> None:
    """And so does the next save. Catches a checkpoint that lacks a rank's shards, ranks that go on
    alone, and an error that is never heard."""
    run = tmp_path / "run"
    config = recipe(corpus, run, tp=2, checkpoint_interval=2, steps=8)
    for message, steps in pools(2).run(fail_on_rank_1, config.to_dict()):
        assert (
            "step-000006 cannot be written ([Errno 28] No space left on device on rank" in message
        )
        assert "make room" in message
        assert steps == 6
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    train(recipe(corpus, run, steps=8), device="cpu", resume=True, stop_after=3)


def fail_on_one_rank(rank: int, world: int, settings: dict[str, Any]) -> None:
    """The disk is full for the last rank at step 2, and for rank 0 at the end of step 6's save."""

    def on_write(path: Path) -> None:
        if rank == 1 and saved_step(path) == 2:
            raise OSError(28, "No space left on device")

    def on_record(path: Path, text: str) -> None:
        if path.parent.name == ".step-000006.partial":
            raise UserError("full") from OSError(28, "No space left on device")
        write(path, text)

    write = checkpointer.write_text
    checkpointer.write_text = on_record
    try:
        with hooks(on_write):
            train(build(TrainConfig, settings, "test recipe"), device="cpu")
    finally:
        checkpointer.write_text = write


def test_ranks_make_up_together_for_a_save_that_failed_on_one(
    corpus: Path, tmp_path: Path, pools: Pools
) -> None:
    """Catches a rank that ends where the others save again, and plans that a failure has undone."""
    config = recipe(corpus, tmp_path / "run", tp=2, checkpoint_interval=2, steps=8)
    pools(2).run(fail_on_one_rank, config.to_dict())
    assert steps_of(tmp_path / "run") == [4, 8]
    pools(2).run(go_on, config.to_dict() | {"out": str(tmp_path / "whole")}, False)
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name


def killed_while_writing(rank: int, world: int, settings: dict[str, Any], step: int) -> None:
    def on_write(path: Path) -> None:
        if rank == 1 and saved_step(path) == step and "optimizer" in path.name:
            os.kill(os.getpid(), signal.SIGKILL)

    with hooks(on_write):
        train(build(TrainConfig, settings, "test recipe"), device="cpu")


@pytest.mark.parametrize(("step", "layout"), [(4, {"tp": 2}), (2, {"dp_shard": 0})])
def test_a_rank_killed_while_it_writes_costs_that_checkpoint_alone(
    corpus: Path, tmp_path: Path, pools: Pools, step: int, layout: dict[str, int]
) -> None:
    """Where it is the first, the run starts again."""
    run = tmp_path / "run"
    config = recipe(corpus, run, checkpoint_interval=2, **layout)
    with pytest.raises(RankError, match="exit code -9"):
        pools(2).run(killed_while_writing, config.to_dict(), step)
    assert steps_of(run) == ([2] if step == 4 else [])
    pools(2).run(go_on, config.to_dict(), True)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [
        "step-000002", "step-000004", "step-000006",
    ]  # fmt: skip
    pools(2).run(go_on, config.to_dict() | {"out": str(tmp_path / "whole")}, False)
    assert untimed(run) == untimed(tmp_path / "whole")
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(run)[name]), name


def test_a_checkpoint_that_cannot_be_removed_fails_no_save(
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """NFS keeps files that are open. Each save and --resume tell of what is left, and
    try again; it refuses a save of the same step alone."""
    run, remove = tmp_path / "run", shutil.rmtree
    folder = run / "checkpoints"
    stuck = {".step-000001.old", ".step-000009.partial"}

    def kept(path: Path, *arguments: Any, ignore_errors: bool = False, **options: Any) -> None:
        if Path(path).name not in stuck:
            remove(path, *arguments, ignore_errors=ignore_errors, **options)
        elif not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    def resume(stop_after: int) -> str:
        settings = recipe(corpus, run, checkpoint_interval=1, keep_checkpoints=1, steps=9)
        train(settings, device="cpu", resume=stop_after > 3, stop_after=stop_after)
        return capsys.readouterr().err

    monkeypatch.setattr(shutil, "rmtree", kept)
    warning = f"warning: {folder / '.step-000001.old'} cannot be removed ([Errno 39] Directory"
    assert resume(3).count(warning) == 2, "of the saves at steps 2 and 3"
    assert {path.name for path in folder.iterdir()} == {".step-000001.old", "step-000003"}
    (folder / ".step-000009.partial").mkdir()
    assert ".step-000009.partial cannot be removed" in resume(5)
    assert steps_of(run) == [5]
    stuck.remove(".step-000001.old")
    with pytest.raises(
        UserError, match=r"\.step-000009\.partial, which an interrupted .*remove it"
    ):
        resume(9)
    assert steps_of(run) == [8]
    stuck.clear()
    resume(9)
    assert [path.name for path in folder.iterdir()] == ["step-000009"]
    load_model(newest(run))


LAYOUTS = [(1, 1, "DDP"), (1, 2, "HSDP"), (2, 0, "TP x FSDP")]


def save_all(rank: int, world: int, settings: dict[str, Any], out: str) -> None:
    """Three layouts of one run; the second save of each is not planned anew."""
    for tp, dp_shard, name in LAYOUTS:
        changes = {"tp": tp, "dp_shard": dp_shard, "out": f"{out}/{name}"}
        train(build(TrainConfig, settings | changes, "test recipe"), device="cpu")


def test_ranks_share_out_what_is_written(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    """Each number lies in one file; each rank writes about its share; torch's own reader finds
    everything. Catches replicas that all write, or one that writes for all, and boxes that say the
    wrong place."""
    alone = recipe(corpus, tmp_path / "alone", steps=3, checkpoint_interval=2)
    train(alone, device="cpu")
    pools(4).run(save_all, alone.to_dict(), str(tmp_path))
    whole = weights(tmp_path / "alone")
    size = sum(value.numel() for value in whole.values())
    for _, _, name in LAYOUTS:
        folder = newest(tmp_path / name)
        held = []
        for rank in range(4):
            (path,) = folder.glob(f"shard-{rank + 1:05d}-model-*.safetensors")
            held.append(sum(value.numel() for value in load_file(path).values()))
        assert sum(held) == size, name
        assert max(held) < size / 4 * 1.5, name
        sums = json.loads((folder / "checksums.json").read_text())
        assert {*sums} == {path.name for path in folder.iterdir()}
        for key, value in weights(tmp_path / name).items():
            assert (value - whole[key]).abs().max() < 2e-4, (name, key)
        reader = dcp.HuggingFaceStorageReader(str(folder))
        expected = stored(folder) | stored(folder, "optimizer")
        found = {key: torch.zeros_like(value) for key, value in expected.items()}
        dcp.load(found, storage_reader=reader, no_dist=True)
        for key, value in expected.items():
            assert torch.equal(found[key], value), (name, key)


def test_large_shards_are_several_files(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a model that lacks one of them is refused, not run with what the memory held."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    train(recipe(corpus, tmp_path / "run"), device="cpu", stop_after=2)
    files = sorted(newest(tmp_path / "run").glob("shard-00001-model-*.safetensors"))
    assert len(files) > 2
    monkeypatch.undo()
    model = load_model(newest(tmp_path / "run"))
    assert model.config.plan.name == "ladder"
    train(recipe(corpus, tmp_path / "run"), device="cpu", resume=True)
    train(recipe(corpus, tmp_path / "whole"), device="cpu")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    first = tmp_path / "run" / "checkpoints" / "step-000002"
    files[1].unlink()
    with pytest.raises(UserError, match="lacks the tensor"):
        load_model(first)


def test_a_missing_shard_is_found_without_checksums(
    corpus: Path, tmp_path: Path, pools: Pools
) -> None:
    config = recipe(corpus, tmp_path / "run", tp=2, steps=3)
    pools(2).run(go_on, config.to_dict(), False)
    load_model(newest(tmp_path / "run"))
    for rank, message in ((1, "lacks the tensor .* a file is missing"), (2, "has the shape")):
        path = next(newest(tmp_path / "run").glob(f"shard-{rank:05d}-model-*.safetensors"))
        path.rename(tmp_path / "away")
        with pytest.raises(UserError, match=message):
            load_model(newest(tmp_path / "run"))
        (tmp_path / "away").rename(path)
