"""Runs that are turned over to their plan layer by layer, while they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import checkpoints, newest, read_config
from ladder.models import UserError, resolve_plan
from ladder.train.config import TrainConfig
from ladder.train.conversion import make_schedule
from ladder.train.loop import train
from tests.distributed import Pools
from tests.samples import small_config
from tests.train.runs import losses, recipe, run_on_ranks, stored, untimed, weights

LAYERWISE = {"start_step": 2, "every": 2, "order": "last-first"}
OF_TWO = {"tp_degree": 2, "layers": [{"layers": "0-1", "preset": "dtp-2"}]}  # as a file may be
LISTED = [{"step": 1, "plan": "ladder@1"}, {"step": 4, "plan": "ladder"}]


@pytest.fixture(scope="module")
def base(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("base") / "run"
    train(recipe(corpus, run, plan="standard", steps=20), device="cpu")
    return run


def converting(corpus: Path, base: Path, out: Path, **changes: Any) -> TrainConfig:
    settings = {"model": None, "init": str(base), "convert_layers": LAYERWISE}
    return recipe(corpus, out, **settings | changes)


@pytest.mark.parametrize("order", ["last-first", "first-last"])
def test_which_plan_is_in_force(order: str) -> None:
    """A layer after start_step, another every so many; those that are what they will be stay."""
    model = small_config("ladder@1-3")
    first = resolve_plan("standard", 4)
    spec = {"start_step": 3, "every": 2, "order": order}
    schedule = make_schedule(spec, first, model, 8)
    converted = []
    for step in range(10):
        records = schedule.plan(step).sublayers
        converted.append([n for n in range(4) if records[2 * n].own_lag])
        assert all(records[2 * n].own_lag == records[2 * n + 1].own_lag for n in range(4))
    if order == "last-first":
        one, two = [3], [2, 3]
    else:
        one, two = [1], [1, 2]
    assert converted == [[], [], [], one, one, two, two, *[[1, 2, 3]] * 3]
    assert schedule.plan(7) == model.plan


@pytest.mark.parametrize(
    ("spec", "plan"),
    [
        (LAYERWISE, "ladder"),
        pytest.param(LISTED, "ladder", marks=pytest.mark.slow),
        pytest.param(LISTED, None, marks=pytest.mark.slow),
    ],
)
def test_it_goes_on_to_the_bit_from_any_step(
    corpus: Path, base: Path, tmp_path: Path, spec: Any, plan: Any
) -> None:
    """Each checkpoint holds the plan that it was trained with. Catches a conversion that begins
    again, is forgotten, or comes a step early; the starting plan's folder may be gone."""
    settings = {"convert_layers": spec, "plan": plan, "checkpoint_interval": 1}
    train(converting(corpus, base, tmp_path / "whole", **settings), device="cpu")
    plans = [read_config(folder).plan for _, folder in checkpoints(tmp_path / "whole")]
    lags = [sum(record.own_lag for record in each.sublayers) for each in plans]
    assert lags == ([0, 0, 2, 2, 4, 4] if spec is LAYERWISE else [0, 2, 2, 2, 4, 4])
    assert plans[-1].name == "ladder"
    for stop in (2, 3, 5):
        run = tmp_path / f"stopped-{stop}"
        config = converting(corpus, base, run, **settings)
        train(config, device="cpu", stop_after=stop)
        train(config, device="cpu", resume=True)
        assert untimed(run) == untimed(tmp_path / "whole")
        for name, value in weights(tmp_path / "whole").items():
            assert torch.equal(value, weights(run)[name]), name


def test_each_step_trains_its_plan(corpus: Path, base: Path, tmp_path: Path) -> None:
    """Until the first conversion it is the standard model, and the ladder after the last."""
    run = tmp_path / "run"
    train(converting(corpus, base, run, checkpoint_interval=4), device="cpu")
    standard = converting(corpus, base, tmp_path / "s", plan="standard", convert_layers=None)
    train(standard, device="cpu")
    assert losses(run)[:2] == losses(tmp_path / "s")[:2]
    assert losses(run)[2] != losses(tmp_path / "s")[2]
    assert set(stored(newest(run))) == set(weights(base))


def test_ranks_convert_as_one_process(
    corpus: Path, base: Path, tmp_path: Path, pools: Pools
) -> None:
    train(converting(corpus, base, tmp_path / "alone"), device="cpu")
    for name, changes in {
        "tp": {"tp": 2, "sequence_parallel": True},
        "fsdp": {"dp_shard": 0},
    }.items():
        config = converting(corpus, base, tmp_path / name, **changes)
        pools(2).run(run_on_ranks, config.to_dict(), 3)
        assert losses(tmp_path / name) == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"convert_layers": "last-first"}, "convert_layers='last-first' must be"),
        ({"convert_layers": {"start_step": 1}}, "every=None of convert_layers must be a whole"),
        ({"convert_layers": {**LAYERWISE, "ordr": 1}}, "did you mean 'order'"),
        ({"convert_layers": {**LAYERWISE, "every": 4}}, "ends with step 6, .* steps=6"),
        ({"convert_layers": [{"step": 1}]}, "entry 1 of convert_layers"),
        ({"convert_layers": list(reversed(LISTED)), "plan": None}, "step=1 of entry 2"),
        ({"convert_layers": LISTED, "plan": "hybrid"}, "ends with plan 'ladder' and not with"),
        ({"plan": "standard"}, "no layer is left to convert"),
        ({"convert_layers": [{"step": 1, "plan": "parallel"}], "plan": None}, "ladder convert"),
        ({"convert_layers": [{"step": 1, "plan": OF_TWO}, *LISTED[1:]]}, "depends on T"),
    ],
)
def test_bad_schedules_are_refused(
    corpus: Path, base: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(converting(corpus, base, tmp_path / "run", **changes), device="cpu")
    assert not (tmp_path / "run").exists()
