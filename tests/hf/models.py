"""Our models in transformers' interface."""

from __future__ import annotations

from typing import Any

from ladder.hf import LadderForCausalLM
from tests.infer import engines


def wrapped(plan: str = "ladder", degree: int | None = None, **changes: Any) -> LadderForCausalLM:
    """Random, in float64, with wide logits, so that its choices are no near ties."""
    return LadderForCausalLM.from_transformer(engines.make(plan, degree, **changes))
