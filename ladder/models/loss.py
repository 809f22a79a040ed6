"""Cross-entropy, and divergence from a teacher, over a vocabulary that may be split over ranks.

Only the logits are kept for the backward pass, which recomputes the probabilities: in float32 these
would be the largest tensors of a training step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ladder.models.reducer import Reducer


def sum_exp(logits: Tensor, largest: Tensor) -> Tensor:
    """Sums of exp(logits - largest) over the last dimension, in float32 or better: [...]."""
    return (logits - largest).exp_().sum(-1)  # the difference has the wider of the two types


def scaled_probabilities(logits: Tensor, largest: Tensor, scale: Tensor) -> Tensor:
    """exp(logits - largest) * scale in the precision of `sum_exp`, rounded to the logits' dtype."""
    return (logits - largest).exp_().mul_(scale).to(logits.dtype)


@dataclass
class LossFunctions:
    """The two functions that read all logits; compiled versions may replace them."""

    sum_exp: Callable[[Tensor, Tensor], Tensor] = sum_exp
    scaled_probabilities: Callable[[Tensor, Tensor, Tensor], Tensor] = scaled_probabilities


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        first: int,
        reducer: Reducer,
        functions: LossFunctions,
    ) -> Tensor:
        kind = torch.promote_types(logits.dtype, torch.float32)
        largest = reducer.max_(logits.amax(-1, keepdim=True).to(kind))
        index = targets - first
        inside = (index >= 0) & (index < logits.shape[-1]) & (targets >= 0)
        index = index.where(inside, 0).unsqueeze(-1)
        picked = (logits.gather(-1, index) - largest).squeeze(-1) * inside
        total = functions.sum_exp(logits, largest)
        if reducer.ranks.process == reducer.ranks.processes - 1:  # it holds the vocabulary's end
            total = total.masked_fill(targets >= first + logits.shape[-1], torch.nan)
        both = reducer.sum_(torch.stack((total, picked)))
        total, picked = both[0], both[1]
        ctx.save_for_backward(logits, largest, total, index, inside, targets)
        ctx.functions = functions
        return (total.log() - picked).where(targets >= 0, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, largest, total, index, inside, targets = ctx.saved_tensors
        grad = grads[0].where(targets >= 0, 0.0).unsqueeze(-1)
        scale = grad / total.unsqueeze(-1)
        result = ctx.functions.scaled_probabilities(logits, largest, scale)
        # The target's entry, p - 1, is rounded once, like the others.
        picked = (logits.gather(-1, index) - largest).exp() * scale
        picked = picked - grad * inside.unsqueeze(-1)
        result.scatter_(-1, index, picked.to(result.dtype))
        return result, None, None, None, None


def token_losses(
    logits: Tensor, targets: Tensor, first: int, reducer: Reducer, functions: LossFunctions
) -> Tensor:
    """-log p(target) of each token in nats: [B, S], float32 (float64 for float64 logits).

    logits: [B, S, V_local], this process's part of the vocabulary, which starts at row `first`.
    targets: [B, S] int64. A negative target has loss 0; the loss and gradient of one beyond the
    vocabulary are NaN (raising an error would make the host wait for the device). Every process
    returns the same. Forward needs one maximum and one sum over the processes; backward needs no
    collective and gives the gradient of this process's logits.
    """
    result = _TokenLosses.apply(logits, targets, first, reducer, functions)
    assert isinstance(result, Tensor)
    return result


ROWS = 1024  # tokens whose logits, of teacher and student, are in float32 at once


class _TeacherLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher: Tensor, targets: Tensor, temperature: float,
        reducer: Reducer,
    ) -> Tensor:  # fmt: skip
        kind = torch.promote_types(logits.dtype, torch.float32)
        both = logits.flatten(0, 1), teacher.flatten(0, 1)
        largest = reducer.max_(torch.stack([each.amax(-1) for each in both]).to(kind))
        sums = torch.empty(3, both[0].shape[0], dtype=kind, device=logits.device)
        for rows in _blocks(sums.shape[1]):
            own, wanted = (
                (each[rows].to(kind) - most[rows, None]) / temperature
                for each, most in zip(both, largest, strict=True)
            )
            weights = wanted.exp()
            sums[0, rows] = own.exp().sum(-1)
            sums[1, rows] = weights.sum(-1)
            sums[2, rows] = (weights * (wanted - own)).sum(-1)
        sums = reducer.sum_(sums)
        ctx.save_for_backward(logits, teacher, targets, largest, sums)
        ctx.temperature = temperature
        result = sums[2] / sums[1] - sums[1].log() + sums[0].log()
        return result.view_as(targets).where(targets >= 0, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, teacher, targets, largest, sums = ctx.saved_tensors
        both = logits.flatten(0, 1), teacher.flatten(0, 1)
        grad = (grads[0].where(targets >= 0, 0.0) / ctx.temperature).flatten()
        result = torch.empty_like(both[0])
        for rows in _blocks(len(grad)):
            own, wanted = (
                ((each[rows].to(sums.dtype) - most[rows, None]) / ctx.temperature).exp()
                * (grad[rows] / total[rows]).unsqueeze(-1)
                for each, most, total in zip(both, largest, sums[:2], strict=True)
            )
            result[rows] = (own - wanted).to(result.dtype)
        return result.view_as(logits), None, None, None, None


def _blocks(count: int) -> list[slice]:
    return [slice(at, at + ROWS) for at in range(0, count, ROWS)]


def teacher_losses(
    logits: Tensor, teacher: Tensor, targets: Tensor, temperature: float, reducer: Reducer
) -> Tensor:
    """KL(teacher || student) of each token in nats: [B, S], float32 (float64 for float64 logits).

    The distributions are softmax(logits / temperature) over the whole vocabulary.

    logits, teacher: [B, S, V_local], the same part of the vocabulary for both. targets: [B, S]
    int64; a negative target has loss 0. As in `token_losses`, no logits are gathered: forward needs
    one maximum and one sum, backward no collective. The teacher gets no gradient.
    """
    result = _TeacherLosses.apply(logits, teacher, targets, temperature, reducer)
    assert isinstance(result, Tensor)
    return result
