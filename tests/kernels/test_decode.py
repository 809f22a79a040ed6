"""Products, landings and pushes of a decode step, against float64: support.py says how they run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.kernels import PushTarget, SendJob, decode_shapes, land, new_landing, project
from ladder.kernels.limits import MAX_ROWS
from tests.kernels.products import WAYS, check_product, check_pushes, empty_slots, squares_of
from tests.kernels.support import DTYPES, _poisoned_memory, assert_close, on  # noqa: F401  (fixtures)

# -- products ------------------------------------------------------------------------------------

# On a GPU each number of rows, of columns, type and way to use a product is a kernel to compile.
SMALL = [  # rows, weight rows, columns, dtype
    *(
        on("cpu", *s, dtype)
        for s in (
            *((1, 96, 96), (3, 71, 200), (8, 6, 2100), (5, 33, 12), (2, 6, 1024), (1, 6, 4096)),
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
    *(on("cuda", m, 32064, 4096) for m in (1, 5, 64)),
]


@pytest.mark.parametrize(("device", "m", "n", "k", "dtype"), SMALL)
def test_products(device: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    """Each branch of the kernels: plain, gated, of a residual before its norm, with an addend."""
    for gated, normed, adds in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)):
        check_product(device, m, n, k, dtype, bool(gated), bool(normed), bool(adds))


@pytest.mark.parametrize(("device", "m"), [on("interpreter", m) for m in (5, 40)])
def test_a_product_of_many_outputs(device: str, m: int) -> None:
    """Cut as a head's is, whose tiles have more rows."""
    with mock.patch.object(decode_shapes, "MANY", 64):
        check_product(device, m, 150, 300, torch.float32, False, True, False)


@pytest.mark.parametrize(("device", "m", "n", "k"), LARGE)
def test_products_of_llamas(device: str, m: int, n: int, k: int) -> None:
    check_product(device, m, n, k, torch.bfloat16, False, False, False)
    check_product(device, m, n, k, torch.bfloat16, True, True, False)


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


PUSHES = [  # rows, ranks, columns, size of the residual, dtype, what pushes
    *(on("interpreter", 3, 4, 40, 70, dtype, by) for dtype in DTYPES for by in WAYS),
    *(
        on("interpreter", *s, torch.bfloat16, by)
        # Sends in the product's own programs, and landings of two parts at once there.
        for s in ((1, 2, 40, 70), (17, 2, 12, 2100), (33, 2, 12, 4100))
        for by in WAYS
    ),
    *(
        on("cuda", *s, dtype, by)
        for s in ((1, 2, 1100, 2000), (3, 4, 1024, 4096), (20, 2, 1100, 2000), (48, 3, 1100, 4000))
        for dtype in DTYPES
        for by in WAYS
    ),
]


@pytest.mark.parametrize(("device", "rows", "world", "inner", "size", "dtype", "by"), PUSHES)
def test_pushed_partials_land_beside_the_next_product(
    device: str, rows: int, world: int, inner: int, size: int, dtype: torch.dtype, by: str
) -> None:
    with mock.patch.object(decode_shapes, "FULL", 1):  # of so few tiles, too, riders are inside
        check_pushes(device, rows, world, inner, size, dtype, by)


@pytest.mark.parametrize(
    ("device", "span"), [on(each, span) for each in ("interpreter", "cuda") for span in (1, 2, 4)]
)
def test_riders_take_as_many_chunks_at_once_as_they_are_told(device: str, span: int) -> None:
    """Rows of 5 chunks, so that the last part of a row has fewer."""
    with mock.patch.object(decode_shapes, "span", lambda _, rows, *more: span if rows else 0):
        check_pushes(device, 4, 2, 12, 4100, torch.bfloat16, WAYS[-1])


def test_riders_keep_to_the_programs_that_there_are() -> None:
    """16 rows of a send beside 40 tiles; 64 rows of a landing of 6 chunks, 192 pairs, of which 132
    begin at once."""
    with mock.patch.object(decode_shapes, "FULL", 1):
        assert decode_shapes.span(True, 16, 4, 40, eight_bits=False) == 0
        assert decode_shapes.span(True, 16, 4, 64, eight_bits=False) == 1
    assert decode_shapes.span(False, 64, 6, 256, eight_bits=False) == 0


@pytest.mark.parametrize(
    ("sends", "rows", "products", "found"),
    [
        # Rows of 4096, and the tiles of QKV, and of O, of gate and up and of down of an 8B at TP 4.
        (True, 4, 128, 0), (True, 8, 128, 0), (True, 9, 128, 1), (True, 16, 128, 1),
        (True, 17, 128, 0), (True, 16, 96, 1), (True, 16, 95, 0), (True, 64, 256, 0),
        (False, 33, 128, 0), (False, 34, 128, 2), (False, 64, 128, 2), (False, 64, 95, 0),
        (False, 64, 127, 0), (False, 48, 96, 2), (False, 49, 96, 0), (False, 33, 256, 0),
    ],
)  # fmt: skip
def test_where_a_rider_has_no_programs_of_its_own(
    sends: bool, rows: int, products: int, found: int
) -> None:
    assert decode_shapes.span(sends, rows, 4, products, eight_bits=False) == found
    assert decode_shapes.span(sends, rows, 4, products, eight_bits=True) == 0
