"""Overlapped products: their schedules in any order of events, and on ranks that share memory."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ladder.ops
from ladder.comm import driver
from ladder.kernels.prefill import land_rows_reference
from ladder.models.errors import UserError
from ladder.ops import schedules, workspace
from ladder.ops.collectives import staged_all_gather
from ladder.ops.landings import staged_everywhere, staged_scatter
from ladder.ops.products import (
    staged_all_gather_matmul,
    staged_linear_all_reduce,
    staged_matmul_all_reduce,
    staged_matmul_reduce_scatter,
)
from ladder.ops.registry import ANOTHER, OPERATORS
from ladder.ops.schedules import Await, Follow, Put, Schedule
from ladder.ops.spread import Blocks
from ladder.ops.track_maps import all_to_all
from tests.comm.mapped import shared_memory
from tests.comm.threads import FakeDriver
from tests.distributed import Pools
from tests.interpreter import interpreting
from tests.kernels.support import _poisoned_memory, on  # noqa: F401  (a fixture)
from tests.ops.everyone import check_refused, in_order
from tests.ops.everyone import random as numbers
from tests.ops.everyone import world as group_name
from tests.ops.overlapped import (
    EPS,
    EVERY,
    FEW_ROWS,
    IMPLEMENTATIONS,
    WHOLE,
    arguments,
    check_same,
    flat,
    landing,
    lands,
    operands,
    ring_owners,
    ring_sums,
    run_of,
)
from tests.ops.streams import Everyone, Group, Machine, Queued, WrongOrderError

TILE: dict[str, Any] = {"tile": "16x32x16", "stages": 2}
BLOCKS: list[dict[str, Any]] = [{"blocks": 2}, {"blocks": 3, "ratio": 2, "streams": 2}]
# `chunked` and `ring` have torch's products and, on a CPU, a sum by torch; the others need their
# kernel.
CASES = [
    on("interpreter" if name in ("waiting", "tracked") else "cpu", op, name) for op, name in EVERY
]


def options_of(op: str, name: str) -> list[dict[str, Any]]:
    if name == "ring" or (op in WHOLE and name == "chunked"):
        return BLOCKS
    if name == "chunked":
        return [{}, {"streams": 2}]
    return [{"waiting": TILE, "tracked": {**TILE, "pieces": 2}}.get(name, {})]


def expected(
    op: str, name: str, options: dict[str, Any], inputs: list[Any], rank: int, average: bool
) -> list[Tensor]:
    """The exact results: see `operands`."""
    world = len(inputs)
    if op == "all_gather_matmul":
        whole = torch.cat([A for A, _ in inputs])
        return [whole, *(whole @ B for B in (inputs[rank][1], inputs[rank][1][:, :5]))]
    partials = [A @ B for A, B in inputs]
    averaged = average and op not in WHOLE
    if name == "ring":
        owners = ring_owners(op, len(partials[0]), world, options)
        total = ring_sums(partials, owners, 1 / world if averaged else 1.0)
        return [total if op in WHOLE else total.chunk(world)[rank]]
    if op not in WHOLE:
        partials = [each.chunk(world)[rank] for each in partials]
    if lands(op):
        residual, weight = landing(len(partials[0]), inputs[rank][1])
        return list(land_rows_reference(partials, residual, weight, EPS))
    total = in_order(partials)
    return [(total / world if averaged else total).to(inputs[0][0].dtype)]


def provoke(
    op: str, ways: list[tuple[str, dict[str, Any]]], world: int, seed: int, calls: int = 4,
    change: Callable[[int, Schedule], Schedule] = lambda rank, schedule: schedule,
    rows: tuple[int, ...] = (1, 9, 20), columns: tuple[int, ...] = (8, 40),
) -> None:  # fmt: skip
    """Several calls of several shapes, queued on all ranks, then run in a random order of events.

    Inputs are written on the main stream right before their call and overwritten right after it.
    ways: implementations and their options, in turn.
    """
    source = random.Random(seed)
    sets = [source.randrange(2) for _ in range(99)] if seed % 3 else [seed % 2] * 99
    everyone = Everyone(world)
    machine = Machine(world, sets.__getitem__, change)
    shapes = [(world * source.choice(rows), source.choice(columns)) for _ in range(calls)]
    if op in WHOLE:
        shapes = [(m - source.randrange(world), n) for m, n in shapes]
    outs: dict[tuple[int, int], list[Tensor]] = {}
    wanted: dict[tuple[int, int], list[Tensor]] = {}
    with machine.recording():
        for rank in range(world):
            machine.rank = rank
            group = Group(rank, everyone)
            for call, (m, n) in enumerate(shapes):
                per_rank = m // world if op == "all_gather_matmul" else m
                inputs = operands(world, call, per_rank, n, torch.bfloat16)
                A, B = (torch.full_like(each, torch.nan) for each in inputs[rank])
                average = call % 2 == 1
                machine.main(lambda A=A, mine=inputs[rank][0]: A.copy_(mine))
                machine.main(lambda B=B, mine=inputs[rank][1]: B.copy_(mine))
                given = arguments(op, A, B, average, world)
                name, options = ways[call % len(ways)]
                found = run_of(op, name)(group, *given, **options)
                outs[rank, call] = flat(found)
                machine.main(lambda A=A, B=B: (A.fill_(torch.nan), B.fill_(torch.nan)))
                wanted[rank, call] = expected(op, name, options, inputs, rank, average)
    machine.execute(source)
    for (rank, call), found in outs.items():
        way = ways[call % len(ways)]
        averaged = way[0] == "ring" and call % 2 == 1
        check_same(op, f"{op} {way} {rank, call}", found, wanted[rank, call], averaged)


@pytest.mark.parametrize(("device", "op", "name"), CASES)
def test_any_order_of_events_gives_the_sums_in_rank_order(device: str, op: str, name: str) -> None:
    """Bit for bit. A piece read early is NaN or another call's; a wait too much never ends.

    Sets of buffers alternate, or are one and the same, as in a graph of one call.
    """
    for options in options_of(op, name):
        for seed in range(3):
            provoke(op, [(name, options)], (2, 3, 4)[seed], seed)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_implementations_that_share_slots(op: str) -> None:
    """The slots of a ring are in another order, so it waits for all peers, and frees all."""
    ways = [(name, options) for name in ("chunked", "ring") for options in options_of(op, name)]
    for seed in range(12):
        random.Random(seed).shuffle(ways)
        provoke(op, ways, 3 + seed % 2, 3 * seed, 6)  # all calls use the same set


def schedules_of(world: int) -> dict[str, Callable[[int], Schedule]]:
    return {
        "gather": lambda rank: schedules.all_gather(rank, world),
        "waiting": lambda rank: schedules.all_gather(rank, world, waiting=True),
        "scatter": lambda rank: schedules.reduce_scatter(rank, world),
        "landing": lambda rank: schedules.reduce_scatter(rank, world, waiting=True),
        "spread": lambda rank: schedules.all_reduce(rank, world, 2),
        "ring": lambda rank: schedules.ring(rank, world, 2),
        "ring spread": lambda rank: schedules.ring(rank, world, 2, spread=True),
        "gather 2": lambda rank: schedules.all_gather(rank, world, streams=2),
        "scatter 2": lambda rank: schedules.reduce_scatter(rank, world, streams=2),
        "landing 2": lambda rank: schedules.reduce_scatter(rank, world, True, streams=2),
        "spread 2": lambda rank: schedules.all_reduce(rank, world, 3, streams=2),
        "ring 2": lambda rank: schedules.ring(rank, world, 3, streams=2),
        "ring spread 2": lambda rank: schedules.ring(rank, world, 3, streams=2, spread=True),
        "tracked": lambda rank: schedules.tracked(
            all_to_all(2 * world, 2, world, 1).compile(rank), world
        ),
        "tracked landing": lambda rank: schedules.tracked(
            all_to_all(2 * world, 2, world, 1).compile(rank), world, waiting=True
        ),
    }


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("name", schedules_of(1))
def test_schedules(name: str, world: int) -> None:
    """Words go back to where they were; each peer is sent to; no two ranks send to one at once."""
    every = [schedules_of(world)[name](rank) for rank in range(world)]
    puts: dict[Any, list[int]] = {}
    for rank, schedule in enumerate(every):
        for step in schedule:
            if isinstance(step, Put):
                puts.setdefault(step.word, []).append(step.value)
            if isinstance(step, Await):
                assert step.word.rank == rank  # no rank polls a peer's memory
            if isinstance(step, Follow):
                recorded = [each for each in schedule if getattr(each, "event", "") == step.event]
                assert recorded.index(step) > 0, step
        after_sent = schedule[schedule.index(Follow("main", "sent")) + 1 :]
        # A ring's slots are read by copies, too; else they are free before all has been sent.
        assert all(step.word.kind == "free" for step in after_sent)
        assert bool(after_sent) == (name.startswith("ring") and world > 1)
        targets = [s.word.rank for s in schedule if isinstance(s, Put) and s.stream == "copies"
                   and s.word.kind == "arrived"]  # fmt: skip
        whole = "ring" not in name or "spread" in name
        wanted = set(range(world)) if whole else {(rank + 1) % world}
        assert set(targets) == wanted - {rank}
        order = list(dict.fromkeys(targets))
        assert [(q - rank) % world for q in order] in (
            list(range(1, world)), list(range(world - 1, 0, -1)), [1],
        )  # fmt: skip
    for word, values in puts.items():
        values.sort()
        own_counter = word.kind == "full"
        assert values == ([0] if own_counter else [0, 1]), word


def steps_to_lose(op: str, name: str, options: dict[str, Any]) -> list[int]:
    """The steps of rank 0 of two without which something must fail."""
    gather = op == "all_gather_matmul"
    which = "gather" if gather else "landing" if lands(op) else "scatter"
    if op in WHOLE:
        which = "spread" if name == "chunked" else f"{name} spread"
    elif name != "chunked":
        which = f"{name} landing" if lands(op) else name
    schedule = schedules_of(2)[which + (" 2" if options.get("streams") == 2 else "")](0)
    found = []
    for n, step in enumerate(schedule):
        ends = isinstance(step, Follow) and step.event == "sent" and not gather
        # A capture needs the copies to begin after the main stream; the count does otherwise.
        begins = isinstance(step, Follow) and step.event == "begun" and name == "tracked"
        resets = isinstance(step, Put) and step.word.kind == "full" and step.stream == "main"
        if isinstance(step, Await | Put | Follow) and not (ends or begins or resets):
            found.append(n)
    return found


@pytest.mark.parametrize(("device", "op", "name"), CASES)
def test_a_schedule_without_a_step_fails(device: str, op: str, name: str) -> None:
    """Each wait, each word and each event is needed: in some order of events, all else is wrong."""
    for options in options_of(op, name):
        for lost in steps_to_lose(op, name, options):

            def change(rank: int, schedule: Schedule, lost: int = lost) -> Schedule:
                return schedule if rank else (*schedule[:lost], *schedule[lost + 1 :])

            found = (fails(op, name, options, seed, change) for seed in range(60))
            assert any(found), f"{options} without step {lost}"


@pytest.mark.parametrize("device", [on("interpreter")])
def test_counts_of_own_blocks_are_reset(device: str) -> None:
    """A block has another number, or its count is another's, in the next shape."""

    def change(rank: int, schedule: Schedule) -> Schedule:
        own = [s for s in schedule if isinstance(s, Put) and s.word.kind == "full"]
        assert any(step.stream == "main" for step in own)
        return tuple(s for s in schedule if s not in own or s.stream != "main")

    (options,) = options_of(op := "matmul_reduce_scatter", name := "tracked")
    assert any(fails(op, name, options, seed, change) for seed in range(30))


def fails(
    op: str, name: str, options: dict[str, Any], seed: int,
    change: Callable[[int, Schedule], Schedule],
) -> bool:  # fmt: skip
    try:
        provoke(op, [(name, options)], 2, seed, 3, change, (7, 20), (8,))
    except AssertionError:
        return True
    return False


class SerialStreams:
    """The host runs the steps of both streams at once, in the order in which it enqueues them."""

    def __init__(self, device: torch.device) -> None:
        self.recorded: set[str] = set()

    def on(self, stream: str) -> Any:
        return mock.MagicMock()

    def record(self, event: str) -> None:
        self.recorded.add(event)

    def follow(self, event: str) -> None:
        assert event in self.recorded
        self.recorded.remove(event)


STAGED = {
    "all_gather_matmul": staged_all_gather_matmul,
    "matmul_reduce_scatter": staged_matmul_reduce_scatter,
    "matmul_all_reduce": staged_matmul_all_reduce,
    "linear_all_reduce": staged_linear_all_reduce,
    "matmul_reduce_scatter_add_rms_norm": staged_scatter,
    "matmul_all_reduce_add_rms_norm": staged_everywhere,
}


def on_ranks(rank: int, world: int, folder: str, which: list[tuple[str, str]]) -> list[str]:
    """Real processes over memory that all of them map; ranks that come late; bit for bit `staged`.

    Shapes change from call to call, and several implementations share a workspace.
    """
    group = dist.group.WORLD
    fake = FakeDriver(random.Random(rank))
    with (
        interpreting() as ran,
        shared_memory(rank, world, folder),
        mock.patch.object(workspace, "CudaStreams", SerialStreams),
        mock.patch.object(workspace, "MIN_WORDS", 64),
        mock.patch.object(workspace, "_workspaces", {}),
        mock.patch.object(driver, "driver", return_value=fake),
        mock.patch.object(
            torch.cuda, "current_stream", return_value=SimpleNamespace(cuda_stream=0)
        ),
    ):
        results = []
        for call in range(4):
            for op, name in which:
                rows, n = [(20, 40), (1, 8), (7, 40), (3, 8)][call]
                rows *= 1 if op == "all_gather_matmul" or name == "pushed" else world
                if op in WHOLE:
                    rows += call % 3
                dtype = torch.bfloat16 if name == "pushed" else torch.float16
                A, B = operands(world, call, rows, n - (name == "pushed"), dtype)[rank]
                if op == "linear_all_reduce":  # a weight as in nn.Linear
                    B = B.t().contiguous().t()
                average = call % 2 == 1
                given = arguments(op, A, B, average, world)
                options = options_of(op, name)[call % len(options_of(op, name))]
                found = flat(run_of(op, name)(group, *given, **options))
                if name == "ring":  # it adds in another order
                    inputs = operands(world, call, rows, n, dtype)
                    wanted = expected(op, name, options, inputs, rank, average)
                    check_same(op, f"{op} on rank {rank}", found, wanted, average)
                else:
                    results.append((op, given, found))
        for op, given, found in results:
            check_same(op, f"{op} on rank {rank}", found, flat(STAGED[op](group, *given)))
        turned(group)
    return ran


def turned(group: Any) -> None:
    """Rows in another dimension than the first, operands that are views; against float64."""
    rank, world = dist.get_rank(), dist.get_world_size()
    As = [numbers(3, 2 * world, 9, seed=q, dtype=torch.bfloat16) for q in range(world)]
    Bs = [numbers(5, 9, seed=10 + q, dtype=torch.bfloat16).t() for q in range(world)]
    for name in IMPLEMENTATIONS["all_gather_matmul"]:
        A = As[rank].transpose(0, 1)
        whole, (out,) = run_of("all_gather_matmul", name)(
            group, A, [Bs[0]], 1, True, **options_of("all_gather_matmul", name)[-1]
        )
        joined = torch.cat([each.transpose(0, 1) for each in As], 1)
        assert torch.equal(whole, joined)
        assert torch.equal(whole, staged_all_gather(group, A, 1))
        torch.testing.assert_close(
            out.double(), joined.double() @ Bs[0].double(), rtol=2e-2, atol=2e-2
        )
    exact = sum(A.double() @ B.double() for A, B in zip(As, Bs, strict=True))
    for name in IMPLEMENTATIONS["matmul_reduce_scatter"]:
        out = run_of("matmul_reduce_scatter", name)(
            group, As[rank], Bs[rank], "sum", 1, **options_of("matmul_reduce_scatter", name)[-1]
        )
        assert out.is_contiguous()
        wanted = exact.chunk(world, 1)[rank]
        torch.testing.assert_close(out.double(), wanted, rtol=4e-2, atol=8e-2)


@pytest.mark.parametrize(("device", "world"), [on("interpreter", world) for world in (2, 4)])
def test_ranks_that_share_memory_agree_with_staged(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, world: int
) -> None:
    for ran in pools(world).run(on_ranks, str(tmp_path), EVERY + FEW_ROWS):
        assert {"_gemm_kernel", "_project_kernel", "_push_all_reduce"} <= set(ran)
        interpreted += ran


def asked(rank: int, world_size: int) -> None:
    A, B = torch.ones(4, 3), torch.ones(3, 5)
    for op, name in EVERY + FEW_ROWS:
        args: tuple[Any, ...] = arguments(op, A, B, False, world_size)
        args = (A, [B], 0) if op == "all_gather_matmul" else args
        with ladder.ops.use(op, name):
            words = rf"{op} by '{name}' cannot run here: it"
            check_refused(words, getattr(torch.ops.ladder, op), *args, group_name())


def test_without_gpus_they_are_refused_by_name(pools: Pools) -> None:
    pools(2).run(asked)


def test_what_cannot_run_is_refused_and_nothing_is_picked_unmeasured() -> None:
    for op, names in IMPLEMENTATIONS.items():
        shapes: Any = [(512, 256), (256, 512)]
        if op == "all_gather_matmul":
            shapes = [(512, 256), [(256, 512)]]
        choice = ladder.ops.explain(op, shapes, ranks=4, device="NVIDIA H200")
        assert choice.implementation == "staged"
        others = dict(choice.others)
        for name in names:
            ordered = OPERATORS[op].implementations[name].ordered
            assert ("not measured as faster" if ordered else ANOTHER) in others[name]
        wide = ladder.ops.explain(op, shapes, ranks=4, device="NVIDIA H200", dtype=torch.float32)
        refused = {name for name, why in wide.others if "not float32" in why}
        assert refused == set(names) - {"chunked", "ring"}
        empty = [(0, 256), *shapes[1:]]
        why = dict(ladder.ops.explain(op, empty, ranks=4, device="NVIDIA H200").others)
        assert all("a size is 0" in why[name] for name in names)
        alone = dict(ladder.ops.explain(op, shapes, ranks=1, device="NVIDIA H200").others)
        assert all("one rank" in alone[name] for name in names)
        if lands(op):
            shapes = [(512, 256), (256, 16385)]
            why = dict(ladder.ops.explain(op, shapes, ranks=4, device="NVIDIA H200").others)
            assert all("rows of up to 16384 columns" in why[name] for name in names)
    for op, name in FEW_ROWS:
        for rows, dtype, words in (
            (64, torch.bfloat16, "not measured as faster"),
            (65, torch.bfloat16, "it is for up to 64 rows"),
            (64, torch.float16, "not float16"),
        ):
            given = {"ranks": 4, "device": "NVIDIA H200", "dtype": dtype}
            choice = ladder.ops.explain(op, [(rows, 256), (256, 256)], **given)
            assert words in dict(choice.others)[name]


def test_a_wrong_tile_is_refused() -> None:
    A, B = torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    for name, given in (("waiting", (A, [B], 0, False)), ("tracked", (A, B, "sum", 0))):
        op = "all_gather_matmul" if name == "waiting" else "matmul_reduce_scatter"
        for tile in ("128x256", "128x250x64", "8x8x8", "axbxc"):
            words = rf"tile='{tile}'; expected rows x columns x depth"
            check_refused(words, run_of(op, name), Group(0, Everyone(2)), *given, tile=tile)
    tracked = run_of("matmul_reduce_scatter", "tracked")
    check_refused("pieces=0; expected 1", tracked, None, A, B, "sum", 0, pieces=0)


def test_wrong_options_are_refused() -> None:
    A, B, group = torch.ones(8, 8), torch.ones(8, 8), Group(0, Everyone(2))
    gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
    for op, name, given in (
        (gather, "chunked", (A, [B], 0, False)), (scatter, "chunked", (A, B, "sum", 0)),
        (scatter, "ring", (A, B, "sum", 0)), ("matmul_all_reduce", "chunked", (A, B)),
        ("matmul_all_reduce", "ring", (A, B)),
    ):  # fmt: skip
        for streams in (0, 3):
            words = rf"streams={streams}; expected 1 to 2"
            check_refused(words, run_of(op, name), group, *given, streams=streams)
    for options, words in (
        ({"blocks": 0}, "blocks=0; expected 1 to 8"), ({"blocks": 9}, "blocks=9; expected 1 to 8"),
        ({"ratio": 0}, "ratio=0; expected 1 to 8"), ({"ratio": 9}, "ratio=9; expected 1 to 8"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            Blocks(8, 2, **{"blocks": 1, "ratio": 1, **options})


def test_blocks_share_all_rows_and_end_at_whole_tiles() -> None:
    for rows, world, blocks, ratio in (
        (4096, 2, 2, 2), (4096, 2, 3, 2), (4096, 4, 1, 1), (100, 3, 8, 8), (1, 4, 3, 2),
        (8191, 2, 2, 1), (1000, 2, 2, 4),
    ):  # fmt: skip
        cut = Blocks(rows, world, blocks, ratio)
        every = [cut.part(block, rank) for block in range(blocks) for rank in range(world)]
        assert [row for part in every for row in range(part.start, part.stop)] == list(range(rows))
        for rank in range(world):
            own = [cut.place(block, rank) for block in range(blocks)]
            assert all(a.stop <= b.start for a, b in pairwise(own))
            assert own[-1].stop <= cut.height
    assert Blocks(4096, 2, 2, 2).starts == [0, 1408, 2048]  # 11 and 5 tiles of 128 rows
    assert Blocks(4096, 2, 4, 1).starts == [0, 512, 1024, 1536, 2048]


def test_memory_cannot_be_made_in_a_capture() -> None:
    """Refused with the remedy, on any rank alike; what is there already is used."""
    machine = Machine(2, lambda n: n % 2)
    A, B, wide = (
        torch.ones(*shape, dtype=torch.bfloat16) for shape in ((8, 8), (8, 8), (8, 2**11))
    )
    tall = torch.ones(2**12, 8, dtype=torch.bfloat16)
    group: Any = Group(0, Everyone(2))
    chunked, tracked = (run_of("matmul_reduce_scatter", name) for name in ("chunked", "tracked"))
    with machine.recording():
        with mock.patch.object(workspace, "capturing", return_value=True):
            check_refused("matmul_reduce_scatter needs new memory", chunked, group, A, B, "sum", 0)
        chunked(group, A, B, "sum", 0)
        with mock.patch.object(workspace, "capturing", return_value=True):
            chunked(group, A[:4], B, "sum", 0)
            check_refused("MiB.*run it once with these", chunked, group, tall, wide, "sum", 0)
            check_refused("tables of tiles", tracked, group, A, B, "sum", 0)


def test_an_unfinished_wait_is_seen() -> None:
    """The executor of these tests itself: a word that nobody sets."""
    machine = Machine(1, lambda n: 0)
    space = mock.Mock()
    space.words.by_rank = [torch.zeros(2, 3, 256, dtype=torch.int32)]
    machine._push("main", Queued(1, Await("main", schedules.Word(0, "free", 0)), space))
    with pytest.raises(WrongOrderError, match="waits for ever"):
        machine.execute(random.Random(0))
