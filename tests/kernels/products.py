"""Products of a decode step, pushes and landings, against float64: see support.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels import (
    PushTarget,
    SendJob,
    land,
    new_landing,
    project,
    send,
)
from ladder.kernels.limits import CHUNK
from tests.kernels.support import assert_close

EPS = 1e-5
WAYS = ("the product", "a send")  # what pushes a partial


def squares_of(x: Tensor) -> Tensor:
    """The sums of squares after a landing, of [M, D]: [M, ceil(D / CHUNK)] float32."""
    padded = F.pad(x.float().square(), (0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).sum(-1)


def empty_slots(slots: Tensor) -> bool:
    return bool(((slots == 0) & torch.signbit(slots)).all())


def check_product(
    device: str, m: int, n: int, k: int, dtype: torch.dtype, gated: bool, normed: bool, adds: bool,
    beside: bool = False, arrived: Tensor | None = None,
) -> None:  # fmt: skip
    x = torch.randn(m, k, device=device)
    if normed:  # a residual, whose rows differ in size
        x = x * (torch.rand(m, 1, device=device) * 3 + 0.2)
    x = x.to(dtype)
    gate, up = (torch.randn(2, n, k, device=device) / k**0.5).to(dtype)
    add = torch.randn(m, n, device=device).to(dtype)
    results = []
    for kind in (torch.float64, dtype):
        wide = F.rms_norm(x.to(kind), (k,), None, EPS) if normed else x.to(kind)
        y = F.linear(wide, gate.to(kind))
        y = F.silu(y) * F.linear(wide, up.to(kind)) if gated else y
        results.append(y - add.to(kind) / 4 if adds else y)
    options: dict[str, Any] = {"squares": squares_of(x), "eps": EPS} if normed else {}
    options |= {"add": add, "factor": -0.25} if adds else {}
    options |= {"beside": beside, "arrived": arrived}
    found = project(x, gate, up if gated else None, **options)
    assert found is not None
    assert_close(found, *results)
    assert arrived is None or not arrived.any()


def check_pushes(
    device: str, rows: int, world: int, inner: int, size: int, dtype: torch.dtype, by: str
) -> None:
    """Several ranks on one device, one after another; -0.0 among what is sent.

    No reference has slots to share, so there is no case of it.
    """
    start = 64
    sets = [torch.full((start + world * rows * size + 64,), -0.0, dtype=dtype, device=device)
            for _ in range(world)]  # fmt: skip
    buffers = torch.tensor([each.data_ptr() for each in sets], device=device)
    x = torch.randn(world, rows, inner, device=device).to(dtype)
    weight = (torch.randn(world, size, inner, device=device) / inner**0.5).to(dtype)
    residual, add = torch.randn(2, rows, size, device=device).to(dtype)
    # Where only the smallest negative number is added, its part rounds to -0.0 (in the 16-bit
    # types; the interpreter has no such bfloat16).
    weight[:, ::5] = 0
    add[:, ::5] = -torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    partials = torch.einsum("wri,wsi->wrs", x.double(), weight.double())
    plain = torch.stack([F.linear(one, matrix) for one, matrix in zip(x, weight, strict=True)])
    added: dict[str, Any] = {"add": add, "factor": 1 / world}
    for rank in range(world):
        push = PushTarget(buffers, start, rank, world)
        if by == "the product":
            keep = rank != 1
            beside = rank % 2 == 1  # cut otherwise, some of them
            kept = project(x[rank], weight[rank], push=push, keep=keep, beside=beside, **added)
            assert (kept is not None) == keep
            if kept is not None:
                assert_close(kept, partials[rank], plain[rank])
        else:
            partial = project(x[rank], weight[rank], **added)
            assert partial is not None
            partial[:, ::5] = -0.0
            send(SendJob(partial, push))
    views = [each[start : start + rows * size * world].view(world, rows, size) for each in sets]
    for slots in views:
        assert not ((slots == 0) & torch.signbit(slots)).any(), "a peer would wait for ever"
    outs = []
    total = residual.double() + partials.sum(0) + add.double()
    rounded = (plain + (add / world).to(dtype)).sum(0) + residual
    for rank in range(world):
        job = new_landing(residual, sums=[views[rank]])
        around = job.squares.new_full((job.squares.numel() + 8,), torch.nan)
        job.squares = around[:-8].view_as(job.squares)
        land(job)
        assert_close(job.out, total, rounded)
        assert_close(job.squares, squares_of(job.out).double(), squares_of(job.out))
        assert around[-8:].isnan().all()
        outs.append(job.out)
        assert empty_slots(sets[rank]), "a slot is not clear, or something beside it was written"
    for out in outs:
        assert torch.equal(out, outs[0])
