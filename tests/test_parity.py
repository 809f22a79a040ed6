"""Every layout of 2 and of 4 ranks trains every plan as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ladder.config import build
from ladder.train import metrics
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools
from tests.test_train import recipe, recorded

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


def curve(run: Path) -> tuple[list[float], list[float]]:
    found = [record for record in metrics.read(run) if "loss" in record]
    return [record["loss"] for record in found], [record["gradient_norm"] for record in found]


def train_all(rank: int, world: int, settings: dict[str, Any], out: str) -> None:
    for tp, dp_shard, name in LAYOUTS[world]:
        changes = {"tp": tp, "dp_shard": dp_shard, "out": f"{out}/{name} of {world}"}
        changes |= {"micro_batch_size": 4 if tp == world else 2}  # of 8: one, two or four of them
        train(build(TrainConfig, settings | changes, "test recipe"), device="cpu")


@pytest.mark.parametrize(
    ("plan", "degree"),
    [
        ("standard", None),
        ("parallel", None),
        ("ladder", None),
        ("hybrid", None),
        ("desync-2x", 4),
        ("desync-3x", 4),
        ("desync-4x", 4),
        ("dtp-1", 4),
        ("dtp-2", 4),
    ],
)
def test_every_layout_trains_as_one_process(
    corpus: Path, tmp_path: Path, pools: Pools, plan: str, degree: int | None
) -> None:
    """Twenty steps of micro-batches, on 2 and on 4 ranks. Catches gradients that are summed and not
    averaged, reduced once too often, or of one micro-batch only; shared ones summed over the wrong
    ranks; a norm that counts replicas or leaves shards out; windows read twice."""
    alone = recipe(
        corpus, tmp_path / "alone", plan=plan, tp_degree=degree, steps=20, batch_size=8, lr=3e-3
    )
    train(alone, device="cpu")
    expected, norms = curve(tmp_path / "alone")
    assert len(expected) == 20
    for world in LAYOUTS:
        pools(world).run(train_all, alone.to_dict(), str(tmp_path), limit=240.0)
    for name in [f"{name} of {world}" for world, each in LAYOUTS.items() for _, _, name in each]:
        found = curve(tmp_path / name)
        assert found[0] == pytest.approx(expected, abs=1e-4), name
        assert found[1] == pytest.approx(norms, abs=1e-4), name
        held = [recorded(tmp_path / run, "heldout_loss") for run in ("alone", name)]
        assert held[1] == pytest.approx(held[0], abs=1e-4), name
