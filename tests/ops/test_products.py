"""Products that gather or sum over the ranks, on gloo ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.ops import products
from ladder.ops.checks import check_backend
from ladder.ops.gradients import joined
from tests.distributed import Pools, mesh
from tests.ops.everyone import (
    TOLERANCE,
    check_gradients,
    check_operator,
    check_refused,
    gpus,
    in_order,
    on_ranks,
    random,
    world,
)
from tests.samples import relative_error

OPS = torch.ops.ladder


def exact(found: Tensor, expected: Tensor) -> None:
    """Bit for bit, in shape, dtype and layout."""
    assert found.is_contiguous()
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def values(rank: int, world_size: int, dtype: torch.dtype, group: str | None = None) -> None:
    """Every product against float64, and bit for bit against the sum that the page promises.

    With 4 ranks, some element differs if sums are in another order (float32) or if there is a
    rounding between (bfloat16).
    """
    name, T = group or world(), world_size
    # Each rank's rows and its slices of K; odd sizes, and inputs that are not contiguous.
    rows = [random(3, 2, 9, seed=q, dtype=dtype).transpose(0, 1) for q in range(T)]  # [2, 3, 9]
    Bs = [random(9, n, seed=n, dtype=dtype) for n in (5, 1)]
    for dim in (0, 1):
        whole = torch.cat(rows, dim)
        for return_A in (True, False):
            A, outs = OPS.all_gather_matmul(rows[rank], Bs, dim, name, return_A=return_A)
            assert (A is not None) == return_A
            if A is not None:
                exact(A, whole)
            for out, B in zip(outs, Bs, strict=True):
                exact(out, whole.contiguous() @ B)
                assert relative_error(out, whole.double() @ B.double()) < TOLERANCE[dtype]
        exact(OPS.all_gather(rows[rank], dim, name), whole.contiguous())

    As = [random(7, 2 * T, 33, seed=q, dtype=dtype).transpose(0, 1) for q in range(T)]
    Ws = [random(5, 33, seed=10 + q, dtype=dtype).t() for q in range(T)]
    partials = [A @ B for A, B in zip(As, Ws, strict=True)]  # [2 T, 7, 5]
    total = in_order(partials)
    reference = sum(A.double() @ B.double() for A, B in zip(As, Ws, strict=True))
    mine = total.chunk(T)[rank]
    A, B = As[rank], Ws[rank]
    exact(OPS.matmul_reduce_scatter(A, B, "sum", 0, name), mine.to(dtype))
    exact(OPS.matmul_reduce_scatter(A, B, "avg", 0, name), (mine / T).to(dtype))
    assert relative_error(mine.to(dtype), reference.chunk(T)[rank]) < TOLERANCE[dtype]
    turned = OPS.matmul_reduce_scatter(A.transpose(0, 1), B, "sum", 1, name)
    assert relative_error(turned.transpose(0, 1), mine.double()) < TOLERANCE[dtype]
    exact(OPS.reduce_scatter(partials[rank], "sum", 0, name), mine.to(dtype))
    exact(OPS.all_reduce(partials[rank], name), total.to(dtype))
    for rows_used in (2 * T, 1):  # with 1, the elements are no multiple of T
        some = [A[:rows_used] @ B for A, B in zip(As, Ws, strict=True)]
        exact(OPS.matmul_all_reduce(A[:rows_used], B, name), in_order(some).to(dtype))
    addends = [random(2 * T, 7, 5, seed=20 + q, dtype=dtype) for q in range(T)]
    added = [torch.addmm(C.flatten(0, 1), A.flatten(0, 1), B).unflatten(0, A.shape[:2])
             for A, B, C in zip(As, Ws, addends, strict=True)]  # fmt: skip
    exact(OPS.matmul_all_reduce(A, B, name, addends[rank]), in_order(added).to(dtype))
    few = [F.linear(A[0, :3], B.t()) for A, B in zip(As, Ws, strict=True)]
    for most in (products.FEW_BYTES, 0):  # by a gather, and by an all-to-all first
        with mock.patch.object(products, "FEW_BYTES", most):
            exact(OPS.linear_all_reduce(A[0, :3], B.t(), name), in_order(few).to(dtype))


def in_half(rank: int, world_size: int) -> None:
    """In a group of every second pair of ranks."""
    group = mesh(2, 2)["tp"].get_group()
    values(rank % 2, 2, torch.float32, group.group_name)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_values(pools: Pools, dtype: torch.dtype) -> None:
    pools(2).run(values, dtype)


def test_values_on_four_ranks(pools: Pools) -> None:
    pools(4).run(values, torch.bfloat16)
    pools(4).run(values, torch.float32)
    pools(4).run(in_half)


def gradients(rank: int, world_size: int) -> None:
    """Every adjoint in float64; a backward that leaves out a collective fails this."""
    T, name = world_size, world()
    A, B, C = random(T, 2, 2, 3), random(T, 3, 2, seed=1), random(T, 3, 1, seed=2)
    for return_A in (True, False):

        def gather(a: Tensor, b: Tensor, c: Tensor, return_A: bool = return_A) -> Any:
            whole, (x, y) = OPS.all_gather_matmul(a, [b, c], 1, name, return_A=return_A)
            return (x, y, whole) if return_A else (x, y)

        check_gradients(gather, A, B, C)
        check_gradients(lambda a, b: OPS.all_gather_matmul(a, [b], 1, name)[1][0], A, B)
    for op in ("sum", "avg"):
        check_gradients(lambda a, b, op=op: OPS.matmul_reduce_scatter(a, b, op, 0, name), A, B)
    check_gradients(lambda a, b: OPS.matmul_all_reduce(a, b, name), A, B)
    more = random(T, 2, 2, 2, seed=3)
    check_gradients(lambda a, b, c: OPS.matmul_all_reduce(a, b, name, c), A, B, more)
    check_gradients(lambda a, b: OPS.linear_all_reduce(a, b, name), A, B.transpose(1, 2))
    check_gradients(lambda a: OPS.all_gather(a, 0, name), A)
    check_gradients(lambda a: OPS.reduce_scatter(a, "avg", 1, name), A)
    check_gradients(lambda a: OPS.all_reduce(a, name), A)


def needed(rank: int, world_size: int) -> None:
    """Gradients of some inputs alone: as when all are needed."""
    name = world()
    A, B = random(2, 3, seed=rank), random(3, 2, seed=9 + rank)

    def run(op: Any, needs: tuple[bool, bool]) -> list[Tensor | None]:
        a, b = (x.clone().requires_grad_(n) for x, n in zip((A, B), needs, strict=True))
        op(a, b).square().sum().backward()
        return [a.grad, b.grad]

    for op in (
        lambda a, b: OPS.all_gather_matmul(a, [b], 0, name, return_A=False)[1][0],
        lambda a, b: OPS.matmul_reduce_scatter(a, b, "sum", 0, name),
        lambda a, b: OPS.matmul_all_reduce(a, b, name),
        lambda a, b: OPS.linear_all_reduce(a, b.t(), name),
    ):
        every = run(op, (True, True))
        for needs in ((True, False), (False, True)):
            for grad, wanted, need in zip(run(op, needs), every, needs, strict=True):
                assert (grad is not None) == need
                if grad is not None:
                    torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=0)


def checked(rank: int, world_size: int) -> None:
    """opcheck of every operator, with inputs that need gradients."""
    name = world()
    A = random(2, 3, seed=rank, dtype=torch.float32).requires_grad_()
    B = random(3, 4, seed=1, dtype=torch.float32).requires_grad_()
    for return_A in (True, False):
        check_operator(OPS.all_gather_matmul, A, [B, B], 0, name, return_A=return_A)
    check_operator(OPS.matmul_reduce_scatter, A, B, "sum", 0, name)
    plain = A.detach(), [B.detach(), B.detach()], [(A @ B).detach()] * 2
    check_operator(OPS.all_gather_matmul_backward, *plain, 0, name)
    own = (A @ B).detach()[:1]
    check_operator(OPS.matmul_reduce_scatter_backward, own, A.detach(), B.detach(), 0, name)
    check_operator(OPS.matmul_all_reduce, A, B, name)
    check_operator(OPS.matmul_all_reduce, A, B, name, (A @ B).detach().requires_grad_())
    check_operator(OPS.linear_all_reduce, A, B.detach().t(), name)
    check_operator(OPS.all_gather, A, 0, name)
    check_operator(OPS.reduce_scatter, A, "avg", 0, name)
    check_operator(OPS.all_reduce, A, name)


def refused(rank: int, world_size: int) -> None:
    """What is wrong is refused by its name, on every rank, before anything is sent."""
    name = world()
    A, B = torch.ones(4, 3), torch.ones(3, 5)
    gather, scatter = OPS.all_gather_matmul, OPS.matmul_reduce_scatter
    check_refused(r"group_name='none' names no process group", gather, A, [B], 0, "none")
    check_refused(r"Bs\[1\] has shape \[5, 3\]; expected \[3, n\]", gather, A, [B, B.t()], 0, name)
    check_refused(
        r"Bs\[0\] is torch.bfloat16 and A torch.float32", gather, A, [B.bfloat16()], 0, name
    )
    check_refused("Bs is empty", gather, A, [], 0, name)
    check_refused(r"gather_dim=1 of A \[4, 3\]; expected 0 to 0", gather, A, [B], 1, name)
    back, grad = OPS.all_gather_matmul_backward, A @ B
    check_refused(r"1 matrices Bs and 2 gradients", back, A, [B], [grad, grad], 0, name)
    words = r"grads\[0\] has shape \[4, 3\]; expected \[4, 5\], a product of whole and Bs\[0\]"
    check_refused(words, back, A, [B], [A], 0, name)
    check_refused(r"whole has 3 rows in dimension 0", back, A[:3], [B], [grad[:3]], 0, name)
    back = OPS.matmul_reduce_scatter_backward
    words = r"grad has shape \[4, 5\]; expected \[2, 5\], this rank's rows of A @ B"
    check_refused(words, back, grad, A, B, 0, name)
    check_refused(r"B has shape \[5, 3\]", back, grad[:2], A, B.t(), 0, name)
    check_refused(r"A has 3 rows in dimension 0", back, grad[:2], A[:3], B, 0, name)
    check_refused(r"scatter_dim=1 of A \[4, 3\]", back, grad[:2], A, B, 1, name)
    check_refused(r"A is torch.int64; expected bfloat16", gather, A.long(), [B.long()], 0, name)
    check_refused(r"A has shape \[3\]; expected two dimensions", gather, A[0], [B], 0, name)
    check_refused(r"B is on meta and A on cpu", scatter, A, B.to("meta"), "sum", 0, name)
    check_refused(r"reduce_op='max'; expected 'sum' or 'avg'", scatter, A, B, "max", 0, name)
    check_refused(r"scatter_dim=-1 of A", scatter, A, B, "sum", -1, name)
    check_refused(r"A has 3 rows in dimension 0, which 2 ranks", scatter, A[:3], B, "sum", 0, name)
    check_refused(r"B has shape \[5, 3\]", OPS.matmul_all_reduce, A, B.t(), name)
    words = r"addend has shape \[3, 5\]; expected \[4, 5\], the shape of A @ B"
    check_refused(words, OPS.matmul_all_reduce, torch.ones(4, 3), torch.ones(3, 5), name, B)
    check_refused(
        r"weight has shape \[3, 5\]; expected \[n, 3\]", OPS.linear_all_reduce, A, B, name
    )
    check_refused(
        rf"group_name='{name}' has no backend for tensors on mps", check_backend, name,
        dist.group.WORLD, torch.device("mps"),
    )  # fmt: skip


def test_gradients(pools: Pools) -> None:
    pools(2).run(gradients)
    pools(2).run(needed)


def twice(rank: int, world_size: int) -> None:
    """Gradients of gradients, which the operator of the first ones does not have."""
    A, B, C = (random(2, 3, seed=n).requires_grad_() for n in range(3))
    for return_A in (True, False):

        def gather(a: Tensor, b: Tensor, c: Tensor, return_A: bool = return_A) -> Any:
            matrices = [b.t(), c.t()]
            return tuple(OPS.all_gather_matmul(a, matrices, 0, world(), return_A=return_A)[1])

        assert torch.autograd.gradgradcheck(gather, (A, B, C))

    def scatter(a: Tensor, b: Tensor) -> Any:
        return OPS.matmul_reduce_scatter(a, b.t(), "avg", 0, world())

    assert torch.autograd.gradgradcheck(scatter, (A, B))


def test_gradients_of_gradients(pools: Pools) -> None:
    pools(1).run(twice)


def test_torch_accepts_the_operators(pools: Pools) -> None:
    pools(2).run(checked)


def forward(rank: int, world_size: int) -> None:
    """In forward mode, where a tangent would be lost; not before or after it."""
    x, B, words = torch.ones(4, 3), torch.ones(3, 5), "have no forward-mode derivative"

    def product(x: Tensor) -> Tensor:
        total: Tensor = OPS.matmul_all_reduce(x, B, world())
        return total

    def tangent(x: Tensor) -> Tensor:
        return torch.func.jvp(product, (x,), (x,))[1]

    check_refused(words, tangent, x)
    with pytest.raises(Exception, match=words):  # one of torch.compile's own
        torch.compile(tangent, backend="aot_eager")(x)
    with torch.autograd.forward_ad.dual_level():
        check_refused(words, OPS.all_reduce, x, world())
    for each in (product, torch.compile(product, backend="aot_eager")):
        assert torch.equal(each(x), torch.full((4, 5), 3.0 * world_size))


def test_forward_mode_is_refused(pools: Pools) -> None:
    pools(2).run(forward)


def test_the_gradient_of_one_product_is_not_copied() -> None:
    one, two = torch.ones(2, 3), torch.ones(2, 1)
    assert joined([one], -1) is one
    assert joined([one, two], -1).shape == (2, 4)


def test_wrong_arguments_are_refused_by_name(pools: Pools) -> None:
    pools(2).run(refused)


@gpus
def test_on_gpus() -> None:
    on_ranks(
        (values, (torch.bfloat16,)),
        (values, (torch.float16,)),
        (values, (torch.float32,)),
        (gradients, ()),
    )
