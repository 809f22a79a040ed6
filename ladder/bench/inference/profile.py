"""Traces of a prefill and a few decode steps, for `ladder bench inference --profile`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ladder.bench import trace
from ladder.infer.session import Session

DECODE_STEPS = 4  # consecutive, or as many as there are; the first aligns the ranks


@torch.inference_mode()
def profile_session(
    session: Session, prompts: Sequence[Sequence[int]], uniforms: Tensor, out: Path
) -> str:
    """Trace a prefill and some decode steps of the session: see `trace.profile`.

    uniforms: a row for each new token, of which the prefill chooses the first.
    """
    steps = min(DECODE_STEPS, len(uniforms) - 1)

    def decode() -> None:
        for _ in range(steps):
            session.step()

    phases = {"prefill": lambda: session.prefill(prompts, uniforms), "decode": decode}
    text, _ = trace.profile(phases, {"decode": steps}, session.tokens.device, out)
    return text
