"""Add outputs to the residual and norm the sum, on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
from torch import Tensor

from ladder.jit import begin, check_dtype, check_tensor, jit, kernel, launch, on_triton, tl, triton
from ladder.kernels.limits import MAX_ADDENDS, MAX_SIZE
from ladder.models.errors import UserError

Addends = Sequence[tuple[Tensor, float]]
Pair = tuple[Tensor, Tensor]


def add_rms_norm_reference(
    residual: Tensor, addends: Addends, weight: Tensor, eps: float, out: Pair | None = None
) -> Pair:
    total = residual.float()
    for addend, factor in addends:
        turns = len(residual) // max(1, len(addend))
        total = total + addend.float().repeat(turns, 1) * factor
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + eps)
    if weight.dim() == 2:
        weight = weight.repeat_interleave(len(total) // len(weight), 0)
    normed = normed * weight.float()
    if out is not None:
        return out[0].copy_(total), out[1].copy_(normed)
    return total.to(residual.dtype), normed.to(residual.dtype)


@jit
@no_type_check
def _addend(addend, factor, row, rows, SHARED: tl.constexpr, i, inside, D: tl.constexpr):
    own = row % rows if SHARED else row
    return tl.load(addend + own.to(tl.int64) * D + i, mask=inside, other=0).to(tl.float32) * factor


@kernel("computation")
@no_type_check
def _norm_kernel(
    residual, weight, landed, normed, eps,
    a0, a1, a2, a3, a4, a5, a6, a7, f0, f1, f2, f3, f4, f5, f6, f7,
    rows, each, COUNT: tl.constexpr, SHARED: tl.constexpr, RANKS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SHARED: bit n is set if addend n has only `rows` rows, which the residual's rows take in
    turns. RANKS: every `each` consecutive rows have a weight of their own."""
    begin(PDL)
    # The whole row stays in registers: it is read once, so `landed` may be `residual` itself.
    i = tl.arange(0, BLOCK)
    inside = i < D
    program = tl.program_id(0)
    at = program.to(tl.int64) * D + i
    if RANKS:
        weight += program // each * D
    gain = tl.load(weight + i, mask=inside, other=0).to(tl.float32)
    total = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
    if COUNT > 0:
        total += _addend(a0, f0, program, rows, SHARED & 1, i, inside, D)
    if COUNT > 1:
        total += _addend(a1, f1, program, rows, SHARED & 2, i, inside, D)
    if COUNT > 2:
        total += _addend(a2, f2, program, rows, SHARED & 4, i, inside, D)
    if COUNT > 3:
        total += _addend(a3, f3, program, rows, SHARED & 8, i, inside, D)
    if COUNT > 4:
        total += _addend(a4, f4, program, rows, SHARED & 16, i, inside, D)
    if COUNT > 5:
        total += _addend(a5, f5, program, rows, SHARED & 32, i, inside, D)
    if COUNT > 6:
        total += _addend(a6, f6, program, rows, SHARED & 64, i, inside, D)
    if COUNT > 7:
        total += _addend(a7, f7, program, rows, SHARED & 128, i, inside, D)
    scale = tl.rsqrt(tl.sum(total * total, 0) / D + eps)
    tl.store(landed + at, total.to(landed.dtype.element_ty), mask=inside)
    tl.store(normed + at, (total * scale * gain).to(normed.dtype.element_ty), mask=inside)


def _check(residual: Tensor, addends: Addends, weight: Tensor, out: Pair | None) -> int:
    """Check all arguments; returns the rows of addends that have fewer than the residual, or 0."""
    if residual.dim() != 2 or not 1 <= residual.shape[1] <= MAX_SIZE:
        raise UserError(
            f"residual has shape {tuple(residual.shape)}; expected [M, D] with D up to {MAX_SIZE}"
        )
    if len(addends) > MAX_ADDENDS:
        raise UserError(f"{len(addends)} addends; add at most {MAX_ADDENDS} at a time")
    shape = (residual.shape[0], residual.shape[1])
    check_dtype(residual=residual, weight=weight)
    check_tensor("residual", residual, shape, residual)
    ranks = len(weight) if weight.dim() == 2 else None
    check_tensor("weight", weight, shape[1:] if ranks is None else (ranks, shape[1]), residual)
    if ranks is not None and (ranks == 0 or shape[0] % ranks):
        raise UserError(
            f"weight has shape {tuple(weight.shape)}: its {ranks} ranks must divide the "
            f"residual's {shape[0]} rows"
        )
    few = _fewer(residual, addends)
    for n, (addend, _) in enumerate(addends):
        check_dtype(addend=addend)
        rows = few if few and len(addend) == few else shape[0]
        check_tensor(f"addends[{n}]", addend, (rows, shape[1]), residual)
    for name, tensor in zip(("out[0]", "out[1]"), out or (), strict=False):
        check_dtype(residual=residual, out=tensor)
        check_tensor(name, tensor, shape, residual)
    return few


def _fewer(residual: Tensor, addends: Addends) -> int:
    found = {len(addend) for addend, _ in addends if len(addend) < len(residual)}
    if len(found) > 1 or any(len(residual) % each for each in found if each):
        raise UserError(
            f"addends of {sorted(found)} rows for a residual of {len(residual)}: the rows of those "
            f"that have fewer must be equally many, and divide the residual's"
        )
    return found.pop() if found else 0


@torch.no_grad()
def add_rms_norm(
    residual: Tensor, addends: Addends, weight: Tensor, eps: float, out: Pair | None = None
) -> Pair:
    """Add up to 8 addends to the residual and norm the sum: (new residual, normed), both [M, D].

    residual: [M, D], D up to 16384, not changed unless `out[0]` is the residual itself.
    addends: (tensor [M, D], factor) pairs, added in this order; their dtype may differ from the
        residual's (for example, partials in float32). Some may be [R, D], where R divides M: row
        m % R of these is added to row m (a sum of all ranks, to the residual of each virtual one).
    weight: [D], in the residual's dtype; or [R, D], where R divides M: row m has that of rank
        m // (M / R) (of virtual ranks, whose rows follow one another).

    The sum is computed in float32 and rounded once, to the new residual. The norm is computed from
    the sum before that rounding, which is closer to the exact value. Not differentiable.
    """
    few = _check(residual, addends, weight, out)
    if not on_triton(residual):
        return add_rms_norm_reference(residual, addends, weight, eps, out)
    landed, normed = (
        (torch.empty_like(residual), torch.empty_like(residual)) if out is None else out
    )
    rows, size = residual.shape
    each = rows // len(weight) if weight.dim() == 2 else 0
    block = triton.next_power_of_2(size)
    unused = MAX_ADDENDS - len(addends)
    launch(
        _norm_kernel, (rows,), residual.device,
        residual, weight, landed, normed, eps,
        *(addend for addend, _ in addends), *[residual] * unused,
        *(float(factor) for _, factor in addends), *[0.0] * unused,
        few, each, COUNT=len(addends),
        SHARED=sum(1 << n for n, (addend, _) in enumerate(addends) if len(addend) < rows),
        RANKS=each > 0, D=size, BLOCK=block,
        # 16 bytes per thread: each program has one row, so only latency matters.
        num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return landed, normed
