"""The shipped training recipes resolve and match their comments."""

from __future__ import annotations

import pytest

from ladder.config import load_plan
from ladder.models import ModelConfig, Transformer, resolve_plan
from ladder.train.config import load_train_config
from ladder.train.optim import make_optimizer
from tests import ROOT

RECIPES = sorted(path.stem for path in (ROOT / "configs/train").glob("*.yaml"))
FINE_TUNED = ("paper-sft", "tiny-sft")  # their models are those that they start from
DEMO = ["data=runs/data", "out=runs/demo"]  # what the demo sets


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in FINE_TUNED])
@pytest.mark.parametrize("plan", ["standard", "parallel", "ladder", "hybrid"])
def test_a_recipe_resolves_under_every_plan(name: str, plan: str) -> None:
    config = load_train_config(name, [*(DEMO if name == "demo" else []), f"plan={plan}"])
    model = config.model_config(49152)
    assert model.plan == resolve_plan(load_plan(plan), model.num_layers, None)


@pytest.mark.parametrize(("name", "dp_shard"), [("paper-1b", 1), ("paper-3b", 8)])
def test_the_papers_recipe(name: str, dp_shard: int) -> None:
    """Ladder Residual 4.1 and its authors' configs: batch, steps, warm-up, schedule, AdamW; DDP for
    the 1B, HSDP for the 3B. 100B tokens and 8B of warm-up count 2048 x 2048 tokens as 4M."""
    config = load_train_config(name, [])
    assert (config.model, config.dp_shard) == (name, dp_shard)
    tokens = config.batch_size * config.seq_len
    assert tokens == 4 * 2**20
    assert (config.steps * 4e6, config.warmup_steps * 4e6) == (100e9, 8e9)
    assert config.model_config(49152).tie_embeddings
    optimizer = make_optimizer(Transformer(ModelConfig(64, 32, 48, 1, 4, 4)), config)
    assert {group["eps"] for group in optimizer.param_groups} == {1e-10}
    assert (config.lr, config.min_lr, config.betas) == (3e-4, 3e-5, (0.9, 0.95))
    assert (config.weight_decay, config.seq_len, config.dtype) == (0.1, 2048, "bfloat16")
    assert (config.checkpoint_interval, config.keep_checkpoints) == (500, 3)  # 48 saves fill a disk


def test_the_papers_fine_tuning() -> None:
    """Ladder Residual 4.2.1: the upper half, epochs, batch, rate, warm-up, a cosine to the end."""
    config = load_train_config("paper-sft", [])
    assert (config.plan, config.epochs, config.batch_size) == ("hybrid", 2, 32)
    assert (config.lr, config.min_lr, config.warmup_steps) == (5e-6, 0, 200)
    assert config.with_steps(32_001).steps == 2001
    assert load_train_config("paper-sft", ["steps=500"]).epochs == 0
    assert (
        load_train_config("paper-1b", ["epochs=0.5", "warmup_steps=1"]).with_steps(8192).steps == 2
    )
