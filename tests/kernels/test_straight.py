"""Products whose weights go straight into tensor-core operands: the cases of test_decode.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from ladder.kernels import decode_shapes, project
from tests.kernels.products import WAYS, check_product, check_pushes
from tests.kernels.support import _poisoned_memory, on  # noqa: F401  (a fixture)

HALVES = (torch.bfloat16, torch.float16)


@contextmanager
def straight(block: int, step: int, warps: int) -> Iterator[None]:
    def blocks(rows: int, *_: object) -> tuple[int, int, int, int, int]:
        padded = max(8, decode_shapes.power_of_2(rows))
        return padded, block, step, warps, decode_shapes.STRAIGHT

    with mock.patch.object(decode_shapes, "blocks", blocks):
        yield


CASES = [  # rows, weight rows, columns, (weight rows of a program, columns of a step, warps), dtype
    *(
        on("interpreter", *shape, dtype)
        for shape in (
            (1, 33, 200, (16, 128, 4)),
            (3, 48, 256, (16, 128, 2)),
            (8, 5, 12, (16, 128, 4)),
            (9, 64, 520, (32, 256, 4)),
            (5, 20, 600, (16, 128, 2)),
            (2, 16, 512, (16, 128, 4)),
            (17, 40, 100, (16, 64, 1)),
        )
        for dtype in HALVES
    ),
    *(
        on("cuda", *shape, dtype)
        for shape in (
            (1, 33, 200, (16, 128, 4)),
            (3, 71, 256, (16, 256, 4)),
            (5, 5, 12, (16, 128, 4)),
            (16, 71, 1096, (16, 256, 8)),
            (17, 64, 520, (32, 256, 4)),
            (64, 71, 200, (32, 128, 4)),
        )
        for dtype in HALVES
    ),
]


@pytest.mark.parametrize(("device", "m", "n", "k", "shape", "dtype"), CASES)
def test_products(
    device: str, m: int, n: int, k: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Each branch, with and without steps, rows and columns that are not whole."""
    with straight(*shape):
        for gated, normed, adds in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)):
            check_product(device, m, n, k, dtype, bool(gated), bool(normed), bool(adds))


@pytest.mark.parametrize(
    ("device", "m", "n", "k", "shape"),
    [
        on("cuda", m, n, k, (16 if m < 64 else 32, step, warps))
        for m in (1, 4, 16, 64)
        for n, k in ((1536, 4096), (4096, 1024), (4096, 3584), (2048, 2304))
        for step, warps in ((256, 4), (512, 8))
    ],
)
def test_products_of_llamas(
    device: str, m: int, n: int, k: int, shape: tuple[int, int, int]
) -> None:
    with straight(*shape):
        check_product(device, m, n, k, torch.bfloat16, False, False, False)
        check_product(device, m, n, k, torch.bfloat16, True, True, False)


@pytest.mark.parametrize(
    ("device", "rows", "world", "inner", "size", "dtype", "by"),
    [
        *(on("interpreter", 3, 2, 40, 70, dtype, by) for dtype in HALVES for by in WAYS),
        *(
            on("cuda", *shape, dtype, by)
            for shape in ((1, 2, 1100, 2000), (3, 4, 1024, 4096), (64, 3, 1100, 2000))
            for dtype in HALVES
            for by in WAYS
        ),
    ],
)
def test_what_rides(
    device: str, rows: int, world: int, inner: int, size: int, dtype: torch.dtype, by: str
) -> None:
    """Pushes, sends and landings."""
    with straight(16, 128, 4):
        check_pushes(device, rows, world, inner, size, dtype, by)


def test_weights_of_other_sizes_are_refused() -> None:
    with straight(16, 128, 4), mock.patch("ladder.kernels.decode.on_triton", return_value=True):
        x = torch.ones(3, 32)
        with pytest.raises(AssertionError, match="float32"):
            project(x, torch.ones(16, 32))
