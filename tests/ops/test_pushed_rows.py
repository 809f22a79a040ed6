"""Rows that are pushed to their owners, on ranks that share memory, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.kernels import grouped
from ladder.kernels import rows as kernels
from ladder.ops.registry import OPERATORS
from tests.distributed import Pools
from tests.kernels.support import on
from tests.ops.pushed_inputs import EXPERTS, expert_inputs
from tests.ops.pushes import check_same, late, pushing

OPS = ("all_to_all_rows", "return_rows", "matmul_all_to_all")
SEND, BACK, PRODUCT = (OPERATORS[op].implementations for op in OPS)

# Rows of each rank (rank + 1 times as many, or none on rank 0), columns, capacity, dtype.
CALLS = [
    (7, 5, 9, torch.bfloat16),  # rows of 10 bytes
    (13, 8, 70, torch.float32),
    (11, 24, 3, torch.bfloat16),  # rows that do not fit
    (0, 4, 2, torch.float64),
    (11, 1, 40, torch.int64),
    (4, 40, 12, torch.float16),  # several tiles in a row
]


def inputs(rank: int, ranks: int, call: int) -> tuple[Tensor, Tensor]:
    """Rows, and their owners: of all ranks and of none; on call 1 rank 1 owns all."""
    count, columns, _, dtype = CALLS[call]
    source = torch.Generator().manual_seed(100 * call + rank)
    m = count * (rank + 1) if call != 2 or rank else 0
    x = (100 * torch.randn(m, columns, generator=source)).to(dtype)
    owners = torch.randint(-1, ranks, (m,), generator=source)
    if call == 1:
        owners.fill_(1)
    return x, owners.to(torch.int32 if call % 2 else torch.int64)


def on_ranks(rank: int, ranks: int, folder: str) -> list[str]:
    """Calls of several shapes and dtypes one after the other, against `staged` on the same."""
    group: Any = dist.group.WORLD
    given = [(*inputs(rank, ranks, call), CALLS[call][2]) for call in range(len(CALLS))]
    with (
        pushing(rank, ranks, folder) as ran,
        # Several chunks, scans, programs and tiles already for few rows.
        mock.patch.multiple(kernels, launch=late(rank), CHUNK=4, SCAN=8, TILE=32, WIDEST=8),
    ):
        sent = [SEND["pushed"].run(group, *each) for each in given]
        back = [
            BACK["pushed"].run(group, found[0], owners)
            for found, (_, owners, _) in zip(sent, given, strict=True)
        ]
    for call, (x, owners, capacity) in enumerate(given):
        wanted = SEND["staged"].run(group, x, owners, capacity)
        for found, exact in zip(sent[call], wanted, strict=True):
            check_same(found, exact, (call, rank))
        returned = BACK["staged"].run(group, wanted[0], owners)
        check_same(back[call], returned, (call, rank, "back"))
    return ran


@pytest.mark.parametrize(
    ("device", "ranks"), [on("interpreter", 2), on("interpreter", 4, slow=True)]
)
def test_rows_reach_their_owners_and_come_back(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, ranks: int
) -> None:
    """Bit for bit as `staged`: counts, rows that do not fit, rows of none, ranks without rows."""
    for ran in pools(ranks).run(on_ranks, str(tmp_path)):
        assert set(ran) == {
            "_place_kernel", "_push_rows_kernel", "_receive_rows_kernel", "_push_pieces_kernel",
            "_gather_rows_kernel",
        }  # fmt: skip
        interpreted += ran


def products(rank: int, ranks: int, folder: str, dtype: torch.dtype) -> list[str]:
    """Both implementations by turns, in one mailbox; several tiles of an expert, or none."""
    group: Any = dist.group.WORLD
    given = [expert_inputs(rank, call, ranks, dtype) for call in range(len(EXPERTS))]
    names = ["pushed", "grouped"] if dtype == torch.bfloat16 else ["pushed"]
    options: dict[str, dict[str, Any]] = {"pushed": {"tile": "16x32x16", "stages": 2}}
    with (
        pushing(rank, ranks, folder) as ran,
        mock.patch.multiple(kernels, launch=late(rank), CHUNK=4, SCAN=8, TILE=32, WIDEST=8),
        mock.patch.object(grouped, "launch", late(rank)),
    ):
        found = [
            (call, name, PRODUCT[name].run(group, *each, **options.get(name, {})))
            for call, each in enumerate(given)
            for name in names
        ]
        for call, (h, W, offsets, owners, capacity) in enumerate(given):
            beyond = offsets + (offsets == offsets[-1]) * 1000  # the host does not know of it
            owned = torch.where(torch.arange(len(owners)) < offsets[-1], owners, -1)
            results = PRODUCT["pushed"].run(
                group, h, W, beyond, owned, capacity, **options["pushed"]
            )
            found.append((call, "beyond", results))
    for call, name, results in found:
        for one, exact in zip(results, PRODUCT["staged"].run(group, *given[call]), strict=True):
            check_same(one, exact, (call, rank, name))
    return ran


@pytest.mark.parametrize(
    ("device", "ranks", "dtype"),
    [on("interpreter", 2, torch.bfloat16), on("interpreter", 4, torch.float16, slow=True)],
)
def test_products_of_experts_reach_the_owners_of_their_rows(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, ranks: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Bit for bit as `staged`: ragged experts, experts without rows, rows of none, overflow."""
    for ran in pools(ranks).run(products, str(tmp_path), dtype):
        assert {"_place_kernel", "_grouped_push_kernel", "_receive_rows_kernel"} <= set(ran)
        assert ("_push_rows_kernel" in ran) == (dtype == torch.bfloat16)
        interpreted += ran
