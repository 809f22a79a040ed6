"""Matrix products of a decode step that norm their input and push their result.

They replace the all-reduce kernels of tensor parallelism. `project` multiplies a few rows by a
weight. It can
- read a residual before its norm: the landing has stored sums of squares, and the norm's weight is
  folded into the matrix, so only one factor per row is missing;
- push its result into a slot on every rank (`PushTarget`), where the data is its own flag: an empty
  slot holds -0.0, which is never sent (see `ladder.kernels.landing`).

Weights are read before the previous kernel has ended (programmatic dependent launch), unless that
kernel may write them (`fixed`).

Source: fused computation-collective operations (GEMV + all-reduce), and T3, on NVLink.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.primitives import EMPTY
from ladder.jit import (
    element,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    kernel,
    launch,
    multiplied,
    on_triton,
    tl,
    triton,
)
from ladder.kernels import decode_shapes
from ladder.kernels.carveout import stages_that_fit
from ladder.kernels.landing import PushTarget, bits_of
from ladder.kernels.limits import CHUNK, MAX_ROWS
from ladder.kernels.pieces import MOST_COLUMNS, Pieces
from ladder.kernels.tiles import _tile, _tile_of_pieces
from ladder.kernels.vectors import _product
from ladder.models.eight_bits import BLOCK
from ladder.models.storage import dequantise, is_quantised

Scales = tuple[Tensor, Tensor | None]  # of `weight` and `up`: see ladder.models.quantised


def project_reference(
    x: Tensor, weight: Tensor, up: Tensor | None = None, *,
    squares: Tensor | None = None, eps: float = 0.0, add: Tensor | None = None, factor: float = 1.0,
    scales: Scales | None = None,
) -> Tensor:  # fmt: skip
    x = x.float()
    if scales is not None:
        weight = dequantise(weight, scales[0], torch.float32)
        if up is not None:
            assert scales[1] is not None
            up = dequantise(up, scales[1], torch.float32)
    if squares is not None:
        x = x * torch.rsqrt(squares.sum(1, keepdim=True) / x.shape[1] + eps)
    y = F.linear(x, weight.float())
    if up is not None:
        y = F.silu(y) * F.linear(x, up.float())
    return y if add is None else y + add.float() * factor


@kernel("both")
@no_type_check
def _project_kernel(
    x, weight, up, scales, up_scales, pieces, factors, sums, arrived, out, squares, add, factor,
    eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    WP: tl.constexpr, CHUNKS: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, GIVES: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    SWAP: tl.constexpr, ALIGN: tl.constexpr, SHARES: tl.constexpr, FIXED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK: the columns that share a scale; 0: a scale for each row, or none.

    EARLY: steps of `_tile` whose weights are brought into L2 before the wait; a power of two, or 0.
    AHEAD: before the wait, a tile reads what its end needs beside the sums. ROWS, PARTS, SWAP,
    SHARES: see `_tile`. ALIGN: rows of the weight begin at multiples of so many elements, and so
    does `up`, counted from `weight`. FIXED: weights are read before the wait. WP: WORLD, rounded up
    to a power of two.
    """
    if PDL:
        gdc_launch_dependents()
        if not FIXED:
            gdc_wait()
    WAITS: tl.constexpr = PDL & FIXED
    program, share = tl.program_id(0), 0
    if SHARES > 1:
        program, share = program // SHARES, program % SHARES
    if STAGES == 0:
        _product(program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers,
                 start, N, M, MP, K, BN, BK, GATED, NORM, CP, ADD, STORE, PUSH, RANK, WORLD,
                 WP, CHUNKS, BITS, EMPTY, GIVES, WAITS, BLOCK)  # fmt: skip
    elif pieces is not None:
        _tile_of_pieces(program, share, weight, up, scales, up_scales, sums, arrived, pieces,
                        factors, out, squares, add, factor, eps, buffers, start, N, M, MP, K, BN,
                        BK, GATED, NORM, CHUNKS, CP, ADD, STORE, PUSH, RANK, WORLD, BITS, EMPTY,
                        STAGES, KIND, GIVES, WAITS, BLOCK, EARLY, AHEAD, ROWS, PARTS, ALIGN,
                        SHARES)  # fmt: skip
    else:
        _tile(program, share, x, weight, up, scales, up_scales, sums, arrived, out, squares, add,
              factor, eps, buffers, start, N, M, MP, K, BN, BK, GATED, NORM, CP, ADD, STORE, PUSH,
              RANK, WORLD, CHUNKS, BITS, EMPTY, STAGES, KIND, GIVES, WAITS, BLOCK, EARLY, AHEAD,
              ROWS, PARTS, SWAP, ALIGN, SHARES)  # fmt: skip


def _kind_of(dtype: torch.dtype) -> object:
    """The Triton type in which pieces are multiplied; the interpreter cannot multiply e4m3."""
    if dtype == torch.int8:
        return tl.int8
    return tl.float32 if interpreted() else tl.float8e4nv


def project(
    x: Tensor, weight: Tensor, up: Tensor | None = None, *,
    squares: Tensor | None = None, pieces: Pieces | None = None, eps: float = 0.0,
    add: Tensor | None = None, factor: float = 1.0, push: PushTarget | None = None,
    keep: bool = True, scales: Scales | None = None, fixed: bool = True,
    gives: torch.dtype | None = None, beside: bool = False, out: Tensor | None = None,
    arrived: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """x [M, K] times weight [N, K] transposed, for M from 1 to 64: [M, N] in `gives`, or as x.

    The sum is in float32 (but see `pieces`) and rounded once.

    up: the result is silu(x weight^T) * (x up^T). squares: x is a residual before its norm (of
    weight 1), and these are the sums of squares from its landing. pieces: those of x, which
    multiply a weight of their dtype if `decode_shapes.by_pieces`. add: [M, N], added with `factor`
    to the pushed result (without `push`, to the returned one). push: the slots on every rank to
    which the result is written. keep: also return it, without `add`.
    scales: of weights that are stored in 8 bits (ladder.models.quantised). They are read as stored,
    and converted in registers, except with `pieces`; the sum of a row, or of a block's columns, is
    multiplied by its scale. fixed: no kernel that may still run when this is launched writes the
    weights, their scales or the target's addresses, so they are read before the previous one has
    ended. beside: other kernels are meant to run at the same time. out: memory for the result.
    arrived: int32 zeros, one for each tile, and zeros again afterwards: they count the programs
    that share the columns of a tile. Launches that share it must follow one another.
    """
    rows, size = x.shape
    outputs, gives = weight.shape[0], gives or x.dtype
    assert 1 <= rows <= MAX_ROWS, rows
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape[1] == size
    wanted = weight.dtype if scales is not None and is_quantised(weight.dtype) else x.dtype
    assert weight.dtype == wanted, (weight.dtype, x.dtype)
    assert up is None or (up.shape == weight.shape and up.is_contiguous())
    for each, matrix in zip(scales or (), (weight, up), strict=False):
        assert (each is None) == (matrix is None)
        assert each is None or (each.shape, each.dtype) in (
            ((outputs,), torch.float32),
            ((outputs, -(-size // BLOCK)), torch.uint8),
        )
    assert add is None or add.shape == (rows, outputs), add.shape
    chunks = 1 if squares is None else squares.shape[1]
    assert squares is None or squares.shape in ((rows, 1), (rows, -(-size // CHUNK)))
    assert push is not None or keep
    assert out is None or (keep and out.is_contiguous())
    assert out is None or (out.shape, out.dtype) == ((rows, outputs), gives)
    assert fixed or scales is None, "scales are read early"
    if not on_triton(x):
        assert push is None, "only GPUs share slots"
        plain = {} if add is None else {"add": add, "factor": factor}
        y = project_reference(x, weight, up, squares=squares, eps=eps, scales=scales, **plain)
        return y.to(gives) if out is None else out.copy_(y)
    blocked = scales is not None and scales[0].dim() == 2
    if pieces is not None and (
        weight.dtype != pieces.values.dtype or not decode_shapes.by_pieces(rows)
        or size > MOST_COLUMNS
    ):  # fmt: skip
        pieces = None
    padded, block, step, warps, stages, parts, swapped, shares = decode_shapes.blocks(
        rows, outputs, size, up is not None, x.itemsize, scales is not None, pieces is not None,
        scales is not None and x.dtype == torch.float16, beside, scaled=BLOCK if blocked else 0,
        shared=arrived is not None,
    )  # fmt: skip
    if blocked and stages:
        assert step in (BLOCK * parts, BLOCK * parts * (2 if pieces else 1)), (step, parts)
    own = decode_shapes.rows_each(outputs, block, up is not None) if stages else block
    if stages:
        column = padded * x.itemsize + block * (1 if up is None else 2) * weight.itemsize
        stages = stages_that_fit(stages, column * step, x.device)
    align = 16 // weight.itemsize
    if size % align or (up is not None and (up.data_ptr() - weight.data_ptr()) % 16):
        align = 1
    # `add` goes to the returned result only if nothing is pushed.
    store = keep and not (add is not None and push is None)
    if out is None:
        out = torch.empty(rows, outputs, dtype=gives, device=x.device) if keep else x
    world = 1 if push is None else push.world
    tiles, sums = triton.cdiv(outputs, own), x
    if shares > 1:
        assert arrived is not None, "programs that share a tile are counted"
        assert tiles <= len(arrived), (tiles, len(arrived))
        partial = padded * block * (1 if up is None else 2)
        sums = x.new_empty(tiles * shares * partial, dtype=torch.float32)
    launch(
        _project_kernel, (tiles * shares,), x.device,
        x, weight, weight if up is None else up, *(scales or (None, None)),
        *(pieces or (None, None)), sums, x if arrived is None else arrived, out,
        x if squares is None else squares,
        x if add is None else add, float(factor), float(eps),
        x if push is None else push.buffers, 0 if push is None else push.start, outputs,
        M=rows, MP=padded, K=size, BN=block, BK=step, GATED=up is not None,
        NORM=squares is not None, CHUNKS=chunks, CP=triton.next_power_of_2(chunks),
        ADD=add is not None, STORE=store, PUSH=push is not None,
        RANK=0 if push is None else push.rank, WORLD=world, WP=triton.next_power_of_2(world),
        BITS=bits_of(x), EMPTY=EMPTY[x.element_size()], STAGES=stages,
        BLOCK=BLOCK if blocked else 0, EARLY=decode_shapes.EARLY,
        AHEAD=fixed and padded <= decode_shapes.MOST_AHEAD,
        ROWS=own, PARTS=parts, SWAP=swapped, ALIGN=align, SHARES=shares,
        FIXED=fixed or stages > 0,  # L2, into which these are brought early, is never stale
        KIND=multiplied(x.dtype) if pieces is None else _kind_of(pieces.values.dtype),
        GIVES=element(gives), num_warps=warps,
    )  # fmt: skip
    return out if keep else None
