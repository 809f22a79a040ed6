"""Landings of a decode step (wait, sum, add to the residual) and the sends for which they wait.

A landing waits for the slots that every rank writes, sums them in float32 in rank order, adds the
residual, rounds once, stores the sums of squares (and the pieces, see `ladder.kernels.pieces`), and
clears the slots. An empty slot holds -0.0, which is never sent.

It is a kernel of its own (`land`), or rides in a product (`ladder.kernels.decode.project`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.primitives import EMPTY, SPIN_LIMIT, clear, push_to_slots, receive_sum
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
from ladder.kernels.limits import CHUNK, MAX_OWNS, MAX_SUMS, MOST_CHUNKS
from ladder.kernels.pieces import (
    Pieces,
    largest,
    new_pieces,
    row_factor,
    split,
    split_reference,
)

# Words of 2 bytes that a thread of a landing has of all ranks and sums at once, without spills; of
# MANY_WARPS, which leave it half of the registers, or if it takes a row in turns, the second.
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
    """The sending of a finished partial [M, D] to every rank's slots.

    It replaces a `PushTarget` if the next kernel does not wait for the sum. A kernel that pushes
    ends only when every rank has acknowledged its writes, which takes time on the critical path.
    In the next kernel they take place beside its product.
    """

    partial: Tensor
    push: PushTarget
    launched: bool = False


@dataclass
class LandingJob:
    """One landing: out = residual (0 if `replaces`) + sums over ranks + own partials.

    residual, out: [M, D], different tensors, since other kernels may still read the residual.
    squares: [M, ceil(D / CHUNK)] float32, sums of the squares of `out`; [M, 1] with `pieces`, those
    of `out`, whose factor follows from a whole row, which one program then has. sums: slots [world,
    M, D] of this rank, which are cleared after they have been read. owns: (tensor [M, D], factor).
    """

    residual: Tensor
    out: Tensor
    squares: Tensor
    sums: Sequence[Tensor] = ()
    owns: Sequence[tuple[Tensor, float]] = ()
    replaces: bool = False
    pieces: Pieces | None = None
    launched: bool = False


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
    """Land CHUNK elements of a row, from `first` on: what is stored of them, in float32."""
    i = first + tl.arange(0, CHUNK)
    inside = i < D
    at = row.to(tl.int64) * D + i
    kind: tl.constexpr = residual.dtype.element_ty
    total = tl.zeros([CHUNK], tl.float32)
    if not REPLACES:
        total += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    for k in tl.static_range(SUMS):
        slot = (sum0 if k == 0 else sum1).to(tl.pointer_type(BITS)) + at
        total = receive_sum(slot, M * D, inside, total, kind, WORLD, EMPTY, SPIN_LIMIT)
        clear(slot, M * D, 0, inside, -1, WORLD, EMPTY)
    if OWNS > 0:
        total += tl.load(own0 + at, mask=inside, other=0).to(tl.float32) * factor0
    if OWNS > 1:
        total += tl.load(own1 + at, mask=inside, other=0).to(tl.float32) * factor1
    rounded = total.to(kind)
    tl.store(out + at, rounded, mask=inside)
    return rounded.to(tl.float32)


@jit
@no_type_check
def _land(
    program, residual, out, squares, pieces, factors, sum0, sum1, own0, own1, factor0, factor1,
    M, D: tl.constexpr, WORLD: tl.constexpr, SUMS: tl.constexpr,
    OWNS: tl.constexpr, REPLACES: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr,
    EMPTY: tl.constexpr, SPIN_LIMIT: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A part of a landing: SPAN times CHUNK elements of one row. SPLITS: all of them, CHUNK at a
    time, and then their pieces."""
    chunks: tl.constexpr = (D + CHUNK - 1) // CHUNK
    if SPLITS & (chunks == 1):
        x = _land_chunk(program, 0, residual, out, sum0, sum1, own0, own1, factor0, factor1, M, D,
                        WORLD, SUMS, OWNS, REPLACES, CHUNK, BITS, EMPTY, SPIN_LIMIT)  # fmt: skip
        tl.store(squares + program, tl.sum(x * x, 0))
        shrink = row_factor(largest(x), factors + program)
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
        shrink = row_factor(top, factors + program)
        tl.debug_barrier()  # other threads may have stored what this one reads again
        for chunk in range(chunks):
            i = chunk * CHUNK + tl.arange(0, CHUNK)
            at = program.to(tl.int64) * D + i
            x = tl.load(out + at, mask=i < D, other=0).to(tl.float32)
            split(x * shrink, pieces, at, i < D, M * D)
    else:
        spans: tl.constexpr = (chunks + SPAN - 1) // SPAN
        row, first = program // spans, (program % spans) * SPAN
        x = _land_chunk(row, first * CHUNK, residual, out, sum0, sum1, own0, own1, factor0, factor1,
                        M, D, WORLD, SUMS, OWNS, REPLACES, SPAN * CHUNK, BITS, EMPTY,
                        SPIN_LIMIT)  # fmt: skip
        if SPAN == 1:
            tl.store(squares + program, tl.sum(x * x, 0))
        else:
            chunk = first + tl.arange(0, SPAN)
            square = tl.sum(tl.reshape(x * x, [SPAN, CHUNK]), 1)
            tl.store(squares + row * chunks + chunk, square, mask=chunk < chunks)


@jit
@no_type_check
def _send(
    program, partial, buffers, start, M, D: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A part of a send: SPAN times CHUNK elements of one row."""
    spans: tl.constexpr = (D + SPAN * CHUNK - 1) // (SPAN * CHUNK)
    row = program // spans
    i = (program % spans) * SPAN * CHUNK + tl.arange(0, SPAN * CHUNK)
    at = row.to(tl.int64) * D + i
    bits = tl.load(partial + at, mask=i < D, other=0).to(BITS, bitcast=True)
    push_to_slots(buffers, start + RANK * M * D, at, bits, i < D, RANK, WORLD, BITS, EMPTY)


@jit
@no_type_check
def _finish(
    y, m, n, inside, out, add, factor, buffers, start, N, M: tl.constexpr, KIND: tl.constexpr,
    ADD: tl.constexpr, STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr,
    WORLD: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Store rows m and columns n of a product, add `add`, and push the sum."""
    if STORE:
        tl.store(out + m * N + n, y.to(KIND), mask=inside)
    if ADD:
        y += tl.load(add + m * N + n, mask=inside, other=0).to(tl.float32) * factor
    if PUSH:
        bits = y.to(KIND).to(BITS, bitcast=True)
        push_to_slots(buffers, start, (RANK * M + m) * N + n, bits, inside, 0, WORLD, BITS, EMPTY)
    elif not STORE:
        tl.store(out + m * N + n, y.to(KIND), mask=inside)


@kernel("communication")
@no_type_check
def _send_kernel(
    partial, buffers, start, M, D: tl.constexpr, WORLD: tl.constexpr, RANK: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _send(tl.program_id(0), partial, buffers, start, M, D, WORLD, RANK, CHUNK, BITS, EMPTY, 1)


@kernel("landing")
@no_type_check
def _land_kernel(
    residual, out, squares, pieces, factors, sum0, sum1, own0, own1, factor0, factor1, M,
    D: tl.constexpr, WORLD: tl.constexpr, SUMS: tl.constexpr,
    OWNS: tl.constexpr, REPLACES: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr,
    EMPTY: tl.constexpr, SPIN_LIMIT: tl.constexpr, SPLITS: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    _land(tl.program_id(0), residual, out, squares, pieces, factors, sum0, sum1, own0, own1,
          factor0, factor1, M, D, WORLD, SUMS, OWNS, REPLACES, CHUNK, BITS, EMPTY, SPIN_LIMIT,
          SPLITS, SPAN)  # fmt: skip


def rider_arguments(
    rider: LandingJob | SendJob | None,
    like: Tensor,
    push: PushTarget | None,
    warps: int,
    span: int = 1,
) -> tuple[list, dict]:
    """The kernel arguments of a rider: pointers and factors, and constants.

    warps: of a program. span: see `parts_of`.
    """
    job = rider if isinstance(rider, LandingJob) else None
    sums: list[Tensor] = [] if job is None else list(job.sums)
    owns = [] if job is None else list(job.owns)
    assert len(sums) <= MAX_SUMS, len(sums)
    assert len(owns) <= MAX_OWNS, len(owns)
    tensors = [like] * 5
    if isinstance(rider, LandingJob):
        tensors = [rider.residual, rider.out, rider.squares, *(rider.pieces or (like, like))]
    elif isinstance(rider, SendJob):
        tensors[0] = rider.partial
    size = like.element_size()
    world = sums[0].shape[0] if sums else 1 if push is None else push.world
    pointers = [
        *tensors,
        *sums, *[like] * (MAX_SUMS - len(sums)),
        *(own for own, _ in owns), *[like] * (MAX_OWNS - len(owns)),
        *(float(factor) for _, factor in owns), *[0.0] * (MAX_OWNS - len(owns)),
        tensors[0].shape[0],
    ]  # fmt: skip
    constants = {
        "D": 0 if rider is None else tensors[0].shape[1],
        "WORLD": world, "SUMS": len(sums), "OWNS": len(owns),
        "REPLACES": job is not None and job.replaces, "CHUNK": _chunk(job, world, warps),
        "BITS": bits_of(like), "EMPTY": EMPTY[size], "SPIN_LIMIT": SPIN_LIMIT,
        "SPLITS": job is not None and job.pieces is not None, "SPAN": span,
    }  # fmt: skip
    return pointers, constants


def _chunk(job: LandingJob | None, world: int, warps: int) -> int:
    """The elements of a row that a program lands at once."""
    if job is None or job.pieces is None:
        return CHUNK
    row = triton.next_power_of_2(job.out.shape[1])
    if row <= _most(job, world, warps, WHOLE if warps < MANY_WARPS else AT_ONCE):
        return max(CHUNK, row)
    # In turns, for which a row is read again.
    return max(CHUNK, _most(job, world, warps, AT_ONCE))


def _most(job: LandingJob, world: int, warps: int, words: int) -> int:
    """The most elements, a power of two, of which each thread has no more than so many words."""
    each = max(1, world * len(job.sums)) * (job.out.element_size() // 2)
    return 1 << max(0, (32 * warps * words // each).bit_length() - 1)


def span_of(rider: LandingJob | SendJob | None, warps: int) -> int:
    """The most chunks of a row that a program of a rider can have at once, without spills."""
    if isinstance(rider, SendJob):
        return MOST_CHUNKS // (rider.partial.element_size() // 2)
    if rider is None or not rider.sums:
        return MOST_CHUNKS
    return max(1, min(MOST_CHUNKS, _most(rider, len(rider.sums[0]), warps, WHOLE) // CHUNK))


def bits_of(like: Tensor) -> object:
    return tl.int16 if like.element_size() == 2 else tl.int32


def chunks_of(rider: LandingJob | SendJob | None) -> tuple[int, int]:
    """The rows of a rider, and the chunks of each: CHUNK elements, or all of them; (0, 0): none."""
    if rider is None:
        return 0, 0
    if isinstance(rider, LandingJob):
        rows, chunks = rider.squares.shape
        return rows, chunks
    rows, size = rider.partial.shape
    return rows, -(-size // CHUNK)


def parts_of(rider: LandingJob | SendJob | None, span: int = 1) -> int:
    """The parts of a rider, each of `span` chunks of a row."""
    rows, chunks = chunks_of(rider)
    return rows * -(-chunks // span)


def land(job: LandingJob) -> None:
    """Launch a landing as a kernel of its own."""
    assert not job.launched
    job.launched = True
    if not on_triton(job.residual):
        land_reference(job)
        return
    warps = 4
    if job.pieces is not None:  # one program for each row, of few rows
        warps *= max(1, min(4, triton.next_power_of_2(job.out.shape[1]) // CHUNK))
    pointers, constants = rider_arguments(job, job.residual, None, warps)
    launch(
        _land_kernel, (parts_of(job),), job.residual.device,
        *pointers, **constants, num_warps=warps,
    )  # fmt: skip


def send(job: SendJob) -> None:
    """Launch a send as a kernel of its own."""
    assert not job.launched
    job.launched = True
    partial, push = job.partial, job.push
    launch(
        _send_kernel, (parts_of(job),), partial.device,
        partial, push.buffers, push.start, partial.shape[0], D=partial.shape[1],
        WORLD=push.world, RANK=push.rank, CHUNK=CHUNK, BITS=bits_of(partial),
        EMPTY=EMPTY[partial.element_size()], num_warps=4,
    )  # fmt: skip


def new_landing(residual: Tensor, **fields: object) -> LandingJob:
    """A landing onto `residual` [M, D], with new memory for its results."""
    rows, size = residual.shape
    squares = torch.empty(rows, -(-size // CHUNK), dtype=torch.float32, device=residual.device)
    return LandingJob(residual, torch.empty_like(residual), squares, **fields)  # type: ignore[arg-type]


def with_pieces(job: LandingJob) -> LandingJob:
    """The same landing, which makes the pieces of its result, too."""
    return replace(job, squares=job.squares.new_empty(len(job.out), 1), pieces=new_pieces(job.out))
