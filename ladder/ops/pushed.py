"""Products whose rows a kernel pushes, before or after: for decoding, and for short prompts.

`pushed`: a product (for up to 64 rows by a kernel made for few, `ladder.kernels.project`), then one
kernel that sends, waits and sums. Either all ranks send to all at once (`ladder.comm.push`), or
each rank sums its share and sends that on (`ladder.comm.two_shot`), which moves less between more
than two ranks. Nothing overlaps, but up to some megabytes this takes less time than the backend's
all-reduce. A reduce-scatter needs only the first of the two shots, and a gather, before its
product, only the second. A landing is in the same kernel (`ladder.kernels.push_land`); in an
all-reduce every rank lands all rows.

`pushing`: for up to 64 rows the product itself pushes, each of its programs as soon as it has its
elements. One kernel waits and sums (`ladder.kernels.collect`), as in a decode step of the engine.
Both count their calls in the GPU's memory, so they work in any CUDA graph.

Source of `pushing`: fused computation-collective operations (Punniyamurthy et al., 2024), GEMV +
AllReduce.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.push import DTYPES, PushAllReduce
from ladder.comm.two_shot import KINDS, TwoShotAllReduce
from ladder.jit import multiprocessors
from ladder.kernels import SendJob, project, send
from ladder.kernels.collect import Collector
from ladder.kernels.limits import MAX_ROWS
from ladder.kernels.push_land import PushedLanding
from ladder.models.errors import UserError
from ladder.operator_names import GATHER, LANDING, REDUCE, REDUCE_LANDING, REDUCE_LINEAR, SCATTER
from ladder.ops.calls import rows_back, rows_first
from ladder.ops.products import product
from ladder.ops.refusals import landing_refusal, peer_refusal
from ladder.ops.registry import Call, implement
from ladder.ops.workspace import Workspace, workspace

LARGEST, SMALLEST = 2**24, 2**16  # bytes: of the largest message; of the smallest slots
SHOTS = ("shots",)


def push_refusal(call: Call) -> str | None:
    rows, outputs = (call.exact or call.sizes)[:2]
    return _refusal(call, rows * outputs, "partials")


def gather_refusal(call: Call) -> str | None:
    rows, _, inputs = call.exact or call.sizes
    return _refusal(call, rows * inputs, "rows of all ranks")


def _refusal(call: Call, elements: int, what: str) -> str | None:
    if elements * call.dtype.itemsize > LARGEST:
        return f"it is for {what} of up to {LARGEST // 2**20} MiB"
    if call.dtype not in DTYPES:
        name = str(call.dtype).removeprefix("torch.")
        return f"its kernel takes bfloat16, float16 and float32, not {name}"
    return peer_refusal(call)


@implement(REDUCE_LINEAR, "pushed", push_refusal, SHOTS)
def pushed_linear_all_reduce(
    group: dist.ProcessGroup, x: Tensor, weight: Tensor, shots: int = 1
) -> Tensor:
    """shots: 1: every rank sends its partial to all; 2: each sums its share, and sends that."""
    return _sum(group, REDUCE_LINEAR, x, weight, None, shots)


def pushing_refusal(call: Call) -> str | None:
    if (call.exact or call.sizes)[0] > MAX_ROWS:
        return f"its product is for up to {MAX_ROWS} rows"
    return push_refusal(call)


@implement(REDUCE_LINEAR, "pushing", pushing_refusal)
def pushing_linear_all_reduce(group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
    rows = x.flatten(0, -2).contiguous()
    size = len(rows) * len(weight) * x.element_size()
    space = workspace(group, REDUCE_LINEAR, x.device)
    collect = _sized(space, group, Collector, size, x.dtype)
    if weight.is_contiguous():
        project(rows, weight, push=collect.target, keep=False, fixed=False)
    else:
        send(SendJob(product(rows, weight.t(), None), collect.target))
    total: Tensor = collect(len(rows), len(weight))
    return total.view(*x.shape[:-1], -1)


@implement(REDUCE, "pushed", push_refusal, SHOTS)
def pushed_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None, shots: int = 1
) -> Tensor:
    """shots: as of `pushed_linear_all_reduce`."""
    return _sum(group, REDUCE, A, B.t(), addend, shots)


@implement(GATHER, "pushed", gather_refusal)
def pushed_all_gather_matmul(
    group: dist.ProcessGroup, A: Tensor, Bs: list[Tensor], gather_dim: int, return_A: bool
) -> tuple[Tensor | None, list[Tensor]]:
    own = rows_first(A, gather_dim).contiguous()
    shots = all_shots(workspace(group, GATHER, A.device), group, kinds=1)
    flat, count = _padded(own.view(1, -1))
    whole = shots.gather(flat[0])[:, :count].reshape(-1, own.shape[1])
    outs = [rows_back(product(whole, B, None), A, gather_dim) for B in Bs]
    return rows_back(whole, A, gather_dim) if return_A else None, outs


@implement(SCATTER, "pushed", push_refusal)
def pushed_matmul_reduce_scatter(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, reduce_op: str, scatter_dim: int
) -> Tensor:
    rows, n = rows_first(A, scatter_dim), B.shape[1]
    shots = all_shots(workspace(group, SCATTER, A.device), group, kinds=1)
    flat, count = _padded(product(rows, B, None).view(shots.world, -1))
    out = shots.scatter(flat, reduce_op == "avg")[:count].view(-1, n)
    return rows_back(out, A, scatter_dim)


def landing_push_refusal(call: Call) -> str | None:
    return push_refusal(call) or landing_refusal(call)


@implement(LANDING, "pushed", landing_push_refusal)
def pushed_scatter_landing(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float,
    scatter_dim: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, before = rows_first(A, scatter_dim), rows_first(residual, scatter_dim)
    landed, normed = _land(group, LANDING, rows, B, before.contiguous(), weight, eps)
    return rows_back(landed, A, scatter_dim), rows_back(normed, A, scatter_dim)


@implement(REDUCE_LANDING, "pushed", landing_push_refusal)
def pushed_landing_everywhere(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    rows, before = A.flatten(0, -2), residual.flatten(0, -2).contiguous()
    landed, normed = _land(group, REDUCE_LANDING, rows, B, before, weight, eps)
    return landed.view(residual.shape), normed.view(residual.shape)


def _land(
    group: dist.ProcessGroup, op: str, rows: Tensor, B: Tensor, residual: Tensor, weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    space = workspace(group, op, rows.device)
    land: PushedLanding = _sized(space, group, PushedLanding, residual.nbytes, rows.dtype)
    out = torch.empty_like(residual), torch.empty_like(residual)
    land(product(rows, B, None), residual, weight.contiguous(), eps, out)
    return out


def _padded(parts: Tensor) -> tuple[Tensor, int]:
    """Rows padded to whole accesses of 16 bytes, and their number of elements before."""
    count, width = parts.shape[1], parts.element_size()
    more = -count % (16 // width)
    if more:  # else padding would copy
        return F.pad(parts, (0, more)), count
    return (parts.clone() if parts.storage_offset() * width % 4 else parts), count  # as words


def _sum(
    group: dist.ProcessGroup, op: str, x: Tensor, weight: Tensor, addend: Tensor | None, shots: int
) -> Tensor:
    """The sum of the ranks' x @ weight^T + addend."""
    if shots not in (1, 2):
        raise UserError(f"shots={shots}; expected 1 or 2")
    rows = x.flatten(0, -2)
    size = len(rows) * len(weight) * x.element_size()
    # Before the product: in a capture this raises, and cuBLAS cannot be initialised there either.
    push = _kernel(workspace(group, op, x.device), group, size + -size % 16, x.dtype, shots)
    # Copying a weight to another layout takes longer than a product that reads it as it lies.
    few = len(rows) <= MAX_ROWS and weight.is_contiguous() and addend is None
    if few:
        partial = project(rows.contiguous(), weight, fixed=False)
    else:
        partial = product(rows, weight.t(), addend)
    assert partial is not None
    flat, count = _padded(partial.view(1, -1))
    total: Tensor = push(flat[0], True)
    return total[:count].view(*x.shape[:-1], -1)


def _kernel(
    space: Workspace, group: dist.ProcessGroup, size: int, dtype: torch.dtype, shots: int
) -> PushAllReduce | TwoShotAllReduce:
    """The kernel that sums messages of `size` bytes. Prompts of many lengths share the slots."""
    if shots == 2:
        return all_shots(space, group)
    push: PushAllReduce = _sized(space, group, PushAllReduce, size, dtype)
    return push


def all_shots(
    space: Workspace, group: dist.ProcessGroup, size: int = LARGEST, kinds: int = KINDS
) -> TwoShotAllReduce:
    """Two-shot kernels for messages of `size` bytes or more, on all SMs: nothing runs beside them.

    kinds: see `TwoShotAllReduce`.
    """
    device, most, padding = space.device, _most(size), 16 * space.world
    found: TwoShotAllReduce = space.once(
        ("shots", most, kinds),
        lambda: TwoShotAllReduce(most + padding, group, device, multiprocessors(device, 2), kinds),
        f"slots for {most} bytes",
    )
    return found


def _sized(
    space: Workspace, group: dist.ProcessGroup, kind: type[Any], size: int, dtype: torch.dtype
) -> Any:
    """A `kind` for messages of `size` bytes or more; messages of many sizes share it."""
    most = _most(size)
    return space.once(
        (kind, most, dtype), lambda: kind(most // dtype.itemsize, dtype, group, space.device),
        f"slots for {most} bytes",
    )  # fmt: skip


def _most(size: int) -> int:
    """`size` rounded up: the bytes of slots that messages of similar sizes share."""
    return max(SMALLEST, 1 << (size - 1).bit_length())
