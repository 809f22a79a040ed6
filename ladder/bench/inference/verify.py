"""The check before timing: an engine's logits against the same weights in float32.

The same given tokens (teacher forcing) go through the engine's prefill and decode steps, and
through the plain modules, in the weights' dtype and in float32. The engine's largest error and root
mean square may be at most twice those of the plain modules; it must choose the reference's token
wherever the reference's best two logits differ by more than that error; and a second run must be
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling
from ladder.infer.session import Session
from ladder.models.transformer import Transformer

ALLOWED = 2.0  # times the plain modules' error
SEED = 17


@dataclass(frozen=True)
class Reference:
    """Tokens [n, prompt + steps] and their logits in float32, [steps + 1, n, V].

    plain_error, plain_rms: the largest and the root-mean-square error of the plain modules.
    """

    tokens: Tensor
    prompt: int
    logits: Tensor
    plain_error: float
    plain_rms: float


@dataclass(frozen=True)
class EngineCheck:
    """The result of the check.

    sequences: distinct sequences, which the batch repeats. compared: pairs (sequence, step).
    disagreements: pairs in which the engine's token differs although the reference's best two
    logits differ by more than the allowed error. repeats: whether a second run was bitwise equal.
    """

    error: float
    rms: float
    plain_error: float
    plain_rms: float
    disagreements: int
    compared: int
    sequences: int
    steps: int
    repeats: bool

    @property
    def passes(self) -> bool:
        """Whether the engine may be timed; a NaN fails."""
        return (
            self.error <= ALLOWED * self.plain_error
            and self.rms <= ALLOWED * self.plain_rms
            and self.disagreements == 0
            and self.repeats
        )

    def __str__(self) -> str:
        return (
            f"largest error of a logit {self.error:.4g} (allowed {ALLOWED * self.plain_error:.4g}, "
            f"{ALLOWED:g} times the plain path's), root mean square {self.rms:.4g} (allowed "
            f"{ALLOWED * self.plain_rms:.4g}), {self.disagreements} wrong tokens of "
            f"{self.compared}, a second run {'is equal' if self.repeats else 'differs'}"
        )


@torch.inference_mode()
def reference(
    model: Transformer, count: int, prompt: int, steps: int, cache: str = "auto"
) -> Reference:
    """The logits of `count` random sequences, computed by the plain modules of a sharded model.

    The model has the engine's weights, plan and T. It is left in float32. cache: see Engine.
    """
    source = torch.Generator().manual_seed(SEED)
    shape = (count, prompt + steps)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=source)
    exact: list[Tensor] = []
    plain: list[Tensor] = []
    for dtype, found in ((None, plain), (torch.float32, exact)):
        # float32: the same weights, converted when they are used
        model.use(replace(model.runtime, compute_dtype=dtype))
        engine = Engine(model, graphs=False, fused=False, cache=cache)
        session = engine.session(count, prompt + steps, Sampling())
        found += forced(session, tokens, prompt)
    logits = torch.stack(exact)
    difference = torch.stack(plain) - logits
    return Reference(
        tokens,
        prompt,
        logits,
        plain_error=float(difference.abs().max()),
        plain_rms=float(difference.square().mean().sqrt()),
    )


def forced(session: Session, tokens: Tensor, prompt: int) -> Iterator[Tensor]:
    """The logits [B, V] float32 after the prompt and after each given token: tokens [B, S]."""
    model = session.model
    session.prefill(list(tokens[:, :prompt]), torch.zeros((1, len(tokens))))
    for position in range(prompt, tokens.shape[1] + 1):
        logits = model.reducer.gather(session.logits, model.config.vocab_size)
        yield logits.to(torch.float32, copy=True)  # a graph's next replay overwrites them
        if position < tokens.shape[1]:
            session.tokens.copy_(tokens[:, position])
            session.step()


@torch.inference_mode()
def check_session(session: Session, expected: Reference) -> EngineCheck:
    """Compare a session's prefill and decode steps, twice, with the reference."""
    batch, distinct = len(session.tokens), len(expected.tokens)
    rows = torch.arange(batch) % distinct
    device = session.tokens.device
    worst, squares = torch.zeros((2,), device=device)
    disagreements = torch.zeros((), dtype=torch.int64, device=device)
    runs = []
    odd = torch.arange(expected.logits.shape[-1], device=device) * 2 + 1
    for _ in range(2):
        sums = []
        for step, logits in enumerate(forced(session, expected.tokens[rows], expected.prompt)):
            exact = expected.logits[step][rows.to(device)]
            difference = (logits - exact).abs()
            worst = torch.maximum(worst, difference.max())  # keeps a NaN
            squares = squares + difference.square().mean()
            best = exact.topk(2).values
            clear = ~(best[:, 0] - best[:, 1] <= ALLOWED * expected.plain_error)
            disagreements += (clear & (session.out != exact.argmax(-1))).sum()
            sums.append((logits.view(torch.int32) * odd).sum(-1))  # sums bits, so rounds nothing
        runs.append(torch.stack(sums))
    steps = len(runs[0])
    return EngineCheck(
        error=float(worst),
        rms=float((squares / (2 * steps)).sqrt()),
        plain_error=expected.plain_error,
        plain_rms=expected.plain_rms,
        disagreements=int(disagreements),
        compared=2 * steps * batch,
        sequences=distinct,
        steps=steps - 1,
        repeats=bool((runs[0] == runs[1]).all()),
    )
