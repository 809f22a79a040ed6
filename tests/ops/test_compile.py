"""The operators within torch.compile: one graph, forward and backward, on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ladder.ops  # noqa: F401  (defines the operators)
from tests.distributed import Pools
from tests.ops.everyone import random, world

OPS = torch.ops.ladder


def block(
    x: Tensor, residual: Tensor, gain: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    table: Tensor, experts: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Every operator that a model calls, one after the other. x: [m / T, k]."""
    name, ranks = world(), torch.distributed.get_world_size()
    whole, (g, u) = OPS.all_gather_matmul(x, [gate, up], 0, name)
    h = F.silu(g) * u
    landed, normed = OPS.matmul_reduce_scatter_add_rms_norm(h, down, residual, gain, 1e-5, 0, name)
    rows = OPS.matmul_reduce_scatter(h, down, "sum", 0, name)
    y = OPS.matmul_all_reduce(h, down, name) + OPS.linear_all_reduce(h, down.t(), name)
    both = OPS.matmul_all_reduce_add_rms_norm(h, down, whole, gain, 1e-5, name)
    at = torch.arange(len(x))
    sent, _, _ = OPS.all_to_all_rows(normed, at % ranks, len(x), name)
    back = OPS.return_rows(sent * 2, at % ranks, name)
    offsets = torch.tensor([0, 1, len(x)])
    expert, counts, overflow = OPS.matmul_all_to_all(back, experts, offsets, at % ranks, 1, name)
    bags = OPS.embedding_bag_all_to_all(
        [table], torch.arange(2 * ranks) % 3, torch.arange(2 * ranks + 1), "mean", name
    )
    return landed, rows, y, *both, expert, counts, overflow, bags


def compared(rank: int, world_size: int, frozen: tuple[int, ...]) -> None:
    """frozen: the numbers of arguments without a gradient."""
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for found, expected in zip(run(compiled, rank, frozen), run(block, rank, frozen), strict=True):
        torch.testing.assert_close(found, expected)


def run(function: Callable[..., Any], rank: int, frozen: tuple[int, ...] = ()) -> list[Tensor]:
    """The outputs, and the gradients of the arguments that are not frozen."""
    shapes = ((4, 3), (4, 3), (3,), (3, 5), (3, 5), (5, 3), (3, 2), (2, 3, 3))
    leaves = [
        random(*shape, seed=10 * rank + n, dtype=torch.float32).requires_grad_(n not in frozen)
        for n, shape in enumerate(shapes)
    ]
    outputs = function(*leaves)
    sum(each.square().sum() for each in outputs if each.requires_grad).backward()
    return [*outputs, *(leaf.grad for leaf in leaves if leaf.requires_grad)]


def kept(rank: int, world_size: int) -> None:
    """Autocast changes no bit and no dtype of a result or a gradient, compiled or not."""
    expected = run(block, rank)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for function, rtol in ((block, 0.0), (compiled, 1e-5)):
        with torch.autocast("cpu", torch.bfloat16):
            found = run(function, rank)
        for each, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(each, wanted, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("frozen", [(), (7,), (0, 1, 2, 3, 4, 5, 6)])
def test_a_model_of_operators_compiles_into_one_graph(
    pools: Pools, frozen: tuple[int, ...]
) -> None:
    """With frozen experts, and with all else frozen. A fake implementation with another shape than
    the real one fails this, too."""
    pools(2).run(compared, frozen)


def test_autocast_converts_nothing(pools: Pools) -> None:
    pools(2).run(kept)
