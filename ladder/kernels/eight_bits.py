"""Products of many rows with weights in 8 bits, and the kernels that convert to and from 8 bits.

`linear` multiplies by a weight that `ladder.models.quantised` made. It converts pieces of it to the
activations' type, so that little more than the stored weight is in memory; or it rounds the rows of
its input to e4m3 and multiplies in e4m3 (`torch._scaled_mm`). Hopper's tensor cores keep 14 bits of
a sum of such products, cut and not rounded; after every so many columns cuBLAS promotes it, that is
adds it to a sum in float32 (arXiv 2412.19437, 3.3.2).
"""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.primitives import ASSEMBLY
from ladder.jit import begin, jit, kernel, launch, on_triton, tl, triton
from ladder.kernels.limits import PIECE
from ladder.models.eight_bits import BLOCK
from ladder.models.storage import dequantise, rounded

PRODUCT_CAPABILITY = (9, 0)  # of GPUs whose products in e4m3 have a scale for each row
MULTIPLE = 16  # both sizes of a weight must be multiples for them
WARPS = 8


@jit
@no_type_check
def power(exponent):
    """2^(exponent - 127), for exponents from 1 to 254."""
    return (exponent << 23).to(tl.float32, bitcast=True)


@jit
@no_type_check
def fitting_exponent(largest, LEAST: tl.constexpr):
    """The exponent of the least power of two, at least LEAST, for which e4m3 holds `largest`."""
    bits = largest.to(tl.int32, bitcast=True)
    # 1.75 x 2^8 is e4m3's largest value
    found = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(largest > 0, tl.maximum(found, LEAST), 127)


@jit
@no_type_check
def to_e4m3(x):
    """Round x, float32, to the nearest of e4m3's values, ties to even. Signs are kept, also those
    of zeros; beyond the largest value the result is NaN. Up to 448 it is torch's conversion, bit
    for bit.

    Conversions differ in ties, in small values and beyond the largest. So x is rounded first, and
    only a value of e4m3 is converted.
    """
    bits = x.to(tl.int32, bitcast=True)
    step = power(tl.maximum((bits >> 23) & 0xFF, 121) - 3)  # between e4m3's neighbours of x
    shift = step * 12582912.0  # 1.5 x 2^23: of the sum, float32 keeps multiples of the step
    y = (tl.abs(x) + shift) - shift
    # The sum's zero has no sign, so it is set afterwards; in the float: ptxas of CUDA 12.8 compiles
    # bytes of e4m3 that are changed wrongly (every second one is what its register held before).
    y = (y.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)
    small = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.where(tl.abs(y) <= 448.0, small, 0x7F).to(tl.float8e4nv, bitcast=True)


@jit
@no_type_check
def widened(x, KIND: tl.constexpr):
    """x in KIND. e4m3 becomes bfloat16 by way of float32: Triton's own way is float16, and Hopper
    converts that to bfloat16 one element at a time, at a fraction of the rate of other conversions.
    int8 becomes float32 and float16 by its bits, since Hopper converts integers as slowly: the last
    bits of a float32 from 2^23 on count ones, and those of a float16 from 2^10 on.
    """
    if (x.dtype == tl.int8) & (KIND == tl.float32):  # noqa: SIM300
        bits = x.to(tl.uint8, bitcast=True).to(tl.int32) ^ 0x4B000080  # 2^23 + 128 + x
        x = bits.to(tl.float32, bitcast=True) - 8388736.0
    elif (x.dtype == tl.int8) & (KIND == tl.float16):  # noqa: SIM300
        if ASSEMBLY:
            # 2^10 + 128 + x of four elements, of which the compiler makes twice as much work.
            x = tl.inline_asm_elementwise(
                """{ .reg .b32 t, most; xor.b32 t, $2, 0x80808080; mov.b32 most, 0x64806480;
                prmt.b32 $0, t, 0x64646464, 0x4140; sub.rn.f16x2 $0, $0, most;
                prmt.b32 $1, t, 0x64646464, 0x4342; sub.rn.f16x2 $1, $1, most; }""",
                "=&r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4,
            )  # fmt: skip
    elif (x.dtype == tl.float8e4nv) & (KIND == tl.bfloat16):  # noqa: SIM300  (KIND is a constexpr)
        x = x.to(tl.float32)
    return x.to(KIND)


# -- from 8 bits -----------------------------------------------------------------------------


@kernel("computation")
@no_type_check
def _unpack_kernel(
    stored, scales, out, N, K, ROWS: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program: ROWS rows of COUNT blocks of WIDTH columns."""
    begin(PDL)
    across = tl.cdiv(K, COUNT * WIDTH)
    n = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None, None]
    block = tl.program_id(0) % across * COUNT + tl.arange(0, COUNT)[None, :, None]
    k = block * WIDTH + tl.arange(0, WIDTH)[None, None, :]
    inside = (n < N) & (k < K)
    at = n.to(tl.int64) * K + k
    values = tl.load(stored + at, mask=inside, other=0.0).to(tl.float32)
    if BLOCKED:
        blocks = tl.cdiv(K, WIDTH)
        there = (n < N) & (block < blocks)
        scale = power(tl.load(scales + n * blocks + block, mask=there, other=127).to(tl.int32))
    else:
        scale = tl.load(scales + n, mask=n < N, other=0)
    tl.store(out + at, (values * scale).to(out.dtype.element_ty), mask=inside)


@torch.no_grad()
def unpack(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """`ladder.models.storage.dequantise` in one kernel: contiguous [N, K] times its scales."""
    if not on_triton(stored):
        return dequantise(stored, scales, dtype)
    assert stored.is_contiguous()
    assert scales.is_contiguous()
    out = torch.empty(stored.shape, dtype=dtype, device=stored.device)
    rows, count = 4, 8
    programs = triton.cdiv(stored.shape[0], rows) * triton.cdiv(stored.shape[1], count * BLOCK)
    launch(
        _unpack_kernel, (programs,), stored.device, stored, scales, out, *stored.shape,
        ROWS=rows, COUNT=count, WIDTH=BLOCK, BLOCKED=scales.dim() == 2, num_warps=WARPS,
    )  # fmt: skip
    return out


# -- to 8 bits -------------------------------------------------------------------------------


@kernel("computation")
@no_type_check
def _round_rows_kernel(x, out, scales, K, BK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BK)
    top = tl.zeros([BK], tl.float32)
    for k in range(0, K, BK):
        value = tl.load(x + row * K + k + i, mask=k + i < K, other=0).to(tl.float32)
        top = tl.maximum(top, tl.abs(value))
    exponent = fitting_exponent(tl.max(top, 0), 1)
    tl.store(scales + row, power(exponent))
    factor = power(254 - exponent)
    for k in range(0, K, BK):
        value = tl.load(x + row * K + k + i, mask=k + i < K, other=0).to(tl.float32)
        tl.store(out + row * K + k + i, to_e4m3(value * factor), mask=k + i < K)


@torch.no_grad()
def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`ladder.models.storage.rounded` to fp8 in one kernel: x [M, K] -> ([M, K], [M] float32).

    The scales are powers of two. What is not finite becomes NaN.
    """
    if not on_triton(x):
        return rounded(x, "fp8")
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    width = min(4096, triton.next_power_of_2(x.shape[1]))
    launch(
        _round_rows_kernel, (len(x),), x.device, x, out, scales, x.shape[1],
        BK=width, num_warps=WARPS,
    )  # fmt: skip
    return out, scales


# -- products --------------------------------------------------------------------------------


def linear(
    x: Tensor, stored: Tensor, scales: Tensor, out: Tensor | None = None, rounds: bool = False
) -> Tensor:
    """x [M, K] times a weight in 8 bits [N, K], transposed: [M, N], sums in float32.

    out: where to write it. rounds: round each row of x to e4m3, and multiply in e4m3, with sums as
    above on GPUs; the weight must be one of fp8 with a scale for each row (`product_refusal`).
    """
    if rounds:
        small, factors = round_rows(x)
        if not x.is_cuda:
            exact = F.linear(dequantise(small, factors, torch.float32),
                             dequantise(stored, scales, torch.float32))  # fmt: skip
            found = exact.to(x.dtype)
        else:
            found = torch._scaled_mm(
                small, stored.t(), scale_a=factors[:, None], scale_b=scales[None],
                out_dtype=x.dtype, use_fast_accum=False,  # which would not promote
            )  # fmt: skip
        return found if out is None else out.copy_(found)
    if out is None:
        out = torch.empty(len(x), len(stored), dtype=x.dtype, device=x.device)
    step = max(MULTIPLE, PIECE // stored.shape[1])
    for start in range(0, len(stored), step):
        rows = slice(start, start + step)
        torch.mm(x, unpack(stored[rows], scales[rows], x.dtype).t(), out=out[:, rows])
    return out


def product_refusal(weight: Tensor, dtype: torch.dtype) -> str | None:
    """The reason why `linear` cannot multiply by this weight [N, K] in e4m3, or None."""
    if weight.device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(weight.device)
    if (major, minor) < PRODUCT_CAPABILITY:
        return f"{weight.device} has compute capability {major}.{minor}, and its products need 9.0"
    if dtype != torch.bfloat16:
        return f"its products give bfloat16, and not {str(dtype).removeprefix('torch.')}"
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return f"this rank's part has the shape {list(weight.shape)}, no multiples of {MULTIPLE}"
    return None
