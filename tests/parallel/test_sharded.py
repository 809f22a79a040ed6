"""Prefill with the residual sharded by tokens, on gloo ranks."""

from __future__ import annotations

import warnings
import weakref
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladder.comm import transports
from ladder.models import Ranks, UserError, resolve_plan
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.refusals import sharded_refusal
from ladder.parallel.sharded import ShardedReducer
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.samples import (
    DEPENDS_ON_T,
    SAME_AT_ANY_T,
    full_model,
    relative_error,
    sample_tokens,
    small_config,
)


def compared(rank: int, world_size: int, plan: str, batch: int, length: int) -> dict[str, Any]:
    """In a worker: the sharded reducer's logits against AsyncReducer's, and what it called."""
    config = small_config(SAME_AT_ANY_T[plan])
    model = full_model(config, seed=4, dtype=torch.float32)
    shard_model(model, tp_mesh(world_size))
    tokens = sample_tokens(config, 1, batch, length)
    plain = model.reducer
    assert isinstance(plain, AsyncReducer)
    counts = {"all_to_all_single": 0, "all_gather": 0, "all_reduce": 0}
    partials: list[weakref.ref] = []
    alive = 0

    def counted(where: Any, name: str) -> Any:
        original = getattr(where, name)

        def call(*args: Any, **options: Any) -> Any:
            nonlocal alive
            counts[name] += 1
            if name == "all_to_all_single":
                partials.append(weakref.ref(args[1]))
                alive = max(alive, sum(each() is not None for each in partials))
            return original(*args, **options)

        return mock.patch.object(where, name, call)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # as torch 2.13 has for older names
        last = torch.tensor([(3 * n) % length for n in range(batch)])
        border = -(-batch * length // world_size)  # the second rank's first row
        last[border // length] = border % length
        expected = model(tokens), model(tokens, last=last)
        reducer = ShardedReducer(plain.ranks, plain.group, config.plan)
        model.use(replace(model.runtime, reducer=reducer))
        calls = (dist, "all_to_all_single"), (transports, "all_gather"), (dist, "all_reduce")
        with ExitStack() as stack:
            for call in calls:
                stack.enter_context(counted(*call))
            logits = model(tokens)
        found = logits, model(tokens, last=last)
    assert torch.isfinite(logits).all()
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, found)
    same = all(torch.equal(a, b) for each in everyone for a, b in zip(found, each, strict=True))
    return {"error": max(errors), "same": same, "counts": counts, "alive": alive}


@pytest.mark.parametrize(
    ("world_size", "batch", "length"),
    [
        (2, 2, 8),
        (2, 3, 7),
        (4, 3, 7),
        (4, 1, 2),
        pytest.param(2, 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("plan", SAME_AT_ANY_T)
def test_a_sharded_residual_computes_the_same(
    pools: Pools, plan: str, batch: int, length: int, world_size: int
) -> None:
    """Rows that T does not divide, fewer rows than ranks, lags that grow and shrink.

    A wrong row or order of landing changes the logits; a collective too many, or partials kept
    until the end of the pass (half of the memory of a large prompt), is counted.
    """
    resolved = resolve_plan(SAME_AT_ANY_T[plan], 4, world_size)
    first = next(n for n, read in enumerate(resolved.landings) if read)
    deepest = 1 + max(record.own_lag for record in resolved.sublayers)
    for result in pools(world_size).run(compared, plan, batch, length):
        assert result["error"] < 1e-5
        assert result["same"]
        sublayers = len(resolved.sublayers)
        assert result["counts"]["all_to_all_single"] == sublayers
        assert result["counts"]["all_gather"] == sublayers + 1 - first
        assert result["counts"]["all_reduce"] == 1  # the embedding
        if (batch * length) % world_size == 0:  # else it is a padded copy that is seen
            assert result["alive"] <= deepest + 1


@pytest.mark.parametrize("plan", DEPENDS_ON_T)
def test_plans_whose_residuals_differ_are_refused(plan: str) -> None:
    resolved = resolve_plan(DEPENDS_ON_T[plan], 4, 4)
    ranks = Ranks(4, 1, 1)
    assert sharded_refusal(resolved, ranks)
    with pytest.raises(UserError, match=r"cannot run with its residual sharded.*reducer=async"):
        ShardedReducer(ranks, None, resolved)


def test_ranks_and_transports_are_refused() -> None:
    plan = resolve_plan("ladder", 4, 4)
    assert sharded_refusal(plan, Ranks(4, 1, 1)) is None
    assert "virtual" in str(sharded_refusal(plan, Ranks(4, 0, 2)))
    assert "one process" in str(sharded_refusal(plan, Ranks(1, 0, 1)))
    with pytest.raises(UserError, match=r"did you mean .copy"):
        ShardedReducer(Ranks(4, 1, 1), None, plan, "cpoy")
