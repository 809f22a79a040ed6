"""Products, landings and pushes of a decode step, against float64: support.py says how they run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.kernels import PushTarget, decode_shapes, land, new_landing, project
from ladder.kernels.decode_shapes import Cut
from ladder.kernels.limits import MAX_ROWS
from tests.kernels.products import WAYS, check_product, check_pushes, empty_slots, squares_of
from tests.kernels.support import DTYPES, _poisoned_memory, assert_close, on  # noqa: F401  (fixtures)

# -- products ------------------------------------------------------------------------------------

# On a GPU each number of rows, of columns, type and way to use a product is a kernel to compile.
SMALL = [  # rows, weight rows, columns, dtype
    *(
        on("cpu", *s, dtype)
        for s in (
            *((1, 96, 96), (3, 71, 200), (8, 6, 2100), (5, 33, 12), (2, 34, 1024), (1, 34, 4096)),
            *(
                (2, 71, 9000),
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
        for m in (1, 2, 8, 32, 64)
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


@pytest.mark.parametrize(("device", "m"), [on("interpreter", m) for m in (2, 5, 20, 33, 64)])
def test_a_product_beside_other_kernels(device: str, m: int) -> None:
    """Whose tiles have 64 rows of the weight, as the first operand."""
    two = {(2, 150, 300, False): Cut(16, 64, 128, 4, 5, swapped=True)}
    sizes = {"MIDDLE": range(64, 200), "FEW": 64, "SHAPES_BESIDE": two}
    with mock.patch.multiple(decode_shapes, **sizes):
        assert decode_shapes.blocks(m, 150, 300, False, 2, beside=True).block == 64
        with mock.patch.object(decode_shapes, "blocks", wraps=decode_shapes.blocks) as cut:
            for dtype in (torch.bfloat16, torch.float16):
                check_product(device, m, 150, 300, dtype, False, True, True, beside=True)
    assert [call.args[-1] for call in cut.call_args_list] == [True, True]


@pytest.mark.parametrize(
    ("device", "m", "n", "k"),
    [
        *(on("interpreter", *shape) for shape in ((33, 70, 1100), (64, 40, 1300))),
        *(on("cuda", *shape) for shape in ((33, 1536, 4096), (64, 768, 4096), (64, 1000, 2304))),
    ],
)
def test_programs_share_the_columns_of_a_tile(device: str, m: int, n: int, k: int) -> None:
    """With an odd number of steps, too. What no program has written is NaN, and would show."""
    assert decode_shapes.blocks(m, n, k, False, 2, shared=True).shares == 2
    arrived = torch.zeros(n, dtype=torch.int32, device=device)
    torch.use_deterministic_algorithms(True)  # then new memory holds NaN
    try:
        for dtype in (torch.bfloat16, torch.float16):
            for normed, adds in ((False, False), (True, True)):
                check_product(device, m, n, k, dtype, False, normed, adds, arrived=arrived)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "m", "n", "k"), LARGE)
def test_products_of_llamas(device: str, m: int, n: int, k: int) -> None:
    check_product(device, m, n, k, torch.bfloat16, False, False, True, beside=True)
    check_product(device, m, n, k, torch.bfloat16, True, True, False, beside=True)
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
    nowhere = PushTarget(torch.zeros(1, dtype=torch.int64), 0, 0, 1)
    with pytest.raises(AssertionError, match="only GPUs share slots"):
        project(x, weight, push=nowhere)


# -- landings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize(
    ("device", "rows", "size", "world"),
    [
        *(
            on(where, *s)
            for where in ("cpu", "interpreter")
            for s in ((3, 1500, 3), (1, 96, 1), (9, 2049, 2), (2, 4000, 4), (64, 70, 2))
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


SLOW = (2, 3, 12, 4100), (33, 2, 12, 4100)  # in the interpreter, half a minute each
PUSHES = [  # rows, ranks, columns, size of the residual, dtype, what pushes
    *(on("interpreter", 3, 4, 40, 70, dtype, by) for dtype in DTYPES for by in WAYS),
    *(
        on("interpreter", *s, torch.bfloat16, by, slow=s in SLOW)
        # Rows of 1 to 5 chunks, the last of them full or not; as many rows as there may be.
        for s in (
            *((1, 3, 40, 70), (5, 3, 12, 2000), (17, 2, 12, 2100), (4, 2, 12, 4096)),
            *((4, 3, 12, 4100), (64, 2, 12, 70), *SLOW),
        )
        for by in WAYS
    ),
    *(
        on("cuda", *s, dtype, by)
        for s in (
            *((1, 2, 1100, 2000), (3, 4, 1024, 4096), (20, 2, 1100, 2000), (48, 3, 1100, 4000)),
            (64, 8, 1100, 3000),
        )
        for dtype in DTYPES
        for by in WAYS
    ),
]


@pytest.mark.parametrize(("device", "rows", "world", "inner", "size", "dtype", "by"), PUSHES)
def test_pushed_partials_land(
    device: str, rows: int, world: int, inner: int, size: int, dtype: torch.dtype, by: str
) -> None:
    check_pushes(device, rows, world, inner, size, dtype, by)


# -- cuts ----------------------------------------------------------------------------------------


def test_cuts_of_few_rows() -> None:
    """Steps of 512 columns where these divide the weight's, but of float32."""
    cuts = {
        (rows, outputs, size): decode_shapes.blocks(rows, outputs, size, False, 2)[1:6]
        for rows, outputs, size in (
            (3, 1536, 4096), (16, 1536, 4096), (4, 4096, 3584), (16, 1024, 2304), (4, 2304, 2304),
            (16, 4096, 1024), (17, 1536, 4096), (32, 1536, 4096), (32, 1024, 2304),
        )
    }  # fmt: skip
    assert list(cuts.values()) == [
        (16, 512, 4, 6, 4), (16, 512, 4, 6, 4), (32, 512, 4, 4, 1), (16, 256, 4, 8, 4),
        (32, 256, 4, 6, 1), (32, 128, 4, 4, 1), *[(16, 512, 4, 4, 4)] * 2, (16, 512, 4, 4, 1),
    ]  # fmt: skip
    single = decode_shapes.blocks(16, 4096, 3584, False, 4)
    assert (single.step, single.stages) == (128, 6)


def test_cuts_of_products_beside_other_kernels() -> None:
    """Products of many outputs have tiles of 64 rows of the weight, in fp8 of 17 rows and more (O's
    of 3 and 4, too), and of 33 rows those of an 8B's rank. Few outputs have tiles of 32 there in
    bfloat16. Gate and up of 9 to 32 rows have fewer stages, and so has down in fp8 of 3, 4 and
    9 to 16. Sizes and types that were not measured keep theirs."""

    def cuts(rows: int, outputs: int, size: int, **kind: Any) -> list[Cut]:
        kind = {"gated": False, "itemsize": 2} | kind
        return [decode_shapes.blocks(rows, outputs, size, **kind, beside=each) for each in (0, 1)]

    large = Cut(64, 64, 128, 4, 5, swapped=True)
    for rows in (33, 64):
        for kind in ({}, {"eight_bits": True, "half": True}):
            assert cuts(rows, 4096, 1024, **kind)[1] == large
            assert cuts(rows, 4096, 3584, **kind)[1] == large._replace(stages=6)
        apart, beside = cuts(rows, 1536, 4096)
        assert (apart.block, beside) == (16, apart._replace(block=32))
    for rows, padded in ((3, 16), (16, 16), (17, 32), (32, 32)):
        few = large._replace(padded=padded)
        assert cuts(rows, 4096, 1024)[1] == cuts(rows, 2304, 512)[1] == few
        assert cuts(rows, 8192, 2048)[1] == few._replace(stages=7)
        apart, beside = cuts(rows, 4096, 3584, eight_bits=True, half=True)
        assert apart.block == 32
        if rows > 16:
            assert beside == Cut(32, 64, 256, 4, 5, swapped=True)
    for rows, stages in ((2, 6), (3, 3), (4, 3), (5, 6), (8, 6), (9, 4), (16, 4)):
        apart, beside = cuts(rows, 4096, 3584, eight_bits=True, half=True)
        assert (apart.stages, beside) == (6, apart._replace(stages=stages))
        apart, beside = cuts(rows, 4096, 1024, eight_bits=True, half=True)
        assert beside == (Cut(16, 64, 256, 4, 3, swapped=True) if rows in (3, 4) else apart)
        for outputs, size in ((4096, 14336), (4096, 7168), (4096, 2048), (8192, 1024)):
            apart, beside = cuts(rows, outputs, size, eight_bits=True, half=True)
            assert apart == beside
    for shape in ((2, 8192, 2048), (16, 1536, 4096), (64, 8192, 2048), (64, 2304, 512)):
        apart, beside = cuts(*shape)
        assert apart == beside
    for rows, outputs, size, fewer in (
        (8, 3584, 4096, False), (9, 3584, 4096, True), (32, 3584, 4096, True),
        (16, 1792, 4096, False), (17, 1792, 4096, True), (32, 7168, 8192, False),
    ):  # fmt: skip
        apart, beside = cuts(rows, outputs, size, gated=True)
        assert beside == apart._replace(stages=4 if fewer else 6)
    for kind in ({"itemsize": 4}, {"gated": True}, {"eight_bits": True}, {"pieces": True}):
        apart, beside = cuts(64, 4096, 1024, **kind)
        assert apart == beside, kind
    for outputs, stages in ((3584, 8), (7168, 4)):
        apart, beside = cuts(64, outputs, 4096, gated=True, pieces=True)
        assert (apart.stages, beside) == (stages, apart._replace(stages=4))
    apart, beside = cuts(16, 3584, 4096, gated=True, itemsize=4)
    assert apart == beside
    assert cuts(64, 1536, 4096, itemsize=4)[0] == cuts(64, 1536, 4096, itemsize=4)[1]


@pytest.mark.parametrize(("device", "m"), [on("interpreter", 64)])
def test_the_last_to_arrive_has_the_sum(device: str, m: int) -> None:
    """And no other stores. With a count of one too many, that is the first of two."""
    x, weight = torch.randn(m, 1280).bfloat16(), torch.randn(40, 1280).bfloat16()
    arrived = torch.ones(40, dtype=torch.int32)
    torch.use_deterministic_algorithms(True)  # new memory holds NaN, that of the second, too
    try:
        found = project(x, weight, arrived=arrived)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found is not None
    assert found.isnan().all()


def test_programs_that_share_a_tile() -> None:
    """QKV of many rows: of pieces as many as there are SMs for, in 16 bits two if it runs alone."""

    def shares(rows: int, outputs: int, size: int, **kind: Any) -> list[int]:
        kind = {"gated": False, "itemsize": 2, "shared": True} | kind
        return [
            decode_shapes.blocks(rows, outputs, size, **kind, beside=each).shares for each in (0, 1)
        ]

    pieces: dict[str, Any] = {"eight_bits": True, "pieces": True}
    for rows, outputs, size, kind, expected in (
        (64, 1536, 4096, {}, [2, 1]), (32, 1536, 4096, {}, [1, 1]), (64, 2560, 8192, {}, [1, 1]),
        (64, 1536, 4096, {"itemsize": 4}, [1, 1]), (64, 1536, 4096, {"eight_bits": True}, [1, 1]),
        (64, 1536, 4096, {"gated": True}, [1, 1]), (64, 1536, 4096, {"shared": False}, [1, 1]),
        (33, 1536, 4096, pieces, [4, 2]), (64, 768, 4096, pieces, [4, 4]),
        (64, 1024, 2304, pieces, [3, 2]), (64, 2560, 8192, pieces, [2, 2]),
        (64, 3072, 4096, pieces, [2, 2]), (64, 6144, 4096, pieces, [1, 1]),
        (64, 1536, 512, pieces, [2, 2]), (64, 1536, 1280, pieces, [3, 2]),
        (17, 1536, 4096, pieces, [4, 2]),
        (16, 1536, 4096, pieces, [1, 1]), (32, 2560, 8192, pieces, [1, 1]),
        (64, 1536, 4096, pieces | {"scaled": 128}, [4, 1]),
        (32, 1536, 4096, pieces | {"scaled": 128}, [1, 1]),
        (64, 1536, 4096, pieces | {"gated": True}, [1, 1]),
        (64, 1536, 4096, pieces | {"shared": False}, [1, 1]),
    ):  # fmt: skip
        assert shares(rows, outputs, size, **kind) == expected, (rows, outputs, size, kind)


def test_cuts_of_one_and_two_rows() -> None:
    """Some depend on what runs beside; in float32, and in 8 bits but of gate and up, none does."""

    def cuts(*shape: Any, **kind: Any) -> list[Cut]:
        kind = {"gated": False, "itemsize": 2} | kind
        return [decode_shapes.blocks(*shape, **kind, beside=each) for each in (False, True)]

    alone, beside = cuts(1, 4096, 1024)
    assert (alone.block, alone.step, alone.warps) == (4, 1024, 2)
    assert beside == alone._replace(block=2)
    alone, beside = cuts(1, 1536, 4096)
    assert (alone.step, beside.step) == (4096, 2048)
    alone, beside = cuts(2, 4096, 3584)
    assert (alone.stages, beside) == (0, Cut(16, 64, 128, 4, 7, swapped=True))
    alone, beside = cuts(1, 3584, 4096, gated=True, eight_bits=True)
    assert (alone.warps, beside) == (4, alone._replace(warps=2))
    for kind in ({"itemsize": 4}, {"eight_bits": True}):
        for shape in ((1, 4096, 1024), (2, 4096, 1024), (2, 4096, 3584)):
            alone, beside = cuts(*shape, **kind)
            assert alone == beside, kind
    for shape in ((2, 1536, 4096), (1, 4096, 3584), (1, 1536, 8192)):
        alone, beside = cuts(*shape)
        assert alone == beside, shape
    # Steps that leave little padding.
    steps = [cuts(1, 4096, size)[0].step for size in (512, 3584, 7168)]
    assert steps == [512, 1024, 1024]
    assert cuts(1, 4096, 7168, eight_bits=True)[0].step == 1024
    assert [cuts(1, 4096, size, gated=True)[0].warps for size in (2048, 3072, 8192)] == [4, 2, 4]


def test_programs_of_gated_products_have_equal_shares() -> None:
    """Of the fullest SM's rows; no more than a tile has. Others have a tile each."""
    rows = {
        (outputs, block): decode_shapes.rows_each(outputs, block, True)
        for outputs, block in ((3584, 32), (1024, 32), (4224, 32), (4228, 32), (7168, 32), (34, 16))
    }
    assert list(rows.values()) == [28, 8, 32, 20, 28, 4]
    assert decode_shapes.rows_each(3584, 32, False) == 32
    assert decode_shapes.rows_each(32064, 64, False) == 64
