"""Messages of rows in 8 bits: packed, summed and unpacked as torch does it, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ladder.kernels.messages import (
    pack,
    pack_reference,
    scale_at,
    sum_messages,
    sum_messages_reference,
    unpack,
)
from ladder.models.errors import UserError
from ladder.models.storage import rounded
from tests.kernels.support import DTYPES, _poisoned_memory, on  # noqa: F401  (fixtures)

KINDS = ["fp8", "int8"]


def some_rows(count: int, size: int, dtype: torch.dtype) -> Tensor:
    """Rows of very different sizes, zeros among them."""
    rows = torch.randn(count, size) * 4.0 ** torch.randint(-9, 6, (count, 1))
    rows[count // 2] = 0
    rows[:, :: size // 3] = 0
    return rows.to(dtype)


def parts_of(message: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Its elements and its scales, as bytes: what fills up is no part of it."""
    at = scale_at(size)
    return message[:, :size].cpu(), message[:, at : at + 4].cpu()


def assert_same(found: Tensor, expected: Tensor, size: int) -> None:
    assert found.shape == expected.shape
    for mine, theirs in zip(parts_of(found, size), parts_of(expected, size), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("device", "count", "size"),
    [on("cpu", 7, 40), on("interpreter", 7, 40), on("interpreter", 3, 1003),
     on("cuda", 7, 40), on("cuda", 130, 4096), on("cuda", 33, 12289)],
)  # fmt: skip
def test_packed_and_unpacked(
    device: str, count: int, size: int, dtype: torch.dtype, kind: str
) -> None:
    rows = some_rows(count, size, dtype)
    message = pack(rows.to(device), kind, count + 2)
    assert_same(message, pack_reference(rows, kind, count + 2), size)
    small, scales = rounded(rows, kind)
    values = (small.float() * scales[:, None]).to(dtype)
    found = unpack(message[None], kind, size, dtype).cpu()
    assert torch.equal(found[:count], values)
    assert (found[count:] == 0).all()
    several = torch.stack((message, message.flip(0), message))[:, :count]
    exact = small.float() * scales[:, None]
    turned = torch.cat((torch.zeros(2, size), exact.flip(0)))[:count]
    found = unpack(several, kind, size, torch.float32).cpu()
    assert torch.equal(found, exact + turned + exact)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("device", "count", "size", "world", "rank"),
    [on("cpu", 5, 40, 4, 1), on("interpreter", 5, 40, 4, 1), on("interpreter", 3, 1003, 2, 0),
     on("cuda", 5, 40, 4, 1), on("cuda", 70, 4096, 2, 0), on("cuda", 70, 12289, 4, 3)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums(
    device: str, count: int, size: int, world: int, rank: int, dtype: torch.dtype, kind: str
) -> None:
    """The own message is not read; of the last rank's share there are fewer rows."""
    own = some_rows(count - 1, size, dtype)
    others = [pack_reference(some_rows(count, size, dtype), kind, count) for _ in range(world)]
    others[rank] = torch.full_like(others[rank], 0x7F)
    parts = torch.stack(others)
    found = sum_messages(own.to(device), parts.to(device), rank, kind)
    assert_same(found, sum_messages_reference(own, parts, rank, kind), size)
    values = [unpack(each[None], kind, size, torch.float64) for each in others]
    values[rank] = torch.cat((own, torch.zeros(1, size, dtype=dtype))).double()
    exact = torch.stack(values).sum(0)
    error = (unpack(found.cpu()[None], kind, size, torch.float64) - exact).abs()
    relative, absolute = (2.0**-4, 2.0**-9) if kind == "fp8" else (2.0**-20, 0.501 / 127)
    assert (error <= relative * exact.abs() + absolute * exact.abs().amax(1, keepdim=True)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
def test_what_is_not_finite_stays_so(device: str, bad: float, kind: str) -> None:
    """Its row becomes NaN, and no other one."""
    rows = torch.randn(6, 48)
    rows[2, 7] = bad
    message = pack(rows.to(device), kind, 6)
    own = torch.zeros(6, 48, device=device)
    parts = torch.stack((message, message))
    for found in (message, sum_messages(own, parts, 1, kind)):
        values = unpack(found[None], kind, 48, torch.float32).cpu()
        assert values[2].isnan().all()
        assert values[[0, 1, 3, 4, 5]].isfinite().all()


def test_rows_that_no_program_can_hold_are_refused() -> None:
    with pytest.raises(UserError, match="rows have 16385 columns; messages in 8 bits have 1 to"):
        pack(torch.zeros(1, 16385), "fp8", 1)
