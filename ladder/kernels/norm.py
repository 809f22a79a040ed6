"""Add outputs to the residual and norm the sum, on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
from torch import Tensor

from ladder.jit import begin, check_dtype, check_tensor, kernel, launch, on_triton, tl, triton
from ladder.kernels.limits import MAX_ADDENDS
from ladder.models.errors import UserError

MAX_SIZE = 16384

Addends = Sequence[tuple[Tensor, float]]
Pair = tuple[Tensor, Tensor]


def add_rms_norm_reference(
    residual: Tensor, addends: Addends, weight: Tensor, eps: float, out: Pair | None = None
) -> Pair:
    total = residual.float()
    for addend, factor in addends:
        total = total + addend.float() * factor
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
    if out is not None:
        return out[0].copy_(total), out[1].copy_(normed)
    return total.to(residual.dtype), normed.to(residual.dtype)


@kernel("computation")
@no_type_check
def _norm_kernel(
    residual, weight, landed, normed, eps,
    a0, a1, a2, a3, a4, a5, a6, a7, f0, f1, f2, f3, f4, f5, f6, f7,
    COUNT: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # The whole row stays in registers: it is read once, so `landed` may be `residual` itself.
    i = tl.arange(0, BLOCK)
    inside = i < D
    at = tl.program_id(0).to(tl.int64) * D + i
    gain = tl.load(weight + i, mask=inside, other=0).to(tl.float32)
    total = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 0:
        total += tl.load(a0 + at, mask=inside, other=0).to(tl.float32) * f0
    if COUNT > 1:
        total += tl.load(a1 + at, mask=inside, other=0).to(tl.float32) * f1
    if COUNT > 2:
        total += tl.load(a2 + at, mask=inside, other=0).to(tl.float32) * f2
    if COUNT > 3:
        total += tl.load(a3 + at, mask=inside, other=0).to(tl.float32) * f3
    if COUNT > 4:
        total += tl.load(a4 + at, mask=inside, other=0).to(tl.float32) * f4
    if COUNT > 5:
        total += tl.load(a5 + at, mask=inside, other=0).to(tl.float32) * f5
    if COUNT > 6:
        total += tl.load(a6 + at, mask=inside, other=0).to(tl.float32) * f6
    if COUNT > 7:
        total += tl.load(a7 + at, mask=inside, other=0).to(tl.float32) * f7
    scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    tl.store(landed + at, total.to(landed.dtype.element_ty), mask=inside)
    tl.store(normed + at, (total * scale * gain).to(normed.dtype.element_ty), mask=inside)


def _check(residual: Tensor, addends: Addends, weight: Tensor, out: Pair | None) -> None:
    if residual.dim() != 2 or not 1 <= residual.shape[1] <= MAX_SIZE:
        raise UserError(
            f"residual has shape {tuple(residual.shape)}; expected [M, D] with D up to {MAX_SIZE}"
        )
    if len(addends) > MAX_ADDENDS:
        raise UserError(f"{len(addends)} addends; add at most {MAX_ADDENDS} at a time")
    shape = (residual.shape[0], residual.shape[1])
    check_dtype(residual=residual, weight=weight)
    check_tensor("residual", residual, shape, residual)
    check_tensor("weight", weight, shape[1:], residual)
    for n, (addend, _) in enumerate(addends):
        check_dtype(addend=addend)
        check_tensor(f"addends[{n}]", addend, shape, residual)
    for name, tensor in zip(("out[0]", "out[1]"), out or (), strict=False):
        check_dtype(residual=residual, out=tensor)
        check_tensor(name, tensor, shape, residual)


@torch.no_grad()
def add_rms_norm(
    residual: Tensor, addends: Addends, weight: Tensor, eps: float, out: Pair | None = None
) -> Pair:
    """Add up to 8 addends to the residual and norm the sum: (new residual, normed), both [M, D].

    residual: [M, D], D up to 16384, not changed unless `out[0]` is the residual itself.
    addends: (tensor [M, D], factor) pairs, added in this order; their dtype may differ from the
        residual's (for example, partials in float32).
    weight: [D], in the residual's dtype.

    The sum is computed in float32 and rounded once, to the new residual. The norm is computed from
    the sum before that rounding, which is closer to the exact value. Not differentiable.
    """
    _check(residual, addends, weight, out)
    if not on_triton(residual):
        return add_rms_norm_reference(residual, addends, weight, eps, out)
    landed, normed = (
        (torch.empty_like(residual), torch.empty_like(residual)) if out is None else out
    )
    rows, size = residual.shape
    block = triton.next_power_of_2(size)
    unused = MAX_ADDENDS - len(addends)
    launch(
        _norm_kernel, (rows,), residual.device,
        residual, weight, landed, normed, eps,
        *(addend for addend, _ in addends), *[residual] * unused,
        *(float(factor) for _, factor in addends), *[0.0] * unused,
        COUNT=len(addends), D=size, BLOCK=block,
        # 16 bytes per thread: each program has one row, so only latency matters.
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return landed, normed
