"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.models.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token. top_k: 0 keeps all. top_p: 1 keeps all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1 (all tokens)")


def generators(sampling: Sampling, count: int) -> list[torch.Generator]:
    """One source of randomness per prompt, so its text does not depend on its neighbours'."""
    return [torch.Generator().manual_seed(sampling.seed * 1_000_003 + i) for i in range(count)]


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., V] after temperature, top-k and top-p (in this order): [..., V] float32.

    top-p keeps the smallest set of likeliest tokens whose probabilities reach top_p. Raises
    RuntimeError for logits that are not finite.
    """
    scores = logits.float() / sampling.temperature
    if not torch.isfinite(scores).all():
        raise RuntimeError("the model's logits are not finite")
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    chances = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = chances.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
        chances = torch.zeros_like(chances).scatter(-1, index, ordered)
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def sample(logits: Tensor, sampling: Sampling, sources: list[torch.Generator]) -> Tensor:
    """The next token of each sequence, logits [B, V] -> [B] int64; every rank picks the same."""
    if not torch.isfinite(logits).all():
        raise RuntimeError("the model's logits are not finite")
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = probabilities(logits, sampling).cpu()
    picks = [
        torch.multinomial(row, 1, generator=source)
        for row, source in zip(chances, sources, strict=True)
    ]
    return torch.cat(picks).to(logits.device)
