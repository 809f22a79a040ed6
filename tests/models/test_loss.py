"""The loss: against torch's in float64, what it keeps, and compiled."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.models.loss import LossFunctions, scaled_probabilities, sum_exp, token_losses
from ladder.models.reducer import Reducer
from tests.parallel.steps import BACKENDS

VOCABULARY = 301


def sample(dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets of which some are to be ignored, and a weight for each token."""
    source = torch.Generator().manual_seed(5)
    logits = (torch.randn(3, 7, VOCABULARY, generator=source) * scale).to(dtype)
    targets = torch.randint(0, VOCABULARY, (3, 7), generator=source)
    targets[0, :3] = -100
    return logits.requires_grad_(), targets, torch.rand(3, 7, generator=source) + 0.5


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype: torch.dtype, scale: float) -> None:
    """Every gradient is rounded once, that of the target too, which is the difference of two near
    numbers where the model is sure. Catches exp(inf), a gradient where no loss is wanted, and p - 1
    computed from a rounded p."""
    logits, targets, weights = sample(dtype, scale)
    losses = token_losses(logits, targets, 0, Reducer(), LossFunctions())
    (losses * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    wanted = F.cross_entropy(exact.transpose(1, 2), targets, reduction="none")
    (wanted * weights).sum().backward()
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.allclose(losses.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(losses[targets < 0], torch.zeros_like(losses[targets < 0]))
    assert logits.grad is not None
    assert exact.grad is not None
    assert logits.grad.dtype == dtype
    allowed = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-8}[dtype]
    difference = (logits.grad.double() - exact.grad).abs()
    assert (difference <= allowed * exact.grad.abs() + 1e-6 * (dtype != torch.float64)).all()


def test_only_the_logits_are_kept() -> None:
    logits, targets, _ = sample(torch.bfloat16, 1.0)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        token_losses(logits, targets, 0, Reducer(), LossFunctions())
    large = [each for each in kept if each.numel() >= logits.numel()]
    assert [each.data_ptr() for each in large] == [logits.data_ptr()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled(backend: str) -> None:
    """The compiled passes, which `compile=true` puts in, give the same."""
    compiled = LossFunctions(
        torch.compile(sum_exp, backend=backend),
        torch.compile(scaled_probabilities, backend=backend),
    )
    found = []
    for each in (LossFunctions(), compiled):
        logits, targets, weights = sample(torch.float32, 3.0)
        losses = token_losses(logits, targets, 0, Reducer(), each)
        (losses * weights).sum().backward()
        found.append((losses, logits.grad))
    for plain, compiled in zip(*found, strict=True):
        assert torch.allclose(plain, compiled, rtol=1e-5, atol=1e-6)
