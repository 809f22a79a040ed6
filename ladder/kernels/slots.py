"""The sum of what all ranks have put into this rank's slots."""

from __future__ import annotations

from typing import no_type_check

import torch
from torch import Tensor

from ladder.comm.primitives import load
from ladder.jit import begin, check_dtype, check_tensor, kernel, launch, on_triton, tl, triton

BLOCK, WARPS = 4096, 8


def sum_slots_reference(slots: Tensor, out: Tensor, average: bool = False) -> Tensor:
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for piece in slots:
        total += piece
    return out.copy_(total / len(slots) if average else total)


@kernel("landing")
@no_type_check
def _sum_slots_kernel(
    slots, out, stride, count, WORLD: tl.constexpr, AVERAGE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    step = tl.zeros_like(i) + stride  # in 64 bits
    total = tl.zeros([BLOCK], tl.float32)
    for other in tl.static_range(WORLD):
        total += load(slots + other * step + i, inside, 0).to(tl.float32)
    if AVERAGE:
        total = tl.div_rn(total, tl.full([BLOCK], WORLD, tl.float32))
    tl.store(out + i, total.to(out.dtype.element_ty), mask=inside)


@torch.no_grad()
def sum_slots(slots: Tensor, out: Tensor, average: bool = False) -> Tensor:
    """The sum of slots [T, M, N] over the first dimension, into out [M, N]; returns `out`.

    In float32 and in rank order, rounded once; average: divided by T before. One dtype (bfloat16,
    float16, float32); each slot and `out` are dense. Not differentiable.
    """
    check_dtype(slots=slots, out=out)
    for piece in slots:
        check_tensor("a slot", piece, tuple(out.shape), out)
    if not on_triton(out):
        return sum_slots_reference(slots, out, average)
    launch(
        _sum_slots_kernel, (triton.cdiv(out.numel(), BLOCK),), out.device,
        slots, out, slots.stride(0), out.numel(), WORLD=len(slots), AVERAGE=average, BLOCK=BLOCK,
        num_warps=WARPS, dependent=False,  # it follows waits and copies, not a kernel
    )  # fmt: skip
    return out
