"""Attention within documents, where a window of the token stream holds several of them.

Positions go on over the whole window and do not begin again with each document: rotary attention
depends on the difference of two positions alone, which is the same within a document either way.
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
    """Documents for a kernel that attends within each of many sequences that lie end to end.

    starts: int32 [N + 1], as `document_starts` has them; documents of no tokens may follow, which
    make N a power of two: compiled attention is compiled anew for each N. longest: none has more
    tokens. kernel: `varlen_attn`, or what has its signature.
    """

    starts: Tensor
    longest: int
    kernel: Callable[..., Tensor]


def document_starts(tokens: Tensor, end: int) -> Tensor:
    """Where each document begins in tokens [B, S], row after row, and B * S: int32 [N + 1].

    `end` is the token that ends a document, and belongs to it; a row begins one too. For tokens in
    the host's memory: N depends on them, so that on a GPU the host would wait for it.
    """
    return starts_of(document_begins(tokens, end))


def document_begins(tokens: Tensor, end: int) -> Tensor:
    """Whether a document begins at each place of tokens [B, S], as `document_starts` has them."""
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end
    return begins


def starts_of(begins: Tensor) -> Tensor:
    """The places of a bool [B, S] that are true, row after row, and B * S: int32 [N + 1]."""
    starts = begins.flatten().nonzero().flatten()
    return F.pad(starts, (0, 1), value=begins.numel()).int()


def within_documents(
    starts: Tensor, shape: torch.Size, held: int, dtype: torch.dtype, head_dim: int
) -> Packed | Tensor:
    """What attention needs to stay within the documents of tokens of `shape`, once for all layers.

    For queries of that dtype and head_dim, of `held` ranks one after another. Where there is no
    kernel for them, a mask [held * B, 1, S, S], true where attended. The host waits for nothing.
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
    places = torch.arange(held * rows * size, dtype=torch.int32, device=starts.device)
    number = torch.searchsorted(starts, places, right=True).view(held * rows, 1, size)
    return (number.unsqueeze(3) == number.unsqueeze(2)).tril()


def attend(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    """Causal attention within each document; [R * B, heads, S, head_dim] in and out."""
    rows, _, size, _ = q.shape
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    starts, longest, kernel = packed
    # A window to the left without end and to the right not at all: causal.
    out = kernel(*flat, starts, starts, longest, longest, window_size=(-1, 0))
    return out.unflatten(0, (rows, size)).transpose(1, 2)


@functools.cache
def _kernel() -> Callable[..., Tensor]:
    """torch's `varlen_attn`, for fewer heads of keys and values than of queries too.

    Imported where it is needed, for it brings all of torch's compiler. torch 2.11 takes whatever
    heads its kernel can, and later versions by an option.
    """
    from torch.nn.attention.varlen import varlen_attn

    found: Callable[..., Tensor] = varlen_attn
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        found = functools.partial(varlen_attn, enable_gqa=True)
    return found


def _has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention, which `varlen_attn` is, computes this there."""
    return (
        device.type == "cuda"
        and dtype in (torch.bfloat16, torch.float16)
        and head_dim % 8 == 0
        and head_dim <= 256
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )
