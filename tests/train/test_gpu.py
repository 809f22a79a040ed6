"""Training on GPUs, in every layout, compiled and checkpointed: the losses of one CPU process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.cli import main
from ladder.config import build
from ladder.parallel import launch
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.train.runs import losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
WORLDS = [world for world in (2, 4) if world <= torch.cuda.device_count()]


def layouts(world: int) -> dict[str, dict[str, Any]]:
    """The changes of a recipe, by name; two mesh dimensions need four GPUs."""
    two_dimensions = {
        "HSDP": {"dp_shard": 2, "activation_checkpointing": "full"},
        "TP + SP + FSDP": {"tp": 2, "dp_shard": 0, "sequence_parallel": True},
    }
    return {
        "DDP": {"compile": True},
        "FSDP": {"dp_shard": 0},
        "FSDP, compiled": {
            "dp_shard": 0, "compile": True, "micro_batch_size": 1,
            "activation_checkpointing": "selective",
        },
        "TP + SP": {"tp": world, "sequence_parallel": True},
        "TP + SP, fused": {"tp": world, "sequence_parallel": True, "reducer": "fused"},
        "TP + SP, compiled": {
            "tp": world, "sequence_parallel": True, "compile": True,
            "activation_checkpointing": "selective",
        },
    } | (two_dimensions if world == 4 else {})  # fmt: skip


def train_all(settings: dict[str, Any], world: int) -> int:
    for name, changes in layouts(world).items():
        changes = {**changes, "out": f"{settings['out']}/{name}"}
        train(build(TrainConfig, settings | changes, "test recipe"), device="cuda")
    return 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("plan", ["standard", "ladder", "hybrid"])
def test_layouts(corpus: Path, tmp_path: Path, plan: str, world: int) -> None:
    """Twelve steps. Catches memory that is used again on another stream too early, and a collective
    that is waited for on the wrong one."""
    settings: dict[str, Any] = {
        "data": str(corpus), "out": str(tmp_path / "cpu"), "plan": plan, "steps": 12,
        "seq_len": 64, "batch_size": 8, "warmup_steps": 1, "log_interval": 1, "eval_windows": 4,
        "lr": 1e-3, "tensorboard": False, "model": {"name": "tiny", "num_layers": 6},
    }  # fmt: skip
    train(build(TrainConfig, settings, "test recipe"), device="cpu")
    there = settings | {"out": str(tmp_path)}
    assert launch.run(train_all, (there, world), nproc=world) == 0
    for name in layouts(world):
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "cpu"), abs=1e-3), name


@pytest.mark.parametrize("world", WORLDS)
def test_bench_train(tmp_path: Path, capfd: pytest.CaptureFixture[str], world: int) -> None:
    command = (
        f"bench train --model tiny --plans standard ladder none --layouts fsdp tp{world}+sp "
        f"--steps 2 --seq-len 64 --nproc {world}"
    )
    assert main([*command.split(), "--out", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert f"tp{world}+sp  ladder no_comm" in printed
    assert "nan" not in printed
