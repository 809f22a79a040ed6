"""Kernels of prefill against float64.

How the kernels are run is in support.py. test_gpu_prefill.py runs the same checks, and more, on
GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.kernels.prefill import land_rows, rotary_prompt, swiglu
from ladder.models import UserError
from tests.kernels.support import (  # noqa: F401  (fixtures)
    DTYPES,
    _poisoned_memory,
    assert_close,
    check_land_rows,
    check_rotary_prompt,
    check_swiglu,
    on,
)

ON_A_CPU = pytest.mark.parametrize("device", [on("cpu"), on("interpreter")])


@ON_A_CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size", "count"), [(3, 96, 4), (1, 200, 0), (5, 1536, 8)])
def test_land_rows(device: str, rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    """A piece or the residual left out or taken twice, a norm of something else, a row beyond."""
    check_land_rows(device, rows, size, count, dtype)


@ON_A_CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(3, 96), (33, 6), (9, 515), (1, 1536)])
def test_swiglu(device: str, rows: int, inner: int, dtype: torch.dtype) -> None:
    check_swiglu(device, rows, inner, dtype)


@ON_A_CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "heads"), [(2, 5, (4, 2, 16)), (1, 37, (3, 1, 12)), (2, 130, (2, 2, 64))]
)
def test_rotary_prompt(
    device: str, batch: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype,
    normed: bool,
) -> None:  # fmt: skip
    """Places counted wrong in a second block or sequence, heads mixed up, values turned or normed,
    a norm of the wrong half, the keys' gain for the queries'."""
    check_rotary_prompt(device, batch, length, heads, dtype, normed)


@ON_A_CPU
def test_land_rows_sums_in_rank_order(device: str) -> None:
    """1e8 + 1 - 1e8 is 0 in float32, in this order alone: no pairwise or reversed sum."""
    size = 64
    values = [torch.full((2, size), value, device=device) for value in (1e8, 1.0, -1e8)]
    residual, weight = torch.full_like(values[0], 0.5), torch.ones(size, device=device)
    landed, _ = land_rows(values, residual, weight, 1e-5)
    assert (landed == 0.5).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: land_rows([x] * 9, x, x[0], 1e-5), "9 pieces"),
        (lambda x: land_rows([x[:1]], x, x[0], 1e-5), r"pieces\[0\] has shape \(1, 8\)"),
        (lambda x: land_rows([x.half()], x, x[0], 1e-5), "dtypes"),
        (lambda x: swiglu(x[:, :7]), r"expected \[M, 2 H\]"),
        (lambda x: swiglu(x[:, :6]), "not contiguous"),
        (
            lambda x: rotary_prompt(
                x.view(1, 2, 8), x.new_zeros(9, 2), *x.new_zeros(2, 1, 1, 1, 2), 2, 1
            ),
            "L of 2 or more",
        ),
        (
            lambda x: rotary_prompt(
                x.view(1, 2, 8), x.new_zeros(1, 2), *x.new_zeros(2, 1, 1, 9, 2), 2, 1
            ),
            "table is",
        ),
    ],
)
def test_refusals(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(torch.randn(2, 8))
