"""Log-likelihoods of continuations, in batches of similar length, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ladder.infer.cache import reading
from ladder.infer.engine import NotFiniteError, device_of
from ladder.infer.sampling import choose_greedily
from ladder.models.errors import UserError
from ladder.models.layers import vocabulary_start
from ladder.models.loss import token_losses
from ladder.models.transformer import Transformer


class Request(NamedTuple):
    """The token ids of a context, at least one, and of a continuation, which may be empty.

    task: its name, for errors.
    """

    context: Sequence[int]
    continuation: Sequence[int]
    task: str | None = None


class Score(NamedTuple):
    """The score of a continuation.

    loglikelihood: of the whole continuation, in nats. greedy: whether greedy decoding gives it.
    """

    loglikelihood: float
    greedy: bool


@torch.inference_mode()
def score(
    model: Transformer,
    requests: Sequence[Request],
    batch: int,
    progress: Callable[[int], None] = lambda done: None,
    *,
    cache: str = "auto",
    where: str = "the model",
) -> list[Score]:
    """log p(continuation | context) of each request; every rank passes the same requests.

    A request longer than the model's context is cut at the front, as in lm-evaluation-harness's
    Hugging Face model: its last max_seq_len + 1 tokens are kept, the last being only a target. The
    log-likelihood of an empty continuation is 0. Requests with the same input tokens (such as
    answers of one token) share a sequence. progress: called with the number of finished requests.
    cache: the type of the keys and values that are attended to (`ladder.infer.cache.reading`).
    where: the model's folder, for errors.

    Raises UserError, before the first forward pass, for a continuation longer than the model's
    context or a token outside its vocabulary, NotFiniteError if the logits are not finite.
    """
    results = [Score(0.0, True)] * len(requests)
    room = model.config.max_seq_len
    sharing: dict[tuple[int, ...], list[int]] = {}  # input tokens -> the requests that have them
    for i, (context, continuation, task) in enumerate(requests):
        assert context, "a context holds at least one token"
        if len(continuation) > room:
            raise UserError(
                f"{'a task' if task is None else f'task {task!r}'} has a continuation of "
                f"{len(continuation)} tokens, longer than the context of {where}, "
                f"max_seq_len={room}; leave the task out"
            )
        if not all(0 <= token < model.config.vocab_size for token in (*context, *continuation)):
            raise UserError(
                f"a text has a token outside vocab_size={model.config.vocab_size} of {where}; is "
                f"its tokenizer another model's?"
            )
        if continuation:
            fed = (*context, *continuation)[-(room + 1) : -1]
            sharing.setdefault(fed, []).append(i)
    # The longest first: little padding, and a batch that is too large for the memory fails at once.
    order = sorted(sharing, key=lambda fed: (-len(fed), fed))
    done = sum(not request.continuation for request in requests)
    for start in range(0, len(order), batch):
        chunk = order[start : start + batch]
        wanted = [(row, i) for row, fed in enumerate(chunk) for i in sharing[fed]]
        asked = [(row, requests[i].continuation) for row, i in wanted]
        found = _score(model, chunk, asked, cache)
        for (_, i), each in zip(wanted, found, strict=True):
            results[i] = each
        done += len(wanted)
        progress(done)
    return results


def _score(
    model: Transformer,
    chunk: Sequence[tuple[int, ...]],
    wanted: Sequence[tuple[int, Sequence[int]]],
    cache: str,
) -> list[Score]:
    """The scores of pairs (row of the chunk, targets of the row's last positions)."""
    device = device_of(model)
    # Padded on the right: attention is causal, so no token attends to the padding.
    tokens = torch.zeros((len(chunk), len(chunk[0])), dtype=torch.int64)
    for row, fed in zip(tokens, chunk, strict=True):
        row[: len(fed)] = torch.tensor(fed)
    rows: list[int] = []
    positions: list[int] = []
    targets: list[int] = []
    sizes: list[int] = []
    for at, continuation in wanted:
        size, end = len(continuation), len(chunk[at])
        rows += [at] * size
        positions += range(end - size, end)
        targets += continuation
        sizes.append(size)
    tokens = tokens.to(device)
    logits = model(tokens, gather=False, **reading(model, tokens, cache))
    # Only the continuations' logits are converted to float32 and compared between the ranks.
    logits = logits[torch.tensor(rows, device=device), torch.tensor(positions, device=device)]
    goal = torch.tensor(targets, device=device)
    reducer = model.reducer
    first = vocabulary_start(model.config.vocab_size, reducer.ranks)
    losses: Tensor = token_losses(logits[None], goal[None], first, reducer, model.runtime.losses)[0]
    likeliest = choose_greedily(logits, first, reducer) == goal
    losses, likeliest = losses.double().cpu(), likeliest.cpu()
    if not torch.isfinite(losses).all():
        raise NotFiniteError("the model's logits are not finite")
    return [
        Score(-float(each.sum()), bool(same.all()))
        for each, same in zip(losses.split(sizes), likeliest.split(sizes), strict=True)
    ]
