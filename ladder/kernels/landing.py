"""Landings of a decode step (wait, sum, add to the residual), and sends of unpushed partials.

A landing waits for the slots that every rank writes, sums them in float32 in rank order, adds the
residual, rounds once, stores the sums of squares (and the pieces, see `ladder.kernels.pieces`), and
clears the slots. An empty slot holds -0.0, which is never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.primitives import (
    EMPTY,
    SPIN_LIMIT,
    clear,
    peers,
    peers_across,
    push_across,
    push_to_slots,
    receive_sum,
)
from ladder.jit import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    kernel,
    launch,
    on_triton,
    tl,
    triton,
)
from ladder.kernels.limits import CHUNK, MAX_OWNS, MAX_SUMS
from ladder.kernels.pieces import (
    Pieces,
    largest,
    new_pieces,
    row_factor,
    split,
    split_reference,
)

# The most words of 2 bytes, of all ranks and sums, that a thread of a landing holds at once without
# spills. AT_ONCE is for MANY_WARPS, which leave a thread half the registers, and for rows in turns.
WHOLE, AT_ONCE, MANY_WARPS = 128, 64, 16


@dataclass(frozen=True)
class PushTarget:
    """The target of a push: slots [rank, row, element] on every rank, from element `start` on.

    buffers: [world] int64, each rank's address of the same symmetric memory.
    """

    buffers: Tensor
    start: int
    rank: int
    world: int


@dataclass
class SendJob:
    """The sending of a finished partial [M, D] to every rank's slots. No product can push it if
    cuBLAS computes it, or if a rank keeps its own part of a sum of several products."""

    partial: Tensor
    push: PushTarget


@dataclass
class LandingJob:
    """One landing: out = residual (0 if `replaces`) + sums over ranks + own partials.

    residual, out: [M, D], different tensors, since other kernels may still read the residual.
    squares: [M, ceil(D / CHUNK)] float32, sums of the squares of `out`. pieces: of `out`; squares
    are then [M, 1], since a row's factor needs the whole row, and so one program lands it. sums:
    slots [world, M, D] of this rank, which are cleared after they have been read. owns: (tensor [M,
    D], factor).
    """

    residual: Tensor
    out: Tensor
    squares: Tensor
    sums: Sequence[Tensor] = ()
    owns: Sequence[tuple[Tensor, float]] = ()
    replaces: bool = False
    pieces: Pieces | None = None


def land_reference(job: LandingJob) -> None:
    total = torch.zeros_like(job.residual, dtype=torch.float32)
    if not job.replaces:
        total += job.residual.float()
    for slots in job.sums:
        assert not torch.any((slots == 0) & torch.signbit(slots)), "a slot is empty"
        for part in slots:
            total += part.float()
        slots.fill_(-0.0)
    for own, factor in job.owns:
        total += own.float() * factor
    job.out.copy_(total)
    if job.pieces is not None:
        job.squares.copy_(job.out.float().square().sum(-1, keepdim=True))
        split_reference(job.out, job.pieces)
        return
    padded = F.pad(job.out.float().square(), (0, -total.shape[1] % CHUNK))
    job.squares.copy_(padded.unflatten(1, (-1, CHUNK)).sum(-1))


@jit
@no_type_check
def _land_chunk(
    row, first, residual, out, sum0, sum1, own0, own1, factor0, factor1, M, D: tl.constexpr,
    WORLD: tl.constexpr, SUMS: tl.constexpr, OWNS: tl.constexpr, REPLACES: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, SPIN_LIMIT: tl.constexpr,
):  # fmt: skip
    """Land CHUNK elements of a row, from `first` on; returns the stored values, in float32."""
    i = first + tl.arange(0, CHUNK)
    inside = i < D
    at = row.to(tl.int64) * D + i
    kind: tl.constexpr = residual.dtype.element_ty
    total = tl.zeros([CHUNK], tl.float32)
    if not REPLACES:
        total += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    slots = ()
    for k in tl.static_range(SUMS):
        slot = (sum0 if k == 0 else sum1).to(tl.pointer_type(BITS)) + at
        slots += (slot,)
        total = receive_sum(slot, M * D, inside, total, kind, WORLD, EMPTY, SPIN_LIMIT)
    if OWNS > 0:
        total += tl.load(own0 + at, mask=inside, other=0).to(tl.float32) * factor0
    if OWNS > 1:
        total += tl.load(own1 + at, mask=inside, other=0).to(tl.float32) * factor1
    rounded = total.to(kind)
    tl.store(out + at, rounded, mask=inside)
    for k in tl.static_range(SUMS):  # here this takes fewer registers
        clear(slots[k], M * D, 0, inside, -1, WORLD, EMPTY)
    return rounded.to(tl.float32)


@jit
@no_type_check
def _targets(
    buffers, PUSH: tl.constexpr, WORLD: tl.constexpr, WP: tl.constexpr, BITS: tl.constexpr
):
    """Every rank's slots, for `_finish`; nothing unless PUSH. WP: see there."""
    found = ()
    if PUSH & (WP > 0):
        found = peers_across(buffers, WORLD, WP, BITS)
    elif PUSH:
        found = peers(buffers, 0, WORLD, BITS)
    return found


@jit
@no_type_check
def _finish(
    y, m, n, inside, out, add, factor, targets, start, N, M: tl.constexpr, KIND: tl.constexpr,
    ADD: tl.constexpr, STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, WP: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Store rows m and columns n of a product, add `add`, and push the sum to `_targets`.

    WP: 0, or WORLD rounded up to a power of two: threads have y along a third dimension, and each
    pushes to one rank.
    """
    if STORE:
        tl.store(out + m * N + n, y.to(KIND), mask=inside)
    if ADD:
        y += tl.load(add + m * N + n, mask=inside, other=0).to(tl.float32) * factor
    if PUSH:
        bits = y.to(KIND).to(BITS, bitcast=True)
        at = (RANK * M + m) * N + n
        if WP > 0:
            push_across(targets, start, at, bits, inside, EMPTY)
        else:
            push_to_slots(targets, start, at, bits, inside, WORLD, EMPTY)
    elif not STORE:
        tl.store(out + m * N + n, y.to(KIND), mask=inside)


@kernel("communication")
@no_type_check
def _send_kernel(
    partial, buffers, start, M, D: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: CHUNK elements of a row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    targets = peers(buffers, RANK, WORLD, BITS)
    chunks: tl.constexpr = (D + CHUNK - 1) // CHUNK
    program = tl.program_id(0)
    i = (program % chunks) * CHUNK + tl.arange(0, CHUNK)
    at = (program // chunks).to(tl.int64) * D + i
    bits = tl.load(partial + at, mask=i < D, other=0).to(BITS, bitcast=True)
    push_to_slots(targets, start + RANK * M * D, at, bits, i < D, WORLD, EMPTY)


@kernel("landing")
@no_type_check
def _land_kernel(
    residual, out, squares, pieces, factors, sum0, sum1, own0, own1, factor0, factor1, M,
    D: tl.constexpr, WORLD: tl.constexpr, SUMS: tl.constexpr,
    OWNS: tl.constexpr, REPLACES: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr,
    EMPTY: tl.constexpr, SPIN_LIMIT: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: CHUNK elements of a row. SPLITS: all elements of a row, CHUNK at a time, and
    then their pieces."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    chunks: tl.constexpr = (D + CHUNK - 1) // CHUNK
    if SPLITS & (chunks == 1):
        x = _land_chunk(program, 0, residual, out, sum0, sum1, own0, own1, factor0, factor1, M, D,
                        WORLD, SUMS, OWNS, REPLACES, CHUNK, BITS, EMPTY, SPIN_LIMIT)  # fmt: skip
        tl.store(squares + program, tl.sum(x * x, 0))
        shrink = row_factor(largest(x), factors + program, pieces.dtype.element_ty)
        i = tl.arange(0, CHUNK)
        split(x * shrink, pieces, program.to(tl.int64) * D + i, i < D, M * D)
    elif SPLITS:
        square, top = 0.0, 0
        for chunk in range(chunks):
            x = _land_chunk(program, chunk * CHUNK, residual, out, sum0, sum1, own0, own1, factor0,
                            factor1, M, D, WORLD, SUMS, OWNS, REPLACES, CHUNK, BITS, EMPTY,
                            SPIN_LIMIT)  # fmt: skip
            square += tl.sum(x * x, 0)
            top = tl.maximum(top, largest(x))
        tl.store(squares + program, square)
        shrink = row_factor(top, factors + program, pieces.dtype.element_ty)
        tl.debug_barrier()  # other threads may have stored what this one reads again
        for chunk in range(chunks):
            i = chunk * CHUNK + tl.arange(0, CHUNK)
            at = program.to(tl.int64) * D + i
            x = tl.load(out + at, mask=i < D, other=0).to(tl.float32)
            split(x * shrink, pieces, at, i < D, M * D)
    else:
        row, first = program // chunks, (program % chunks) * CHUNK
        x = _land_chunk(row, first, residual, out, sum0, sum1, own0, own1, factor0, factor1, M, D,
                        WORLD, SUMS, OWNS, REPLACES, CHUNK, BITS, EMPTY, SPIN_LIMIT)  # fmt: skip
        tl.store(squares + program, tl.sum(x * x, 0))


def _chunk(job: LandingJob, world: int, warps: int) -> int:
    """The elements of a row that a program lands at once."""
    if job.pieces is None:
        return CHUNK
    row = triton.next_power_of_2(job.out.shape[1])
    if row <= _most(job, world, warps, WHOLE if warps < MANY_WARPS else AT_ONCE):
        return max(CHUNK, row)
    # In turns, after which the row is read again.
    return max(CHUNK, _most(job, world, warps, AT_ONCE))


def _most(job: LandingJob, world: int, warps: int, words: int) -> int:
    """The most elements, a power of two, of which each thread has no more than `words` words."""
    each = max(1, world * len(job.sums)) * (job.out.element_size() // 2)
    return 1 << max(0, (32 * warps * words // each).bit_length() - 1)


def bits_of(like: Tensor) -> object:
    return tl.int16 if like.element_size() == 2 else tl.int32


def land(job: LandingJob) -> None:
    """Launch a landing."""
    residual, sums, owns = job.residual, list(job.sums), list(job.owns)
    if not on_triton(residual):
        land_reference(job)
        return
    assert len(sums) <= MAX_SUMS, len(sums)
    assert len(owns) <= MAX_OWNS, len(owns)
    (rows, size), world, warps = residual.shape, sums[0].shape[0] if sums else 1, 4
    if job.pieces is not None:  # one program for each row, of few rows
        warps *= max(1, min(4, triton.next_power_of_2(size) // CHUNK))
    unused = [residual] * max(MAX_SUMS, MAX_OWNS)
    launch(
        _land_kernel, (job.squares.numel(),), residual.device,
        residual, job.out, job.squares, *(job.pieces or (residual, residual)),
        *sums, *unused[len(sums) : MAX_SUMS],
        *(own for own, _ in owns), *unused[len(owns) : MAX_OWNS],
        *(float(factor) for _, factor in owns), *[0.0] * (MAX_OWNS - len(owns)), rows,
        D=size, WORLD=world, SUMS=len(sums), OWNS=len(owns), REPLACES=job.replaces,
        CHUNK=_chunk(job, world, warps), BITS=bits_of(residual),
        EMPTY=EMPTY[residual.element_size()], SPIN_LIMIT=SPIN_LIMIT,
        SPLITS=job.pieces is not None, num_warps=warps,
    )  # fmt: skip


def send(job: SendJob) -> None:
    """Launch a send."""
    partial, push = job.partial, job.push
    rows, size = partial.shape
    launch(
        _send_kernel, (rows * triton.cdiv(size, CHUNK),), partial.device,
        partial, push.buffers, push.start, rows, D=size, WORLD=push.world, RANK=push.rank,
        CHUNK=CHUNK, BITS=bits_of(partial), EMPTY=EMPTY[partial.element_size()], num_warps=4,
    )  # fmt: skip


def new_landing(residual: Tensor, **fields: object) -> LandingJob:
    """A landing onto `residual` [M, D], with new memory for its results."""
    rows, size = residual.shape
    squares = torch.empty(rows, -(-size // CHUNK), dtype=torch.float32, device=residual.device)
    return LandingJob(residual, torch.empty_like(residual), squares, **fields)  # type: ignore[arg-type]


def with_pieces(job: LandingJob, dtype: torch.dtype) -> LandingJob:
    """The same landing, which also makes the pieces of its result, of this dtype."""
    squares = job.squares.new_empty(len(job.out), 1)
    return replace(job, squares=squares, pieces=new_pieces(job.out, dtype))
