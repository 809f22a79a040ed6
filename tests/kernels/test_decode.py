"""Products, landings and pushes of a decode step, against float64: support.py says how they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels import PushTarget, SendJob, land, new_landing, project, send
from ladder.kernels.decode import MAX_ROWS
from ladder.kernels.landing import CHUNK
from tests.kernels.support import DTYPES, _poisoned_memory, assert_close, on  # noqa: F401  (fixtures)

EPS = 1e-5


def squares_of(x: Tensor) -> Tensor:
    """The sums of squares after a landing, of [M, D]: [M, ceil(D / CHUNK)] float32."""
    padded = F.pad(x.float().square(), (0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).sum(-1)


def empty_slots(slots: Tensor) -> bool:
    return bool(((slots == 0) & torch.signbit(slots)).all())


# -- products ------------------------------------------------------------------------------------

# On a GPU each number of rows, of columns, type and way to use a product is a kernel to compile.
SMALL = [  # rows, weight rows, columns, dtype
    *(
        on("cpu", *s, dtype)
        for s in (
            *((1, 96, 96), (3, 71, 200), (8, 6, 2100), (5, 33, 12), (2, 1, 1024), (1, 6, 4096)),
            *(
                (2, 7, 9000),
                (9, 71, 200),
                (16, 34, 96),
                (17, 34, 1304),
                (33, 5, 1304),
                (64, 33, 12),
            ),
        )
        for dtype in DTYPES
    ),
    *(
        on("interpreter", *s, dtype)
        for s in ((1, 18, 96), (3, 33, 200), (5, 33, 12), (2, 6, 1100), (9, 34, 96), (17, 5, 1100))
        for dtype in DTYPES
    ),
    # On either side of where tensor cores take over, powers of two, and not.
    *(
        on("cuda", m, 71, 200, dtype)
        for m in (*range(1, 10), 16, 17, 33, 64)
        for dtype in DTYPES[:2]
    ),
    *(
        on("cuda", *s, dtype)
        for s in ((1, 33, 12), (2, 7, 9000), (3, 96, 96), (5, 33, 12), (9, 7, 9000), (64, 96, 96))
        for dtype in DTYPES
    ),
]
# 8B, 70B and 1B at TP 4: QKV, attention's output, down; and 8B's head.
LARGE = [
    *(
        on("cuda", m, *s)
        for m in (1, 8, 32, 64)
        for s in ((1536, 4096), (4096, 1024), (4096, 3584))
    ),
    *(on("cuda", m, *s) for m in (1, 33) for s in ((2560, 8192), (8192, 2048), (8192, 7168))),
    *(on("cuda", m, *s) for m in (2, 5, 16) for s in ((768, 2048), (2048, 512))),
    *(on("cuda", m, 32064, 4096) for m in (1, 64)),
]


@pytest.mark.parametrize(("device", "m", "n", "k", "dtype"), SMALL)
def test_products(device: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Each branch of the kernels: plain, gated, of a residual before its norm, with an addend."""
    for gated, normed, adds in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)):
        check_product(device, m, n, k, dtype, bool(gated), bool(normed), bool(adds))


@pytest.mark.parametrize(("device", "m", "n", "k"), LARGE)
def test_products_of_llamas(device: str, m: int, n: int, k: int) -> None:
    check_product(device, m, n, k, torch.bfloat16, False, False, False)
    check_product(device, m, n, k, torch.bfloat16, True, True, False)


def check_product(
    device: str, m: int, n: int, k: int, dtype: torch.dtype, gated: bool, normed: bool, adds: bool
) -> None:
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
    found = project(x, gate, up if gated else None, **options)
    assert found is not None
    assert_close(found, *results)


def test_a_product_that_does_not_fit_is_refused() -> None:
    x, weight = torch.randn(4, 16), torch.randn(4, 16)
    refused: list[tuple[Tensor, Tensor, dict[str, Any]]] = [
        (torch.randn(MAX_ROWS + 1, 16), weight, {}),
        (x[:0], weight, {}),
        (x.t().contiguous().t(), weight, {}),
        (x, weight[:, :15].contiguous(), {}),
        (x, torch.randn(16, 4).t(), {}),
        (x, weight, {"keep": False}),  # and nowhere to push to
    ]
    for one, other, options in refused:
        with pytest.raises(AssertionError):
            project(one, other, **options)
    landed = new_landing(x)
    land(landed)
    with pytest.raises(AssertionError):
        project(x, weight, rider=landed)
    with pytest.raises(AssertionError):
        land(landed)
    nowhere = PushTarget(torch.zeros(1, dtype=torch.int64), 0, 0, 1)
    with pytest.raises(AssertionError, match="only one target"):
        project(x, weight, push=nowhere, rider=SendJob(x, nowhere))
    with pytest.raises(AssertionError, match="only GPUs share slots"):
        project(x, weight, push=nowhere)
    with pytest.raises(AssertionError, match="only GPUs share slots"):
        project(x, weight, rider=SendJob(x, nowhere))


# -- landings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(
    ("device", "rows", "size", "world"),
    [
        *(
            on(where, *s)
            for where in ("cpu", "interpreter")
            for s in ((3, 1500, 3), (1, 96, 1), (9, 2049, 2))
        ),
        *(on("cuda", *s) for s in ((3, 1500, 3), (1, 96, 1), (64, 8192, 4), (8, 4096, 8))),
    ],
)
def test_a_landing(
    device: str, rows: int, size: int, world: int, replaces: bool, dtype: torch.dtype
) -> None:
    """Catches outputs that land twice or not at all, a residual kept or lost, slots not cleared."""
    residual, own, other = torch.randn(3, rows, size, device=device).to(dtype)
    slots = torch.randn(2, world, rows, size, device=device).to(dtype)
    parts = [*slots.flatten(0, 1), -1.0 * own, 2.0 * other, *([] if replaces else [residual])]
    exact = torch.stack([part.double() for part in parts]).sum(0)
    before = residual.clone()
    job = new_landing(residual, sums=list(slots.clone()), owns=[(own, -1.0), (other, 2.0)],
                  replaces=replaces)  # fmt: skip
    land(job)
    assert_close(job.out, exact, exact.to(dtype))
    assert_close(job.squares, squares_of(job.out).double(), squares_of(job.out))
    assert all(empty_slots(taken) for taken in job.sums)
    assert torch.equal(residual, before)
    again = new_landing(
        residual, sums=list(slots), owns=[(own, -1.0), (other, 2.0)], replaces=replaces
    )
    land(again)
    assert torch.equal(again.out, job.out)


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
def test_a_landing_of_nothing_is_the_residual(device: str) -> None:
    residual = torch.randn(2, 1030, device=device)
    job = new_landing(residual)
    land(job)
    assert torch.equal(job.out, residual)
    assert job.out.data_ptr() != residual.data_ptr()


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
@pytest.mark.parametrize("rows", [2, 9])
def test_a_rider_has_rows_of_its_own(device: str, rows: int) -> None:
    residual, own = torch.randn(2, 5, 1100, device=device)
    x, weight = torch.randn(rows, 40, device=device), torch.randn(7, 40, device=device)
    job, alone = (new_landing(residual, owns=[(own, 0.5)]) for _ in range(2))
    y = project(x, weight, rider=job)
    land(alone)
    assert torch.equal(y, project(x, weight))
    assert torch.equal(job.out, alone.out)
    assert_close(job.squares, alone.squares.double(), alone.squares)


WAYS = ("the product", "a send", "a send that rides")
PUSHES = [  # rows, ranks, columns, size of the residual, dtype, what pushes
    *(on("interpreter", 3, 4, 40, 70, dtype, by) for dtype in DTYPES for by in WAYS),
    *(
        on("interpreter", *s, torch.bfloat16, by)
        for s in ((1, 2, 40, 70), (9, 2, 12, 1030))
        for by in WAYS
    ),
    *(
        on("cuda", *s, dtype, by)
        for s in ((1, 2, 1100, 2000), (3, 4, 1024, 4096), (9, 2, 1100, 2000), (64, 3, 1100, 2000))
        for dtype in DTYPES
        for by in WAYS
    ),
]


@pytest.mark.parametrize(("device", "rows", "world", "inner", "size", "dtype", "by"), PUSHES)
def test_pushed_partials_land_beside_the_next_product(
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
    for rank in range(world):
        push = PushTarget(buffers, start, rank, world)
        if by == "the product":
            keep = rank != 1
            kept = project(x[rank], weight[rank], push=push, add=add, factor=1 / world, keep=keep)
            assert (kept is not None) == keep
        else:
            partial = project(x[rank], weight[rank], add=add, factor=1 / world)
            assert partial is not None
            partial[:, ::5] = -0.0
            sending, kept = SendJob(partial, push), None
            if by == "a send":
                send(sending)
            else:
                kept = project(x[rank], weight[rank], rider=sending)
            assert sending.launched
        if kept is not None:
            assert_close(kept, partials[rank], plain[rank])
    views = [each[start : start + rows * size * world].view(world, rows, size) for each in sets]
    for slots in views:
        assert not ((slots == 0) & torch.signbit(slots)).any(), "a peer would wait for ever"
    # Every rank lands it inside another product.
    outs = []
    total = residual.double() + partials.sum(0) + add.double()
    rounded = (plain + (add / world).to(dtype)).sum(0) + residual
    for rank in range(world):
        job = new_landing(residual, sums=[views[rank]])
        y = project(x[rank], weight[rank], rider=job)
        assert_close(y, partials[rank], plain[rank])
        assert job.launched
        assert_close(job.out, total, rounded)
        assert_close(job.squares, squares_of(job.out).double(), squares_of(job.out))
        outs.append(job.out)
        assert empty_slots(sets[rank]), "a slot is not clear, or something beside it was written"
    for out in outs:
        assert torch.equal(out, outs[0])
