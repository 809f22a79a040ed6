"""Runs of training: a recipe, what a run wrote, and ways to end one early."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import TensorReader, checkpoints, newest, read_checksums, write_checksums
from ladder.cli import main
from ladder.config import build
from ladder.files import checksum
from ladder.models import UserError
from ladder.train import loop, metrics
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.commands import Command, Start

LAG_2 = [
    {
        "layers": "0-1",
        "attention": {"own_lag": 2, "peer_lag": 2},
        "mlp": {"own_lag": 2, "peer_lag": 2},
    }
]
DESYNC_THEN_LADDER = [{"layers": 0, "preset": "desync-2x"}, {"layers": 1, "preset": "ladder"}]

SHAPE = {
    "name": "tiny",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
}
TIMES = ("tokens_per_second", "tokens_per_second_per_gpu", "data_wait", "checkpoint_seconds")


def recipe(corpus: Path, out: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "data": str(corpus),
        "out": str(out),
        "model": SHAPE,
        "plan": "ladder",
        "steps": 6,
        "seq_len": 16,
        "batch_size": 4,
        "lr": 1e-2,
        "min_lr": 1e-3,
        "warmup_steps": 2,
        "log_interval": 1,
        "eval_windows": 4,
        "tensorboard": False,
    }
    return build(TrainConfig, settings | changes, "test recipe")


def recorded(run: Path, name: str) -> list[float]:
    return [record[name] for record in metrics.read_metrics(run) if name in record]


def losses(run: Path) -> list[float]:
    return recorded(run, "loss")


def untimed(run: Path) -> list[dict[str, Any]]:
    """All that a run recorded, but for its speed, and when it saved."""
    records = [
        {name: value for name, value in record.items() if name not in TIMES}
        for record in metrics.read_metrics(run)
    ]
    return [record for record in records if len(record) > 1]


def stored(folder: Path, stem: str = "model") -> dict[str, torch.Tensor]:
    """The full tensors of a checkpoint, for any number of ranks that wrote it."""
    reader = TensorReader(folder, stem)
    return {
        name: reader.part(name, tuple(slice(0, size) for size in reader.shape(name)))
        for name in reader.files
    }


def weights(run: Path) -> dict[str, torch.Tensor]:
    return stored(newest(run))


def run_on_ranks(rank: int, world: int, settings: dict[str, Any], stop: int | None) -> None:
    config = build(TrainConfig, settings, "test recipe")
    train(config, device="cpu", stop_after=stop)
    if stop:
        train(config, device="cpu", resume=True)


def seal(path: Path) -> None:
    """Have a checkpoint's checksums agree with a file that was changed."""
    sums = read_checksums(path.parent)
    write_checksums(path.parent, sums | {path.name: checksum(path)})


def training(start: Start, config: TrainConfig, *options: str, **settings: Any) -> Command:
    """`ladder train` of a recipe."""
    path = Path(config.out).with_suffix(".json")
    path.write_text(json.dumps(config.to_dict()))
    return start(main, ["train", str(path), "--device", "cpu", *options], **settings)


def steps_of(run: Path) -> list[int]:
    return [step for step, _ in checkpoints(run)]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def fail_on_ranks(rank: int, world: int, settings: dict[str, Any], resume: bool) -> str:
    with pytest.raises(UserError) as caught:
        train(build(TrainConfig, settings, "test recipe"), device="cpu", resume=resume)
    return str(caught.value)


def go_on(rank: int, world: int, settings: dict[str, Any], resume: bool, behind: int = 0) -> None:
    before, loop.BEHIND["cpu"] = loop.BEHIND["cpu"], behind
    try:
        train(build(TrainConfig, settings, "test recipe"), device="cpu", resume=resume)
    finally:
        loop.BEHIND["cpu"] = before
