"""Embedding bags of tables that are split over gloo ranks."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import ladder.ops  # noqa: F401  (defines the operators)
from tests.distributed import Pools
from tests.ops.everyone import (
    TOLERANCE,
    check_gradients,
    check_operator,
    check_refused,
    gpus,
    on_ranks,
    random,
    world,
)
from tests.samples import relative_error

OPS = torch.ops.ladder
DIM = 3


class Lookup(NamedTuple):
    """A rank's tables, and the bags [table][sample] of the whole batch in them."""

    weights: list[Tensor]
    bags: list[list[list[int]]]

    @property
    def indices(self) -> list[int]:
        return [index for table in self.bags for bag in table for index in bag]

    def offsets(self, kind: torch.dtype = torch.int64) -> Tensor:
        lengths = [0, *(len(bag) for table in self.bags for bag in table)]
        return torch.tensor(lengths).cumsum(0).to(kind)


def lookup(rank: int, batch: int, tables: int, dtype: torch.dtype, empty: bool = False) -> Lookup:
    """Tables of different sizes; ragged bags with repetitions, some of them empty, or all."""
    rows = [2 + 3 * table + rank for table in range(tables)]
    weights = [
        random(DIM, size, seed=10 * rank + table, dtype=dtype).t()
        for table, size in enumerate(rows)
    ]
    bags = [
        [
            [(i * i + b + rank) % size for i in range(0 if empty else (3 * b + table + rank) % 5)]
            for b in range(batch)
        ]
        for table, size in enumerate(rows)
    ]
    return Lookup(weights, bags)


def pooled(each: Lookup, mode: str) -> Tensor:
    """[B, tables x DIM] in float64, by a plain loop; differentiable."""
    columns = []
    for weight, bags in zip(each.weights, each.bags, strict=True):
        rows = []
        for bag in bags:
            total = weight[0].double() * 0  # differentiable, too, where all bags are empty
            for index in bag:
                total = total + weight[index].double()
            rows.append(total / max(1, len(bag)) if mode == "mean" else total)
        columns.append(torch.stack(rows))
    return torch.cat(columns, dim=1)


def values(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Forward and backward, with as many tables on each rank and with unequal numbers."""
    T, name = world_size, world()
    batch = 2 * T
    for mode, kind, counts, empty in (
        ("sum", torch.int64, [2] * T, False),
        ("mean", torch.int32, [1 + q % 2 for q in range(T)], False),
        ("mean", torch.int64, [1] * T, True),
    ):
        each = [lookup(q, batch, counts[q], dtype, empty) for q in range(T)]
        mine = each[rank]
        leaves = [weight.detach().requires_grad_() for weight in mine.weights]
        given = leaves, torch.tensor(mine.indices, dtype=kind), mine.offsets(kind), mode, name
        out = OPS.embedding_bag_all_to_all(*given, table_counts=counts)
        assert out.dtype == dtype
        whole = torch.cat([pooled(one, mode) for one in each], dim=1)
        assert relative_error(out, whole.chunk(T)[rank]) < TOLERANCE[dtype]
        if len(set(counts)) == 1:
            assert torch.equal(out, OPS.embedding_bag_all_to_all(*given))
        grad = random(batch, sum(counts) * DIM, seed=3, dtype=dtype)
        out.backward(grad.chunk(T)[rank])
        exact = [weight.double().requires_grad_() for weight in mine.weights]
        first = sum(counts[:rank]) * DIM
        columns = grad.double()[:, first : first + counts[rank] * DIM]
        pooled(Lookup(exact, mine.bags), mode).backward(columns)
        for leaf, wanted in zip(leaves, exact, strict=True):
            assert leaf.grad is not None
            assert wanted.grad is not None
            assert relative_error(leaf.grad, wanted.grad) < TOLERANCE[dtype]


def rounded_once(rank: int, world_size: int) -> None:
    """Sums and means of ones: bfloat16 stops counting at 256, and rounds a sum of 257 to 256."""
    for mode, length, value in (("sum", 300, 300), ("mean", 257, 1)):
        ones = torch.ones(1, 2, dtype=torch.bfloat16, requires_grad=True)
        indices = torch.zeros(length * world_size, dtype=torch.int64)
        offsets = torch.arange(world_size + 1) * length
        out = OPS.embedding_bag_all_to_all([ones], indices, offsets, mode, world())
        assert (out == value).all()
        out.sum().backward()
        assert ones.grad is not None
        assert (ones.grad == value * world_size).all()


def gradients(rank: int, world_size: int) -> None:
    T, name = world_size, world()
    each = lookup(0, T, 1, torch.float64)
    indices, offsets = torch.tensor(each.indices), each.offsets()
    for mode in ("sum", "mean"):
        check_gradients(
            lambda w, mode=mode: OPS.embedding_bag_all_to_all([w], indices, offsets, mode, name),
            random(T, *each.weights[0].shape),
        )


def checked(rank: int, world_size: int) -> None:
    T, name = world_size, world()
    each = lookup(0, T, 2, torch.float32)
    weights = [weight.requires_grad_() for weight in each.weights]
    indices, offsets = torch.tensor(each.indices), each.offsets()
    op = OPS.embedding_bag_all_to_all
    check_operator(op, weights, indices, offsets, "mean", name)
    rows = [len(weight) for weight in weights]
    grad = random(1, 2 * T * DIM, dtype=torch.float32)
    check_operator(
        OPS.embedding_bag_all_to_all_backward, grad, indices, offsets, rows, "mean", name
    )
    back = OPS.embedding_bag_all_to_all_backward
    for words, wrong, ends, lengths in (
        (r"grad has shape \[2, 12\]; expected 1 rows, of this", grad.repeat(2, 1), offsets, rows),
        (r"grad has shape \[1, 11\]; .* of 4 tables with as many", grad[:, 1:], offsets, rows),
        ("rows is empty; give the rows of each table", grad, offsets, []),
        ("offsets is torch.float32; expected int32", grad, offsets.float(), rows),
        (r"offsets has shape \[3\]; expected 2 tables x B \+ 1", grad, offsets[:3], rows),
    ):
        check_refused(words, back, wrong, indices, ends, lengths, "mean", name)
    a, b = weights
    for words, tables in (
        ("weights is empty", []),
        (r"weights\[1\] is torch.float64 and weights\[0\] torch.float32", [a, b.double()]),
        (r"weights\[1\] has shape \[5, 2\]; expected \[rows, 3\]", [a, b[:, :2]]),
        (r"weights\[0\] has shape \[\]; expected 2 dimensions", [torch.ones(())]),
    ):
        check_refused(words, op, tables, indices, offsets, "sum", name)
    for words, where, ends, mode in (
        ("mode='max'; expected 'sum' or 'mean'", indices, offsets, "max"),
        ("indices is torch.float32; expected int32", indices.float(), offsets, "sum"),
        ("offsets is torch.int32 and indices torch.int64", indices, offsets.int(), "sum"),
        (r"offsets has shape \[3\]; expected 2 tables x B \+ 1", indices, offsets[:3], "sum"),
        (r"indices has shape \[1, \d+\]; expected one dim", indices[None], offsets, "sum"),
        (r"indices of weights\[0\] are 10\d to 10\d; .* 0 to 1$", indices + 100, offsets, "sum"),
        ("offsets must ascend from 0 to the", indices, offsets.flip(0), "sum"),
    ):
        check_refused(words, op, weights, where, ends, mode, name)
    given = weights, indices, offsets, "sum", name
    check_refused(r"table_counts=\[2\]; expected 2 numbers", op, *given, table_counts=[2])
    check_refused(
        r"table_counts=\[3, 3\] has 3 for this rank with 2 tables", op, *given, table_counts=[3, 3]
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values(pools: Pools, dtype: torch.dtype) -> None:
    pools(2).run(values, dtype)


def test_on_four_ranks(pools: Pools) -> None:
    pools(4).run(values, torch.bfloat16)
    pools(4).run(rounded_once)


def test_gradients(pools: Pools) -> None:
    pools(2).run(gradients)


def test_torch_accepts_the_operators_and_wrong_arguments_are_refused(pools: Pools) -> None:
    pools(2).run(checked)


@gpus
def test_on_gpus() -> None:
    on_ranks(
        (values, (torch.bfloat16,)), (values, (torch.float32,)), (rounded_once, ()), (gradients, ())
    )
