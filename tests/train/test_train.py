"""Training: the same under every parallelism, recorded, and refused where it cannot work."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import checkpoints, load_model, newest
from ladder.config import build
from ladder.files import checksum
from ladder.models import Transformer, UserError
from ladder.train import loop, metrics
from ladder.train.config import LEAST_EPS, TrainConfig
from ladder.train.loop import train
from ladder.train.optim import learning_rate, make_optimizer
from tests.distributed import Pools
from tests.samples import small_config
from tests.train.runs import DESYNC_THEN_LADDER, LAG_2, SHAPE, losses, recipe, run_on_ranks, weights


def test_training_learns(corpus: Path, tmp_path: Path) -> None:
    """A gradient of the wrong sign, or targets that are not shifted, does not get here."""
    result = train(recipe(corpus, tmp_path / "run", steps=60), device="cpu")
    found = losses(tmp_path / "run")
    assert found[0] == pytest.approx(math.log(300), rel=0.05)
    assert result is not None
    assert result.loss < 4.0 < found[0]
    assert 0 < result.bits_per_byte < 8


@pytest.mark.parametrize(
    ("plan", "degree", "world", "tp", "micro"),
    [
        ("ladder", None, 2, 2, 0),
        ("ladder", None, 2, 1, 1),
        pytest.param("standard", None, 4, 2, 1, marks=pytest.mark.slow),
        ("desync-2x", 4, 4, 2, 0),
        ("dtp-1", 2, 2, 2, 2),
        (LAG_2, None, 2, 2, 0),
        (DESYNC_THEN_LADDER, 4, 2, 2, 0),
    ],
)
def test_parallel_training_equals_one_process(
    corpus: Path,
    tmp_path: Path,
    pools: Pools,
    plan: Any,
    degree: int | None,
    world: int,
    tp: int,
    micro: int,
) -> None:
    """TP, data parallelism, accumulation and both; and a checkpoint written on ranks resumes."""
    alone = recipe(corpus, tmp_path / "alone", plan=plan, tp_degree=degree)
    train(alone, device="cpu")
    settings = alone.to_dict() | {
        "out": str(tmp_path / "ranks"),
        "tp": tp,
        "micro_batch_size": micro,
    }
    pools(world).run(run_on_ranks, settings, 3)
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), abs=1e-4)
    norms = [
        [
            record["gradient_norm"]
            for record in metrics.read_metrics(tmp_path / run)
            if "loss" in record
        ]
        for run in ("alone", "ranks")
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    after = weights(tmp_path / "ranks")
    for name, value in weights(tmp_path / "alone").items():
        assert (value - after[name]).abs().max() < 2e-4, name


def test_bfloat16_trains_close_to_float32(corpus: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        train(recipe(corpus, tmp_path / dtype, dtype=dtype, steps=20), device="cpu")
    full, half = losses(tmp_path / "float32"), losses(tmp_path / "bfloat16")
    assert half != full
    assert half == pytest.approx(full, abs=0.05)
    assert all(value.dtype == torch.float32 for value in weights(tmp_path / "bfloat16").values())


def test_checkpoints_and_records(corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe(corpus, run, checkpoint_interval=2, tensorboard=True), device="cpu")
    assert [step for step, _ in checkpoints(run)] == [2, 4, 6]
    assert json.loads((run / "recipe.json").read_text())["plan"] == "ladder"
    assert any((run / "tensorboard").iterdir())
    model = load_model(newest(run))
    assert model.config.plan.name == "ladder"
    assert not [path for path in run.rglob("*") if ".tmp" in path.name]


@pytest.mark.parametrize(("plan", "degree"), [("ladder", None), ("desync-2x", 2), ("dtp-1", 2)])
def test_weight_decay_is_for_matrices(
    corpus: Path, tmp_path: Path, plan: str, degree: int | None
) -> None:
    """Not for norms, which are [T, D] where each rank has its own, nor for biases."""
    model = Transformer(small_config(plan, tp_degree=degree, qkv_bias=True, qk_norm=True))
    names = {parameter: name for name, parameter in model.named_parameters()}
    if degree is not None:
        assert any("norm" in name and p.dim() == 2 for p, name in names.items())
    optimizer = make_optimizer(model, recipe(corpus, tmp_path, weight_decay=0.25))
    groups = {
        group["weight_decay"]: {names[parameter] for parameter in group["params"]}
        for group in optimizer.param_groups
    }
    ends = ("_proj.weight", "embed_tokens.weight", "lm_head.weight")
    matrices = {name for name in names.values() if name.endswith(ends)}
    assert groups == {0.25: matrices, 0.0: {*names.values()} - matrices}
    assert len(matrices) == 4 * 7 + 2


def test_learning_rate_schedule(corpus: Path, tmp_path: Path) -> None:
    config = recipe(corpus, tmp_path, steps=101, warmup_steps=20, lr=1.0, min_lr=0.1)
    rates = [learning_rate(step, config) for step in range(101)]
    assert rates[0] == 1 / 20
    assert rates[19] == rates[20] == 1.0
    assert rates[60] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    late = recipe(corpus, tmp_path, steps=3, warmup_steps=2, lr=1.0, min_lr=0.1)
    assert [learning_rate(step, late) for step in range(3)] == [0.5, 1.0, 0.1]
    one = recipe(corpus, tmp_path, steps=1, warmup_steps=0, lr=1.0, min_lr=0.1)
    assert learning_rate(0, one) == 1.0


def test_the_least_eps_keeps_steps_finite() -> None:
    """For gradients whose squares are 0 in float32, or nearly; those of 0 change nothing."""
    for size in (0.0, 1e-30, 1e-23, 1e-20, 1e-16, 1.0):
        model = Transformer(small_config("standard"))
        settings = {"data": "", "out": "", "adam_eps": LEAST_EPS, "lr": 1.0, "weight_decay": 0.0}
        optimizer = make_optimizer(model, build(TrainConfig, settings, "test recipe"))
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
            parameter.grad = torch.full_like(parameter, size)
        optimizer.step()
        moved = torch.nn.utils.parameters_to_vector(model.parameters()).abs().max().item()
        assert moved <= 1.01 if size else moved == 0, size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"warmup_steps": 6}, "warmup_steps=6 must be below steps=6.*warmup_steps=0"),
        ({"betas": [0.9]}, "betas="),
        ({"adam_eps": 0.0}, "adam_eps=0.0 must be 1e-16 or more: .*float32.* 1e-8 is usual"),
        ({"adam_eps": -1e-8}, "adam_eps=-1e-08 must be 1e-16 or more"),
        ({"seq_len": 4096}, "seq_len=4096 is longer than the model's max_seq_len"),
        ({"plan": "none", "tp_degree": 2}, "plan='none' has no communication"),
        ({"plan": "none"}, "plan='none' has no communication"),
        ({"plan": "desync-2x"}, "set tp_degree"),
        ({"plan": "ladder", "tp_degree": 2}, "leave tp_degree out"),
        ({"plan": "desync-2x", "tp_degree": 3}, "tp_degree=3 does not divide num_heads=4"),
        ({"model": "tinny"}, "did you mean 'tiny'"),
        ({"micro_batch_size": 3}, "micro_batch_size=3 does not divide"),
        ({"seq_len": 10**6}, r"^data=\S*: seq_len=1000000 is longer than split 'train'"),
        ({"tp": 2}, "start it with --nproc"),
        ({"data": "/nowhere"}, "no prepared data in /nowhere"),
    ],
)
def test_bad_recipes_are_refused(
    corpus: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Each before anything is written."""
    with pytest.raises(UserError, match=message):
        train(recipe(corpus, tmp_path / "run", **changes), device="cpu")
    assert not (tmp_path / "run").exists()


def test_held_out_text_is_looked_for_before_training(corpus: Path, tmp_path: Path) -> None:
    """A split that cannot be evaluated must not cost a whole training run first."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    changes = {"seq_len": 2000, "model": {**SHAPE, "max_seq_len": 4000}}
    with pytest.raises(UserError, match=r"^data=\S*: seq_len=2000 is longer than split 'heldout'"):
        train(recipe(data, tmp_path / "run", **changes), device="cpu")
    (data / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not the tokenizer that the tokens were made with"):
        train(recipe(data, tmp_path / "run"), device="cpu")
    assert not (tmp_path / "run").exists()


def test_damaged_shards_are_refused(corpus: Path, tmp_path: Path) -> None:
    """Under TP a token beyond the vocabulary would train silently, as zeros."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    shard = data / "train-00000.bin"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    index = json.loads((data / "index.json").read_text())
    index["splits"]["train"]["shards"][0]["sha256"] = checksum(shard)  # as if it was written so
    (data / "index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="holds token 65535, beyond vocab_size=300"):
        train(recipe(data, tmp_path / "run"), device="cpu")


def test_a_host_that_is_a_step_ahead_trains_the_same(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. Catches a step that is recorded under another's number or not at all, an
    evaluation or a checkpoint of another step, and a wish to stop that is not heard."""
    settings = {"steps": 9, "log_interval": 2, "eval_interval": 5, "checkpoint_interval": 4}
    train(recipe(corpus, tmp_path / "whole", **settings), device="cpu")
    monkeypatch.setitem(loop.BEHIND, "cpu", 1)
    run = recipe(corpus, tmp_path / "run", **settings)
    take, taken = loop.take_step, []

    def told(*arguments: Any) -> Any:
        taken.append(arguments)
        if len(taken) == 6:
            signal.raise_signal(signal.SIGTERM)  # heard of when the seventh is launched
        return take(*arguments)

    monkeypatch.setattr(loop, "take_step", told)
    assert train(run, device="cpu") is None
    assert [step for step, _ in checkpoints(tmp_path / "run")] == [4, 7]
    assert [r["step"] for r in metrics.read_metrics(tmp_path / "run") if "loss" in r] == [
        2,
        4,
        6,
        7,
    ]
    train(run, device="cpu", resume=True)
    found, whole = (
        {r["step"]: r["loss"] for r in metrics.read_metrics(tmp_path / name) if "loss" in r}
        for name in ("run", "whole")
    )
    assert found.pop(7)
    assert found == whole
    evaluated = [
        [r["heldout_loss"] for r in metrics.read_metrics(tmp_path / name) if "heldout_loss" in r]
        for name in ("run", "whole")
    ]
    assert evaluated[0] == evaluated[1]
    assert len(evaluated[0]) == 2
    for name, value in weights(tmp_path / "whole").items():
        assert torch.equal(value, weights(tmp_path / "run")[name]), name
