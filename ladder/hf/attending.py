"""Adapters of transformers' caches and attention masks, and of rows that hold documents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ladder.models.documents import starts_of
from ladder.models.errors import UserError

TOKEN_DTYPES = (torch.int64, torch.int32)  # that torch's embedding takes


class LadderCache:
    """A cache of transformers with the interface of the Transformer; None: no earlier tokens.

    Virtual ranks are stored as additional heads, so that the first dimension is the batch, which
    beam search reorders.
    """

    def __init__(self, cache: Any, held: int) -> None:
        self.cache, self.held = cache, held

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            return keys, values
        if self.held == 1:
            return self.cache.update(keys, values, layer)
        stored = self.cache.update(self._as_heads(keys), self._as_heads(values), layer)
        return self._as_rows(stored[0]), self._as_rows(stored[1])

    def _as_heads(self, x: Tensor) -> Tensor:
        """[R * B, heads, S, head_dim] -> [B, R * heads, S, head_dim]."""
        return x.unflatten(0, (self.held, -1)).transpose(0, 1).flatten(1, 2)

    def _as_rows(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.held, -1)).transpose(0, 1).flatten(0, 1)


def attended(mask: Tensor | None, past: Any, tokens: Tensor, keys: int) -> Tensor:
    """The attention mask of `tokens` [B, S] after `past` tokens: bool [B, 1, S, keys].

    mask: [B, past + S], 0 for padding. No token attends to padding; padding attends to itself,
    since the softmax of an empty row is undefined.
    """
    batch, size = tokens.shape
    positions = torch.arange(keys, device=tokens.device)
    own = past + torch.arange(size, device=tokens.device)[:, None]
    seen = (positions <= own)[None, None].expand(batch, 1, size, keys)
    if mask is None:
        return seen
    kept = nn.functional.pad(mask[:, :keys].bool(), (0, max(0, keys - mask.shape[1])), value=True)
    return seen & kept[:, None, None, :] | (positions == own)


def refuse_forms(tokens: Any, mask: Any) -> None:
    """Raise UserError for `input_ids` and an `attention_mask` of other forms than ours."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in TOKEN_DTYPES:
        raise UserError(
            f"input_ids is {_form(tokens)}; expected [B, S] of int64, sequences and their tokens "
            f"(of one sequence, input_ids[None])"
        )
    if mask is None:
        return
    expected = (
        "expected [B, S], 0 for padding, or [B, 1, S, keys] of bool, true where attended, or of "
        "float, which is added"
    )
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise UserError(f"attention_mask is {_form(mask)}; {expected}")
    if mask.dim() == 4 and mask.dtype != torch.bool and not mask.is_floating_point():
        raise UserError(f"attention_mask is {_form(mask)}; {expected}; give it as .bool()")
    if mask.shape[0] not in (len(tokens), 1):
        raise UserError(
            f"attention_mask is {_form(mask)} for {len(tokens)} sequences; give one row for each"
        )


def _form(value: Any) -> str:
    """Its shape and dtype, of a tensor."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def given_mask(mask: Tensor | None, past: Any, tokens: Tensor, keys: int) -> Tensor | None:
    """The attention mask of `tokens` [B, S] after `past` tokens, from that of a forward pass.

    mask: [B, past + S], 0 for padding, or [B, 1, S, keys], which is returned unchanged. The result
    is None for a causal mask without padding and without past.
    """
    if mask is not None and mask.dim() == 2:
        size = tokens.shape[1]
        if mask.shape[1] < past + size:
            raise UserError(
                f"attention_mask has {mask.shape[1]} positions for {past + size} tokens, including "
                f"those in the cache; give one position per token"
            )
        if not past and mask[:, :size].all():
            mask = None  # for a faster kernel
    if mask is None and not past:
        return None
    if mask is None or mask.dim() == 2:
        return attended(mask, past, tokens, keys)
    if mask.shape[2] not in (tokens.shape[1], 1) or mask.shape[3] not in (keys, 1):
        raise UserError(
            f"attention_mask is {_form(mask)}; expected [B, 1, {tokens.shape[1]}, {keys}], the "
            f"tokens and the keys that they may attend to"
        )
    return mask


def packed(positions: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """The starts of documents in rows [B, S] that hold several (see document_starts); else None.

    A document begins where `positions` [B, S] do not increase by one, or where the numbers of
    `mask` [B, S] change. 0 in the mask is padding, which attends only to itself.
    """
    given = positions if mask is None else mask
    if given is None:
        return None
    begins = torch.ones_like(given, dtype=torch.bool)
    after = torch.zeros_like(begins[:, 1:])
    if positions is not None:
        after = positions.diff() != 1
    inside = after
    if mask is not None:
        changes = mask[:, 1:] != mask[:, :-1]
        inside = (after | changes) & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
        after = after | changes
    if not inside.any():
        return None
    begins[:, 1:] = after
    return starts_of(begins)
