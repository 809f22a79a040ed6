"""Training steps on GPUs: the losses of the CPU, and a host that never waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.config import build
from ladder.parallel import launch
from ladder.train import metrics
from ladder.train.config import TrainConfig
from ladder.train.interruption import Interruption
from ladder.train.loop import train
from ladder.train.optim import make_optimizer
from ladder.train.prefetch import Batch, MicroBatch
from ladder.train.step import take_step, to_host
from tests.gpu import WORLDS, batch, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train_on_gpus(settings: dict[str, Any]) -> int:
    train(build(TrainConfig, settings, "test recipe"), device="cuda")
    return 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("plan", "degree"), [("ladder", None), ("desync-2x", 4)])
def test_training_on_gpus_equals_the_cpu(
    corpus: Path, tmp_path: Path, world: int, plan: str, degree: int | None
) -> None:
    """TP, and with 4 GPUs TP x data parallel, against one CPU process."""
    settings: dict[str, Any] = {
        "data": str(corpus), "out": str(tmp_path / "cpu"), "plan": plan, "tp_degree": degree,
        "steps": 5, "seq_len": 16, "batch_size": 4, "warmup_steps": 1, "log_interval": 1,
        "eval_windows": 4, "lr": 1e-3, "tensorboard": False,
    }  # fmt: skip
    train(build(TrainConfig, settings, "test recipe"), device="cpu")
    there = settings | {"out": str(tmp_path / "gpu"), "tp": min(world, 2)}
    assert launch.run(train_on_gpus, (there,), nproc=world) == 0
    losses = [
        [record["loss"] for record in metrics.read_metrics(tmp_path / run) if "loss" in record]
        for run in ("cpu", "gpu")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-3)


@pytest.mark.parametrize("plan", ["ladder", "desync-2x"])
def test_a_training_step_never_waits_for_the_gpu(plan: str) -> None:
    """Catches what keeps the host from being a step ahead: a number that is asked for, a copy from
    memory that is not page-locked."""
    device = torch.device("cuda", 0)
    model = make(plan, 2 if plan != "ladder" else None, torch.float32, device=device)
    model.use(replace(model.runtime, compute_dtype=torch.bfloat16))
    config = build(TrainConfig, {"data": "", "out": ""}, "test recipe")
    optimizer = make_optimizer(model, config)
    tokens, targets = (each.to(device) for each in batch())
    whole = Batch([0], [MicroBatch(tokens, targets, None)] * 2, 2.0 * tokens.numel())
    told = Interruption()
    first = take_step(model, optimizer, whole, None, 1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = take_step(model, optimizer, whole, None, 1.0)
        stop = to_host(told.on_any_rank(device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert second().sums < first().sums
    assert stop() == [0]


@pytest.mark.parametrize("wrapped", [False, True])
def test_masked_training_on_a_gpu(corpus: Path, tmp_path: Path, wrapped: bool) -> None:
    """The CPU's losses in bfloat16, with batches from pinned memory; plain, and with sublayers that
    are compiled and checkpointed. Catches batches that are overwritten while they are copied,
    documents that are another micro-batch's, and a kernel that cannot be compiled."""
    settings: dict[str, Any] = {
        "data": str(corpus), "plan": "ladder", "mask_documents": True, "dtype": "bfloat16",
        "steps": 12, "seq_len": 256, "batch_size": 4, "micro_batch_size": 2, "warmup_steps": 1,
        "log_interval": 1, "eval_windows": 4, "lr": 1e-3, "tensorboard": False,
    }  # fmt: skip
    found = []
    for out, device in (("cpu", "cpu"), ("gpu", "cuda")):
        changes: dict[str, Any] = {"out": str(tmp_path / out)}
        if wrapped and device == "cuda":
            changes |= {"compile": True, "activation_checkpointing": "selective"}
        result = train(build(TrainConfig, settings | changes, "test recipe"), device=device)
        assert result is not None
        records = [record for record in metrics.read_metrics(tmp_path / out) if "loss" in record]
        assert all(0 <= record["data_wait"] < 1 for record in records)
        found.append([*(record["loss"] for record in records), result.loss])
    assert found[1] == pytest.approx(found[0], rel=2e-2)
