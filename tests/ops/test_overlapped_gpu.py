"""Overlapped products on GPUs, provoked: many calls in flight, graphs, ranks that come late."""

from __future__ import annotations

import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ladder.ops
from ladder.kernels.gemm import Tiling, gemm, tiles_of
from ladder.operator_names import GATHER_BACKWARD, SCATTER_BACKWARD
from ladder.ops.registry import OPERATORS
from ladder.ops.track_maps import rotated
from ladder.parallel import launch
from tests.ops.everyone import TOLERANCE
from tests.ops.loss import check_loss, end_one_rank
from tests.ops.overlapped import (
    BLOCKED,
    EPS,
    EVERY,
    FEW_ROWS,
    IN_BLOCKS,
    OF_SHARDS,
    PUSHES,
    WHOLE,
    added_gradients,
    arguments,
    check_same,
    flat,
    landing,
    lands,
    of_many_sizes,
    ring_owners,
    ring_sums,
    run_of,
)
from tests.ops.pushes import poisoned
from tests.ops.replays import replay
from tests.samples import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

WORLDS = [world for world in (2, 4) if world <= torch.cuda.device_count()]
# Rows of all ranks, columns, and columns of A: whole tiles, several to a program; ragged; few rows.
SHAPES = [(4096, 4096, 1024), (1036, 1000, 520), (8, 2056, 264), (2048, 1024, 4096), (60, 136, 72)]
FEW = [
    (8, 4096, 1024),
    (1, 8200, 3584),
    (64, 2048, 512),
    (3, 1001, 264),
    (33, 1024, 2048),
    (515, 1024, 264),  # more than `pushing` takes
]
PUSHED = ("pushed", "pushing")
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "chunked": [
        {},
        {"streams": 2},
        {"pairs": True},
        {"pairs": True, "streams": 2},
        {"whole": True, "pairs": True},
        {"whole": True, "streams": 2},
    ],
    # Of `chunked` sums.
    "blocks": [{"blocks": 1}, {"blocks": 3}, {"blocks": 3, "ratio": 2, "streams": 2}],
    "push": PUSHES,
    "blocked": BLOCKED,
    "ring": [{}, {"blocks": 1}, {"blocks": 3, "ratio": 2, "streams": 2}],
    "waiting": [{}, {"tile": "128x128x64", "stages": 4}],
    "pushed": [{"shots": 2}, {}],
    "pushing": [{}, {}],
    "tracked": [{}, {"pieces": 2}, {"tile": "256x128x64", "stages": 4, "pieces": 3}],
    "summing": [{}, {"pieces": 1}, {"tile": "256x128x64", "stages": 3, "pieces": 3}],
}

# One for each schedule that is waited for in another way.
LOST = [
    ("all_gather_matmul", "waiting"), ("matmul_reduce_scatter", "chunked"),
    ("matmul_reduce_scatter", "tracked"), ("matmul_reduce_scatter", "ring"),
    ("matmul_reduce_scatter", "summing"),
    ("matmul_reduce_scatter_add_rms_norm", "chunked"),
    ("matmul_reduce_scatter_add_rms_norm", "tracked"), *IN_BLOCKS, *FEW_ROWS[:2],
]  # fmt: skip


def cases(which: str) -> list[tuple[str, str]]:
    if which == "blocks":
        return [(op, "chunked") for op in (*WHOLE, "matmul_reduce_scatter")]
    if which == "push":
        return [("matmul_all_reduce", "chunked")]
    return [(op, name) for op, name in EVERY + IN_BLOCKS + FEW_ROWS if name == which]


def choices(which: str, op: str, name: str) -> list[dict[str, Any]]:
    """Those of OPTIONS that the implementation has."""
    known = set(OPERATORS[op].implementations[name].options)
    return [each for each in OPTIONS[which] if known >= each.keys()]


def inputs_of(
    op: str, name: str, call: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Rank-specific operands, whose products are exact: as in tests.ops.overlapped."""
    world, rank = launch.world_size(), launch.rank()
    shapes = {"pushed": FEW, "pushing": FEW[:-1]}.get(name, SHAPES)
    rows, n, k = shapes[call % len(shapes)]
    if name in PUSHED:
        rows *= world if "scatter" in op else 1
    elif op in OF_SHARDS:
        rows //= world
    elif op in WHOLE and rows > 1 and name != "summing":
        rows -= 1
    source = torch.Generator(device=device).manual_seed(1000 * call + rank)
    made = {"generator": source, "device": device}
    A = torch.zeros(rows, k, device=device)
    A.scatter_(
        1, torch.randint(k, (rows, 1), **made), 2.0 ** torch.randint(-3, 4, (rows, 1), **made)
    )
    A, B = A.to(dtype), of_many_sizes(k, n, **made).to(dtype)
    return A, B.t().contiguous().t() if call % 2 else B


def check(
    op: str, name: str, options: dict[str, Any], turn: object, found: list[Tensor],
    given: tuple[Any, ...],
) -> None:  # fmt: skip
    """Bit for bit `staged`, or the sums in its own order, or as it rounds them."""
    averaged = name == "ring" and given[2:3] == ("avg",)
    if op == SCATTER_BACKWARD:
        grads = gathered(given[0])
        inputs = [(grad, given[2].t()) for grad in grads]
        wanted = added_gradients(inputs, launch.rank(), options)
    else:
        wanted = wanted_of(op, given, options) if name == "ring" else staged(op, given)
    check_same(op, (op, name, options, turn), found, wanted, averaged)


def staged(op: str, given: tuple[Any, ...]) -> list[Tensor]:
    return flat(run_of(op, "staged")(dist.group.WORLD, *given))


def gathered(x: Tensor) -> list[Tensor]:
    """That of each rank."""
    found = [torch.empty_like(x) for _ in range(launch.world_size())]
    dist.all_gather(found, x)
    return found


def wanted_of(op: str, given: tuple[Any, ...], options: dict[str, Any]) -> list[Tensor]:
    """What `ring` gives."""
    world, rank = launch.world_size(), launch.rank()
    A, B, *more = given
    partials = gathered(A @ B)
    owners = ring_owners(op, len(A), world, options)
    if op in WHOLE:
        return [ring_sums(partials, owners, addend=more[0] if more else None)]
    total = ring_sums(partials, owners, 1 / world if more[0] == "avg" else 1.0)
    return [total.chunk(world)[rank]]


def provoked(which: str) -> int:
    for op, name in cases(which):
        wide = (torch.float32,) if name in PUSHED else ()
        for dtype in (torch.bfloat16, torch.float16, *wide):
            provoke(op, name, dtype, choices(which, op, name))
            dense(op, name, dtype)
    if which == "push":
        ragged()
    return 0


def each_once() -> int:
    device, group = launch.join("cuda"), dist.group.WORLD
    for which in OPTIONS:
        for op, name in cases(which):
            options = choices(which, op, name)[-1]
            for call in (1, 4):  # ragged; few rows
                A, B = inputs_of(op, name, call, device, torch.bfloat16)
                given = arguments(op, A, B, call % 2 == 1, launch.world_size())
                found = flat(run_of(op, name)(group, *given, **options))
                check(op, name, options, call, found, given)
    return 0


@pytest.mark.parametrize("world", WORLDS)
def test_each_once(world: int) -> None:
    """Few calls, for compute-sanitizer: see benchmarks/sanitize.py."""
    assert launch.run(each_once, (), nproc=world) == 0


def ragged() -> None:
    """Ranks with fewer rows than others, of nearly as many bytes as slots are made for."""
    device = launch.join("cuda")
    run = run_of("matmul_all_reduce", "chunked")
    source = torch.Generator(device=device).manual_seed(launch.rank())
    for rows in (1365, 1363):
        A = torch.randint(-2, 3, (rows, 64), generator=source, device=device).bfloat16()
        B = torch.randint(-2, 3, (64, 6144), generator=source, device=device).bfloat16()
        given = dist.group.WORLD, A, B
        found = [run(*given, push=True) for _ in range(3)]
        wanted = run_of("matmul_all_reduce", "staged")(*given)
        check_same("matmul_all_reduce", rows, found, [wanted] * 3)


def provoke(op: str, name: str, dtype: torch.dtype, every: list[dict[str, Any]]) -> None:
    """Ten calls of several shapes in flight at a time, ranks that come late, poisoned outputs."""
    device = launch.join("cuda")
    rank, group, run = launch.rank(), dist.group.WORLD, run_of(op, name)
    own = random.Random(100 + rank)
    for turn, options in enumerate(4 * every):
        made = [inputs_of(op, name, 10 * turn + call, device, dtype) for call in range(10)]
        given = [
            arguments(op, A, B, call % 2 == 1, launch.world_size())
            for call, (A, B) in enumerate(made)
        ]
        torch.cuda.synchronize()
        with mock.patch.object(torch.Tensor, "new_empty", poisoned):
            found = []
            for each in given:
                if own.random() < 0.3:
                    torch.cuda._sleep(own.randrange(10_000_000) * (rank + 1))
                found.append(flat(run(group, *each, **options)))
        for call, each in enumerate(given):
            check(op, name, options, (turn, call), found[call], each)


def dense(op: str, name: str, dtype: torch.dtype) -> None:
    """Operands without zeros against float64, through the operator, which `use` makes run it."""
    device = launch.join("cuda")
    world, rank = launch.world_size(), launch.rank()
    source = torch.Generator(device=device).manual_seed(rank)
    rows = 512 if op in OF_SHARDS else 512 * world
    rows = 16 if name in PUSHED else rows
    A = torch.randn(rows, 1024, generator=source, device=device).to(dtype)
    B = (torch.randn(768, 1024, generator=source, device=device) / 32).to(dtype).t()
    parts: list[list[Tensor]] = []
    for each in (A, B.t().contiguous()):
        everyone = [torch.empty_like(each) for _ in range(world)]
        dist.all_gather(everyone, each)
        parts.append([part.double() for part in everyone])
    As, Bs = parts[0], [part.t() for part in parts[1]]
    group_name = dist.group.WORLD.group_name
    ops = torch.ops.ladder
    results: list[Tensor] = []
    others: list[tuple[Tensor, Tensor]] = []  # the matrices' gradients, and exactly
    with ladder.ops.use(op, name):
        for _ in range(2):
            if op == "all_gather_matmul":
                results += ops.all_gather_matmul(A, [B], 0, group_name, return_A=False)[1]
            elif op == GATHER_BACKWARD:
                whole = landing(len(A), B)[0]
                found, of_Bs = ops.all_gather_matmul_backward(whole, [B.t()], [A], 0, group_name)
                results.append(found)
                others.append((of_Bs[0], whole.double().t() @ A.double()))
            elif op == SCATTER_BACKWARD:
                whole = landing(world * len(A), B)[0]
                found, of_B = ops.matmul_reduce_scatter_backward(A, whole, B.t(), 0, group_name)
                results.append(found)
                others.append((of_B, whole.double().t() @ torch.cat(As)))
            elif op == "matmul_reduce_scatter":
                results.append(ops.matmul_reduce_scatter(A, B, "sum", 0, group_name))
            elif lands(op):
                residual, weight = landing(rows if op in WHOLE else rows // world, B)
                dim = () if op in WHOLE else (0,)
                call = getattr(ops, op)
                results.append(call(A, B, residual, weight, EPS, *dim, group_name)[0] - residual)
            elif op == "linear_all_reduce":
                results.append(ops.linear_all_reduce(A, B.t(), group_name))
            else:
                results.append(ops.matmul_all_reduce(A, B, group_name))
    total = sum(a @ b for a, b in zip(As, Bs, strict=True))
    exact = total.chunk(world)[rank] if "scatter" in op or op == GATHER_BACKWARD else total
    if op in OF_SHARDS:
        exact = torch.cat(As) @ Bs[rank]
    assert torch.equal(*results), "not the same over runs"
    limit = TOLERANCE[dtype] * (3 if lands(op) else 1)  # the residual is rounded, too
    for found, wanted in [(results[0], exact), *others]:
        assert relative_error(found, wanted) < limit
    assert all(torch.equal(found, others[0][0]) for found, _ in others)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("which", OPTIONS)
def test_calls_in_flight(which: str, world: int) -> None:
    """A slot written too early, or a tile read too early, is another's."""
    assert launch.run(provoked, (which,), nproc=world) == 0


def replayed(which: str) -> int:
    device, group = launch.join("cuda"), dist.group.WORLD
    for op, name in cases(which):
        options = choices(which, op, name)[-1]
        run = functools.partial(run_of(op, name), group, **options)
        made = [inputs_of(op, name, call, device, torch.bfloat16) for call in range(4)]
        replay(
            lambda *each, run=run: flat(run(*each)),
            [arguments(op, A, B, False, launch.world_size()) for A, B in made],
            [A for A, _ in made],
            functools.partial(check, op, name, options),
        )
    return 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("which", OPTIONS)
def test_graphs(which: str, world: int) -> None:
    """A graph of one call uses the same set of slots in each replay, but of those that push."""
    assert launch.run(replayed, (which,), nproc=world) == 0


def lose_a_rank(op: str, name: str) -> int:
    made = inputs_of(op, name, 0, launch.join("cuda"), torch.bfloat16)
    given = arguments(op, *made, False, launch.world_size())
    return end_one_rank(lambda: run_of(op, name)(dist.group.WORLD, *given))


@pytest.mark.parametrize("world", WORLDS[-1:])
@pytest.mark.parametrize(("op", "name"), LOST)
def test_a_dead_rank_ends_the_job_and_is_named(
    op: str, name: str, world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    check_loss(lose_a_rank, (op, name), world, capfd)


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (1024, 12288, 4096), (1000, 1304, 776)])
def test_a_persistent_product_at_real_shapes(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    device = torch.device("cuda", 0)
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device) / k**0.5
    a, b = a.bfloat16(), b.bfloat16().t()
    for tiling in (Tiling(), Tiling(128, 128, 64, 4), Tiling(256, 128, 64, 3, halves=False)):
        order = rotated(*tiles_of(m, n, 1, tiling), 1, 10**6, 0)
        out = gemm(a, b, torch.tensor(order, dtype=torch.int32, device=device), tiling=tiling)
        assert relative_error(out, a.double() @ b.double()) < TOLERANCE[torch.bfloat16]
