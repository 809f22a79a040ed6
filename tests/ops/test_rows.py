"""Rows that go to the rank that owns them, and expert products that do, on gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

import ladder.ops  # noqa: F401  (defines the operators)
from ladder.ops import rows as rows_module
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
from tests.ops.pushed_inputs import sent
from tests.samples import relative_error

OPS = torch.ops.ladder
COLUMNS = 3


def some(rank: int, ranks: int) -> list[int]:
    """Rows of every owner and of none, as many on no two ranks."""
    return [(3 * j + rank) % (ranks + 1) - 1 for j in range(5 + 4 * rank)]


def all_to_one(rank: int, ranks: int) -> list[int]:
    return [1] * 6


def nothing(rank: int, ranks: int) -> list[int]:
    """Rank 0 has no rows, the others have rows that nobody owns, and two of rank 0."""
    return [] if rank == 0 else [-1, 0, -1, 0]


OWNERS: dict[str, Callable[[int, int], list[int]]] = {
    each.__name__: each for each in (some, all_to_one, nothing)
}


def check_sent(
    found: tuple[Tensor, Tensor, Tensor], xs: list[Tensor], owners: list[list[int]], to: int,
    capacity: int, tolerance: float = 0.0,
) -> None:  # fmt: skip
    rows, counts, overflow = found
    pieces = sent(xs, owners, to, capacity)
    assert rows.shape == (len(xs), capacity, xs[0].shape[1])
    for piece, expected in zip(rows, pieces, strict=True):
        if len(expected):
            assert relative_error(piece[: len(expected)], expected) <= tolerance
        assert not piece[len(expected) :].any()
    wanted = [own.count(to) for own in owners]
    assert counts.tolist() == wanted
    assert overflow.item() == sum(max(0, count - capacity) for count in wanted)


def values(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Sent as a plain loop says, and back; with room for all, and with too little."""
    T, name = world_size, world()
    for make in OWNERS.values():
        owners = [make(q, T) for q in range(T)]
        xs = [random(COLUMNS, len(owners[q]), seed=q, dtype=dtype).t() for q in range(T)]
        for kind in (torch.int32, torch.int64):
            own = torch.tensor(owners[rank], dtype=kind)
            for capacity in (8 * T, 2, 1):
                found = OPS.all_to_all_rows(xs[rank], own, capacity, name)
                check_sent(found, xs, owners, rank, capacity)
                back = OPS.return_rows(found[0], own, name)
                seen = [0] * T
                for x, y, owner in zip(xs[rank], back, owners[rank], strict=True):
                    fits = owner >= 0 and seen[owner] < capacity
                    assert torch.equal(y, x if fits else torch.zeros_like(x))
                    if owner >= 0:
                        seen[owner] += 1


def lost(rank: int, world_size: int) -> None:
    """Each rank counts the rows for it that did not fit: rank 1 has too many, rank 0 has not."""
    x, T, capacity = torch.ones(5 + rank, 2), world_size, 2
    owners = torch.tensor([1, 1, 1, 0, 1, -1][: len(x)])  # four rows of each rank for rank 1
    offsets = torch.tensor([0, len(x)])
    for found in (
        OPS.all_to_all_rows(x, owners, capacity, world()),
        OPS.matmul_all_to_all(x, torch.ones(1, 2, 3), offsets, owners, capacity, world()),
    ):
        assert int(found[2]) == (4 if rank == 1 else 0)
        # What a sender knows, as docs/operators.md says it.
        mine = torch.bincount(owners[owners >= 0], minlength=T) - capacity
        own = mine.clamp(min=0).sum()
        assert int(own) == 2
        both = torch.stack((found[2], own)).double()
        everywhere, of_senders = OPS.all_reduce(both, world()).tolist()
        assert everywhere == of_senders == 4


def products(rank: int, world_size: int, dtype: torch.dtype) -> None:
    """Each expert's rows by its own matrix; an expert without rows, and rows of no expert."""
    T, name = world_size, world()
    ends = [[0, 3, 3, 4 + q] for q in range(T)]  # rows behind are of no expert
    owners = [some(q, T) for q in range(T)]
    hs = [random(len(owners[q]), 4, seed=q, dtype=dtype) for q in range(T)]
    Ws = [random(3, 2, 4, seed=20 + q, dtype=dtype).transpose(1, 2) for q in range(T)]
    ys, theirs = [], []
    for h, W, end, own in zip(hs, Ws, ends, owners, strict=True):
        expert = [sum(j >= e for e in end[1:]) for j in range(end[-1])]
        rows = [h[j].double() @ W[e].double() for j, e in enumerate(expert)]
        ys.append(torch.stack(rows))
        theirs.append(own[: end[-1]])
    for capacity in (16, 2):
        found = OPS.matmul_all_to_all(
            hs[rank], Ws[rank], torch.tensor(ends[rank]), torch.tensor(owners[rank]), capacity, name
        )
        assert found[0].dtype == dtype
        check_sent(found, ys, theirs, rank, capacity, TOLERANCE[dtype])


def mixture(rank: int, world_size: int) -> None:
    """A mixture of experts from these operators alone, against every token's own experts.

    Tokens are sent in the order of their experts; so those of an expert are together after a stable
    sort of what arrived, and come back in the order in which they were sent.
    """
    T, name, tokens, each, size = world_size, world(), 6, 2, 4
    capacity = 2 * tokens
    x = random(tokens, size, seed=rank)
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(tokens, T * each, generator=generator, device="cpu")
    topk = scores.topk(2).indices.to(x.device)
    factors = random(tokens, 2, seed=50 + rank)
    Ws = random(T, each, size, size, seed=60)
    expert, order = topk.flatten().sort(stable=True)
    token, owners = order // 2, expert // each
    rows, counts, overflow = OPS.all_to_all_rows(x[token], owners, capacity, name)
    kinds, _, _ = OPS.all_to_all_rows((expert % each).double().unsqueeze(1), owners, capacity, name)
    here = torch.arange(capacity) < counts.unsqueeze(1)
    kind = torch.where(here, kinds.squeeze(2), each).flatten()  # the last: no row
    kind, arrived = kind.sort(stable=True)
    offsets = torch.searchsorted(kind, torch.arange(each + 1))
    source = torch.where(kind < each, arrived // capacity, -1)
    h = rows.flatten(0, 1)[arrived]
    y, returned, lost = OPS.matmul_all_to_all(h, Ws[rank], offsets, source, capacity, name)
    assert overflow.item() == 0
    assert lost.item() == 0
    assert torch.equal(returned, torch.bincount(owners, minlength=T))
    place = torch.cat([torch.arange(n) for n in returned.tolist()])
    out = torch.zeros_like(x).index_add_(
        0, token, y[owners, place] * factors.flatten()[order].unsqueeze(1)
    )
    flat = Ws.flatten(0, 1)
    expected = torch.stack(
        [
            sum(factors[t, k] * (x[t] @ flat[topk[t, k]]) for k in range(2))  # type: ignore[misc]
            for t in range(tokens)
        ]
    )
    torch.testing.assert_close(out, expected)


def gradients(rank: int, world_size: int) -> None:
    """Also of rows that do not fit, whose gradient is zero."""
    T, name = world_size, world()
    owners = torch.tensor(some(rank, T)[:5])
    offsets = torch.tensor([0, 2, 4])
    for capacity in (5, 1):
        check_gradients(
            lambda x, c=capacity: OPS.all_to_all_rows(x, owners, c, name)[0], random(T, 5, 2)
        )
        check_gradients(lambda y: OPS.return_rows(y, owners, name), random(T, T, capacity, 2))
        check_gradients(
            lambda h, W, c=capacity: OPS.matmul_all_to_all(h, W, offsets, owners, c, name)[0],
            random(T, 5, 2), random(T, 2, 2, 1),
        )  # fmt: skip
    h, W = random(5, 2), random(2, 2, 1)
    both = [each.clone().requires_grad_() for each in (h, W)]
    OPS.matmul_all_to_all(*both, offsets, owners, 5, name)[0].sum().backward()
    spy = mock.Mock(wraps=rows_module.matmul_all_to_all_backward)
    for frozen in (0, 1):
        one = [each.clone().requires_grad_(n != frozen) for n, each in enumerate((h, W))]
        with mock.patch.object(rows_module, "matmul_all_to_all_backward", spy):
            OPS.matmul_all_to_all(*one, offsets, owners, 5, name)[0].sum().backward()
        assert spy.call_args.kwargs == {"needs_h": frozen == 1, "needs_W": frozen == 0}
        assert one[frozen].grad is None
        assert torch.equal(one[1 - frozen].grad, both[1 - frozen].grad)


def checked(rank: int, world_size: int) -> None:
    T, name = world_size, world()
    owners, offsets = torch.tensor([0, 1, -1, 0]), torch.tensor([0, 2, 3])
    x = random(4, 3, dtype=torch.float32).requires_grad_()
    W = random(2, 3, 5, dtype=torch.float32).requires_grad_()
    rows = random(T, 2, 3, dtype=torch.float32).requires_grad_()
    check_operator(OPS.all_to_all_rows, x, owners, 2, name)
    check_operator(OPS.return_rows, rows, owners, name)
    check_operator(OPS.matmul_all_to_all, x, W, offsets, owners, 1, name)
    grad = random(T, 1, 5, dtype=torch.float32)
    given = grad, x.detach(), W.detach(), offsets, owners
    check_operator(OPS.matmul_all_to_all_backward, *given, name)
    for needs in ({"needs_h": False}, {"needs_W": False}):
        check_operator(OPS.matmul_all_to_all_backward, *given, name, **needs)
        shapes = [
            list(each.shape) for each in OPS.matmul_all_to_all_backward(*given, name, **needs)
        ]
        assert shapes == ([[0], [2, 3, 5]] if "needs_h" in needs else [[4, 3], [0]])
    for words, wrong in (
        (r"grad has shape \[2, 1, 4\]; expected \[2, 1, 5\]", grad[..., :4]),
        (r"grad has shape \[1, 1, 5\]; expected \[2, 1, 5\]", grad[:1]),
        (r"grad is torch.float64 and h torch.float32", grad.double()),
    ):
        check_refused(words, OPS.matmul_all_to_all_backward, wrong, *given[1:], name)
    send, back, product = OPS.all_to_all_rows, OPS.return_rows, OPS.matmul_all_to_all
    check_refused("capacity=0; expected 1 row", send, x, owners, 0, name)
    check_refused(r"owners has shape \[4\]; expected \[3\]", send, x[:3], owners, 2, name)
    check_refused(r"owners is torch.float32", send, x, owners.float(), 2, name)
    check_refused(r"owners has a 2; expected .* 0 to 1, or -1", send, x, owners + 1, 2, name)
    check_refused(r"owners has a -2; expected .* 0 to 1, or -1", send, x, owners - 1, 2, name)
    check_refused(r"owners has a -2; expected", back, rows, owners - 1, name)
    check_refused(
        "x is torch.int8; expected .*float64, int32, int64", send, x.char(), owners, 2, name
    )
    check_refused(r"x has shape \[4\]; expected 2 dimensions", send, x[:, 0], owners, 2, name)
    check_refused(r"rows has shape \[1, 2, 3\]; expected \[2, 2, 3\]", back, rows[:1], owners, name)
    check_refused(r"owners is on meta and rows on cpu", back, rows, owners.to("meta"), name)
    for words, h, matrices, ends in (
        (r"W has shape \[2, 3, 5\]; expected \[2, 2, 5\]", x[:, :2], W, offsets),
        (r"offsets has shape \[2\]; expected \[3\]", x, W, offsets[:2]),
        (r"offsets=\[0, 2, 5\] of h with 4 rows", x, W, torch.tensor([0, 2, 5])),
        (r"offsets=\[0, 2, 1\] of h", x, W, torch.tensor([0, 2, 1])),
        (r"offsets is torch.float32", x, W, offsets.float()),
        (r"W is torch.float64 and h torch.float32", x, W.double(), offsets),
    ):
        check_refused(words, product, h, matrices, ends, owners, 2, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(pools: Pools, dtype: torch.dtype) -> None:
    pools(2).run(values, dtype)
    pools(2).run(products, dtype)


def test_each_rank_counts_the_rows_for_it_that_did_not_fit(pools: Pools) -> None:
    pools(2).run(lost)


def test_on_four_ranks(pools: Pools) -> None:
    pools(4).run(values, torch.float16)
    pools(4).run(products, torch.float64)
    pools(4).run(mixture)


def test_gradients(pools: Pools) -> None:
    pools(2).run(gradients)


def test_torch_accepts_the_operators_and_wrong_arguments_are_refused(pools: Pools) -> None:
    pools(2).run(checked)


@gpus
def test_on_gpus() -> None:
    on_ranks(
        (values, (torch.bfloat16,)), (products, (torch.bfloat16,)), (mixture, ()), (gradients, ())
    )
