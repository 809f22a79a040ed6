"""Held-out loss in bits per byte, which compares models across tokenizers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ladder.data.batches import TokenData, heldout_windows
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel.sharding import local_tensor


@dataclass(frozen=True)
class Heldout:
    """loss: nats per token. bits_per_byte: bits per byte of the text that the tokens stand for."""

    loss: float
    bits_per_byte: float
    tokens: int


def check_heldout(data: TokenData, seq_len: int, limit: int) -> None:
    """Raise UserError unless `bits_per_byte` can be computed: before training, not after it."""
    if not any(
        int(lengths.sum()) for _, _, lengths in heldout_windows(data, seq_len, limit or None)
    ):
        raise UserError(
            f"the first eval_windows={limit} held-out windows stand for no text; raise it, or "
            f"prepare more documents"
        )


@torch.no_grad()
def bits_per_byte(
    model: Transformer,
    data: TokenData,
    seq_len: int,
    batch_size: int,
    limit: int,
    mesh: DeviceMesh | None = None,
) -> Heldout:
    """Evaluate on the first `limit` held-out windows of seq_len tokens (0: all of them).

    Data-parallel ranks share the batches out; every rank returns the same. End-of-document tokens
    are predicted but stand for no bytes.
    """
    device = local_tensor(model.model.embed_tokens.weight).device
    dp, dp_rank = (1, 0) if mesh is None else (mesh["dp"].size(), mesh.get_local_rank("dp"))
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nats, tokens, bytes
    batches = heldout_windows(data, seq_len, limit or None, batch_size)
    for i, (tokens, targets, lengths) in enumerate(batches):
        if i % dp != dp_rank:
            continue
        losses = model(tokens.to(device), targets.to(device))
        sums[0] += losses.double().sum()
        sums[1] += targets.numel()
        sums[2] += int(lengths.sum())
    if mesh is not None and dp > 1:
        dist.all_reduce(sums, group=mesh.get_group("dp"))
    nats, tokens_seen, text = sums.tolist()
    return Heldout(nats / tokens_seen, nats / math.log(2) / text, int(tokens_seen))
