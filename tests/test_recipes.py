"""The shipped training recipes resolve, and are what they say they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from ladder.config import load_plan
from ladder.models import resolve_plan
from ladder.train.config import load_train_config

RECIPES = sorted(path.stem for path in (Path(__file__).parents[1] / "configs/train").glob("*.yaml"))
DEMO = ["data=runs/data", "out=runs/demo"]  # what the demo sets


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("plan", ["standard", "parallel", "ladder", "hybrid"])
def test_a_recipe_resolves_under_every_plan(name: str, plan: str) -> None:
    config = load_train_config(name, [*(DEMO if name == "demo" else []), f"plan={plan}"])
    model = config.model_config(49152)
    assert model.plan == resolve_plan(load_plan(plan), model.num_layers, None)


@pytest.mark.parametrize(("name", "dp_shard"), [("paper-1b", 1), ("paper-3b", 8)])
def test_the_papers_recipe(name: str, dp_shard: int) -> None:
    """Ladder Residual 4.1: tokens, batch, warm-up, schedule; DDP for the 1B, HSDP for the 3B."""
    config = load_train_config(name, [])
    assert (config.model, config.dp_shard) == (name, dp_shard)
    tokens = config.batch_size * config.seq_len
    assert tokens == 4 * 2**20
    assert abs((config.steps - config.warmup_steps) * tokens - 92e9) < 2 * tokens
    assert abs(config.warmup_steps * tokens - 8e9) < tokens
    assert (config.lr, config.min_lr, config.betas) == (3e-4, 3e-5, (0.9, 0.95))
    assert (config.weight_decay, config.seq_len, config.dtype) == (0.1, 2048, "bfloat16")
