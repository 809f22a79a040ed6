"""Bags, rows and experts' products that push on GPUs, provoked: many calls in flight, graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ladder.ops
from ladder.ops.registry import OPERATORS
from ladder.parallel import launch
from tests.ops.loss import check_loss, end_one_rank
from tests.ops.pushes import check_same, poisoned
from tests.ops.replays import replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

WORLDS = [world for world in (2, 4) if world <= torch.cuda.device_count()]
BAGS, SEND, BACK, PRODUCT = (
    "embedding_bag_all_to_all", "all_to_all_rows", "return_rows", "matmul_all_to_all",
)  # fmt: skip
OPTIONS: dict[tuple[str, str], list[dict[str, Any]]] = {
    (BAGS, "pushed"): [
        {}, {"order": "tables"}, {"order": "oblivious", "programs": 100}, {"programs": 4096},
    ],
    (SEND, "pushed"): [{}],
    (BACK, "pushed"): [{}],
    (PRODUCT, "pushed"): [{}, {"tile": "64x128x64", "stages": 4}],
    (PRODUCT, "grouped"): [{}],
}  # fmt: skip
CASES = [*OPTIONS]

# Samples of a rank, tables of a rank, dim, longest bag: large; odd; wide rows; all bags empty.
LOOKUPS = [(256, 24, 256, 60), (7, 3, 100, 9), (33, 2, 1500, 20), (64, 5, 64, 0)]
# Rows of a rank, columns, capacity: all fit; some do not; narrow rows; few.
ROWS = [(4000, 2048, 4000), (1500, 1000, 200), (5000, 1, 3000), (3, 7168, 8)]
# Rows of each of four experts, k, n, capacity.
PRODUCTS = [(1000, 1024, 2048, 4000), (70, 192, 520, 64), (300, 96, 136, 2000), (0, 64, 64, 16)]


def lookups(
    call: int, source: torch.Generator, dtype: torch.dtype, whole: bool = True
) -> tuple[Any, ...]:
    """whole: rows of whole numbers, whose sums are exact in any order."""
    share, tables, dim, longest = LOOKUPS[call % len(LOOKUPS)]
    world, rank, device = launch.world_size(), launch.rank(), source.device
    made: dict[str, Any] = {"generator": source, "device": device}
    counts = [tables + q % 2 for q in range(world)]
    weights, lengths, indices = [], [], []
    for table in range(counts[rank]):
        rows = 50 + 700 * table
        numbers = torch.randint(-3, 4, (rows, dim), **made).float()
        weights.append((numbers if whole else torch.randn(rows, dim, **made)).to(dtype))
        lengths.append(torch.randint(longest + 1, (share * world,), **made))
        indices.append(torch.randint(rows, (int(lengths[-1].sum()),), **made))
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    kind = torch.int32 if call % 2 else torch.int64
    ends = torch.cat([zero, *lengths]).cumsum(0).to(kind)
    return weights, torch.cat(indices).to(kind), ends, "sum", counts


def given_for(op: str, call: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of a call: the same shapes on all ranks but for rows, which differ."""
    world, rank = launch.world_size(), launch.rank()
    source = torch.Generator(device=device).manual_seed(1000 * call + rank)
    made: dict[str, Any] = {"generator": source, "device": device}
    if op == BAGS:
        return lookups(call, source, dtype)
    if op == PRODUCT:
        each, k, n, capacity = PRODUCTS[call % len(PRODUCTS)]
        lengths = torch.tensor([each, 0, each // 3 + rank, each // 2])
        m = int(lengths.sum()) + 5
        h = torch.zeros(m, k, device=device)  # one power of two in a row: products are exact
        h.scatter_(1, torch.randint(k, (m, 1), **made), 0.5)
        W = torch.randn(4, k, n, **made).to(dtype)
        W = W.transpose(1, 2).contiguous().transpose(1, 2) if call % 2 else W
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
        return h.to(dtype), W, ends, torch.randint(-1, world, (m,), **made), capacity
    m, columns, capacity = ROWS[call % len(ROWS)]
    m = 0 if call % 7 == 3 and rank == 0 else m + 13 * rank
    owners = torch.randint(-1, world, (m,), **made)
    if op == SEND:
        return torch.randn(m, columns, **made).to(dtype), owners, capacity
    return torch.randn(world, capacity, columns, **made).to(dtype), owners


def flat(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def run_of(op: str, name: str) -> Callable[..., Any]:
    return OPERATORS[op].implementations[name].run


def check(what: object, found: list[Tensor], op: str, given: tuple[Any, ...]) -> None:
    wanted = flat(run_of(op, "staged")(dist.group.WORLD, *given))
    for out, exact in zip(found, wanted, strict=True):
        check_same(out, exact, what)


def provoked(op: str, name: str) -> int:
    """Ten calls of several shapes in flight at a time, ranks that come late, poisoned outputs;
    30 calls at least of each type, 20 of each option."""
    device = launch.join("cuda")
    rank, group, run = launch.rank(), dist.group.WORLD, run_of(op, name)
    own = random.Random(100 + rank)
    wide = torch.float16 if op == PRODUCT else torch.float32
    choices = OPTIONS[op, name]
    for dtype in (torch.bfloat16,) if name == "grouped" else (torch.bfloat16, wide):
        for turn, options in enumerate(choices * (3 if len(choices) == 1 else 2)):
            given = [given_for(op, 10 * turn + call, device, dtype) for call in range(10)]
            torch.cuda.synchronize()
            with mock.patch.object(torch.Tensor, "new_empty", poisoned):
                found = []
                for each in given:
                    if own.random() < 0.3:
                        torch.cuda._sleep(own.randrange(10_000_000) * (rank + 1))
                    found.append(flat(run(group, *each, **options)))
            for call, each in enumerate(given):
                check((op, name, dtype, options, turn, call), found[call], op, each)
    return 0


def each_once() -> int:
    device = launch.join("cuda")
    for op, name in CASES:
        given = given_for(op, 1, device, torch.bfloat16)
        check((op, name), flat(run_of(op, name)(dist.group.WORLD, *given)), op, given)
    return 0


@pytest.mark.parametrize("world", WORLDS)
def test_each_once(world: int) -> None:
    """Few calls, for compute-sanitizer: see benchmarks/sanitize.py."""
    assert launch.run(each_once, (), nproc=world) == 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("op", "name"), CASES)
def test_calls_in_flight(op: str, name: str, world: int) -> None:
    """Bit for bit `staged`; a slot written or read too early has another call's rows, or NaN."""
    assert launch.run(provoked, (op, name), nproc=world) == 0


def beyond() -> int:
    """Through the dispatcher: offsets beyond the rows, of which the host does not know."""
    device = launch.join("cuda")
    group = dist.group.WORLD
    for name in ("pushed", "grouped"):
        for call in range(len(PRODUCTS)):
            h, W, ends, owners, capacity = given_for(PRODUCT, call, device, torch.bfloat16)
            at = torch.arange(len(owners), device=device)
            owners = torch.where(at < ends[-1], owners, -1)
            far = torch.where(ends == ends[-1], ends + 10**6, ends)
            with ladder.ops.use(PRODUCT, name):
                found = torch.ops.ladder.matmul_all_to_all(
                    h, W, far, owners, capacity, group.group_name
                )
            check((name, call), flat(found), PRODUCT, (h, W, ends, owners, capacity))
    return 0


@pytest.mark.parametrize("world", WORLDS)
def test_offsets_beyond_the_rows(world: int) -> None:
    assert launch.run(beyond, (), nproc=world) == 0


def bags() -> int:
    """Sums of any numbers, in the order of the indices; means; a result that is lent."""
    device = launch.join("cuda")
    rank, group, run = launch.rank(), dist.group.WORLD, run_of(BAGS, "pushed")
    for call in range(3):
        source = torch.Generator(device=device).manual_seed(1000 * call + rank)
        weights, indices, ends, _, counts = lookups(call, source, torch.float32, whole=False)
        given = weights, indices, ends
        outs = [run(group, *given, "sum", counts, **each) for each in OPTIONS[BAGS, "pushed"]]
        for out in outs[1:]:
            check_same(out, outs[0], call)
        staged = run_of(BAGS, "staged")
        torch.testing.assert_close(outs[0], staged(group, *given, "sum", counts))
        mean = run(group, *given, "mean", counts)
        torch.testing.assert_close(mean, staged(group, *given, "mean", counts))
        kept: list[Tensor] = []
        for turn in range(20):
            if rank == turn % 2:
                torch.cuda._sleep(20_000_000)
            lent = run(group, *given, "sum", counts, lent=True)
            if rank == turn % 3:
                torch.cuda._sleep(20_000_000)  # the others are ahead
            kept.append(lent.clone())
        for each in kept:
            check_same(each, outs[0], (call, "lent"))
    return 0


@pytest.mark.parametrize("world", WORLDS)
def test_bags_in_any_order_of_work_are_the_same(world: int) -> None:
    assert launch.run(bags, (), nproc=world) == 0


def replayed(op: str, name: str) -> int:
    device = launch.join("cuda")
    group, run = dist.group.WORLD, run_of(op, name)
    given = [given_for(op, call, device, torch.bfloat16) for call in range(4)]
    replay(
        lambda *each: flat(run(group, *each)), given,
        [each[0][0] if op == BAGS else each[0] for each in given],
        lambda turn, found, each: check((op, name, "graph", turn), found, op, each),
    )  # fmt: skip
    return 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("op", "name"), CASES)
def test_graphs(op: str, name: str, world: int) -> None:
    """Captured as they are: the host waits for nothing."""
    assert launch.run(replayed, (op, name), nproc=world) == 0


def through_operators() -> int:
    """As the operators call them, with `use`, and their gradients, which are those of `staged`."""
    device = launch.join("cuda")
    name = dist.group.WORLD.group_name
    for op in (BAGS, SEND, PRODUCT):
        given = given_for(op, 0, device, torch.bfloat16)
        leaves = given[0] if op == BAGS else [given[0]]
        found: list[list[Tensor]] = []
        for implementation in ("pushed", "staged"):
            mine = [leaf.detach().clone().requires_grad_() for leaf in leaves]
            rest = given[1:4] if op == BAGS else given[1:]
            more = {"table_counts": given[4]} if op == BAGS else {}
            with ladder.ops.use(op, implementation):
                call = getattr(torch.ops.ladder, op)
                out = flat(call(mine if op == BAGS else mine[0], *rest, name, **more))[0]
            out.float().square().sum().backward()
            found.append([out.detach(), *(leaf.grad for leaf in mine if leaf.grad is not None)])
        for pushed, staged in zip(*found, strict=True):
            check_same(pushed, staged, op)
    return 0


@pytest.mark.parametrize("world", WORLDS[:1])
def test_through_the_operators(world: int) -> None:
    assert launch.run(through_operators, (), nproc=world) == 0


def lose_a_rank(op: str, name: str) -> int:
    given = given_for(op, 0, launch.join("cuda"), torch.bfloat16)
    return end_one_rank(lambda: run_of(op, name)(dist.group.WORLD, *given))


@pytest.mark.parametrize("world", WORLDS[-1:])
@pytest.mark.parametrize(("op", "name"), [CASES[0], CASES[1], CASES[3]])
def test_a_dead_rank_ends_the_job_and_is_named(
    op: str, name: str, world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    check_loss(lose_a_rank, (op, name), world, capfd)
