"""The sum of slots."""

from __future__ import annotations

import pytest
import torch

from ladder.kernels import slots as kernels
from ladder.kernels.prefill import land_rows_reference
from ladder.kernels.slots import SlotArrivals, land_slots, sum_slots
from ladder.models import UserError
from tests.comm.scripted import coming, weakened
from tests.kernels.support import (  # noqa: F401  (a fixture)
    DTYPES,
    _poisoned_memory,
    assert_close,
    on,
)


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "rows", "columns"), [(2, 3, 8), (3, 41, 103), (8, 5, 2048)])
def test_sum_slots(device: str, dtype: torch.dtype, count: int, rows: int, columns: int) -> None:
    """Bit for bit the sum in rank order, in float32, rounded once, of slots with gaps between."""
    memory = 3 ** torch.randn(count, rows * columns + 8, device=device)
    memory = (memory * torch.randn_like(memory)).to(dtype)
    slots = memory[:, : rows * columns].unflatten(1, (rows, columns))
    total = torch.zeros(rows, columns)  # on a CPU, which divides: on a GPU, / 3 multiplies
    for piece in slots.cpu():
        total = total + piece.float()
    around = torch.full((rows + 2, columns), 7.0, dtype=dtype, device=device)
    for average in (False, True):
        out = sum_slots(slots, around[1:-1], average)
        assert torch.equal(out.cpu(), (total / count if average else total).to(dtype))
        assert (around[[0, -1]] == 7.0).all()
    for rank in range(count):  # a part that is elsewhere, and its slot not read
        own = slots[rank].clone()
        slots[rank].fill_(torch.nan)
        out = sum_slots(slots, around[1:-1], own=(rank, own))
        assert torch.equal(out.cpu(), total.to(dtype))
        slots[rank].copy_(own)


def landing(
    device: str, dtype: torch.dtype, count: int, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Slots with gaps between, a residual, a weight, and memory for the results."""
    memory = torch.randn(count, rows * columns + 8, device=device).to(dtype)
    slots = memory[:, : rows * columns].unflatten(1, (rows, columns))
    residual, weight = (torch.randn(*shape, device=device).to(dtype)
                        for shape in ((rows, columns), (columns,)))  # fmt: skip
    around = [torch.full((rows + 2, columns), 7.0, dtype=dtype, device=device) for _ in range(2)]
    return slots, residual, weight, (around[0][1:-1], around[1][1:-1])


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "rows", "columns"), [(2, 3, 8), (3, 7, 103), (8, 5, 2048)])
def test_land_slots(device: str, dtype: torch.dtype, count: int, rows: int, columns: int) -> None:
    """Bit for bit the sum in rank order, then the residual; the norm of that before rounding."""
    slots, residual, weight, out = landing(device, dtype, count, rows, columns)
    total = torch.zeros(rows, columns, device=device)
    for piece in (*slots, residual):
        total = total + piece.float()
    landed, normed = land_slots(slots, residual, weight, 1e-3, out)
    assert torch.equal(landed, total.to(dtype))
    wide = sum(piece.double() for piece in (*slots, residual))
    exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-3) * weight.double()
    plain = land_rows_reference(list(slots), residual, weight, 1e-3)[1]
    assert_close(normed, exact, plain)
    assert torch.isfinite(normed).all()
    for each in out:
        memory = each._base
        assert memory is not None
        assert (memory[[0, -1]] == 7.0).all()


@pytest.mark.parametrize("device", [on("interpreter")])
def test_a_landing_waits_for_each_rows_pieces(device: str) -> None:
    """Pieces come with their flags, those of later rows later: who does not wait reads NaN."""
    world, rows, piece = 3, 7, 3
    slots, residual, weight, out = landing(device, torch.float32, world, rows, 24)
    expected = land_rows_reference(list(slots), residual, weight, 1e-3)
    here = slots.clone()
    flags = torch.zeros(16, dtype=torch.int32)
    # Rank 1 is this one: its rows are there.
    table = torch.tensor([[9, -1, 4], [2, -1, 11], [7, -1, 5]], dtype=torch.int32)
    where = {int(table[p, q]): (p, q) for p in range(3) for q in (0, 2)}
    here[[0, 2]] = torch.nan

    def arrive(at: int) -> None:
        p, q = where[at]
        here[q, p * piece : (p + 1) * piece] = slots[q, p * piece : (p + 1) * piece]

    with coming(flags, arrive) as looks:
        found = land_slots(here, residual, weight, 1e-3, out, SlotArrivals(flags, table, piece))
    for each, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(each, exact, rtol=1e-6, atol=1e-6)
    assert list(dict.fromkeys(looks)) == [9, 4, 2, 11, 7, 5]


@pytest.mark.parametrize("device", [on("interpreter")])
def test_a_landing_without_its_wait_is_seen(device: str) -> None:
    for old, new in (
        ("wait(flags + flag, 1, SPIN_LIMIT)", "pass"),
        ("if now != seen:", "if seen < 0:"),  # for the first piece alone
    ):
        with (
            weakened(kernels._land_slots_kernel, old, new),
            pytest.raises(AssertionError, match="not close"),
        ):
            test_a_landing_waits_for_each_rows_pieces(device)


def test_wrong_arguments_are_refused() -> None:
    slots = torch.zeros(2, 3, 4)
    with pytest.raises(UserError, match=r"a slot has shape \(3, 4\); expected \(3, 5\)"):
        sum_slots(slots, torch.zeros(3, 5))
    with pytest.raises(UserError, match="dtypes"):
        sum_slots(slots, torch.zeros(3, 4).half())
    out = torch.zeros(3, 4), torch.zeros(3, 4)
    with pytest.raises(UserError, match=r"weight has shape \(3,\); expected \(4,\)"):
        land_slots(slots, torch.zeros(3, 4), torch.zeros(3), 1e-3, out)
    with pytest.raises(UserError, match=r"a slot has shape \(3, 4\); expected \(2, 4\)"):
        land_slots(slots, torch.zeros(2, 4), torch.zeros(4), 1e-3, (out[0][:2], out[1][:2]))
    with pytest.raises(UserError, match="16385 columns; expected 1 to 16384"):
        land_slots(torch.zeros(2, 1, 16385), torch.zeros(1, 16385), torch.zeros(16385), 0.0, out)
