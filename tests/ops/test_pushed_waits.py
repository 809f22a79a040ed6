"""The kernels of bags, rows and experts beside peers that do everything at the worst moment.

One rank's kernels run in Triton's interpreter, its peers follow a script (tests.comm.scripted):
until a peer opens its slots it still reads what they hold; when it is told that rows are there it
reads them at once; its own rows come with the third look at their word. tests.ops.test_pushed_bags
and test_pushed_rows run several ranks, at random.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels import bags, grouped, rows
from ladder.kernels.gemm import Tiling
from ladder.ops.pushed_rows import received
from tests.comm.scripted import ENDLESS, Script, weakened
from tests.interpreter import addresses
from tests.kernels.support import on
from tests.ops.pushed_inputs import expert_inputs, lookup, pooled, sent

WORLD, RANK = 3, 1
PEERS = [rank for rank in range(WORLD) if rank != RANK]
OPEN, SENT = range(2)


class Exchange:
    """The memory of all ranks, and one exchange of rows as this rank's peers see it.

    like: a rank's slots. stride: words between those of two ranks. asked: what comes with a peer's
    `open`, if anything. rows: what a peer stores in this rank's slots before it says `sent`.
    """

    def __init__(
        self, like: Tensor, stride: int, asked: dict[int, int], rows: Callable[[int, Tensor], None]
    ) -> None:
        self.stride, self.asked, self.rows, self.script = stride, asked, rows, Script()
        memories = [torch.full_like(like, torch.nan) for _ in range(WORLD)]
        flags = [torch.zeros(2 * WORLD * stride, dtype=torch.int32) for _ in range(WORLD)]
        self.slots = SymmetricTensor(RANK, memories, addresses(memories))
        self.words = SymmetricTensor(RANK, flags, addresses(flags))
        self.counters = torch.zeros(2, dtype=torch.int32)
        self.told: dict[int, int] = {}  # by peer: the word beside `open`, as the peer finds it
        self.taken: dict[int, Tensor] = {}  # by peer: its slots, as it finds them
        for peer in PEERS:
            theirs, own = flags[peer], flags[RANK]
            self.script.told(theirs, self.at(OPEN, RANK), lambda p=peer: self.is_told(p))
            self.script.comes(own, self.at(OPEN, peer), lambda p=peer: self.opens(p))
            self.script.told(theirs, self.at(SENT, RANK), lambda p=peer: self.takes(p))
            self.script.comes(own, self.at(SENT, peer), lambda p=peer: self.rows(p, memories[RANK]))

    def at(self, kind: int, rank: int) -> int:
        return (kind * WORLD + rank) * self.stride

    def is_told(self, peer: int) -> None:
        self.told[peer] = int(self.words.by_rank[peer][self.at(OPEN, RANK) + 1])

    def opens(self, peer: int) -> None:
        self.slots.by_rank[peer].fill_(torch.nan)  # what it held, whoever has stored there
        if peer in self.asked:
            self.words.own[self.at(OPEN, peer) + 1] = self.asked[peer]

    def takes(self, peer: int) -> None:
        self.script.late(self.words.own, self.at(OPEN, peer))
        self.taken[peer] = self.slots.by_rank[peer].clone()
        if peer in self.asked:
            self.words.own[self.at(OPEN, peer) + 1] = 1000  # of its next call

    def check(self, wanted: dict[int, Tensor], told: dict[int, int]) -> None:
        """wanted: what each peer is to find in its slots, NaN where nothing is sent."""
        assert self.told == told, "peers are not told what they may send"
        assert set(self.taken) == set(PEERS), "peers are not told that rows are there"
        for peer in PEERS:
            assert_same(self.taken[peer], wanted[peer], "a peer finds other rows")
            where = self.at(OPEN, peer), self.at(SENT, peer)
            assert not any(self.words.own[at] for at in where), "a word is not cleared"
        assert not self.counters.any(), "a counter is not set back"


def assert_same(found: Tensor, wanted: Tensor, what: str) -> None:
    assert torch.equal(found.nan_to_num(77.0), wanted.nan_to_num(77.0)), what


def check_out(found: Tensor, wanted: Tensor) -> None:
    assert_same(found, wanted, "other results")


def check_bags() -> None:
    share, tables, dim = 3, [2, 1, 2], 4
    each = [lookup(q, 0, share * WORLD, tables[q], dim, torch.float32, 5) for q in range(WORLD)]
    whole = [pooled(one, "sum").chunk(WORLD) for one in each]  # [of][to]
    before = [0, *accumulate(tables)]
    out = torch.full((share, before[-1] * dim), torch.nan)

    def columns(of: int) -> slice:
        return slice(before[of] * dim, before[of + 1] * dim)

    def comes(peer: int, slots: Tensor) -> None:
        slots[:, columns(peer)] = whole[peer][RANK]

    mine = each[RANK]
    for order in bags.ORDERS:
        exchange, out = Exchange(out, bags.MAX_PROGRAMS, {}, comes), torch.full_like(out, torch.nan)
        with exchange.script.played():
            bags.push_bags(
                mine.weights, addresses(mine.weights), mine.indices, mine.offsets, "sum",
                torch.tensor(before, dtype=torch.int32), out, exchange.slots, exchange.words,
                programs=1, order=order,
            )  # fmt: skip
        wanted = {peer: torch.full_like(out, torch.nan) for peer in PEERS}
        for peer in PEERS:
            wanted[peer][:, columns(RANK)] = whole[RANK][peer]
        exchange.check(wanted, dict.fromkeys(PEERS, 0))
        check_out(out, torch.cat([one[RANK] for one in whole], dim=1))


CAPACITY, SIZE = 4, 6
# The owners of each rank's rows: some of nobody; five of rank 2 on this one, of which four fit.
OWNERS = [[1, 1, 0, 2], [0, 1, 2, 2, -1, 0, 1, 2, 2, 2], [1, 0, 1, 1, 2, 2]]


def given() -> tuple[list[Tensor], Tensor]:
    """Each rank's rows, and the owners of this rank's."""
    return [torch.randn(len(own), SIZE) for own in OWNERS], torch.tensor(OWNERS[RANK])


def few_of_each() -> Any:
    """Several programs and tiles already for few rows."""
    return mock.patch.multiple(rows, CHUNK=4, SCAN=8, TILE=16, WIDEST=8)


def check_sent(y: list[Tensor], owners: list[list[int]], capacity: int, run: Any) -> None:
    """run(exchange, found) sends this rank's rows, and takes the peers'."""
    pieces = [sent(y, owners, to, capacity) for to in range(WORLD)]  # [to][of]
    found = received(WORLD, capacity, y[0].shape[1], y[0])
    found[0].fill_(torch.nan)

    def comes(peer: int, slots: Tensor) -> None:
        slots[peer, : len(pieces[RANK][peer])] = pieces[RANK][peer]

    numbers = [[own.count(to) for to in range(WORLD)] for own in owners]  # [of][to]
    exchange = Exchange(found[0], 2, {peer: numbers[peer][RANK] for peer in PEERS}, comes)
    with few_of_each(), exchange.script.played():
        run(exchange, found)
    wanted = {peer: torch.full_like(found[0], torch.nan) for peer in PEERS}
    for peer in PEERS:
        wanted[peer][RANK, : len(pieces[peer][RANK])] = pieces[peer][RANK]
    exchange.check(wanted, {peer: numbers[RANK][peer] for peer in PEERS})
    out = torch.zeros_like(found[0])
    for piece, own in zip(out, pieces[RANK], strict=True):
        piece[: len(own)] = own
    counts = [number[RANK] for number in numbers]
    assert found[1].tolist() == counts, "other results"
    assert found[2].item() == sum(max(0, count - capacity) for count in counts), "other results"
    check_out(found[0], out)


def check_rows() -> None:
    xs, owners = given()

    def run(exchange: Exchange, found: Any) -> None:
        memory, out = (exchange.slots, exchange.words), rows.as_bits(found[0])
        places = rows.place(owners, None, CAPACITY, exchange.words)
        bits = rows.as_bits(xs[RANK])
        rows.push_rows(bits, places, owners, out, *found[1:], *memory, exchange.counters)
        rows.receive_rows(out, found[1], *memory, exchange.counters[1:])

    check_sent(xs, OWNERS, CAPACITY, run)


def check_rows_back() -> None:
    """This rank's rows come back, and it returns to each peer the piece that it has asked for."""
    xs, owners = given()
    mine = sent(xs, OWNERS, RANK, CAPACITY)  # by the ranks from which they came
    pieces = torch.full((WORLD, CAPACITY, SIZE), torch.nan)
    for piece, own in zip(pieces, mine, strict=True):
        piece[: len(own)] = own
    out = torch.full_like(xs[RANK], torch.nan)

    def comes(peer: int, slots: Tensor) -> None:
        own = sent(xs, OWNERS, peer, CAPACITY)[RANK]
        slots[peer, : len(own)] = own

    asked = {peer: OWNERS[peer].count(RANK) for peer in PEERS}
    exchange = Exchange(pieces, 2, asked, comes)
    memory, bits = (exchange.slots, exchange.words), rows.as_bits(pieces)
    with few_of_each(), exchange.script.played():
        places = rows.place(owners, None, CAPACITY, exchange.words)
        rows.push_pieces(bits, *memory, exchange.counters)
        where = places, owners, rows.as_bits(out), *memory, exchange.counters[1:]
        rows.gather_rows(bits, *where)
    wanted = {peer: torch.full_like(pieces, torch.nan) for peer in PEERS}
    for peer in PEERS:
        wanted[peer][RANK, : len(mine[peer])] = mine[peer]
    exchange.check(wanted, {peer: OWNERS[RANK].count(peer) for peer in PEERS})
    own = OWNERS[RANK]
    fits = [each >= 0 and own[:n].count(each) < CAPACITY for n, each in enumerate(own)]
    check_out(out, torch.where(torch.tensor(fits).unsqueeze(1), xs[RANK], 0))


def check_experts() -> None:
    every = [expert_inputs(rank, 3, WORLD, torch.float16) for rank in range(WORLD)]
    y, listed = [], []
    for h, W, ends, owners, _ in every:
        parts = [h[a:b] @ W[e] for e, (a, b) in enumerate(pairwise(ends.tolist()))]
        y.append(torch.cat(parts))
        listed.append(owners[: len(y[-1])].tolist())
    h, W, ends, owners, capacity = every[RANK]

    def run(exchange: Exchange, found: Any) -> None:
        memory = exchange.slots, exchange.words
        places = rows.place(owners, ends[-1:], capacity, exchange.words)
        grouped.grouped_push(
            h, W, ends, places, owners, *found, *memory, exchange.counters,
            Tiling(16, 32, 16, 2, 4),
        )  # fmt: skip
        rows.receive_rows(rows.as_bits(found[0]), found[1], *memory, exchange.counters[1:])

    check_sent(y, listed, capacity, run)


CHECKS: dict[str, Callable[[], None]] = {
    "bags": check_bags, "rows": check_rows, "rows back": check_rows_back, "experts": check_experts,
}  # fmt: skip

TELL = """        for s in tl.static_range(1, WORLD):
            to = peer(words, rotate(s, rank, WORLD), tl.int32)
            signal(to + (WORLD + rank) * 2, 1)
"""
TOLD = """    for s in tl.static_range(1, WORLD):
        to = rotate(s, rank, WORLD)
        signal(peer(words, to, tl.int32) + (WORLD + rank) * STRIDE + program, 1)
"""
AWAIT = "    await_open(peer(words, rank, tl.int32), rank, WORLD, SPIN_LIMIT)\n"
ARRIVED = "wait(own + (WORLD + q) * 2, 1, SPIN_LIMIT)"
COUNT = "            tl.store(pair + 1, tl.sum(tl.where(ranks == q, totals, 0)))\n"
OPENED = "            if s > 0:\n                signal(pair, 1)\n"
LAST = '    if arrive(counter, tl.num_programs(0), "sys"):\n'
EAGER = "    if tl.program_id(0) == 0:\n" + TELL
FIRST = "if tl.program_id(0) == 0:"
ZERO = "        tl.store(counter, 0)\n"
LOST, EARLY, SILENT = "a peer finds other rows", "other results", "not told that rows are there"
UNTOLD, KEPT, COUNTED = "not told what they may", "a word is not cleared", "a counter is not set"
# Of each function: the check that must fail, the text, what stands in its place, how it fails.
MUTATIONS: dict[str, tuple[Any, str, str, str, str]] = {
    "bags: no wait for open": (
        bags._push_bags_kernel, "bags",
        "        wait(own + q * STRIDE + program, 1, SPIN_LIMIT)\n", "", LOST,
    ),
    "bags: open stays": (
        bags._push_bags_kernel, "bags",
        "        tl.store(own + q * STRIDE + program, 0)\n", "", KEPT,
    ),
    "bags: never opened": (
        bags._push_bags_kernel, "bags",
        "tl.static_range(1, WORLD):\n        signal(peer(words, rotate",
        "tl.static_range(1, 1):\n        signal(peer(words, rotate", UNTOLD,
    ),
    "bags: told before they are stored": (
        bags._push_bags_kernel, "bags", "    blocks = tl.cdiv(share, BAGS)\n",
        TOLD + "    blocks = tl.cdiv(share, BAGS)\n", LOST,
    ),
    "bags: never told": (bags._push_bags_kernel, "bags", TOLD, "", SILENT),
    "bags: no wait for the peers'": (
        bags._push_bags_kernel, "bags", "        wait(flag, 1, SPIN_LIMIT)\n", "", EARLY,
    ),
    "bags: sent stays": (
        bags._push_bags_kernel, "bags", "        tl.store(flag, 0)\n", "", KEPT,
    ),
    "place: never opened": (rows._place_kernel, "rows", OPENED, "", UNTOLD),
    "place: opened before the number is there": (
        rows._place_kernel, "rows", COUNT + OPENED, OPENED + COUNT, UNTOLD,
    ),
    "rows: no wait for open": (rows._push_rows_kernel, "rows", AWAIT, "", LOST),
    "experts: no wait for open": (grouped._grouped_push_kernel, "experts", AWAIT, "", LOST),
    "await_open: of one peer": (
        rows.await_open, "rows", "static_range(1, WORLD)", "static_range(1, 2)", LOST,
    ),
    "rows: no wait for the peers'": (
        rows._receive_rows_kernel, "rows", ARRIVED, "pass", EARLY,
    ),
    "experts: no wait for the peers'": (
        rows._receive_rows_kernel, "experts", ARRIVED, "pass", EARLY,
    ),
    "rows back: no wait for open": (
        rows._push_pieces_kernel, "rows back",
        "        wait(own + to * 2, 1, SPIN_LIMIT)\n", "", LOST,
    ),
    "rows back: no wait for the peers'": (
        rows._gather_rows_kernel, "rows back",
        "wait(own + (WORLD + rotate(s, rank, WORLD)) * 2, 1, SPIN_LIMIT)", "pass", EARLY,
    ),
    "hand_over: never told": (rows.hand_over, "rows", TELL, "", SILENT),
    "hand_over: told by the first program": (rows.hand_over, "rows", LAST, EAGER + LAST, LOST),
    "hand_over: of experts, by the first program": (
        rows.hand_over, "experts", LAST, EAGER + LAST, LOST,
    ),
    "hand_over: told before the numbers are kept": (
        rows.hand_over, "rows", "        if COUNTS:\n", TELL + "        if COUNTS:\n", EARLY,
    ),
    "hand_over: open stays": (
        rows.hand_over, "rows", "tl.store(own + rotate(s, rank, WORLD) * 2, 0)", "pass",
        KEPT,
    ),
    "hand_over: the counter stays": (rows.hand_over, "rows", ZERO, "", COUNTED),
    "close: by the first program": (
        rows.close, "rows", 'if arrive(counter, tl.num_programs(0), "gpu"):', FIRST,
        ENDLESS,
    ),
    "close: sent stays": (
        rows.close, "rows back",
        "tl.store(own + (WORLD + rotate(s, rank, WORLD)) * 2, 0)", "pass", KEPT,
    ),
    "close: the counter stays": (rows.close, "rows", ZERO, "", COUNTED),
}  # fmt: skip


@pytest.mark.parametrize(("device", "what"), [on("interpreter", what) for what in CHECKS])
def test_rows_are_stored_and_read_when_they_may_be(what: str, device: str) -> None:
    CHECKS[what]()


@pytest.mark.parametrize(("device", "mutation"), [on("interpreter", each) for each in MUTATIONS])
def test_a_mutation_is_seen(mutation: str, device: str) -> None:
    """The test above fails by what the mutation breaks, and by nothing else."""
    function, check, old, new, words = MUTATIONS[mutation]
    with weakened(function, old, new), pytest.raises(AssertionError, match=words):
        CHECKS[check]()
