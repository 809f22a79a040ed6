"""The persistent product: alone, waiting for its rows, and sending its tiles away."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ladder.kernels.gemm import (
    Addition,
    Arrivals,
    Tiling,
    Track,
    _gemm_kernel,
    gemm,
    tiles_of,
)
from ladder.kernels.slots import SlotArrivals
from ladder.models import UserError
from ladder.ops.track_maps import all_to_all, direct_reduce_scatter, rotated
from tests.comm.scripted import coming, weakened
from tests.interpreter import addresses
from tests.kernels.support import _poisoned_memory, assert_close, on  # noqa: F401  (a fixture)

SMALL = Tiling(16, 32, 16)
BF16, FP16 = torch.bfloat16, torch.float16
WAIT_ROWS = "wait(flags + shard, 1, SPIN_LIMIT, TMA)"
WAIT_PIECE = "wait(flags + flag, 1, SPIN_LIMIT)"


def operands(device: str, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(m, k, device=device), torch.randn(k, n, device=device)
    return a.to(dtype), b.to(dtype)


def order_of(m: int, n: int, shards: int, tiling: Tiling, first: int, device: str) -> Tensor:
    """The tiles from shard `first` on."""
    order = rotated(*tiles_of(m, n, shards, tiling), shards, 1, first - 1)
    return torch.tensor(order, dtype=torch.int32, device=device)


def check(device: str, a: Tensor, b: Tensor, shards: int = 1, tiling: Tiling | None = None) -> None:
    tiling = tiling or (Tiling() if device == "cuda" else SMALL)
    around = torch.full((a.shape[0] + 2, b.shape[1]), 7.0, dtype=a.dtype, device=device)
    order = order_of(a.shape[0], b.shape[1], shards, tiling, shards - 1, device)
    out = gemm(a, b, order, tiling=tiling, shards=shards, out=around[1:-1])
    assert_close(out, a.double() @ b.double(), a @ b)
    assert (around[[0, -1]] == 7.0).all()
    assert torch.equal(gemm(a, b, order, tiling=tiling, shards=shards), out)


@pytest.mark.parametrize(
    "device", [on("cpu"), on("interpreter"), on("cuda")]
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "shards"),
    [(16, 32, 16, 1), (33, 72, 40, 1), (36, 64, 48, 4), (50, 40, 24, 2), (3, 8, 200, 3)],
)
def test_gemm(device: str, dtype: torch.dtype, m: int, n: int, k: int, shards: int) -> None:
    """A tile left out, taken twice or in a neighbour's place; rows of the next shard; steps lost.

    Ragged in every dimension, by TMA (all rows are multiples of 16 bytes) and with b both ways.
    """
    a, b = operands(device, m, n, k, dtype)
    check(device, a, b, shards)
    check(device, a, b.t().contiguous().t(), shards)


@pytest.mark.parametrize("device", [on("interpreter"), on("cuda")])
def test_gemm_without_tma_and_in_whole_tiles(device: str) -> None:
    """Rows at odd addresses; operands that are views; the epilogue in one piece."""
    a, b = operands(device, 21, 35, 19, BF16)
    whole = Tiling(32, 32, 32, halves=False)
    for x, y in ((a, b), (a.t().contiguous().t(), b), (a[:, 1:], b[1:]), (a, b[:, ::2])):
        check(device, x, y)
        check(device, x, y, 3, whole)


@pytest.mark.parametrize("device", [on("interpreter")])
def test_a_waiting_gemm_reads_what_has_arrived(device: str) -> None:
    """A shard's rows come with its flag: who does not wait reads NaN. The own shard has no flag."""
    shards, rank = 4, 2
    a, b = operands(device, 4 * 20, 40, 24, BF16)
    here, flags = a.clone(), torch.zeros(shards, dtype=torch.int32)
    for q in range(shards):
        if q != rank:
            here[q * 20 : (q + 1) * 20] = torch.nan

    def arrive(q: int) -> None:
        here[q * 20 : (q + 1) * 20] = a[q * 20 : (q + 1) * 20]

    order = order_of(80, 40, shards, SMALL, rank, device)
    with coming(flags, arrive) as looks:
        out = gemm(here, b, order, tiling=SMALL, shards=shards, arrivals=Arrivals(flags, rank))
    assert_close(out, a.double() @ b.double(), a @ b)
    assert list(dict.fromkeys(looks)) == [3, 0, 1]


@pytest.mark.parametrize("device", [on("cuda")])
@pytest.mark.parametrize("tiling", [Tiling(), Tiling(64, 64, 64, stages=3, warps=4)], ids=str)
def test_a_waiting_gemm_loads_nothing_too_early(device: str, tiling: Tiling) -> None:
    """Rows and flags that come while it runs: loads of the next tile, too, follow its wait."""
    shards, rank = 4, 1
    a, b = operands(device, shards * 500, 6000, 200, BF16)
    order = order_of(len(a), 6000, shards, tiling, rank, device)
    wanted, side = gemm(a, b, order, tiling=tiling, shards=shards), torch.cuda.Stream()
    here, flags = a.clone(), torch.zeros(shards, dtype=torch.int32, device=device)
    for _ in range(20):
        for q in range(shards):
            if q != rank:
                here[q * 500 : (q + 1) * 500] = torch.nan
        flags.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for distance in range(1, shards):
                q = (rank + distance) % shards
                torch.cuda._sleep(random.randint(1, 500_000))  # clocks
                here[q * 500 : (q + 1) * 500].copy_(a[q * 500 : (q + 1) * 500])
                flags[q].fill_(1)
        arrivals = Arrivals(flags, rank)
        out = gemm(here, b, order, tiling=tiling, shards=shards, arrivals=arrivals)
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("device", [on("interpreter"), on("cuda")])
@pytest.mark.parametrize("dma", [True, False])
@pytest.mark.parametrize(("m", "pieces"), [(4 * 20, 1), (4 * 40, 2)])
def test_a_tracked_gemm_fills_places_and_counts(
    device: str, dma: bool, m: int, pieces: int
) -> None:
    """Each chunk where the map says, in own memory or the peer's, and every counter at its count.

    dma: peers' chunks stay, and a copy engine would move them; otherwise tiles go to the peers.
    """
    world, rank, n, tiling = 4, 1, 72, SMALL
    a, b = operands(device, m, n, 24, BF16)
    down, across = tiles_of(m, n, world, tiling)
    program = direct_reduce_scatter(down, across, world, pieces, dma).compile(rank)
    on_device = {k: v.to(device) for k, v in vars(program).items() if isinstance(v, Tensor)}
    slots = [torch.full((m, n), torch.nan, dtype=BF16, device=device) for _ in range(world)]
    product = torch.full_like(slots[0], torch.nan)
    counts = torch.zeros(world, 64, dtype=torch.int32, device=device)
    track = Track(
        on_device["target"], on_device["counter"], on_device["chunk"], on_device["peer"],
        addresses(slots).to(device), addresses(list(counts)).to(device),
    )  # fmt: skip
    out = gemm(a, b, on_device["order"], tiling=tiling, shards=world, out=product, track=track)
    exact, plain = a.double() @ b.double(), a @ b
    shard = m // world
    for owner in range(world):
        mine = slice(owner * shard, (owner + 1) * shard)
        in_slot = not dma or owner == rank
        place, other = slots[owner][rank * shard : (rank + 1) * shard], out[mine]
        if not in_slot:
            place, other = other, place
        assert_close(place, exact[mine], plain[mine])
        assert other.isnan().all()
        assert int(slots[owner].isnan().all(1).sum()) == m - shard * in_slot
    if dma:
        found = counts[rank, : len(program.count)].cpu()
        own = [block.count > 0 and not block.flags for block in program.blocks]
        assert torch.equal(found[own], program.count[own])
    assert int(counts.sum()) == down * across


def summing(
    device: str, world: int, rank: int, shard: int, n: int, pieces: int, average: bool, more: bool
) -> tuple[Callable[..., Tensor], Addition, Tensor, Tensor]:
    """The product to call, what it adds, and the exact sum; and this rank's product without it.

    Numbers of many sizes: the sum depends on the order of the ranks, and on what each rounds.
    """
    m, tiling = world * shard, SMALL if device == "cpu" else Tiling(64, 64, 64, stages=3, warps=4)
    a, b = operands(device, m, n, 24, BF16)
    addend = torch.randn(m, n, device=device).to(BF16) if more else None
    down, across = tiles_of(m, n, world, tiling)
    high = -(-down // world // pieces)
    program = all_to_all(down, across, world, high, keep=True).compile(rank)
    on_device = {k: v.to(device) for k, v in vars(program).items() if isinstance(v, Tensor)}
    counts = torch.zeros(world, 64, dtype=torch.int32, device=device)
    track = Track(
        on_device["target"], on_device["counter"], on_device["chunk"], on_device["peer"],
        addresses(list(counts)).to(device), addresses(list(counts)).to(device),
    )  # fmt: skip
    plain = gemm(a, b, on_device["order"], tiling=tiling, shards=world, addend=addend)
    # Of each slot the rows are dense, and between slots there is room, as for an all-reduce's sums.
    memory = torch.randn(world, 2 * shard, n, device=device) * 30 ** torch.randn(
        world, 1, 1, device=device
    )
    slots = memory.to(BF16)[:, :shard]
    slots[rank] = torch.nan  # of this rank there is no slot
    total = torch.zeros(shard, n, device=device)
    for q in range(world):
        total += plain[rank * shard : (rank + 1) * shard] if q == rank else slots[q]
    flags = torch.zeros(world * pieces + 1, dtype=torch.int32, device=device)
    table = torch.arange(world * pieces, dtype=torch.int32).view(pieces, world)
    table[:, rank] = -1
    around = torch.full((shard + 2, n), 7.0, dtype=BF16, device=device)
    arrivals = SlotArrivals(flags, table.to(device), high * tiling.rows)
    addition = Addition(around[1:-1], slots, arrivals, rank, average)
    order = on_device["order"]

    def run(part: slice = slice(None)) -> Tensor:
        out = torch.full((m, n), torch.nan, dtype=BF16, device=device)
        gemm(a, b, order[part], tiling=tiling, shards=world, out=out, track=track,
             addition=addition, addend=addend)  # fmt: skip
        assert (around[[0, -1]] == 7.0).all()
        theirs = [q for q in range(world) if q != rank]
        found, wanted = (each.view(world, shard, n) for each in (out, plain))
        done = found[theirs][~found[theirs].isnan()]
        assert torch.equal(done, wanted[theirs][~found[theirs].isnan()])
        assert found[rank].isnan().all()
        return out

    return run, addition, (total / world if average else total).to(BF16), counts


@pytest.mark.parametrize("device", [on("interpreter"), on("cuda")])
@pytest.mark.parametrize(
    ("world", "rank", "shard", "n", "average", "more"),
    [
        (2, 0, 40, 72, False, False), (2, 1, 33, 40, True, False), (4, 2, 20, 35, False, True),
        (3, 1, 19, 64, True, True),
    ],
)  # fmt: skip
def test_a_summing_gemm_adds_in_rank_order(
    device: str, world: int, rank: int, shard: int, n: int, average: bool, more: bool
) -> None:
    """Bit for bit, from slots with gaps between, to the own rows alone; each tile counts itself."""
    run, addition, total, counts = summing(device, world, rank, shard, n, 2, average, more)
    addition.arrivals.flags.fill_(1)
    out = run()
    assert torch.equal(addition.out, total)
    assert int(out.isnan().all(1).sum()) == shard
    assert int(counts.sum()) == int(counts[rank].sum()) > 0


@pytest.mark.parametrize("device", [on("interpreter")])
def test_a_summing_gemm_reads_what_has_arrived(device: str) -> None:
    """A piece of a slot comes with its flag; the peers' tiles wait for nothing."""
    world, rank, shard, pieces = 3, 1, 40, 2
    run, addition, total, _ = summing(device, world, rank, shard, 72, pieces, False, False)
    flags, slots = addition.arrivals.flags, addition.slots
    arriving = slots.clone()
    slots.fill_(torch.nan)

    def arrive(at: int) -> None:
        piece, q = divmod(at, world)
        rows = slice(piece * addition.arrivals.rows, (piece + 1) * addition.arrivals.rows)
        slots[q, rows] = arriving[q, rows]

    with coming(flags, arrive) as looks:
        run()
    assert torch.equal(addition.out, total), "other sums"
    assert list(dict.fromkeys(looks)) == [0, 2, 3, 5]


@pytest.mark.parametrize("device", [on("interpreter")])
def test_a_gemm_without_a_wait_is_seen(device: str) -> None:
    for check, old, new, words in (
        (test_a_waiting_gemm_reads_what_has_arrived, WAIT_ROWS, "pass", "nan of"),
        (test_a_summing_gemm_reads_what_has_arrived, WAIT_PIECE, "pass", "other sums"),
        # Of the first piece alone.
        (test_a_summing_gemm_reads_what_has_arrived, "now != seen", "seen < 0", "other sums"),
    ):
        with weakened(_gemm_kernel, old, new), pytest.raises(AssertionError, match=words):
            check(device)


@pytest.mark.parametrize("device", [on("cuda")])
def test_a_summing_gemm_loads_nothing_too_early(device: str) -> None:
    """Pieces and flags that come while it runs."""
    world, rank, shard, pieces = 4, 2, 700, 3
    run, addition, total, _ = summing(device, world, rank, shard, 2048, pieces, False, False)
    flags, slots, rows = addition.arrivals.flags, addition.slots, addition.arrivals.rows
    arriving, side = slots.clone(), torch.cuda.Stream()
    for _ in range(20):
        slots.fill_(torch.nan)
        flags.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            for piece in range(pieces):
                for q in range(world):
                    torch.cuda._sleep(random.randint(1, 200_000))  # clocks
                    part = slice(piece * rows, (piece + 1) * rows)
                    slots[q, part].copy_(arriving[q, part])
                    flags[piece * world + q].fill_(1)
        run()
        torch.cuda.synchronize()
        assert torch.equal(addition.out, total)


def test_wrong_arguments_are_refused() -> None:
    a, b = operands("cpu", 8, 8, 8, BF16)
    order = torch.zeros(1, dtype=torch.int32)
    for call, words in (
        (lambda: gemm(a, b[:4], order), r"shapes \[8, 8\], \[4, 8\]"),
        (lambda: gemm(a.float(), b.float(), order), "expected bfloat16 or float16"),
        (lambda: gemm(a, b, order, shards=3), "8 rows in 3 shards"),
        (lambda: gemm(a, b, order.long()), r"order is torch.int64 \[1\]; expected int32 \[1\]"),
        (lambda: gemm(a, b, order[:0]), r"order is torch.int32 \[0\]; expected int32 \[1\]"),
        (lambda: gemm(a, b, order, out=a[:4]), r"out is torch.bfloat16 \[4, 8\]; expected"),
    ):
        with pytest.raises(UserError, match=words):
            call()


def test_any_shape() -> None:
    source = random.Random(3)
    for _ in range(20):
        m, n = source.randint(1, 9) * 4, source.randint(1, 90)
        down, across = tiles_of(m, n, 4, SMALL)
        order = rotated(down, across, 4, 1, 0)
        assert sorted(order) == list(range(down * across))
