"""Damaged, incomplete and edited checkpoints: refused, with what is wrong and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ladder.checkpoint import CHECKSUMS, digest, newest, read_checksums
from ladder.config import build
from ladder.models.errors import UserError
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools
from tests.train.runs import fail_on_ranks, flip, losses, recipe, seal, steps_of


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
