"""Held-out loss in bits per byte, which is comparable across tokenizers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from ladder.data.prepared import TokenData, heldout_order, heldout_windows, text_bytes
from ladder.models.documents import starts_of
from ladder.models.errors import UserError
from ladder.models.plan import Plan
from ladder.models.transformer import Transformer
from ladder.parallel.data import data_parallel, let_go, sum_over_data
from ladder.parallel.sharding import local_tensor


@dataclass(frozen=True)
class Heldout:
    """loss: nats per token. bits_per_byte: bits per byte of the text that the tokens stand for."""

    loss: float
    bits_per_byte: float
    tokens: int


def check_heldout(data: TokenData, seq_len: int, limit: int) -> None:
    """Raise UserError if `bits_per_byte` cannot be computed. To be called before training."""
    if not any(
        int(lengths.sum()) for _, _, lengths in heldout_windows(data, seq_len, limit or None)
    ):
        raise UserError(
            f"the eval_windows={limit} held-out windows contain no text; raise eval_windows, "
            f"or prepare more documents"
        )


@torch.no_grad()
def bits_per_byte(
    model: Transformer,
    data: TokenData,
    seq_len: int,
    batch_size: int,
    limit: int,
    mesh: DeviceMesh | None = None,
    mask_documents: bool = False,
    plan: Plan | None = None,
    told: Iterator[bool] | None = None,
) -> Heldout | None:
    """Evaluate on `limit` held-out windows of seq_len tokens, evenly spread (0: all of them).

    The batches are divided among the data-parallel ranks; every rank returns the same result.
    End-of-document tokens are predicted but stand for no bytes.

    mask_documents: each token attends only to its own document, for models trained so. The targets
    and their bytes do not depend on it, so the figures are comparable. plan: the plan in force;
    None: the model's own. told: an iterator with one item for each batch, the same on every rank;
    True stops the evaluation, and the result is None.
    """
    device = local_tensor(model.model.embed_tokens.weight).device
    dp, dp_rank = data_parallel(mesh)
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nats, tokens, bytes
    windows = data.windows("heldout", seq_len)
    batches = heldout_order(windows, limit or None, batch_size)
    # Every rank must run the same number of forward passes, since each pass gathers shards of all
    # ranks: a rank without a batch repeats the last one and does not count it.
    told, stopped = told or itertools.repeat(False), False
    while (group := list(itertools.islice(batches, dp))) and not (stopped := next(told)):
        chosen = group[min(dp_rank, len(group) - 1)]
        tokens, targets = windows.read(chosen)
        begins = windows.begins(chosen, tokens, data.eos_id if mask_documents else None)
        documents = None if begins is None else starts_of(begins).to(device)
        losses = model(tokens.to(device), targets.to(device), documents=documents, plan=plan)
        if dp_rank >= len(group):
            continue
        sums[0] += losses.double().sum()
        sums[1] += int((targets >= 0).sum())
        sums[2] += int(text_bytes(data, targets).sum())
    let_go(model)
    if stopped:
        return None
    sum_over_data(sums, mesh)
    nats, tokens_seen, text = sums.tolist()
    return Heldout(nats / tokens_seen, nats / math.log(2) / text, int(tokens_seen))
