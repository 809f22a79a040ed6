"""Choosing the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.models.errors import UserError
from ladder.models.reducer import Reducer

COLDEST = 1e-5  # below this, logits divided by the temperature may overflow
LOWEST = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 takes the likeliest token. top_k: 0 keeps all. top_p: 1 keeps all.

    top_k keeps exactly that many: of tokens that are equally likely, the lowest.
    """

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
        order = scores.argsort(dim=-1, descending=True, stable=True)
        scores = scores.scatter(-1, order[..., sampling.top_k :], -torch.inf)
    chances = scores.softmax(-1)
    if sampling.top_p < 1:
        ordered, index = chances.sort(dim=-1, descending=True, stable=True)
        chances = torch.zeros_like(chances).scatter(-1, index, _nucleus(ordered, sampling.top_p))
        chances = chances / chances.sum(-1, keepdim=True)
    return chances


def _nucleus(ordered: Tensor, top_p: float) -> Tensor:
    """Descending probabilities with 0 for those after the first that reach top_p together."""
    before = ordered.cumsum(-1) - ordered
    return ordered.masked_fill(before >= top_p, 0.0)


def _reached(chances: Tensor) -> Tensor:
    """Cumulated chances [..., V], in float64.

    A GPU's parallel sum does not rise monotonically when it rounds, as it does in float32 wherever
    many chances are 0: then a token of probability 0 might be drawn.
    """
    return chances.cumsum(-1, dtype=torch.float64)


def _draw(reached: Tensor, aim: Tensor) -> Tensor:
    """The first place whose cumulated chance exceeds the aim: [..., V], [...] -> [...] int64.

    Never one of chance 0, even for an aim that has been rounded up to the total.
    """
    below = (reached <= aim.unsqueeze(-1)) & (reached < reached[..., -1:])
    return below.sum(-1)


def choose(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """The next token of each sequence: logits [B, V], uniforms [B] in [0, 1) -> [B] int64.

    -1 where a sequence's logits or chances are not finite: no token. Never waits for the device, so
    it may be recorded in a CUDA graph; ranks with equal logits choose equal tokens.
    """
    top, chosen = logits.max(-1)  # NaN where there is one
    finite = torch.isfinite(top)
    if sampling.temperature > 0:
        reached = _reached(probabilities(logits, sampling))
        chosen = _draw(reached, uniforms * reached[:, -1])
        finite &= torch.isfinite(reached[:, -1])
    return chosen.where(finite, -1)


def choose_parallel(
    logits: Tensor,
    first: int,
    uniforms: Tensor,
    sampling: Sampling,
    reducer: Reducer,
    vocab_size: int,
) -> Tensor:
    """`choose` at a temperature above 0 from this process's logits [B, V_local], from `first` on.

    Every process returns the same tokens, [B] int64, and never waits for its device. What travels
    for each sequence, with P processes:
    - with top_k, with or without top_p: the min(top_k, V_local) best of each, in one gather;
    - with neither: two numbers of each process in a gather, and the token in an all-reduce;
    - with top_p alone: that, and before it a maximum and 8 all-reduces of 256 sums (16 KiB), which
      find the set that is kept, whatever its size.

    The tokens are `choose`'s but where a draw falls within rounding (about 1e-7 of the whole) of
    the border between two neighbouring tokens, or top_p of the border of what is kept: sums are
    made in another order.
    """
    assert sampling.temperature > 0, "choose_greedily is for temperature 0"
    if 0 < sampling.top_k < vocab_size:
        return _choose_among_best(logits, first, uniforms, sampling, reducer, vocab_size)
    scores = logits.float() / sampling.temperature
    if sampling.top_p < 1:
        keys = _keys(scores, first)
        lowest = _lowest_kept(scores, keys, sampling.top_p, reducer)
        scores = scores.masked_fill(keys < lowest, -torch.inf)
    high = scores.max(-1).values
    # Finite where all of a process's logits are -inf, so that its mass is 0 and not NaN.
    base = high.clamp(min=torch.finfo(torch.float32).min)
    reached = _reached((scores - base.unsqueeze(-1)).exp())
    mine = torch.stack((high.double(), reached[:, -1]), dim=-1)
    count = reducer.ranks.processes
    highs, masses = reducer.gather(mine, 2 * count).unflatten(-1, (-1, 2)).unbind(-1)
    top = highs.max(-1).values  # NaN where there is one
    masses = masses * (highs - top.unsqueeze(-1)).exp()
    ends = _reached(masses)
    aim = uniforms * ends[:, -1]
    owner = _draw(ends, aim)
    start = (ends - masses).gather(-1, owner.unsqueeze(-1)).squeeze(-1)
    # What is left of the aim beyond the owner's start, in units of the owner's own sums.
    place = _draw(reached, (aim - start) * (top - base).exp())
    token = reducer.sum_((first + place).where(owner == reducer.ranks.process, 0))
    return token.where(torch.isfinite(top) & torch.isfinite(ends[:, -1]), -1)


def _lowest_kept(scores: Tensor, keys: Tensor, top_p: float, reducer: Reducer) -> Tensor:
    """The key of the last token that top_p keeps, of all processes' [B, V_local]: [B, 1] int64.

    It is the largest integer such that the keys from it on have top_p of the whole mass. The search
    fixes 8 of its 64 bits a round, by the masses from 256 evenly spaced thresholds on. Where a
    score is no number, so is the mass, and the smallest integer is returned: all tokens are kept.
    """
    top = reducer.max_(scores.max(-1, keepdim=True).values)
    # `~` turns the order over without overflow: the largest keys come first.
    falling, order = (~keys).sort(dim=-1)
    sums = F.pad(_reached((scores - top).exp().gather(-1, order)), (1, 0))
    digits = torch.arange(256, device=keys.device)
    lowest = torch.zeros_like(keys[:, :1])
    goal = None
    for shift in range(56, -1, -8):
        # The highest digit is signed: 255 << 56 is beyond int64.
        start = -128 if shift == 56 else 0
        thresholds = lowest + (digits + start) * 2**shift
        mass = reducer.sum_(sums.gather(-1, torch.searchsorted(falling, ~thresholds, right=True)))
        if goal is None:
            goal = top_p * mass[:, :1]  # all keys are at the first threshold or above
        # At least 0: a GPU's sums may fall where they round, and NaN reaches no goal.
        digit = ((mass >= goal).sum(-1, keepdim=True) - 1).clamp(min=0)
        lowest = lowest + (digit + start) * 2**shift
    return lowest


def _choose_among_best(
    logits: Tensor,
    first: int,
    uniforms: Tensor,
    sampling: Sampling,
    reducer: Reducer,
    vocab_size: int,
) -> Tensor:
    """`choose_parallel` with top_k: each process's best are gathered, and the best of those taken.

    A score and its token travel as one integer, which orders them as a stable sort does.
    """
    processes = reducer.ranks.processes
    keys = _keys(logits.float() / sampling.temperature, first)
    count = min(sampling.top_k, -(-vocab_size // processes))
    best = keys.topk(min(count, keys.shape[-1]), dim=-1).values
    best = F.pad(best, (0, count - best.shape[-1]), value=LOWEST)  # the last process has fewer
    best = reducer.gather(best, processes * count).topk(sampling.top_k, dim=-1).values
    scores, tokens = _unpack(best)
    chances = scores.softmax(-1)
    if sampling.top_p < 1:
        chances = _nucleus(chances, sampling.top_p)
    tokens, order = tokens.sort(dim=-1)  # the draw runs over the vocabulary in its own order
    reached = _reached(chances.gather(-1, order))
    place = _draw(reached, uniforms * reached[:, -1])
    chosen = tokens.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return chosen.where(torch.isfinite(scores[:, 0]) & torch.isfinite(reached[:, -1]), -1)


def _keys(scores: Tensor, first: int) -> Tensor:
    """Scores [B, V] float32 of the tokens from `first` on, as int64 that are all different.

    Larger for a larger score, and of equal scores for the lower token. NaN counts as +inf.
    """
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0  # no -0.0
    bits = scores.view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as a float's order: turned over below 0
    tokens = torch.arange(first, first + scores.shape[-1], device=scores.device)
    return (rising.long() << 32) | (0xFFFFFFFF - tokens)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The scores (float32) and tokens (int64) that `_keys` packed."""
    rising = (keys >> 32).int()
    bits = rising ^ ((rising >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)


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
