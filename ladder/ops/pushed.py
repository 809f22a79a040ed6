"""Products of few rows, whose partials every rank pushes to all: for the steps of decoding.

A product made for few rows (`ladder.kernels.project`), then one kernel that pushes, waits and sums
(`ladder.comm.push`). It counts its calls in the GPU's memory, so it works in any CUDA graph.
"""

from __future__ import annotations

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.push import DTYPES, PushAllReduce
from ladder.kernels import project
from ladder.kernels.decode import MAX_ROWS
from ladder.ops.products import product
from ladder.ops.refusals import peer_refusal
from ladder.ops.registry import Call, implement
from ladder.ops.workspace import workspace


def push_refusal(call: Call) -> str | None:
    if call.sizes[0] > MAX_ROWS:
        return f"it is for up to {MAX_ROWS} rows"
    if call.dtype not in DTYPES:
        name = str(call.dtype).removeprefix("torch.")
        return f"its kernel takes bfloat16 and float32, not {name}"
    return peer_refusal(call)


@implement("linear_all_reduce", "pushed", push_refusal)
def pushed_linear_all_reduce(group: dist.ProcessGroup, x: Tensor, weight: Tensor) -> Tensor:
    return _sum(group, "linear_all_reduce", x, weight)


@implement("matmul_all_reduce", "pushed", push_refusal)
def pushed_matmul_all_reduce(
    group: dist.ProcessGroup, A: Tensor, B: Tensor, addend: Tensor | None = None
) -> Tensor:
    return _sum(group, "matmul_all_reduce", A, B.t(), addend)


def _sum(
    group: dist.ProcessGroup, op: str, x: Tensor, weight: Tensor, addend: Tensor | None = None
) -> Tensor:
    """The sum of the ranks' x @ weight^T + addend."""
    rows = x.flatten(0, -2).contiguous()
    count = len(rows) * len(weight)
    padded = count + -count % (16 // x.element_size())  # accesses of 16 bytes
    # Before the product, whose library cannot be initialised in a capture either.
    space = workspace(group, op, x.device)
    push = space.once(
        (padded, x.dtype), lambda: PushAllReduce(padded, x.dtype, group, x.device),
        f"slots for {padded} elements",
    )  # fmt: skip
    # To lay a weight out anew takes longer than a product that reads it as it lies.
    own = weight.is_contiguous() and addend is None
    partial = project(rows, weight) if own else product(rows, weight.t(), addend)
    assert partial is not None
    flat = partial.view(-1)
    if padded > count:  # else padding would copy
        flat = F.pad(flat, (0, padded - count))
    total: Tensor = push(flat, True)
    return total[:count].view(*x.shape[:-1], -1)
