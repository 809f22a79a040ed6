"""The key-value cache of a batch whose sequences may have different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ladder.models.errors import unknown
from ladder.models.storage import LEAST_CACHED, exponents, powers, rounded
from ladder.models.transformer import Transformer
from ladder.parallel.sharding import local_tensor

KINDS = ("auto", "fp8")


def check_cache_kind(kind: str) -> None:
    if kind not in KINDS:
        raise unknown("type of --cache", kind, KINDS)


class Cache:
    """Keys and values of every layer, for `length` positions of each of B sequences.

    Keys are stored at their positions, so padding is never attended to: values that a longer
    neighbour's prefill wrote beyond a sequence's end are overwritten before they are read. Call
    `at` before each forward pass, and pass `mask()` to the model for decoding.

    kind: `auto` stores keys and values in the model's dtype. `fp8` stores them in e4m3 with a scale
    for each head and position: a power of two, kept as its exponent's byte (`exponents` of
    ladder.models.storage). So scales need no calibration, and no value overflows. Prompts and
    decode steps store the same bytes: `rounded(x, "fp8", LEAST_CACHED)` of x in the model's dtype.
    """

    def __init__(self, model: Transformer, batch: int, length: int, kind: str = "auto") -> None:
        check_cache_kind(kind)
        config, ranks = model.config, model.reducer.ranks
        heads = max(1, config.num_kv_heads // ranks.degree)
        self.held = ranks.held
        weight = local_tensor(model.model.embed_tokens.weight)
        shape = (config.num_layers, self.held * batch, heads, length, config.head_dim)
        self.dtype = model.runtime.dtype_of(weight)
        stored = torch.float8_e4m3fn if kind == "fp8" else self.dtype
        self.keys = torch.zeros(shape, dtype=stored, device=weight.device)
        self.values = torch.zeros_like(self.keys)
        self.key_exponents: Tensor | None = None
        self.value_exponents: Tensor | None = None
        if kind == "fp8":
            self.key_exponents = torch.zeros(shape[:-1], dtype=torch.uint8, device=weight.device)
            self.value_exponents = torch.zeros_like(self.key_exponents)
        self.rows = torch.arange(self.held * batch, device=weight.device).unsqueeze(1)

    def tensors(self) -> list[Tensor]:
        found = (self.keys, self.values, self.key_exponents, self.value_exponents)
        return [each for each in found if each is not None]

    def clear(self) -> None:
        """Make all keys and values 0."""
        for each in self.tensors():
            each.view(torch.uint8).zero_()

    def layer_exponents(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The exponents of a layer's keys and values, uint8 [R * B, heads, length], for fp8."""
        if self.key_exponents is None or self.value_exponents is None:
            return None
        return self.key_exponents[layer], self.value_exponents[layer]

    def at(self, positions: Tensor, extent: int) -> None:
        """Set the positions [B, S] of the next tokens.

        extent: the number of cached positions that attention reads, at least max(positions) + 1.
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
        return (
            self._update(self.keys[layer], self.key_exponents, layer, keys),
            self._update(self.values[layer], self.value_exponents, layer, values),
        )

    def _update(self, held: Tensor, scales: Tensor | None, layer: int, new: Tensor) -> Tensor:
        place = self.rows, slice(None), self.positions
        if scales is None:
            held[place] = new.transpose(1, 2)
            return held[:, :, : self.extent]
        stored, factors = rounded(new.transpose(1, 2), "fp8", LEAST_CACHED)
        held.view(torch.uint8)[place] = stored.view(torch.uint8)
        scales[layer][place] = exponents(factors)
        read = held[:, :, : self.extent].float()
        return read.mul_(powers(scales[layer, :, :, : self.extent])[..., None]).to(self.dtype)


def reading(model: Transformer, tokens: Tensor, kind: str) -> dict[str, Any]:
    """Arguments of a forward pass over tokens [B, S] that reads all keys and values from a cache.

    In generation, a prompt attends to its keys and values as they are before the cache stores them.
    With these arguments every token attends to the stored ones, as tokens after the prompt do.
    kind: the cache's type. `auto` gives no arguments: a cache would compute the same.
    """
    if kind == "auto":
        return {}
    cache = Cache(model, len(tokens), tokens.shape[1], kind)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    cache.at(positions, tokens.shape[1])
    return {"positions": positions, "cache": cache, "mask": cache.mask()}
