"""The sum of what all ranks have put into this rank's slots, alone or as a landing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import SPIN_LIMIT, average, load, wait
from ladder.jit import (
    begin,
    check_dtype,
    check_tensor,
    jit,
    kernel,
    launch,
    multiprocessors,
    on_triton,
    tl,
    triton,
)
from ladder.kernels.limits import MAX_SIZE
from ladder.kernels.norm import Pair
from ladder.kernels.prefill import land_rows_reference, norm_row
from ladder.models.errors import UserError

BLOCK, WARPS = 4096, 8


@dataclass(frozen=True)
class SlotArrivals:
    """Slots whose rows come in pieces while a kernel runs.

    flags: int32 words of this rank's memory. table: int32 [pieces, ranks], on its device: piece p
    of rank q is there when flags[table[p, q]] is 1; -1: it is there already. rows: of a piece; the
    last piece may have fewer.
    """

    flags: Tensor
    table: Tensor
    rows: int


def sum_slots_reference(
    slots: Tensor, out: Tensor, average: bool = False, own: tuple[int, Tensor] | None = None
) -> Tensor:
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for rank, piece in enumerate(slots):
        total += piece if own is None or own[0] != rank else own[1]
    return out.copy_(total / len(slots) if average else total)


@jit
@no_type_check
def _add_slots(
    place, stride, inside, WORLD: tl.constexpr, BLOCK: tl.constexpr, own=None,
    OWN: tl.constexpr = -1,
):  # fmt: skip
    """The sum of WORLD slots, `stride` elements apart, in rank order, in float32. own: is added in
    place of the slot of rank OWN."""
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == OWN:
            total += tl.load(own, mask=inside, other=0).to(tl.float32)
        else:
            total += load(place, inside, 0).to(tl.float32)
        place += stride  # not a multiple of it, which could exceed 32 bits
    return total


@kernel("landing")
@no_type_check
def _sum_slots_kernel(
    slots, own, out, stride, count, WORLD: tl.constexpr, AVERAGE: tl.constexpr, OWN: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    total = _add_slots(slots + i, stride, inside, WORLD, BLOCK, own + i, OWN)
    if AVERAGE:
        total = average(total, WORLD)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)


@torch.no_grad()
def sum_slots(
    slots: Tensor, out: Tensor, average: bool = False, own: tuple[int, Tensor] | None = None
) -> Tensor:
    """The sum of slots [T, M, N] over the first dimension, into out [M, N]; returns `out`.

    The sum is in float32 and in rank order, and rounded once. average: it is divided by T before.
    own: (rank, [M, N]), added in place of the slot of that rank. All have one dtype (bfloat16,
    float16, float32); each slot, `own` and `out` are dense. Not differentiable.
    """
    rank, held = own or (-1, out)
    check_dtype(slots=slots, own=held, out=out)
    for piece in (*slots, held):
        check_tensor("a slot", piece, tuple(out.shape), out)
    if not on_triton(out):
        return sum_slots_reference(slots, out, average, own)
    launch(
        _sum_slots_kernel, (triton.cdiv(out.numel(), BLOCK),), out.device,
        slots, held, out, slots.stride(0), out.numel(), WORLD=len(slots), AVERAGE=average, OWN=rank,
        BLOCK=BLOCK, num_warps=WARPS,
        dependent=False,  # it follows waits and copies, not a kernel
    )  # fmt: skip
    return out


@kernel("landing")
@no_type_check
def _land_slots_kernel(
    slots, residual, weight, landed, normed, eps, flags, table, piece, stride, rows,
    WORLD: tl.constexpr, WAITS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    SPIN_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program lands rows in ascending order, as they come. piece: rows of a piece."""
    begin(PDL)
    i = tl.arange(0, BLOCK)
    inside = i < D
    gain = tl.load(weight + i, mask=inside, other=0).to(tl.float32)
    seen = -1
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=1):
        if WAITS:
            now = row // piece
            if now != seen:  # a poll of each piece, not of each row
                for other in tl.static_range(WORLD):
                    flag = tl.load(table + now * WORLD + other)
                    if flag >= 0:
                        wait(flags + flag, 1, SPIN_LIMIT)
            seen = now
        at = (tl.zeros([BLOCK], tl.int64) + row) * D + i
        total = _add_slots(slots + at, stride, inside, WORLD, BLOCK)
        total += tl.load(residual + at, mask=inside, other=0).to(tl.float32)
        tl.store(landed + at, total.to(landed.dtype.element_ty), mask=inside)
        y = norm_row(total, gain, eps, D).to(normed.dtype.element_ty)
        tl.store(normed + at, y, mask=inside)


@torch.no_grad()
def land_slots(
    slots: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Pair,
    arrivals: SlotArrivals | None = None,
) -> Pair:  # fmt: skip
    """The sum of slots [T, M, D] and the residual [M, D], and its norm, into `out`; returns `out`.

    As `ladder.kernels.prefill.land_rows`, whose pieces are the slots. arrivals: the kernel waits
    for each row's pieces by itself. `out` is other memory than the residual. Not differentiable.
    """
    rows, size = residual.shape
    if not 1 <= size <= MAX_SIZE:
        raise UserError(f"residual has {size} columns; expected 1 to {MAX_SIZE}")
    check_dtype(slots=slots, residual=residual, weight=weight, landed=out[0], normed=out[1])
    check_tensor("weight", weight, (size,), residual)
    named = zip(("residual", "out[0]", "out[1]"), (residual, *out), strict=True)
    for name, tensor in (*named, *(("a slot", slot) for slot in slots)):
        check_tensor(name, tensor, (rows, size), residual)
    if not on_triton(residual):
        return land_rows_reference(list(slots), residual, weight, eps, out)
    if rows == 0:
        return out
    block = triton.next_power_of_2(size)
    # Programs that wait are few, so that each polls for several rows.
    programs = rows if arrivals is None else min(rows, 2 * multiprocessors(residual.device, 1))
    launch(
        _land_slots_kernel, (programs,), residual.device,
        slots, residual, weight, *out, eps,
        slots if arrivals is None else arrivals.flags,
        slots if arrivals is None else arrivals.table, 1 if arrivals is None else arrivals.rows,
        slots.stride(0), rows, WORLD=len(slots), WAITS=arrivals is not None, D=size, BLOCK=block,
        SPIN_LIMIT=SPIN_LIMIT, num_warps=min(16, max(1, block // 512)),
        dependent=False,  # it follows waits and copies, not a kernel
    )  # fmt: skip
    return out
