"""Products whose sum is added to the residual and normed, on gloo ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ladder.ops  # noqa: F401  (defines the operators)
from ladder.kernels.prefill import land_rows_reference
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
EPS = 1e-3


def exact(total: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """In float64: the residual, and its norm."""
    scale = torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS)
    return total, total * scale * weight.double()


def values(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Both operators against float64, and against the kernel's reference bit for bit.

    One that rounds the sum before it adds the residual, or norms after rounding, fails the latter
    in bfloat16; the weight is applied, and rows are this rank's, in float32 as well.
    """
    T, name = world_size, world()
    As = [random(3, 2 * T, 9, seed=q, dtype=dtype).transpose(0, 1) for q in range(T)]
    Bs = [random(9, 16, seed=q, dtype=dtype) for q in range(T)]
    whole = random(2 * T, 3, 16, seed=7, dtype=dtype)
    weight = random(16, seed=8, dtype=dtype)
    partials = [A @ B for A, B in zip(As, Bs, strict=True)]
    A, B = As[rank], Bs[rank]
    reference = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True)) + whole.double()

    mine = [part.chunk(T)[rank] for part in (*partials, whole, reference)]
    found = OPS.matmul_reduce_scatter_add_rms_norm(A, B, mine[-2], weight, EPS, 0, name)
    pieces, residual = mine[:T], mine[-2]
    for each, expected in zip(found, exact(mine[-1], weight), strict=True):
        assert relative_error(each, expected) < TOLERANCE[dtype]
    turned = OPS.matmul_reduce_scatter_add_rms_norm(
        A.transpose(0, 1), B, residual.transpose(0, 1), weight, EPS, 1, name
    )
    for each, other in zip(found, turned, strict=True):
        assert relative_error(other.transpose(0, 1), each.double()) < TOLERANCE[dtype]
    every = OPS.matmul_all_reduce_add_rms_norm(A, B, whole, weight, EPS, name)
    for each, other in zip(found, every, strict=True):
        assert torch.equal(each, other.chunk(T)[rank])
    few = OPS.matmul_all_reduce_add_rms_norm(A[0, :1], B, whole[0, :1], weight, EPS, name)
    for each, other in zip(few, every, strict=True):
        assert relative_error(each, other[0, :1].double()) < TOLERANCE[dtype]
    if dtype != torch.float64:
        for each, same in zip(
            found, land_rows_reference(pieces, residual, weight, EPS), strict=True
        ):
            assert torch.equal(each, same)


def gradients(rank: int, world_size: int) -> None:
    """Each rank's residual and weight count as its own copies."""
    T, name = world_size, world()
    A, B = random(T, 4, 2), random(T, 2, 3, seed=1)
    weight = random(T, 3, seed=2)
    check_gradients(
        lambda a, b, r, w: OPS.matmul_reduce_scatter_add_rms_norm(a, b, r, w, EPS, 0, name),
        A, B, random(T, 4 // T, 3, seed=3), weight,
    )  # fmt: skip
    check_gradients(
        lambda a, b, r, w: OPS.matmul_all_reduce_add_rms_norm(a, b, r, w, EPS, name),
        A[:, :2], B, random(T, 2, 3, seed=3), weight,
    )  # fmt: skip


def checked(rank: int, world_size: int) -> None:
    name = world()
    A, B, residual, weight = (
        random(*shape, dtype=torch.float32).requires_grad_()
        for shape in ((4, 3), (3, 5), (4, 5), (5,))
    )
    scatter, everywhere = (
        OPS.matmul_reduce_scatter_add_rms_norm,
        OPS.matmul_all_reduce_add_rms_norm,
    )
    check_operator(scatter, A, B, residual[:2].detach(), weight, EPS, 0, name)
    check_operator(everywhere, A, B, residual, weight, EPS, name)
    words = r"residual has shape \[4, 5\]; expected \[2, 5\]"
    check_refused(words, scatter, A, B, residual, weight, EPS, 0, name)
    words = r"residual has shape \[2, 5\]; expected \[4, 5\]"
    check_refused(words, everywhere, A, B, residual[:2], weight, EPS, name)
    words = r"weight has shape \[3\]; expected \[5\]"
    check_refused(words, everywhere, A, B, residual, weight[:3], EPS, name)
    words = r"weight is torch.float64 and A torch.float32"
    check_refused(words, everywhere, A, B, residual, weight.double(), EPS, name)
    check_refused(r"A has 3 rows", scatter, A[:3], B, residual[:1], weight, EPS, 0, name)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values(pools: Pools, dtype: torch.dtype) -> None:
    pools(2).run(values, dtype)


def test_values_on_four_ranks(pools: Pools) -> None:
    pools(4).run(values, torch.bfloat16)


def test_gradients(pools: Pools) -> None:
    pools(2).run(gradients)


def test_torch_accepts_the_operators_and_wrong_arguments_are_refused(pools: Pools) -> None:
    pools(2).run(checked)


@gpus
def test_on_gpus() -> None:
    on_ranks((values, (torch.bfloat16,)), (values, (torch.float32,)), (gradients, ()))
