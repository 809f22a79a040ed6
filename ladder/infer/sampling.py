"""Choosing the next token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.infer.settings import Sampling as Sampling  # without torch
from ladder.models.reducer import Reducer
from ladder.models.seeds import spread

LOWEST = torch.iinfo(torch.int64).min


def draws(sampling: Sampling, count: int, steps: int) -> Tensor:
    """Random numbers for `steps` tokens of each prompt: uniform in [0, 1), [steps, count] float32.

    Each prompt has a generator of its own, so its text does not depend on the other prompts.
    """
    seeds = [(spread(sampling.seed) + i) % 2**63 for i in range(count)]
    columns = [torch.rand(steps, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(columns, dim=1)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities of logits [..., V] after temperature, top-k and top-p: [..., V] float32.

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
    """Descending probabilities, set to 0 after the first ones that together reach top_p."""
    before = ordered.cumsum(-1) - ordered
    return ordered.masked_fill(before >= top_p, 0.0)


def _reached(chances: Tensor) -> Tensor:
    """Cumulative probabilities [..., V], in float64.

    In float32 a GPU's parallel sum is not monotonic, because of rounding, so a token of
    probability 0 might be drawn.
    """
    return chances.cumsum(-1, dtype=torch.float64)


def _draw(reached: Tensor, aim: Tensor) -> Tensor:
    """The first index whose cumulative probability exceeds `aim`: [..., V], [...] -> [...] int64.

    It never has probability 0, even if `aim` was rounded up to the total.
    """
    below = (reached <= aim.unsqueeze(-1)) & (reached < reached[..., -1:])
    return below.sum(-1)


def choose_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> Tensor:
    """The next token of each sequence: logits [B, V], uniforms [B] in [0, 1) -> [B] int64.

    The definition by which `choose_parallel`, which engines use, is tested. The result is -1 where
    a sequence's logits or probabilities are not finite. The host does not wait for the device, so a
    CUDA graph can record it. Ranks with equal logits choose equal tokens.
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
    """`choose_tokens` for vocabulary-parallel logits [B, V_local] from token `first` on.

    The temperature is above 0. Every process returns the same tokens, [B] int64, and does not wait
    for its device. The communication per sequence:
    - with top_k, with or without top_p: one gather of the min(top_k, V_local) best of each process;
    - with neither: a gather of two numbers of each process, and an all-reduce of the token;
    - with top_p only: the same, after a maximum and 8 all-reduces of 256 sums (2 KiB each), which
      find the set of tokens to keep, for any size of it.

    The tokens equal those of `choose_tokens` unless a random number is within rounding (about 1e-7)
    of the border between two tokens, or top_p of that between kept and dropped tokens, since the
    sums have another order.
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
    # Clamped, so that a process whose logits are all -inf has mass 0 and not NaN.
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
    # The rest of the aim beyond the owner's start, in the scale of the owner's sums.
    index = _draw(reached, (aim - start) * (top - base).exp())
    token = reducer.sum_((first + index).where(owner == reducer.ranks.process, 0))
    return token.where(torch.isfinite(top) & torch.isfinite(ends[:, -1]), -1)


def _lowest_kept(scores: Tensor, keys: Tensor, top_p: float, reducer: Reducer) -> Tensor:
    """The key of the last token that top_p keeps, over all processes' [B, V_local]: [B, 1] int64.

    It is the largest integer such that the keys from it on have top_p of the total mass. Each round
    of the search determines 8 of its 64 bits from the masses above 256 evenly spaced thresholds. If
    a score is NaN, so is the mass, and the smallest integer is returned: all tokens are kept.
    """
    top = reducer.max_(scores.max(-1, keepdim=True).values)
    # `~` reverses the order without overflow: the largest keys come first.
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
        # At least 0: a GPU's sums may decrease by rounding, and a NaN never reaches the goal.
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
    """`choose_parallel` with top_k: the best of all processes' best tokens are candidates.

    A score and its token are gathered as one integer, ordered as by a stable sort.
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
    index = _draw(reached, uniforms * reached[:, -1])
    chosen = tokens.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return chosen.where(torch.isfinite(scores[:, 0]) & torch.isfinite(reached[:, -1]), -1)


def _keys(scores: Tensor, first: int) -> Tensor:
    """Unique int64 keys for scores [B, V] float32 of the tokens from `first` on.

    A larger score has a larger key; of equal scores, the lower token has. NaN counts as +inf.
    """
    scores = scores.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf) + 0.0  # no -0.0
    bits = scores.view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # ordered like the floats: reversed below 0
    tokens = torch.arange(first, first + scores.shape[-1], device=scores.device)
    return (rising.long() << 32) | (0xFFFFFFFF - tokens)


def _unpack(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The scores (float32) and tokens (int64) of keys made by `_keys`."""
    rising = (keys >> 32).int()
    bits = rising ^ ((rising >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), 0xFFFFFFFF - (keys & 0xFFFFFFFF)


def choose_greedily(logits: Tensor, first: int, reducer: Reducer) -> Tensor:
    """`choose_tokens` at temperature 0 for vocabulary-parallel logits [B, V_local].

    Each process sends two numbers per sequence instead of its logits. Of equal logits the lowest
    token wins, as in one process.
    """
    top, index = logits.max(-1)
    mine = torch.stack((top.float(), (index + first).float()), dim=-1)  # exact below 2 ** 24
    count = 2 * reducer.ranks.processes
    tops, tokens = reducer.gather(mine, count).unflatten(-1, (-1, 2)).unbind(-1)
    best, rank = tops.max(-1)
    chosen = tokens.gather(-1, rank.unsqueeze(-1)).squeeze(-1).long()
    return chosen.where(torch.isfinite(best), -1)
