"""What tests of pushes give to ranks, and what a plain loop makes of it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Lookup(NamedTuple):
    """A rank's tables, and its bags of all samples, table by table."""

    weights: list[Tensor]
    indices: Tensor
    offsets: Tensor


def lookup(
    rank: int, call: int, batch: int, tables: int, dim: int, dtype: torch.dtype, longest: int
) -> Lookup:
    """Tables of different sizes; ragged bags with repetitions, empty ones, or all empty.

    Rows differ in size, so that sums depend on their order.
    """
    source = torch.Generator().manual_seed(100 * call + rank)
    weights, lengths, indices = [], [], []
    for table in range(tables):
        rows = 2 + 3 * table + rank
        made = torch.randn(rows, dim, generator=source)
        weights.append((made * 9 ** torch.randn(rows, 1, generator=source)).to(dtype))
        lengths.append(torch.randint(longest + 1, (batch,), generator=source))
        indices.append(torch.randint(rows, (int(lengths[-1].sum()),), generator=source))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), *lengths]).cumsum(0)
    kind = torch.int32 if call % 2 else torch.int64
    return Lookup(weights, torch.cat(indices).to(kind), ends.to(kind))


def pooled(each: Lookup, mode: str) -> Tensor:
    """[B, tables x dim] by a plain loop: in float32 in the order of the indices, rounded once."""
    batch = (len(each.offsets) - 1) // len(each.weights)
    columns = []
    for table, weight in enumerate(each.weights):
        rows = []
        for sample in range(batch):
            start, end = each.offsets[table * batch + sample :][:2].tolist()
            total = torch.zeros(weight.shape[1])
            for index in each.indices[start:end].tolist():
                total += weight[index].float()
            rows.append(total / max(1, end - start) if mode == "mean" else total)
        columns.append(torch.stack(rows).to(weight.dtype))
    return torch.cat(columns, dim=1)


# Rows of each expert on a rank, rows of none, k, n, capacity, and whether W is [experts, n, k].
EXPERTS = [
    ([7, 0, 20], 5, 24, 40, 64, False),
    ([0, 0, 0], 3, 8, 8, 4, True),
    ([33, 1, 4], 0, 40, 8, 6, True),  # rows that do not fit
    ([3, 18, 2], 2, 16, 24, 40, False),
]


def expert_inputs(
    rank: int, call: int, ranks: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """h, W, offsets, owners, capacity. A row of h has one power of two: products are exact."""
    lengths, more, k, n, capacity, turned = EXPERTS[call]
    lengths = [length + rank * (length > 3) for length in lengths]
    m = sum(lengths) + more
    source = torch.Generator().manual_seed(100 * call + rank)
    h = torch.zeros(m, k)
    at = torch.randint(k, (m, 1), generator=source)
    h.scatter_(1, at, 2.0 ** torch.randint(-3, 4, (m, 1), generator=source))
    h[sum(lengths) :] = torch.nan  # rows of no expert
    W = torch.randn(len(lengths), k, n, generator=source).to(dtype)
    W = W.transpose(1, 2).contiguous().transpose(1, 2) if turned else W
    owners = torch.randint(-1, ranks, (m,), generator=source)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    kind = torch.int32 if call % 2 else torch.int64
    return h.to(dtype), W, offsets.to(kind), owners.to(kind), capacity


def sent(xs: list[Tensor], owners: list[list[int]], to: int, capacity: int) -> list[Tensor]:
    """What `to` gets of each rank: its rows in their order, up to the capacity."""
    pieces = []
    for x, own in zip(xs, owners, strict=True):
        rows = [x[j] for j, owner in enumerate(own) if owner == to][:capacity]
        pieces.append(torch.stack(rows) if rows else x.new_zeros(0, x.shape[1]))
    return pieces
