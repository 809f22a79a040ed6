"""The choice of a pass's reducer: by phase, plan, shape and table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ladder.config import model_config
from ladder.models import Ranks, UserError, resolve_plan
from ladder.parallel.choose import (
    INFERENCE,
    REDUCERS,
    TRAINING,
    check_base,
    choose_decode,
    choose_prefill,
    choose_training,
    training_reducer,
)
from ladder.parallel.dispatch import Dispatch, Prefill
from ladder.parallel.overlap import Overlap

TABLE = Dispatch((), "a test", Prefill(direct=100, direct_blocking=200, kernel_barrier=50))
FOUR = Ranks(4, 1, 1)


@pytest.mark.parametrize(
    ("phase", "plan", "shape", "options", "expected"),
    [
        ("train", "ladder", (1, 8), {}, ("async", "")),
        ("train", "ladder", (1, 8), {"sequence_parallel": True}, ("sequence", "")),
        ("train", "standard", (1, 8), {"sequence_parallel": True, "base": "fused"}, ("fused", "")),
        ("train", "desync-2x", (1, 8), {"base": "async"}, ("async", "")),
        ("prefill", "ladder", (2, 5), {}, ("sharded", "direct")),
        ("prefill", "ladder", (2, 6), {}, ("sharded", "copy-kernels")),
        ("prefill", "standard", (2, 10), {}, ("sharded", "direct")),
        ("prefill", "standard", (2, 11), {}, ("sharded", "copy-kernels")),
        ("prefill", "standard", (2, 25), {}, ("sharded", "copy-kernels")),
        ("prefill", "standard", (3, 17), {}, ("sharded", "copy")),
        ("prefill", "desync-2x", (2, 5), {}, ("push", "")),
        ("prefill", "ladder", (2, 5), {"base": "async"}, ("async", "")),
        ("prefill", "ladder", (2, 5), {"table": None}, ("async", "")),
        ("prefill", "ladder", (2, 5), {"ranks": Ranks(4, 0, 2)}, ("push", "")),
        ("decode", "ladder", (64, 1), {}, ("decode", "")),
        ("decode", "ladder", (65, 1), {}, ("push", "")),
        ("decode", "ladder", (65, 1), {"table": None}, ("async", "")),
        ("decode", "ladder", (1, 1), {"ranks": Ranks(4, 0, 2)}, ("push", "")),
    ],
)
def test_the_choice(
    phase: str, plan: str, shape: tuple[int, int], options: Any, expected: tuple[str, str]
) -> None:
    """Each limit of the table from both sides; tokens of 10 bytes."""
    resolved, options = resolve_plan(plan, 4, 4), {"ranks": FOUR, **options}
    if phase == "train":
        choice = choose_training(resolved, shape=shape, **options)
    elif phase == "prefill":
        choice = choose_prefill(
            resolved, shape=shape, token_bytes=10, **{"table": TABLE, **options}
        )
    else:
        choice = choose_decode(resolved, sequences=shape[0], **{"table": TABLE, **options})
    assert (choice.reducer, choice.transport) == expected
    assert choice.why
    assert str(choice).startswith(choice.reducer)


@pytest.mark.parametrize(
    ("phase", "plan", "base", "message"),
    [
        ("train", "ladder", "async-fp8", "reducer=async-fp8 .* no backward pass"),
        ("train", "ladder", "push", "reducer=push .*; use async, sequence, fused or auto"),
        ("train", "desync-2x", "sequence", "reducer=sequence with tp=4 and plan 'desync-2x': .*"),
        ("train", "ladder", "asinc", "did you mean 'async'"),
        ("prefill", "ladder", "sequence", "reducer=sequence .* for training; use async, push"),
        ("decode", "ladder", "sharded", "reducer=sharded .* cannot be a model's reducer"),
    ],
)
def test_what_cannot_be_chosen(phase: str, plan: str, base: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_base(phase, resolve_plan(plan, 4, 4), FOUR, base)


def test_the_reducer_of_training() -> None:
    """By what sequence_parallel asks for; a reducer that has no backward pass is refused."""
    assert training_reducer("auto", False) == training_reducer("async", False) == "async"
    assert training_reducer("auto", True) == training_reducer("sequence", True) == "sequence"
    for name, sharded, said in (
        ("push", False, "reducer=push .* has no backward pass"),
        ("push", True, "reducer=push .* has no backward pass"),
        ("async", True, "reducer=async with sequence_parallel=true: use sequence, fused or auto"),
        ("sequence", False, "reducer=sequence with sequence_parallel=false: use async or auto"),
    ):
        with pytest.raises(UserError, match=said):
            training_reducer(name, sharded)


def test_auto_trains_by_operators_where_they_overlap() -> None:
    """Of plans whose reduces all block, without `attention+mlp`, and only where nothing else was
    asked for."""

    def chosen(plan: str, base: str = "auto", sharded: bool = True, least: int = 8192) -> str:
        choice = choose_training(
            resolve_plan(plan, 4, 4), FOUR, (2, 4096), base,
            sequence_parallel=sharded, overlaps=lambda tokens: tokens >= least,
        )  # fmt: skip
        return choice.reducer

    assert chosen("standard") == "fused"
    assert chosen("standard", least=8193) == "sequence"
    assert chosen("standard", "sequence") == "sequence"
    assert chosen("standard", sharded=False) == "async"
    assert [chosen(plan) for plan in ("ladder", "parallel")] == ["sequence", "sequence"]
    sharded = choose_training(resolve_plan("standard", 4, 4), FOUR, sequence_parallel=True)
    assert sharded.reducer == "sequence"  # nothing is known to overlap


def test_the_products_of_a_training_step() -> None:
    """All eight of a layer, forward and backward, eager, in any order of sums."""
    config, h100 = model_config("half-8b"), "NVIDIA H100 80GB HBM3"
    steps = Overlap(config, h100, 2, torch.bfloat16, training=True)
    assert steps.products == (
        ("all_gather_matmul", 1536, 4096), ("all_gather_matmul", 7168, 4096),
        ("matmul_reduce_scatter", 4096, 1024), ("matmul_reduce_scatter", 4096, 3584),
        ("all_gather_matmul_backward", 4096, 1536), ("all_gather_matmul_backward", 4096, 7168),
        ("matmul_reduce_scatter_backward", 1024, 4096),
        ("matmul_reduce_scatter_backward", 3584, 4096),
    )  # fmt: skip
    assert steps(8192, "eager")  # there the table has those gradients' scatters alone
    assert Overlap(model_config("llama-3-8b"), "NVIDIA H200", 4, torch.bfloat16, training=True)(
        8192, "eager"
    )
    assert not steps(1024, "eager")
    assert Overlap(config, "NVIDIA H200", 2, torch.bfloat16, training=True)(8192, "eager")
    assert not Overlap(config, h100, 2, torch.float32, training=True)(8192, "eager")


def test_training_cannot_shard_the_residual_of_this_plan() -> None:
    with pytest.raises(UserError, match="reducer=sequence with tp=4 and plan 'desync-2x'"):
        choose_training(resolve_plan("desync-2x", 4, 4), FOUR, sequence_parallel=True)


def test_the_registry() -> None:
    assert TRAINING == ("async", "sequence", "fused")
    assert INFERENCE == ("async", "push", "async-fp8", "async-int8", "fused")
    assert all(each.make.__doc__ for each in REDUCERS.values())
