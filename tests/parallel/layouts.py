"""Training in layouts of ranks: one recipe, its curve of losses, and the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ladder.config import build
from ladder.train import metrics
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools
from tests.train.runs import recipe, recorded

LAYOUTS = {  # world: (tp, dp_shard, and what that is called)
    2: [(1, 1, "DDP"), (1, 0, "FSDP"), (2, 1, "TP")],
    4: [
        (1, 1, "DDP"),
        (1, 0, "FSDP"),
        (1, 2, "HSDP"),
        (2, 1, "TP x DDP"),
        (2, 0, "TP x FSDP"),
        (4, 1, "TP"),
    ],
}
Layouts = list[tuple[int, int, str]]


def curve(run: Path) -> tuple[list[float], list[float]]:
    found = [record for record in metrics.read_metrics(run) if "loss" in record]
    return [record["loss"] for record in found], [record["gradient_norm"] for record in found]


def train_all(rank: int, world: int, settings: dict[str, Any], layouts: Layouts, out: str) -> None:
    for tp, dp_shard, name in layouts:
        changes = {"tp": tp, "dp_shard": dp_shard, "out": f"{out}/{name} of {world}"}
        most = settings["micro_batch_size"]
        changes |= {"micro_batch_size": 2 * most if tp == world else most}
        train(build(TrainConfig, settings | changes, "test recipe"), device="cpu")


def compare(
    corpus: Path, tmp_path: Path, pools: Pools, layouts: dict[int, Layouts],
    changes: dict[str, Any], steps: int = 8, **model: Any,
) -> None:  # fmt: skip
    """So many steps of micro-batches on ranks, whose settings have `changes`, and on one process:
    the losses, gradient norms and held-out loss within 1e-4."""
    alone = recipe(corpus, tmp_path / "alone", steps=steps, batch_size=8, lr=3e-3, **model)
    train(alone, device="cpu")
    expected, norms = curve(tmp_path / "alone")
    assert len(expected) == steps
    settings = alone.to_dict() | {"micro_batch_size": 2} | changes  # of 8; 4 by TP alone
    for world, each in layouts.items():
        pools(world).run(train_all, settings, each, str(tmp_path))
    for name in [f"{name} of {world}" for world, each in layouts.items() for _, _, name in each]:
        found = curve(tmp_path / name)
        assert found[0] == pytest.approx(expected, abs=1e-4), name
        assert found[1] == pytest.approx(norms, abs=1e-4), name
        held = [recorded(tmp_path / run, "heldout_loss") for run in ("alone", name)]
        assert held[1] == pytest.approx(held[0], abs=1e-4), name
