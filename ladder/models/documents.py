"""Attention within documents, for windows of tokens that hold several documents.

Positions count over the whole window and do not restart with each document: rotary attention
depends only on the difference of two positions, which is the same within a document either way.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Packed(NamedTuple):
    """The documents of a batch, for a variable-length attention kernel.

    starts: int32 [N + 1], as from `document_starts`; padded with empty documents to a power of two,
    since compiled attention is recompiled for each N. longest: an upper bound of a document's
    tokens. kernel: `varlen_attn`, or a function of the same signature.
    """

    starts: Tensor
    longest: int
    kernel: Callable[..., Tensor]


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """The starts of the documents in tokens [B, S], row after row, then B * S: int32 [N + 1].

    end: the token that ends a document and belongs to it. Each row begins a document, too. tokens
    must be on the CPU: N depends on them, so on a GPU the host would have to wait.
    """
    return starts_of(document_begins(tokens, end))


def document_begins(tokens: Tensor, end: int) -> Tensor:
    """Whether a document begins at each position of tokens: bool [B, S] (see `document_starts`)."""
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end
    return begins


def starts_of(begins: Tensor) -> Tensor:
    """The indices of the true entries of a bool [B, S], then B * S: int32 [N + 1]."""
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=begins.numel()).int()


def within_documents(
    starts: Tensor, shape: torch.Size, held: int, dtype: torch.dtype, head_dim: int
) -> Packed | Tensor:
    """The attention mask of documents in tokens of `shape`, once for all layers.

    A Packed if there is a kernel for queries of that dtype and head_dim; else a bool mask
    [held * B, 1, S, S], true where attended. held: virtual ranks, whose batches are concatenated.
    The host does not wait for the device.
    """
    rows, size = shape
    if held > 1:
        offsets = rows * size * torch.arange(held, dtype=torch.int32, device=starts.device)
        each = (starts[:-1] + offsets[:, None]).flatten()
        starts = torch.cat((each, starts[-1:] * held))
    if _has_kernel(starts.device, dtype, head_dim):
        count = len(starts) - 1
        empty = starts[-1:].expand((1 << (count - 1).bit_length()) - count)
        return Packed(torch.cat((starts, empty)), size, _kernel())
    positions = torch.arange(held * rows * size, dtype=torch.int32, device=starts.device)
    number = torch.searchsorted(starts, positions, right=True).view(held * rows, 1, size)
    return (number.unsqueeze(3) == number.unsqueeze(2)).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Causal attention within each document; [R * B, heads, S, head_dim] in and out."""
    rows, _, size, _ = q.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    starts, longest, kernel = packed
    # Unlimited to the left and none to the right: causal.
    out = kernel(*flat, starts, starts, longest, longest, window_size=(-1, 0))
    return out.unflatten(0, (rows, size)).transpose(1, 2)


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    """torch's `varlen_attn` with grouped-query attention.

    Imported late, since it imports torch's compiler. Versions after torch 2.11 need an option for
    grouped queries.
    """
    from torch.nn.attention.varlen import varlen_attn

    found: Callable[..., Tensor] = varlen_attn
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        found = functools.partial(varlen_attn, enable_gqa=True)
    return found


def _has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention, which `varlen_attn` calls, supports these queries."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
