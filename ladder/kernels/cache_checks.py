"""Checks of the arguments of kernels that read or write a key-value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ladder.jit import check_dtype, check_tensor
from ladder.kernels.norm import Pair
from ladder.models.errors import UserError


def check_stored(keys: Tensor, values: Tensor, exponents: Pair | None, **others: Tensor) -> None:
    """Raise UserError unless a cache has the others' dtype, or e4m3 with fitting exponents."""
    if exponents is None:
        check_dtype(**others, keys=keys, values=values)
        return
    check_dtype(**others)
    for name, cache, of in (("keys", keys, exponents[0]), ("values", values, exponents[1])):
        strides = tuple(stride * cache.shape[-1] for stride in of.stride())
        fits = of.dtype == torch.uint8 and of.shape == cache.shape[:3]
        fits &= strides == cache.stride()[:3]
        if cache.dtype != torch.float8_e4m3fn or not fits or of.device != cache.device:
            raise UserError(
                f"{name} is {cache.dtype} with exponents {of.dtype} {tuple(of.shape)}; expected "
                f"torch.float8_e4m3fn with torch.uint8 {tuple(cache.shape[:3])}, laid out alike"
            )
        if cache.storage_offset() % 2:
            raise UserError(
                f"{name} begins at byte {cache.storage_offset()} of its memory; expected an even "
                f"one, as of `cache[:, n:]`: e4m3 is read in pairs"
            )


def check_cache(keys: Tensor, values: Tensor, positions: Tensor, like: Tensor) -> None:
    """Raise UserError unless keys and values are [B, heads, L, head_dim] with equal strides.

    The last two dimensions must be dense; a cache sliced in the third, `keys[:, :, :extent]`, is
    accepted.
    """
    batch = positions.shape[0]
    for name, cache in (("keys", keys), ("values", values)):
        if cache.dim() != 4 or cache.shape[0] != batch or cache.shape != keys.shape:
            raise UserError(
                f"{name} has shape {tuple(cache.shape)}; expected [{batch}, heads, L, head_dim] "
                f"for {batch} positions, and the same for both"
            )
        if cache.stride()[2:] != (cache.shape[3], 1) or cache.stride() != keys.stride():
            raise UserError(f"{name} has strides {cache.stride()}; expected dense rows of head_dim")
        if cache.device != like.device:
            raise UserError(
                f"{name} is on {cache.device}, the rest on {like.device}; move it there"
            )
    check_tensor("positions", positions, (batch,), like)
    if positions.dtype != torch.int64:
        raise UserError(f"positions is {positions.dtype}; expected torch.int64")


def check_extras(
    bias: Tensor | None, gains: Pair | None, like: Tensor, width: int, head_dim: int
) -> None:
    """Raise UserError unless bias is [width] or None, and gains two of [head_dim] or None."""
    named = {} if bias is None else {"bias": (bias, width)}
    for n, gain in enumerate(gains or ()):
        named[f"gains[{n}]"] = gain, head_dim
    for name, (tensor, size) in named.items():
        check_dtype(like=like, **{name: tensor})
        check_tensor(name, tensor, (size,), like)
