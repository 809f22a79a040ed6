"""What pushes rows, with ranks that are streams of one GPU and share its memory.

The kernels, their protocol and memory ordering, as between GPUs, but for the link: for a machine
that has one, and for compute-sanitizer, which follows one process. Few programs run for each rank,
since all that wait for one another must fit on the GPU at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels import grouped, rows
from ladder.kernels.bags import MAX_PROGRAMS, push_bags
from ladder.kernels.gemm import Tiling
from ladder.ops.pushed_rows import received
from tests.interpreter import addresses
from tests.kernels.support import GPU
from tests.ops.pushed_inputs import EXPERTS, Lookup, expert_inputs, lookup, pooled, sent
from tests.ops.pushes import check_same

pytestmark = GPU
WORLDS = (2, 4)
ROUNDS = 20
# Rows of each rank, columns, capacity: all fit, some do not, rows of 10 bytes.
ROWS = [(3000, 1024, 3000), (700, 200, 90), (50, 5, 40)]


class Box(NamedTuple):
    """A rank's part of what all share: see ladder.ops.mailbox.Mailbox."""

    slots: SymmetricTensor
    words: SymmetricTensor
    counters: Tensor


def boxes(world: int, size: int, words: int) -> list[Box]:
    """size: bytes of a rank's slots."""

    def shared(count: int, value: int) -> list[SymmetricTensor]:
        memory = [
            torch.full((count,), value, dtype=torch.int32, device="cuda") for _ in range(world)
        ]
        table = addresses(memory).cuda()
        return [SymmetricTensor(rank, memory, table) for rank in range(world)]

    slots, flags = shared(-(-size // 4), -1), shared(words, 0)
    zeros = [torch.zeros(2, dtype=torch.int32, device="cuda") for _ in range(world)]
    return [Box(*each) for each in zip(slots, flags, zeros, strict=True)]


Results = list[dict[int, list[Tensor]]]  # [call][rank]


def together(made: list[Box], calls: list[Callable[[int], list[Tensor]]]) -> Iterator[Results]:
    """The results of calls that all ranks make, each on a stream of its own, round by round.

    First every rank makes each alone, with all words set, so that nothing waits: a kernel that is
    loaded, or memory that is allocated, while another waits for it may wait for that one.
    """
    streams = [torch.cuda.Stream() for _ in made]
    kept = []
    for call in calls:
        for rank, box in enumerate(made):
            box.words.own.fill_(1)
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[rank]):
                kept.append(call(rank))
            torch.cuda.synchronize()
    del kept
    for box in made:
        box.words.own.zero_()
        box.counters.zero_()
    torch.cuda.synchronize()
    source = random.Random(0)
    for _ in range(ROUNDS):
        results: Results = []
        for call in calls:
            found: dict[int, list[Tensor]] = {}
            for rank in source.sample(range(len(made)), len(made)):
                with torch.cuda.stream(streams[rank]):
                    if source.random() < 0.3:
                        torch.cuda._sleep(source.randrange(3_000_000))
                    found[rank] = call(rank)
            results.append(found)
        torch.cuda.synchronize()
        yield results


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bags(world: int, dtype: torch.dtype) -> None:
    """Each number as a plain loop sums it; orders of work, ragged and empty bags, wide rows."""
    cases = []
    for number, (share, tables, dim, longest) in enumerate(
        [(40, 3, 256, 30), (7, 2, 100, 9), (5, 1, 1200, 4), (9, 2, 64, 0)]
    ):
        counts = [tables + q % 2 for q in range(world)]
        each = [
            lookup(q, number, share * world, counts[q], dim, dtype, longest) for q in range(world)
        ]
        mode = ("sum", "mean")[number % 2]
        wanted = torch.cat([pooled(one, mode) for one in each], dim=1).chunk(world)
        there = [
            Lookup([w.cuda() for w in one.weights], one.indices.cuda(), one.offsets.cuda())
            for one in each
        ]
        firsts = torch.tensor([*accumulate(counts, initial=0)], dtype=torch.int32).cuda()
        tabled = [addresses(one.weights).cuda() for one in there]
        cases.append((mode, wanted, there, firsts, tabled))
    size = max(case[1][0].nbytes for case in cases)
    made = boxes(world, size, 2 * world * MAX_PROGRAMS)

    def call(case: Any, order: str, programs: int, rank: int) -> list[Tensor]:
        mode, wanted, there, firsts, tabled = case
        mine, box = there[rank], made[rank]
        out = torch.full_like(wanted[rank], torch.nan, device="cuda")
        push_bags(
            mine.weights, tabled[rank], mine.indices, mine.offsets, mode, firsts, out, box.slots,
            box.words, programs=programs, order=order,
        )  # fmt: skip
        return [out]

    ways = [
        (case, order, programs)
        for case in cases
        for order, programs in (("remote", 64), ("oblivious", 7), ("tables", 32))
    ]
    calls = [lambda rank, way=way: call(*way, rank) for way in ways]
    for results in together(made, calls):
        for (case, order, programs), found in zip(ways, results, strict=True):
            for rank in range(world):
                check_same(found[rank][0].cpu(), case[1][rank], (order, programs, rank))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows(world: int, dtype: torch.dtype) -> None:
    """There as `sent` says, with their counts, and back."""
    cases = []
    for number, (m, columns, capacity) in enumerate(ROWS):
        source = torch.Generator().manual_seed(number)
        lengths = [m + 13 * q if q or number != 1 else 0 for q in range(world)]
        xs = [torch.randn(length, columns, generator=source).to(dtype) for length in lengths]
        owners = [torch.randint(-1, world, (length,), generator=source) for length in lengths]
        pieces = [torch.zeros(world, capacity, columns, dtype=dtype) for _ in range(world)]
        for rank, piece in enumerate(pieces):
            listed = [each.tolist() for each in owners]
            for part, own in zip(piece, sent(xs, listed, rank, capacity), strict=True):
                part[: len(own)] = own
        there = [[each.cuda() for each in one] for one in zip(xs, owners, pieces, strict=True)]
        cases.append((xs, owners, pieces, there))
    size = max(case[2][0].nbytes for case in cases)
    made = boxes(world, size, world * rows.WORDS)

    def send(case: Any, rank: int) -> list[Tensor]:
        (x, owners, pieces), box = case[3][rank], made[rank]
        found = received(world, pieces.shape[1], x.shape[1], x)
        found[0].fill_(torch.nan)
        out, memory = rows.as_bits(found[0]), (box.slots, box.words)
        places = rows.place(owners, None, pieces.shape[1], box.words)
        bits = rows.as_bits(rows.dense(x))
        rows.push_rows(bits, places, owners, out, *found[1:], *memory, box.counters)
        rows.receive_rows(out, found[1], *memory, box.counters[1:])
        return list(found)

    def bring(case: Any, rank: int) -> list[Tensor]:
        (x, owners, pieces), box = case[3][rank], made[rank]
        bits, memory = rows.as_bits(pieces), (box.slots, box.words)
        out = torch.full_like(x, torch.nan)
        places = rows.place(owners, None, pieces.shape[1], box.words)
        rows.push_pieces(bits, *memory, box.counters)
        where = places, owners, rows.as_bits(out), *memory, box.counters[1:]
        rows.gather_rows(bits, *where)
        return [out]

    ways = [(way, case) for case in cases for way in (send, bring)]
    calls = [lambda rank, way=way: way[0](way[1], rank) for way in ways]
    with mock.patch.object(rows, "PROGRAMS", 32):
        for results in together(made, calls):
            for (way, case), of_ranks in zip(ways, results, strict=True):
                for rank in range(world):
                    check = check_sent if way is send else check_back
                    check([each.cpu() for each in of_ranks[rank]], case, rank)


def check_sent(found: list[Tensor], case: Any, rank: int) -> None:
    out, counts, overflow = found
    _, owners, pieces, _ = case
    check_same(out, pieces[rank], rank)
    number = [int((own == rank).sum()) for own in owners]
    assert counts.tolist() == number
    assert overflow.item() == sum(max(0, count - out.shape[1]) for count in number)


def check_back(found: list[Tensor], case: Any, rank: int) -> None:
    xs, owners, pieces, _ = case
    mine = owners[rank].unsqueeze(1) == torch.arange(len(xs))
    fits = (mine & (mine.cumsum(0) <= pieces[rank].shape[1])).any(1)
    check_same(found[0], torch.where(fits.unsqueeze(1), xs[rank], 0), (rank, "back"))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_experts(world: int, dtype: torch.dtype) -> None:
    """Exact products, by TMA where rows allow it, at their owners."""
    cases = []
    for number in range(len(EXPERTS)):
        given = [expert_inputs(q, number, world, dtype) for q in range(world)]
        ys, owners = [], []
        for h, W, ends, own, _ in given:
            parts = [
                h[a:b].float() @ W[e].float()
                for e, (a, b) in enumerate(zip(ends.tolist(), ends.tolist()[1:], strict=False))
            ]
            ys.append(torch.cat(parts).to(dtype))
            owners.append(own[: len(ys[-1])].tolist())
        there = [[each.cuda() for each in one[:4]] for one in given]
        cases.append((ys, owners, there, given[0][4]))
    size = max(world * case[3] * case[0][0].shape[1] * 2 for case in cases)
    made = boxes(world, size, world * rows.WORDS)

    def call(case: Any, rank: int) -> list[Tensor]:
        (h, W, ends, owners), capacity, box = case[2][rank], case[3], made[rank]
        found = received(world, capacity, W.shape[2], h)
        found[0].fill_(torch.nan)
        memory = box.slots, box.words
        places = rows.place(owners, ends[-1:], capacity, box.words)
        grouped.grouped_push(
            h, W, ends, places, owners, *found, *memory, box.counters, Tiling(64, 64, 16, 2, 4)
        )
        rows.receive_rows(rows.as_bits(found[0]), found[1], *memory, box.counters[1:])
        return list(found)

    calls = [lambda rank, case=case: call(case, rank) for case in cases]
    with (
        mock.patch.object(rows, "PROGRAMS", 16),
        mock.patch.object(grouped, "multiprocessors", return_value=16),
    ):
        for results in together(made, calls):
            for (ys, owners, _, capacity), found in zip(cases, results, strict=True):
                for rank in range(world):
                    out, counts, _ = (each.cpu() for each in found[rank])
                    wanted = torch.zeros_like(out)
                    for piece, own in zip(wanted, sent(ys, owners, rank, capacity), strict=True):
                        piece[: len(own)] = own
                    check_same(out, wanted, rank)
                    assert counts.tolist() == [own.count(rank) for own in owners]
