"""Generation with a key-value cache: prefill of a padded batch, then a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from ladder.infer.cache import Cache
from ladder.infer.sampling import Sampling, generators, sample
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer


@dataclass
class Completion:
    """What one prompt was continued with. reason: `stop`, `length`, or `context` (it is full)."""

    tokens: list[int] = field(default_factory=list)
    reason: str = ""


@torch.inference_mode()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
    stop: Collection[int] = (),
    on_token: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Continue each prompt (token ids; lengths may differ); every rank returns the same.

    stop: ids that end a sequence and are not part of it. on_token: called with (prompt index,
    token) as each is chosen. Raises UserError for an empty prompt and for one that leaves no room
    in the model's context.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens={max_new_tokens} must be 1 or more")
    context = model.config.max_seq_len
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {i} is empty; give at least one token")
        if len(prompt) >= context:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens and the model's context is "
                f"max_seq_len={context}; shorten it to {context - 1} or fewer"
            )
        if not all(0 <= token < model.config.vocab_size for token in prompt):
            raise UserError(
                f"prompt {i} has a token outside vocab_size={model.config.vocab_size}; is it "
                f"another model's tokenizer?"
            )
    if not prompts:
        return []
    device = model.model.embed_tokens.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    tokens = torch.zeros((len(prompts), longest), dtype=torch.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)

    cache = Cache(model, len(prompts), min(longest + max_new_tokens, context))
    positions = torch.arange(longest, device=device).expand(len(prompts), -1)
    logits = _forward(model, tokens.to(device), positions, cache, lengths - 1)

    sources = generators(sampling, len(prompts))
    results = [Completion() for _ in prompts]
    while True:
        chosen = sample(logits, sampling, sources)
        for i, (result, token) in enumerate(zip(results, chosen.tolist(), strict=True)):
            if result.reason:
                continue
            if token in stop:
                result.reason = "stop"
                continue
            result.tokens.append(token)
            if on_token is not None:
                on_token(i, token)
            if len(result.tokens) == max_new_tokens:
                result.reason = "length"
            elif len(prompts[i]) + len(result.tokens) == context:
                result.reason = "context"
        if all(result.reason for result in results):
            return results
        # A finished sequence goes on in place, its tokens unused, until the last one is done.
        positions = lengths.clamp(max=context - 1).unsqueeze(1)
        logits = _forward(model, chosen.unsqueeze(1), positions, cache)
        lengths = lengths + 1


def _forward(
    model: Transformer,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    cache: Cache,
    last: torch.Tensor | None = None,
) -> torch.Tensor:
    """The next token's logits, [B, V]."""
    mask = cache.at(positions)
    return model(tokens, positions=positions, cache=cache, mask=mask, last=last)[:, -1]
