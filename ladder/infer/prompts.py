"""Prompts as an engine takes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ladder.models.errors import UserError, kind_of

# (length, multiple): prompts of up to this length are padded to this multiple, the graph's width
STEPS = ((64, 16), (512, 64), (4096, 256), (math.inf, 1024))


def padded_width(longest: int) -> int:
    """The width of the graph of prompts whose longest has so many tokens."""
    step = next(step for limit, step in STEPS if longest <= limit)
    return math.ceil(longest / step) * step


def check_prompt(i: int, prompt: Sequence[int] | str | int, context: int, vocab_size: int) -> None:
    """Raise UserError unless a prompt is token ids of the vocabulary that leave room for one more.

    i: its number, for the message.
    """
    if isinstance(prompt, str | int):
        raise UserError(
            f"prompt {i} is {kind_of(prompt)}, no list of token ids; encode text with the model's "
            f"tokenizer, and put a prompt alone into a list"
        )
    if not prompt:
        raise UserError(f"prompt {i} is empty; give at least one token")
    if len(prompt) >= context:
        raise UserError(
            f"prompt {i} has {len(prompt)} tokens and the model's context is "
            f"max_seq_len={context}; shorten it to {context - 1} or fewer"
        )
    if not all(0 <= token < vocab_size for token in prompt):
        raise UserError(
            f"prompt {i} has a token outside vocab_size={vocab_size}; is it another model's "
            f"tokenizer?"
        )
