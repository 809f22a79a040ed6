"""Embedding lookup and greedy choice over a split vocabulary, the two ends of a decode step."""

from __future__ import annotations

from typing import Any, no_type_check

import torch
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.primitives import EMPTY, SPIN_LIMIT, count_spin, peer, sendable
from ladder.comm.push import SETS
from ladder.comm.symmetric import SymmetricTensor
from ladder.jit import begin, interpreted, kernel, launch, on_triton, tl, triton

CHUNK = 1024


@kernel("computation")
@no_type_check
def _embed_kernel(
    tokens, weight, out, first, rows, vocabulary, D: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    n = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + n)
    row = token - first
    held = (row >= 0) & (row < rows)
    value = tl.load(weight + row * D + i, mask=held & (i < D), other=0)
    unknown = (token < 0) | (token >= vocabulary)
    value = tl.where(unknown, float("nan"), value.to(tl.float32))
    tl.store(out + n.to(tl.int64) * D + i, value, mask=i < D)


@torch.no_grad()
def embed(tokens: Tensor, weight: Tensor, first: int, vocabulary: int) -> Tensor:
    """The rows for tokens [M] of `weight` [V_local, D], which starts at token `first`: [M, D].

    Tokens of other ranks have zeros; tokens that are not 0 to `vocabulary` - 1 have NaN.
    """
    rows, size = weight.shape
    if not on_triton(tokens):
        held = (tokens >= first) & (tokens < first + rows)
        unknown = (tokens < 0) | (tokens >= vocabulary)
        factor = held.to(weight.dtype).masked_fill(unknown, torch.nan)
        return weight[(tokens - first).where(held, 0)] * factor.unsqueeze(-1)
    out = torch.empty(len(tokens), size, dtype=weight.dtype, device=weight.device)
    # Not a dependent launch: this kernel starts when the whole previous step has ended, so later
    # kernels may read that step's results before their own wait (`decode_attention`).
    launch(
        _embed_kernel, (len(tokens), triton.cdiv(size, CHUNK)), tokens.device,
        tokens, weight, out, first, rows, vocabulary, D=size, BLOCK=CHUNK, num_warps=4,
        dependent=False,
    )  # fmt: skip
    return out


@kernel("computation")
@no_type_check
def _best_kernel(
    logits, tops, top_tokens, stride, first, V: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The largest of BLOCK logits of one sequence (NaN if any is NaN), and its token."""
    begin(PDL)
    b, part = tl.program_id(0), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + b.to(tl.int64) * stride + i, mask=i < V, other=float("-inf"))
    value = value.to(tl.float32)
    top = tl.max(value, 0)
    token = tl.min(tl.where(value == top, i, V), 0)  # the lowest of equal ones
    wrong = tl.max((value != value).to(tl.int32), 0)
    top = tl.where(wrong > 0, float("nan"), top)
    tl.store(tops + b * PARTS + part, top)
    tl.store(top_tokens + b * PARTS + part, token + first)


@kernel("both")
@no_type_check
def _choose_kernel(
    tops, top_tokens, out, tokens, positions, last, buffers, epochs,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, BATCH: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, WP: tl.constexpr, ADVANCE: tl.constexpr, SETS: tl.constexpr,
    EMPTY: tl.constexpr, SPIN_LIMIT: tl.constexpr, INTERPRETED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The choice for one sequence: the best of this rank's parts, then of all ranks.

    The slots are those of the push all-reduce: three rotating sets, the data is its own flag. The
    wait is a loop of its own: it reads two words of each rank, the logit and its token, as vectors
    over the ranks, of which the largest is chosen; `receive` and `receive_sum` of
    ladder.comm.primitives read a vector of each rank, to be kept apart or added.
    """
    begin(PDL)
    b = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    values = tl.load(tops + b * PARTS + i, mask=i < PARTS, other=float("-inf"))
    where = tl.load(top_tokens + b * PARTS + i, mask=i < PARTS, other=0x7FFFFFFF)
    wrong = tl.max((values != values).to(tl.int32), 0)
    top = tl.max(values, 0)
    token = tl.min(tl.where(values == top, where, 0x7FFFFFFF), 0)
    if WORLD > 1:
        epoch = tl.load(epochs + b)
        top = tl.where(wrong > 0, float("nan"), top)
        bits = sendable(top.to(tl.int32, bitcast=True), EMPTY)
        at = ((epoch % SETS) * WORLD + RANK) * BATCH * 2 + b * 2
        for other in tl.static_range(WORLD):
            base = peer(buffers, other, tl.int32)
            tl.store(base + at, bits)
            tl.store(base + at + 1, token)
        ranks = tl.arange(0, WP)
        own = peer(buffers, RANK, tl.int32)
        slots = own + ((epoch % SETS) * WORLD + ranks) * BATCH * 2 + b * 2
        inside = ranks < WORLD
        found = tl.load(slots, mask=inside, other=0, volatile=True)
        where = tl.load(slots + 1, mask=inside, other=0, volatile=True)
        if not INTERPRETED:
            spins = 0
            while tl.max(((found == EMPTY) | (where == EMPTY)).to(tl.int32)) > 0:
                found = tl.load(slots, mask=inside, other=0, volatile=True)
                where = tl.load(slots + 1, mask=inside, other=0, volatile=True)
                spins = count_spin(spins, SPIN_LIMIT)
        values = tl.where(inside, found.to(tl.float32, bitcast=True), float("-inf"))
        wrong = tl.max((values != values).to(tl.int32), 0)
        top = tl.max(values, 0)
        token = tl.min(tl.where(inside & (values == top), where, 0x7FFFFFFF), 0)
        before = own + (((epoch + SETS - 1) % SETS) * WORLD + ranks) * BATCH * 2 + b * 2
        empty = tl.full([WP], EMPTY, tl.int32)
        tl.store(before, empty, mask=inside)
        tl.store(before + 1, empty, mask=inside)
        tl.debug_barrier()  # each warp has loaded the epoch for itself
        tl.store(epochs + b, (epoch + 1) % SETS)
    finite = (wrong == 0) & (tl.abs(top) < float("inf"))
    tl.store(out + b, tl.where(finite, token, -1).to(tl.int64))
    tl.store(tokens + b, tl.where(finite, token, 0).to(tl.int64))
    if ADVANCE:
        position = tl.load(positions + b)
        tl.store(positions + b, tl.minimum(position + 1, last))


class GreedyChoice:
    """The likeliest next token of `batch` sequences over a vocabulary that is split over `group`.

    All ranks must make one outside a graph capture, and call it in the same order.
    """

    def __init__(self, batch: int, rank: int, world: int, group: Any, device: torch.device) -> None:
        self.rank, self.world = rank, world
        self.epochs = torch.zeros(batch, dtype=torch.int32, device=device)
        self.slots: SymmetricTensor | None = None
        if world > 1:
            words = SETS * world * batch * 2
            self.slots = symmetric.allocate((words,), torch.int32, group, device, bits=EMPTY[4])

    def __call__(
        self, logits: Tensor, first: int, out: Tensor, tokens: Tensor,
        positions: Tensor | None = None, last: int = 0,
    ) -> None:  # fmt: skip
        """Choose from logits [B, V_local], whose first token is `first`.

        out: [B] int64, receives the token, or -1 if the largest logit is not finite. tokens: the
        same with 0 instead of -1. positions: [B] int64, increased by one, up to `last`. Of equal
        logits the lowest token wins.
        """
        batch, size = logits.shape
        assert len(self.epochs) == batch, (len(self.epochs), batch)
        assert logits.stride(1) == 1
        parts = triton.cdiv(size, CHUNK)
        device = logits.device
        tops = torch.empty(batch, parts, dtype=torch.float32, device=device)
        top_tokens = torch.empty(batch, parts, dtype=torch.int32, device=device)
        launch(
            _best_kernel, (batch, parts), device, logits, tops, top_tokens, logits.stride(0), first,
            V=size, PARTS=parts, BLOCK=CHUNK, num_warps=4,
        )  # fmt: skip
        launch(
            _choose_kernel, (batch,), device, tops, top_tokens, out, tokens,
            tokens if positions is None else positions, last,
            self.epochs if self.slots is None else self.slots.addresses, self.epochs,
            PARTS=parts, BLOCK=triton.next_power_of_2(parts), BATCH=batch, RANK=self.rank,
            WORLD=self.world, WP=triton.next_power_of_2(self.world), ADVANCE=positions is not None,
            SETS=SETS, EMPTY=EMPTY[4], SPIN_LIMIT=SPIN_LIMIT, INTERPRETED=interpreted(),
            num_warps=4,
        )  # fmt: skip
