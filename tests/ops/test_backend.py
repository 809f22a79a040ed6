"""Products whose sums the backend makes, on gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ladder.ops
from ladder.operator_names import SCATTER_BACKWARD
from ladder.ops.registry import ANY_ORDER, OPERATORS
from tests.distributed import Pools
from tests.ops.everyone import TOLERANCE, check_gradients, gpus, on_ranks, random, world
from tests.samples import relative_error

OPS = torch.ops.ladder
EPS = 1e-3


def values(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Every operator against float64: sums and averages, rows in any dimension, few rows."""
    T, name = world_size, world()
    limit = 2 * TOLERANCE[dtype]  # the backend may round between its additions
    As = [random(7, 2 * T, 33, seed=q, dtype=dtype).transpose(0, 1) for q in range(T)]
    Bs = [random(5, 33, seed=10 + q, dtype=dtype).t() for q in range(T)]
    total = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))  # [2 T, 7, 5]
    mine, A, B = total.chunk(T)[rank], As[rank], Bs[rank]
    residual, weight = random(*total.shape, seed=7, dtype=dtype), random(5, seed=8, dtype=dtype)

    def landed(total: Any, residual: Any) -> Any:
        whole = total + residual.double()
        scale = torch.rsqrt(whole.square().mean(-1, keepdim=True) + EPS)
        return whole, whole * scale * weight.double()

    own = residual.chunk(T)[rank]
    turned = A.transpose(0, 1), B, own.transpose(0, 1)
    ladder.ops.allow_any_order(name)
    found = [
        (OPS.matmul_reduce_scatter(A, B, "sum", 0, name), mine),
        (OPS.matmul_reduce_scatter(A, B, "avg", 0, name), mine / T),
        (OPS.matmul_reduce_scatter(turned[0], B, "avg", 1, name), mine.transpose(0, 1) / T),
        (OPS.reduce_scatter(A @ B, "avg", 0, name), mine / T),
        (OPS.all_reduce(A @ B, name), total),
        (OPS.matmul_all_reduce(A, B, name), total),
        (OPS.matmul_all_reduce(A, B, name, residual), total + T * residual.double()),
        (OPS.linear_all_reduce(A[0, :3], B.t(), name), total[0, :3]),
        *zip(OPS.matmul_all_reduce_add_rms_norm(A, B, residual, weight, EPS, name),
             landed(total, residual), strict=True),
        *zip(OPS.matmul_reduce_scatter_add_rms_norm(A, B, own, weight, EPS, 0, name),
             landed(mine, own), strict=True),
        *zip(OPS.matmul_reduce_scatter_add_rms_norm(*turned, weight, EPS, 1, name),
             landed(mine.transpose(0, 1), turned[2]), strict=True),
    ]  # fmt: skip
    for n, (each, exact) in enumerate(found):
        assert each.is_contiguous(), n
        assert relative_error(each, exact) < limit, (n, dtype)
    partial = F.linear(A[0, :3], B.t())
    kept = partial.clone()
    OPS.all_reduce(partial, name)
    assert torch.equal(partial, kept)  # no input is changed
    picked = ladder.ops.explain("matmul_all_reduce", [A.shape, B.shape], dtype=dtype)
    assert picked.implementation == ANY_ORDER
    ladder.ops.allow_any_order(name, False)


def gradients(rank: int, world_size: int) -> None:
    """Backward passes, in which other operators add, in the backend's order, too."""
    T, name = world_size, world()
    A, B = random(T, 2, 2, 3), random(T, 3, 2, seed=1)
    ladder.ops.allow_any_order(name)
    check_gradients(lambda a, b: OPS.all_gather_matmul(a, [b], 0, name)[1][0], A, B)
    check_gradients(lambda a, b: OPS.matmul_reduce_scatter(a, b, "avg", 0, name), A, B)
    check_gradients(lambda a, b: OPS.linear_all_reduce(a, b, name), A, B.transpose(1, 2))
    ladder.ops.allow_any_order(name, False)


def empty(rank: int, world_size: int) -> None:
    """Inputs without elements: results have their shape in either order of sums, and gradients."""
    T, name, n = world_size, world(), 3
    B, gain = torch.ones(4, n, requires_grad=True), torch.ones(n)
    none = torch.zeros(0, dtype=torch.int64)
    for order in (False, True):
        ladder.ops.allow_any_order(name, order)
        for dim, lead in ((0, (0,)), (0, (2 * T, 0)), (0, (0, 2)), (1, (0, 2 * T)), (1, (2, 0))):
            x, own = torch.ones(*lead, 4, requires_grad=True), list(lead)
            own[dim] //= T
            whole = [length * (T if at == dim else 1) for at, length in enumerate(lead)]
            rest = torch.ones(*own, n), gain, EPS
            add = torch.ones(*lead, n)
            for out, shape in (
                (OPS.all_gather(x, dim, name), [*whole, 4]),
                (OPS.all_gather_matmul(x, [B], dim, name)[1][0], [*whole, n]),
                (OPS.reduce_scatter(x, "avg", dim, name), [*own, 4]),
                (OPS.matmul_reduce_scatter(x, B, "sum", dim, name), [*own, n]),
                (OPS.matmul_reduce_scatter_add_rms_norm(x, B, *rest, dim, name)[1], [*own, n]),
                (OPS.all_reduce(x, name), [*lead, 4]),
                (OPS.matmul_all_reduce(x, B, name), [*lead, n]),
                (OPS.matmul_all_reduce(x, B, name, add), [*lead, n]),
                (OPS.linear_all_reduce(x, B.t(), name), [*lead, n]),
                (OPS.matmul_all_reduce_add_rms_norm(x, B, add, gain, EPS, name)[1], [*lead, n]),
            ):
                assert list(out.shape) == shape
                out.sum().backward()
    ladder.ops.allow_any_order(name, False)
    for columns in (0, 2):
        rows, counts, lost = OPS.all_to_all_rows(torch.ones(0, columns), none, 2, name)
        assert (rows.shape, counts.tolist(), int(lost)) == ((T, 2, columns), [0] * T, 0)
        assert OPS.return_rows(rows, none, name).shape == (0, columns)
        ends = torch.zeros(2, dtype=torch.int64)
        found = OPS.matmul_all_to_all(
            torch.ones(0, 4), torch.ones(1, 4, columns), ends, none, 1, name
        )
        assert found[0].shape == (T, 1, columns)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values(pools: Pools, dtype: torch.dtype) -> None:
    pools(2).run(values, dtype)


def test_values_on_four_ranks(pools: Pools) -> None:
    pools(4).run(values, torch.bfloat16)


def test_gradients(pools: Pools) -> None:
    pools(2).run(gradients)


def test_inputs_without_elements(pools: Pools) -> None:
    pools(2).run(empty)


def test_every_sum_can_be_the_backends() -> None:
    """What adds has an implementation that is not ordered; what only moves rows has none. The
    gradients of a scatter's product move rows; one of them is a sum by parts."""
    sums = {name for name in OPERATORS if "reduce" in name} - {SCATTER_BACKWARD}
    for name, operator in OPERATORS.items():
        unordered = {each.name for each in operator.implementations.values() if not each.ordered}
        assert (ANY_ORDER in unordered) == (name in sums), name
        assert bool(unordered) == (name in sums or name == SCATTER_BACKWARD), name


@gpus
def test_on_gpus() -> None:
    on_ranks((values, (torch.bfloat16,)), (values, (torch.float32,)), (gradients, ()))
