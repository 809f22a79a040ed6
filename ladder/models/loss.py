"""Cross-entropy over a vocabulary that may be split over the processes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ladder.models.reducer import Reducer


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, first: int, reducer: Reducer) -> Tensor:
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = scores - reducer.max_(scores.amax(-1, keepdim=True))
        index = targets - first
        inside = (index >= 0) & (index < logits.shape[-1]) & (targets >= 0)
        index = index.where(inside, 0).unsqueeze(-1)
        picked = scores.gather(-1, index).squeeze(-1) * inside
        scores.exp_()
        total = scores.sum(-1)
        both = reducer.sum_(torch.stack((total, picked)))
        total, picked = both[0], both[1]
        ctx.save_for_backward(scores.div_(total.unsqueeze(-1)), index, inside, targets)
        ctx.dtype = logits.dtype
        return (total.log() - picked).where(targets >= 0, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, inside, targets = ctx.saved_tensors
        grad = grads[0].where(targets >= 0, 0.0).unsqueeze(-1)
        result = probabilities * grad
        result.scatter_add_(-1, index, -(grad * inside.unsqueeze(-1)).to(result.dtype))
        return result.to(ctx.dtype), None, None, None


def token_losses(logits: Tensor, targets: Tensor, first: int, reducer: Reducer) -> Tensor:
    """-log p(target) of each token in nats: [B, S], float32 (float64 for float64 logits).

    logits: [B, S, V_local], this process's part of the vocabulary, which starts at row `first`.
    targets: [B, S] int64; negative: no loss, 0 is returned. Every process returns the same; the
    gradient of each is that of its own logits, with no collective (one maximum and one sum
    forward).
    """
    result = _TokenLosses.apply(logits, targets, first, reducer)
    assert isinstance(result, Tensor)
    return result
