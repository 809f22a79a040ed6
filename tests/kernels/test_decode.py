"""Products, landings and pushes of a decode step, against float64: support.py says how they run."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.kernels import PushTarget, SendJob, decode_shapes, land, new_landing, project
from ladder.kernels.landing import span_of
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


RIDES = [  # chunks at once, programs of its own, rows of the weight for each of the product's
    *((span, 0, 16) for span in (1, 2, 4)),
    (1, 20, 16),
    (4, 3, 12),  # of 8 parts: two or three for each
    (4, 8, 4),
]


@pytest.mark.parametrize(
    ("device", "way"), [on(each, way) for each in ("interpreter", "cuda") for way in RIDES]
)
def test_riders_ride_as_they_are_told(device: str, way: tuple[int, int, int]) -> None:
    """Rows of 5 chunks, so that the last part of a row has fewer."""
    span, programs, own = way

    def ride(sends: bool, rows: int, chunks: int, *more: object) -> decode_shapes.Ride:
        return decode_shapes.Ride(span, programs if rows else 0, 16, own)

    with mock.patch.object(decode_shapes, "ride", ride):
        check_pushes(device, 4, 2, 12, 4100, torch.bfloat16, WAYS[-1])


@pytest.mark.parametrize(
    ("sends", "rows", "outputs", "found"),
    [
        # Of an 8B at TP 4, rows of 4 chunks: QKV (1536 outputs) has 96 tiles of 16 rows, gate and
        # up (3584) 128 of 28, O and down (4096) 128 of 32. A chunk for each program where they have
        # room; else, in this order:
        (True, 8, 1536, (1, 32, 16, 16)), (False, 0, 4096, (1, 0, 32, 32)),
        # more chunks for each;
        (True, 16, 1536, (2, 32, 16, 16)), (True, 24, 1536, (4, 24, 16, 16)),
        (True, 36, 1536, (4, 36, 16, 16)),
        # beside larger tiles, of gate and up, and down; several rows for each of few programs;
        (True, 9, 3584, (4, 9, 32, 32)), (True, 16, 3584, (4, 16, 32, 32)),
        (True, 41, 3584, (4, 16, 32, 32)), (True, 64, 3584, (4, 16, 32, 32)),
        (True, 48, 1536, (4, 16, 16, 16)), (False, 9, 4096, (4, 9, 64, 36)),
        (False, 16, 4096, (4, 16, 64, 36)),
        # inside of the tiles, in pairs;
        (False, 34, 4096, (2, 0, 32, 32)), (False, 64, 4096, (2, 0, 32, 32)),
        (False, 64, 8192, (2, 0, 32, 32)), (False, 48, 1536, (2, 0, 16, 16)),
        # behind them.
        (True, 5, 3584, (1, 20, 32, 28)), (True, 8, 3584, (1, 32, 32, 28)),
        (True, 17, 3584, (1, 68, 32, 28)), (True, 40, 3584, (1, 160, 32, 28)),
        (False, 8, 4096, (1, 32, 32, 32)), (False, 17, 4096, (1, 68, 32, 32)),
        (False, 33, 4096, (1, 132, 32, 32)), (False, 49, 1536, (1, 196, 16, 16)),
        (False, 64, 1520, (1, 256, 16, 16)),  # 95 tiles
        (False, 67, 8192, (1, 268, 32, 32)),  # more pairs than begin at once
        (True, 16, 8192, (1, 64, 32, 32)), (True, 64, 8192, (1, 256, 32, 32)),  # two waves of tiles
        # Few rows have as few programs as they can, also if chunks have room.
        (True, 4, 1536, (4, 4, 16, 16)), (True, 4, 3584, (4, 4, 32, 28)),
        (False, 4, 4096, (4, 4, 32, 32)), (False, 3, 4096, (4, 3, 32, 32)),
    ],
)  # fmt: skip
def test_where_a_rider_rides(
    sends: bool, rows: int, outputs: int, found: tuple[int, int, int, int]
) -> None:
    block = 16 if outputs < decode_shapes.FEW else 32
    ride = partial(decode_shapes.ride, sends, rows, 4, outputs, block, outputs == 3584)
    assert ride(eight_bits=False) == found
    gains = rows <= 8 or found[1] > 16 or (sends and rows > 40)  # of weights in 8 bits
    behind = decode_shapes.rows_each(outputs, block, outputs == 3584)
    assert ride(eight_bits=True) == (found if gains else (1, 4 * rows, block, behind))


def test_cuts_of_few_rows() -> None:
    """Steps of 512 columns where these divide the weight's, but of float32; larger tiles have half
    of that."""
    cuts = {
        (rows, outputs, size): decode_shapes.blocks(rows, outputs, size, False, 2)[1:6]
        for rows, outputs, size in (
            (3, 1536, 4096), (16, 1536, 4096), (4, 4096, 3584), (16, 1024, 2304), (4, 2304, 2304),
            (16, 4096, 1024),
        )
    }  # fmt: skip
    assert list(cuts.values()) == [
        (16, 512, 4, 6, 4), (16, 512, 4, 6, 4), (32, 512, 4, 4, 1), (16, 256, 4, 8, 4),
        (32, 256, 4, 6, 1), (32, 128, 4, 4, 1),
    ]  # fmt: skip
    single = decode_shapes.blocks(16, 4096, 3584, False, 4)
    assert (single.step, single.stages) == (128, 6)
    assert decode_shapes.of_larger(512, 4, 2) == (256, 8)
    assert decode_shapes.of_larger(256, 4, 4) == (128, 8)
    assert decode_shapes.of_larger(128, 4, 2) == (128, 4)


def test_riders_of_other_shapes() -> None:
    """Rows of other numbers of chunks, tiles that were too large, and threads that cannot hold 4
    chunks."""
    ride = decode_shapes.ride
    for chunks, span in ((1, 1), (2, 2), (3, 4), (5, 4)):
        found = ride(True, 2, chunks, 3584, 32, True, False)
        assert found == (span, 2 * -(-chunks // span), 32, 28)
        assert ride(True, 64, chunks, 3584, 32, True, False).programs == 64 * chunks
    # 36 rows would need twice the tile; gated, or of 128 rows, it takes too many registers.
    assert ride(False, 16, 4, 4096, 32, True, False) == (1, 64, 32, 32)
    assert ride(False, 16, 4, 8192, 64, False, False) == (1, 64, 64, 64)
    assert ride(False, 16, 4, 4096, 32, False, False, most=2) == (2, 16, 64, 36)
    assert ride(False, 64, 4, 4096, 32, False, False, most=1) == (1, 256, 32, 32)
    assert ride(False, 4, 4, 4096, 32, False, False, most=2) == (1, 16, 32, 32)


@pytest.mark.parametrize(
    ("world", "sums", "dtype", "warps", "found"),
    [
        (4, 1, torch.bfloat16, 4, 4), (2, 2, torch.bfloat16, 4, 4), (8, 1, torch.bfloat16, 4, 2),
        (8, 2, torch.bfloat16, 4, 1), (4, 1, torch.float32, 4, 2), (8, 2, torch.float32, 4, 1),
        (3, 1, torch.bfloat16, 4, 4), (6, 1, torch.bfloat16, 4, 2), (4, 1, torch.bfloat16, 2, 2),
        (4, 0, torch.bfloat16, 4, 4),
    ],
)  # fmt: skip
def test_a_program_has_no_more_chunks_than_its_threads_hold(
    world: int, sums: int, dtype: torch.dtype, warps: int, found: int
) -> None:
    slots = [torch.zeros(world, 2, 4096, dtype=dtype)] * sums
    job = new_landing(torch.zeros(2, 4096, dtype=dtype), sums=slots)
    assert span_of(job, warps) == found
    target = PushTarget(torch.zeros(1, dtype=torch.int64), 0, 0, 1)
    assert span_of(SendJob(job.residual, target), warps) == (4 if dtype == torch.bfloat16 else 2)
