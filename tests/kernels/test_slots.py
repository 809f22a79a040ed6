"""The sum of slots."""

from __future__ import annotations

import pytest
import torch

from ladder.kernels.slots import sum_slots
from ladder.models import UserError
from tests.kernels.support import DTYPES, _poisoned_memory, on  # noqa: F401  (a fixture)


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


def test_wrong_arguments_are_refused() -> None:
    slots = torch.zeros(2, 3, 4)
    with pytest.raises(UserError, match=r"a slot has shape \(3, 4\); expected \(3, 5\)"):
        sum_slots(slots, torch.zeros(3, 5))
    with pytest.raises(UserError, match="dtypes"):
        sum_slots(slots, torch.zeros(3, 4).half())
