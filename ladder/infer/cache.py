"""The key-value cache of a batch whose sequences may have different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from ladder.models.transformer import Transformer
from ladder.parallel.sharding import local_tensor


class Cache:
    """Keys and values of every layer, `length` places for each of B sequences.

    A sequence's keys lie at their positions, so no padding is ever attended to: what a longer
    neighbour's prefill wrote beyond a sequence's end is overwritten before it is reached. Call
    `at` before each forward pass, and for decoding hand the model the `mask()`.
    """

    def __init__(self, model: Transformer, batch: int, length: int) -> None:
        config, ranks = model.config, model.reducer.ranks
        heads = max(1, config.num_kv_heads // ranks.degree)
        self.held = ranks.held
        weight = local_tensor(model.model.embed_tokens.weight)
        shape = (config.num_layers, self.held * batch, heads, length, config.head_dim)
        dtype = model.compute_dtype or weight.dtype
        self.keys = torch.zeros(shape, dtype=dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.rows = torch.arange(self.held * batch, device=weight.device).unsqueeze(1)

    def at(self, positions: Tensor, extent: int) -> None:
        """Say where the next tokens go ([B, S]).

        extent: how many places attention looks at, more than the largest position.
        """
        self.positions = positions.repeat(self.held, 1)
        self.extent = extent

    def mask(self) -> Tensor:
        """What the tokens that `at` placed may see: [B, 1, S, extent], true where attended."""
        places = torch.arange(self.extent, device=self.positions.device)
        positions = self.positions[: len(self.positions) // self.held]
        return places <= positions[:, None, :, None]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [R * B, heads, S, head_dim]; return the first `extent` places."""
        self.keys[layer][self.rows, :, self.positions] = keys.transpose(1, 2)
        self.values[layer][self.rows, :, self.positions] = values.transpose(1, 2)
        return self.keys[layer, :, :, : self.extent], self.values[layer, :, :, : self.extent]
