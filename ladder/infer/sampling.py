"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ladder.models.errors import UserError
from ladder.models.reducer import Reducer

COLDEST = 1e-5  # below this, logits divided by the temperature may overflow


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
        if 0 < self.temperature < COLDEST:
            raise UserError(
                f"temperature={self.temperature} is too low to divide by; use 0 (greedy), or "
                f"{COLDEST} and above"
            )
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be 0 (all tokens) or above")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1 (all tokens)")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must be 0 or more, and below 2**63")


def draws(sampling: Sampling, count: int, steps: int) -> Tensor:
    """The randomness of `steps` tokens of each prompt: uniform in [0, 1), [steps, count] float32.

    Each prompt has its own source, so its text does not depend on its neighbours'.
    """
    seeds = [(sampling.seed * 1_000_003 + i) % 2**63 for i in range(count)]
    columns = [torch.rand(steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(columns, dim=1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits [..., V] after temperature, top-k and top-p (in this order): [..., V] float32.

    top-p keeps the smallest set of likeliest tokens whose probabilities reach top_p.
    """
    scores = logits.float() / sampling.temperature
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


def choose(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """The next token of each sequence: logits [B, V], uniforms [B] in [0, 1) -> [B] int64.

    -1 where a sequence's logits or chances are not finite: no token. Never waits for the device, so
    it may be recorded in a CUDA graph; ranks with equal logits choose equal tokens.
    """
    top, chosen = logits.max(-1)  # NaN where there is one
    finite = torch.isfinite(top)
    if sampling.temperature > 0:
        reached = probabilities(logits, sampling).cumsum(-1)
        aim = (uniforms.unsqueeze(-1) * reached[:, -1:]).to(reached.dtype)
        # The first token whose cumulated probability exceeds the aim: never one of probability 0.
        chosen = (reached <= aim).sum(-1).clamp(max=logits.shape[-1] - 1)
        finite &= torch.isfinite(reached[:, -1])
    return chosen.where(finite, -1)


def choose_greedily(logits: Tensor, first: int, reducer: Reducer) -> Tensor:
    """`choose` at temperature 0 from this process's logits [B, V_local], which start at `first`.

    Two numbers a sequence are communicated in place of the vocabulary. Of equal logits the lowest
    token wins, as in one process.
    """
    top, index = logits.max(-1)
    mine = torch.stack((top.float(), (index + first).float()), dim=-1)  # exact below 2 ** 24
    count = 2 * reducer.ranks.processes
    tops, tokens = reducer.gather(mine, count).unflatten(-1, (-1, 2)).unbind(-1)
    best, rank = tops.max(-1)
    chosen = tokens.gather(-1, rank.unsqueeze(-1)).squeeze(-1).long()
    return chosen.where(torch.isfinite(best), -1)
