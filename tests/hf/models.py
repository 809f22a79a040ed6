"""Our models in transformers' interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ladder.hf import LadderForCausalLM
from tests.infer import engines

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def wrapped(plan: str = "ladder", degree: int | None = None, **changes: Any) -> LadderForCausalLM:
    """Random, in float64, with wide logits, so that its choices are no near ties."""
    return LadderForCausalLM.from_transformer(engines.make(plan, degree, **changes))


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Tokens [B, S], with the token 7 as padding, and the mask that says where it is."""
    size = max(map(len, rows))
    tokens, mask = torch.full((len(rows), size), 7), torch.zeros(len(rows), size, dtype=torch.int64)
    for i, row in enumerate(rows):
        part = slice(size - len(row), size) if side == "left" else slice(len(row))
        tokens[i, part], mask[i, part] = torch.tensor(row), 1
    return tokens, mask
