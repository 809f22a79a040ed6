"""Matrix times a few rows, for decoding: limited by reading the weight, which is read once."""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels.launch import begin, check, check_dtype, jit, launch, on_triton, tl, triton
from ladder.models.errors import UserError

MAX_ROWS = 8

# By the rows of x, padded to a power of two: (weight rows a program, columns a step, warps).
# One row: measured on H200 with sketches of this kernel over the linear layers of 1B, 8B and 70B
# at TP 4; 2 x 1024 with 4 warps won against 1, 2 and 4 rows x 512 and 1024. 1024 is 4 warps x 32
# threads x 8 elements: a thread loads 16 bytes of each row, and no value moves between threads
# before the last sum. More rows: the same, not yet measured (benchmarks/kernels.py --tune).
BLOCKS = {1: (2, 1024, 4), 2: (2, 1024, 4), 4: (2, 1024, 4), 8: (2, 1024, 4)}


def skinny_linear_reference(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    y = F.linear(x.float(), weight.float()).to(x.dtype)
    return y if out is None else out.copy_(y)


def gate_up_reference(x: Tensor, gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    y = F.silu(F.linear(x.float(), gate.float())) * F.linear(x.float(), up.float())
    return y.to(x.dtype) if out is None else out.copy_(y)


@jit
@no_type_check
def _linear_kernel(
    x, weight, up, out, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    # [row of x, row of the weight, column]: loaded in three dimensions, all share one layout.
    m = tl.arange(0, MP)[:, None, None]
    n = tl.program_id(0) * BN + tl.arange(0, BN)[None, :, None]
    columns = tl.arange(0, BK)[None, None, :]
    row = n.to(tl.int64) * K  # a head of 2**31 elements and more exists
    # A thread sums its 8 neighbouring columns at once: an accumulator a row and not eight.
    total = tl.zeros([MP, BN, BK // 8], tl.float32)
    total_up = tl.zeros([MP, BN, BK // 8], tl.float32)
    for start in range(0, K, BK):
        k = start + columns
        # Where a block divides K, or M is full, the masks fold away.
        fits = (k < K) | (K % BK == 0)
        a = tl.load(x + m * K + k, mask=fits & ((m < M) | (M == MP)), other=0).to(tl.float32)
        inside = fits & (n < N)
        w = tl.load(weight + row + k, mask=inside, other=0).to(tl.float32)
        if GATED:
            u = tl.load(up + row + k, mask=inside, other=0).to(tl.float32)
            total_up += tl.sum(tl.reshape(a * u, [MP, BN, BK // 8, 8]), 3)
        total += tl.sum(tl.reshape(a * w, [MP, BN, BK // 8, 8]), 3)
    y = tl.sum(total, 2, keep_dims=True)
    if GATED:
        y = y / (1 + tl.exp(-y)) * tl.sum(total_up, 2, keep_dims=True)
    tl.store(out + m * N + n, y.to(out.dtype.element_ty), mask=(m < M) & (n < N))


def _run(x: Tensor, weight: Tensor, up: Tensor | None, out: Tensor | None) -> Tensor:
    rows, size = x.shape
    outputs = weight.shape[0]
    if out is None:
        out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(rows)
    block, step, warps = BLOCKS[padded]
    launch(
        _linear_kernel, (triton.cdiv(outputs, block),), x.device,
        x, weight, weight if up is None else up, out, outputs,
        M=rows, MP=padded, K=size, GATED=up is not None, BN=block, BK=step, num_warps=warps,
    )  # fmt: skip
    return out


def _check(x: Tensor, weights: dict[str, Tensor], out: Tensor | None) -> None:
    if x.dim() != 2 or not 1 <= x.shape[0] <= MAX_ROWS:
        raise UserError(
            f"x has shape {tuple(x.shape)}; expected [M, K] with M from 1 to {MAX_ROWS}: "
            f"above that use torch.nn.functional.linear"
        )
    outputs = next(iter(weights.values())).shape[0]
    check_dtype(x=x, **weights, **({} if out is None else {"out": out}))
    check("x", x, tuple(x.shape), x)
    for name, weight in weights.items():
        check(name, weight, (outputs, x.shape[1]), x)
    if out is not None:
        check("out", out, (x.shape[0], outputs), x)


@torch.no_grad()
def skinny_linear(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """x [M, K] times weight [N, K] transposed, for M from 1 to 8: [M, N].

    All of one dtype (bfloat16, float16, float32), contiguous. Sums in float32 and rounds once;
    writes to `out` where given (it must not be x). Not differentiable.
    """
    _check(x, {"weight": weight}, out)
    return _run(x, weight, None, out) if on_triton(x) else skinny_linear_reference(x, weight, out)


@torch.no_grad()
def gate_up(x: Tensor, gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(x gate^T) * (x up^T), x [M, K] with M from 1 to 8, gate and up [H, K]: [M, H].

    Gate and up may be views of one packed weight. Both products stay in float32 until the result
    is rounded, once. Otherwise as `skinny_linear`.
    """
    _check(x, {"gate": gate, "up": up}, out)
    return _run(x, gate, up, out) if on_triton(x) else gate_up_reference(x, gate, up, out)
