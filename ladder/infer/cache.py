"""The key-value cache of a batch whose sequences may have different lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from ladder.models.transformer import Transformer
from ladder.parallel.sharding import local_tensor


class Cache:
    """Keys and values of every layer, for `length` positions of each of B sequences.

    Keys are stored at their positions, so padding is never attended to: values that a longer
    neighbour's prefill wrote beyond a sequence's end are overwritten before they are read. Call
    `at` before each forward pass, and pass `mask()` to the model for decoding.
    """

    def __init__(self, model: Transformer, batch: int, length: int) -> None:
        config, ranks = model.config, model.reducer.ranks
        heads = max(1, config.num_kv_heads // ranks.degree)
        self.held = ranks.held
        weight = local_tensor(model.model.embed_tokens.weight)
        shape = (config.num_layers, self.held * batch, heads, length, config.head_dim)
        dtype = model.runtime.dtype_of(weight)
        self.keys = torch.zeros(shape, dtype=dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.rows = torch.arange(self.held * batch, device=weight.device).unsqueeze(1)

    def at(self, positions: Tensor, extent: int) -> None:
        """Set the positions [B, S] of the next tokens.

        extent: the number of positions that attention reads, above the largest position.
        """
        self.positions = positions.repeat(self.held, 1)
        self.extent = extent

    def mask(self) -> Tensor:
        """The attention mask of the tokens set by `at`: bool [B, 1, S, extent]."""
        keys = torch.arange(self.extent, device=self.positions.device)
        positions = self.positions[: len(self.positions) // self.held]
        return keys <= positions[:, None, :, None]

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [R * B, heads, S, head_dim]; return the keys and values of `extent` positions."""
        self.keys[layer][self.rows, :, self.positions] = keys.transpose(1, 2)
        self.values[layer][self.rows, :, self.positions] = values.transpose(1, 2)
        return self.keys[layer, :, :, : self.extent], self.values[layer, :, :, : self.extent]
