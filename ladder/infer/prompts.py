"""An engine's prompts: their padded widths, and checks of their token ids."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from ladder.models.errors import UserError, is_whole, kind_of

# (length, multiple): prompts of up to this length are padded to this multiple, the graph's width
STEPS = ((64, 16), (512, 64), (4096, 256), (math.inf, 1024))


def padded_width(longest: int) -> int:
    """The width, which is the graph's, to which prompts of up to `longest` tokens are padded."""
    step = next(step for limit, step in STEPS if longest <= limit)
    return math.ceil(longest / step) * step


def check_room(what: str, tokens: int, context: int) -> None:
    """Raise UserError unless a prompt leaves room in the context for one more token."""
    if tokens >= context:
        raise UserError(
            f"{what} has {tokens} tokens and the model's context is max_seq_len={context}; "
            f"shorten it to {context - 1} or fewer"
        )


def token_ids(i: int, prompt: Any, context: int, vocab_size: int) -> list[int]:
    """The token ids of a prompt, which is a sequence of integers, a tensor or an array.

    i: the prompt's number, for errors. Raises UserError unless the ids are in the vocabulary and
    leave room in the context for one more token.
    """
    found = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(found, str | bytes | int) or not isinstance(found, Iterable):
        raise UserError(
            f"prompt {i} is {kind_of(prompt)}, no list of token ids; encode text with the model's "
            f"tokenizer, and put a prompt alone into a list"
        )
    found = list(found)
    for each in found:
        if not is_whole(each):
            raise UserError(
                f"prompt {i} has {each!r}, no token id; give each prompt as a list of integers"
            )
    found = [operator.index(each) for each in found]
    if not found:
        raise UserError(f"prompt {i} is empty; give at least one token")
    check_room(f"prompt {i}", len(found), context)
    if not all(0 <= token < vocab_size for token in found):
        raise UserError(
            f"prompt {i} has a token outside vocab_size={vocab_size}; is it another model's "
            f"tokenizer?"
        )
    return found
