"""The kernels at the two ends of a decode step, against plain PyTorch: as tests/test_kernels.py."""

from __future__ import annotations

import pytest
import torch

from ladder.infer.sampling import choose_greedily
from ladder.kernels import launch
from ladder.kernels.choice import GreedyChoice, embed
from ladder.models import Reducer
from tests.test_kernels import (  # noqa: F401  (fixtures)
    _interpreter_with_numpy_2_4,
    on,
)

KERNEL = [
    pytest.param("cpu", marks=pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton")),
    on("cuda"),
]


@pytest.mark.parametrize("device", [on("cpu"), on("cuda")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed(device: str, dtype: torch.dtype) -> None:
    weight = torch.randn(50, 1100, device=device).to(dtype)
    tokens = torch.tensor([0, 99, 100, 149, 150, 120], device=device)
    found = embed(tokens, weight, 100)
    wanted = torch.stack([weight[t - 100] if 100 <= t < 150 else 0 * weight[0] for t in tokens])
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", KERNEL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 1024, 2100])
def test_the_greedy_choice(device: str, dtype: torch.dtype, size: int) -> None:
    """Equal logits, NaN and infinities at any place; a strided view of logits; places go on."""
    logits = torch.randn(9, size + 3, device=device).to(dtype)[:, :size]
    logits[1, size // 2] = torch.nan
    logits[2, size - 1] = torch.inf
    logits[3] = -torch.inf
    logits[4] = 2.5
    logits[5, [1, size - 1]] = 100.0
    logits[6, size - 1] = 100.0
    out, tokens = (torch.full((9,), 77, device=device) for _ in range(2))
    positions = torch.arange(9, device=device)
    choice = GreedyChoice(9, 0, 1, None, torch.device(device))
    choice(logits, 0, out, tokens, positions, 7)
    wanted = choose_greedily(logits, 0, Reducer())
    assert out.tolist() == wanted.tolist()
    assert tokens.tolist() == wanted.clamp(min=0).tolist()
    assert positions.tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    choice(logits, 500, out, tokens)
    assert out.tolist() == [500 + token if token >= 0 else -1 for token in wanted.tolist()]
    assert positions[0] == 1
