"""Matrix products of a decode step that norm their input, push their result and run landings.

They replace the all-reduce kernels of tensor parallelism. `project` multiplies a few rows by a
weight. It can
- read a residual before its norm: the landing has stored sums of squares, and the norm's weight is
  folded into the matrix, so only one factor per row is missing;
- push its result into a slot on every rank (`PushTarget`), where the data is its own flag: an empty
  slot holds -0.0, which is never sent;
- run a landing (`LandingJob`) or the push of an earlier result (`SendJob`) in extra programs (see
  `ladder.kernels.landing`). This takes both off the critical path of a plan that lags; a plan that
  blocks pushes from the product itself and launches its landings separately.

Weights are read before the previous kernel has ended (programmatic dependent launch).

Source: fused computation-collective operations (GEMV + all-reduce), and T3, on NVLink.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.primitives import push_to_slots
from ladder.jit import (
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    jit,
    kernel,
    launch,
    on_triton,
    tl,
    triton,
)
from ladder.kernels.landing import (
    CHUNK,
    LandingJob,
    PushTarget,
    SendJob,
    _land,
    _send,
    land,
    programs_of,
    rider_arguments,
    send,
)
from ladder.models.storage import dequantise, is_quantised

MAX_ROWS = 64
MAX_VECTOR_ROWS = 2  # more rows are multiplied on tensor cores


Scales = tuple[Tensor, Tensor | None]  # of the rows of `weight` and `up`, float32 [N] each


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


@jit
@no_type_check
def _product(
    program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, PDL: tl.constexpr,
    partial, rows, riders, SENDS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One program of a product: BN rows of the weight. SENDS: the first `riders` programs send."""
    # [row of x, row of the weight, column]: three dimensions give all loads the same layout.
    m = tl.arange(0, MP)[:, None, None]
    n = program * BN + tl.arange(0, BN)[None, :, None]
    columns = tl.arange(0, BK)[None, None, :]
    row = n.to(tl.int64) * K  # heads with 2**31 elements and more exist
    # Weights depend on no other kernel, so those of the first step are read before the wait.
    # (0.0: an integer has no conversion to 8-bit floats.)
    first = (n < N) & ((columns < K) | (K >= BK))
    w = tl.load(weight + row + columns, mask=first, other=0.0)
    u = w
    if GATED:
        u = tl.load(up + row + columns, mask=first, other=0.0)
    if PDL:
        gdc_wait()
    # The send has no programs of its own: with a branch for them, the compiler keeps fewer loads of
    # the product in flight (benchmarks/results/README.md).
    if SENDS:  # noqa: SIM102  (known when this is compiled; `program` is not)
        if program < riders:
            _send(program, partial, buffers, start, rows, D, WORLD, RANK, CHUNK, BITS, EMPTY)
    # A thread sums its 8 neighbouring columns at once: one accumulator per row and not eight.
    total = tl.zeros([MP, BN, BK // 8], tl.float32)
    total_up = tl.zeros([MP, BN, BK // 8], tl.float32)
    for k in tl.static_range(0, K, BK):
        at = k + columns
        fits = (at < K) | (K % BK == 0)
        if k > 0:
            w = tl.load(weight + row + at, mask=fits & (n < N), other=0.0)
            if GATED:
                u = tl.load(up + row + at, mask=fits & (n < N), other=0.0)
        a = tl.load(x + m * K + at, mask=fits & ((m < M) | (M == MP)), other=0).to(tl.float32)
        total += tl.sum(tl.reshape(a * w.to(tl.float32), [MP, BN, BK // 8, 8]), 3)
        if GATED:
            total_up += tl.sum(tl.reshape(a * u.to(tl.float32), [MP, BN, BK // 8, 8]), 3)
    y = tl.sum(total, 2, keep_dims=True)
    inside = (m < M) & (n < N)
    if scales is not None:
        y = y * tl.load(scales + n, mask=n < N, other=0)
    if NORM:
        chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
        c = tl.arange(0, CP)[None, None, :]
        parts = tl.load(squares + m * chunks + c, mask=(m < M) & (c < chunks), other=0)
        scale = tl.rsqrt(tl.sum(parts, 2, keep_dims=True) / K + eps)
        y = y * scale
        if GATED:
            y_up = tl.sum(total_up, 2, keep_dims=True) * scale
            if up_scales is not None:
                y_up = y_up * tl.load(up_scales + n, mask=n < N, other=0)
            y = y / (1 + tl.exp(-y)) * y_up
    elif GATED:
        y_up = tl.sum(total_up, 2, keep_dims=True)
        if up_scales is not None:
            y_up = y_up * tl.load(up_scales + n, mask=n < N, other=0)
        y = y / (1 + tl.exp(-y)) * y_up
    _finish(y, m, n, inside, out, add, factor, buffers, start, N, M, x.dtype.element_ty, ADD, STORE,
            PUSH, RANK, WORLD, BITS, EMPTY)  # fmt: skip


@jit
@no_type_check
def _tile(
    program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_product` on tensor cores, for more rows."""
    m, n = tl.arange(0, MP)[:, None], program * BN + tl.arange(0, BN)[None, :]
    columns = tl.arange(0, BK)
    rows = tl.trans(n).to(tl.int64) * K  # [BN, 1]
    total = tl.zeros([MP, BN], tl.float32)
    total_up = tl.zeros([MP, BN], tl.float32)
    if PDL:
        gdc_wait()
    for k in tl.range(0, K, BK, num_stages=STAGES):
        at = k + columns[None, :]
        fits = (at < K) | (K % BK == 0)
        a = tl.load(x + m * K + at, mask=fits & ((m < M) | (M == MP)), other=0).to(KIND)
        w = tl.load(weight + rows + at, mask=fits & (tl.trans(n) < N), other=0.0).to(KIND)
        total = tl.dot(a, tl.trans(w), total, input_precision="ieee")
        if GATED:
            u = tl.load(up + rows + at, mask=fits & (tl.trans(n) < N), other=0.0).to(KIND)
            total_up = tl.dot(a, tl.trans(u), total_up, input_precision="ieee")
    y = total
    if scales is not None:
        y = y * tl.load(scales + n, mask=n < N, other=0)
    if up_scales is not None:
        total_up = total_up * tl.load(up_scales + n, mask=n < N, other=0)
    if NORM:
        chunks: tl.constexpr = (K + CHUNK - 1) // CHUNK
        c = tl.arange(0, CP)[None, :]
        parts = tl.load(squares + m * chunks + c, mask=(m < M) & (c < chunks), other=0)
        scale = tl.rsqrt(tl.sum(parts, 1, keep_dims=True) / K + eps)
        y = y * scale
        total_up = total_up * scale
    if GATED:
        y = y / (1 + tl.exp(-y)) * total_up
    _finish(y, m, n, (m < M) & (n < N), out, add, factor, buffers, start, N, M,
            x.dtype.element_ty, ADD, STORE, PUSH, RANK, WORLD, BITS, EMPTY)  # fmt: skip


@jit
@no_type_check
def _either(
    program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers, start, N,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, WORLD: tl.constexpr,
    CHUNK: tl.constexpr, BITS: tl.constexpr, EMPTY: tl.constexpr, STAGES: tl.constexpr,
    KIND: tl.constexpr, PDL: tl.constexpr, partial, rows, riders, SENDS: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    if STAGES == 0:
        _product(program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers,
                 start, N, M, MP, K, BN, BK, GATED, NORM, CP, ADD, STORE, PUSH, RANK, WORLD,
                 CHUNK, BITS, EMPTY, PDL, partial, rows, riders, SENDS, D)  # fmt: skip
    else:
        _tile(program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers,
              start, N, M, MP, K, BN, BK, GATED, NORM, CP, ADD, STORE, PUSH, RANK, WORLD, CHUNK,
              BITS, EMPTY, STAGES, KIND, PDL)  # fmt: skip


@kernel("both")
@no_type_check
def _project_kernel(
    x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers, start, N,
    residual, landed, landed_squares, sum0, sum1, own0, own1, factor0, factor1, rows, riders,
    products,
    M: tl.constexpr, MP: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, CP: tl.constexpr, ADD: tl.constexpr,
    STORE: tl.constexpr, PUSH: tl.constexpr, RANK: tl.constexpr, RIDES: tl.constexpr,
    D: tl.constexpr, WORLD: tl.constexpr, SUMS: tl.constexpr,
    OWNS: tl.constexpr, REPLACES: tl.constexpr, CHUNK: tl.constexpr, BITS: tl.constexpr,
    EMPTY: tl.constexpr, SPIN_LIMIT: tl.constexpr,
    STAGES: tl.constexpr, KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    program = tl.program_id(0)
    # A landing's programs come first in a product of few rows, which is short, and last in one of
    # tiles, whose long programs would otherwise start late.
    before = riders if STAGES == 0 else 0
    landing = 0 if STAGES == 0 else products
    SENDS: tl.constexpr = (RIDES == 2) & (STAGES == 0)
    if (RIDES == 0) | SENDS:
        _either(program, x, weight, up, scales, up_scales, out, squares, add, factor, eps, buffers,
                start, N, M, MP, K, BN, BK, GATED, NORM, CP, ADD, STORE, PUSH, RANK, WORLD, CHUNK,
                BITS, EMPTY, STAGES, KIND, PDL, residual, rows, riders, SENDS, D)  # fmt: skip
    elif (program >= landing) & (program < landing + riders):
        if PDL:
            gdc_wait()
        if RIDES == 1:
            _land(program - landing, residual, landed, landed_squares, sum0, sum1, own0, own1,
                  factor0, factor1, rows, D, WORLD, SUMS, OWNS, REPLACES, CHUNK, BITS,
                  EMPTY, SPIN_LIMIT)  # fmt: skip
        else:
            _send(program - landing, residual, buffers, start, rows, D, WORLD, RANK, CHUNK, BITS,
                  EMPTY)  # fmt: skip
    else:
        _either(program - before, x, weight, up, scales, up_scales, out, squares, add, factor, eps,
                buffers, start, N, M, MP, K, BN, BK, GATED, NORM, CP, ADD, STORE, PUSH, RANK,
                WORLD, CHUNK, BITS, EMPTY, STAGES, KIND, PDL, residual, rows, riders, False,
                D)  # fmt: skip


def _blocks(
    rows: int, outputs: int, size: int, gated: bool, itemsize: int
) -> tuple[int, int, int, int, int]:
    """(padded rows, weight rows per program, columns per step, warps, stages).

    0 stages: no tensor cores. Chosen by measurements on an H200 (benchmarks/results/README.md).
    """
    if rows > MAX_VECTOR_ROWS:
        padded = max(16, triton.next_power_of_2(rows))
        # Few outputs: smaller blocks or longer steps, to use the whole memory bandwidth.
        few, short = outputs < 2048, gated or size <= 1024
        if padded == 16:
            block, step, stages = (32, 512, 4) if few else (32, 256, 6)
            if short:
                block, step, stages = 32, 128, 5 if gated else 4
        elif padded == 32:
            block, step, stages = (16, 512, 4) if few else (32, 256, 5)
            if gated:
                block, step, stages = 32, 128, 6
        else:
            block, step, stages = 16 if few and not short else 32, 128, 5 if short else 6
        return padded, block, step * 2 // itemsize, 4, stages
    padded = triton.next_power_of_2(rows)
    if rows > 1:
        return padded, 2, 2048 if rows == 2 else 1024, 4, 0
    if gated:
        return padded, 2, 1024, 4, 0
    if size <= 1024:
        return padded, 4, 1024, 4, 0
    if size <= 2048:  # few outputs: more programs
        return padded, 2 if outputs < 4096 else 4, 1024, 4, 0
    if size > 4096:
        return padded, 2, 4096, 8, 0
    if outputs < 1024:
        return padded, 1, 2048, 4, 0
    # One step if little of it is padding: then the whole weight is read before the wait.
    return (padded, 2, 2048, 8, 0) if 3072 < size < 4096 else (padded, 2, 4096, 4, 0)


def _fitting(stages: int, stage_bytes: int, device: torch.device) -> int:
    """The number of stages, at most `stages`, for which this GPU has shared memory."""
    found = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return max(2, min(stages, (found - 1024) // stage_bytes))  # 1 KiB is reserved by the system


def _registers(size: int, block: int, step: int, warps: int) -> dict[str, int]:
    """The register limit of a product of one row with a landing: that of the product alone.

    Without a limit the compiler uses more registers for the landing, so that fewer programs run at
    once, or the product has fewer loads in flight. With 4 warps a thread lands twice as much and
    the limit would cause spills, so there is none: {} (benchmarks/results/README.md).
    """
    if warps < 8:
        return {}
    held = block * step // (32 * warps)  # elements of the weight that a thread has in one step
    return {"maxnreg": 32 if held * min(2, -(-size // step)) <= 32 else 48}


def project(
    x: Tensor, weight: Tensor, up: Tensor | None = None, *,
    squares: Tensor | None = None, eps: float = 0.0, add: Tensor | None = None, factor: float = 1.0,
    push: PushTarget | None = None, keep: bool = True, rider: LandingJob | SendJob | None = None,
    scales: Scales | None = None,
) -> Tensor | None:  # fmt: skip
    """x [M, K] times weight [N, K] transposed, for M from 1 to 64: [M, N].

    The sum is in float32 and rounded once.

    up: the result is silu(x weight^T) * (x up^T). squares: x is a residual before its norm (of
    weight 1), and these are the sums of squares from its landing. add: [M, N], added with `factor`
    to the pushed result (without `push`, to the returned one). push: the slots on every rank to
    which the result is written. keep: also return the result, without `add`. rider: a landing or
    send in the same launch, which must not depend on this product. scales: the weights are stored
    in 8 bits (ladder.models.quantised); they are read so, converted in registers, and multiplied by
    the scales of their rows after the sum.
    """
    rows, size = x.shape
    outputs = weight.shape[0]
    assert 1 <= rows <= MAX_ROWS, rows
    assert x.is_contiguous()
    assert weight.is_contiguous()
    assert weight.shape[1] == size
    wanted = weight.dtype if scales is not None and is_quantised(weight.dtype) else x.dtype
    assert weight.dtype == wanted, (weight.dtype, x.dtype)
    assert up is None or (up.shape == weight.shape and up.is_contiguous())
    for each, matrix in zip(scales or (), (weight, up), strict=False):
        assert (each is None) == (matrix is None)
        assert each is None or (each.shape == (outputs,) and each.dtype == torch.float32)
    assert add is None or add.shape == (rows, outputs), add.shape
    assert squares is None or squares.shape == (rows, -(-size // CHUNK)), squares.shape
    assert push is not None or keep
    if rider is not None:
        assert not rider.launched
    if isinstance(rider, SendJob):
        assert push is None, "a launch can push to only one target"
    if not on_triton(x):
        assert push is None, "only GPUs share slots"
        assert not isinstance(rider, SendJob), "only GPUs share slots"
        if rider is not None:
            land(rider)
        plain = {} if add is None else {"add": add, "factor": factor}
        y = project_reference(x, weight, up, squares=squares, eps=eps, scales=scales, **plain)
        return y.to(x.dtype)
    padded, block, step, warps, stages = _blocks(rows, outputs, size, up is not None, x.itemsize)
    if stages and x.is_cuda:
        stage_bytes = padded * x.itemsize + block * (1 if up is None else 2) * weight.itemsize
        stages = _fitting(stages, stage_bytes * step, x.device)
    products = triton.cdiv(outputs, block)
    riders = programs_of(rider)
    sends = isinstance(rider, SendJob) and stages == 0  # in the product's own programs
    if isinstance(rider, SendJob) and sends and riders > products:
        send(rider)
        rider, riders, sends = None, 0, False
    cap: dict[str, Any] = {}
    if isinstance(rider, LandingJob) and rows == 1 and up is None and weight.itemsize == 2:
        cap = _registers(size, block, step, warps)
    to = rider.push if isinstance(rider, SendJob) else push
    pointers, constants = rider_arguments(rider, x, to)
    if to is not None:
        assert constants["WORLD"] == to.world
    if rider is not None:
        rider.launched = True
    # `add` goes to the returned result only if nothing is pushed.
    store = keep and not (add is not None and push is None)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device) if keep else x
    launch(
        _project_kernel, (products + (0 if sends else riders),), x.device,
        x, weight, weight if up is None else up, *(scales or (None, None)), out,
        x if squares is None else squares,
        x if add is None else add, float(factor), float(eps),
        x if to is None else to.buffers, 0 if to is None else to.start, outputs,
        *pointers, riders, products,
        M=rows, MP=padded, K=size, BN=block, BK=step, GATED=up is not None,
        NORM=squares is not None, CP=triton.next_power_of_2(-(-size // CHUNK)),
        ADD=add is not None, STORE=store, PUSH=push is not None,
        RANK=0 if to is None else to.rank,
        RIDES=0 if rider is None else 1 if isinstance(rider, LandingJob) else 2, **constants,
        STAGES=stages,
        # The interpreter has no bfloat16 product.
        KIND=tl.float32 if interpreted() else getattr(tl, str(x.dtype).removeprefix("torch.")),
        num_warps=warps, **({} if interpreted() else cap),
    )  # fmt: skip
    return out if keep else None
