"""Overlapped products: their schedules, in any order of events."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Collection
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.operator_names import GATHER_BACKWARD, SCATTER_BACKWARD
from ladder.ops import schedules, track_schedules
from ladder.ops.gradient_schedules import gathered_gradients
from ladder.ops.steps import COPIES, Await, Follow, Put, Record, Schedule, Word, Work
from ladder.ops.track_maps import all_to_all
from tests.kernels.support import _poisoned_memory, on  # noqa: F401  (a fixture)
from tests.ops.overlapped import (
    BLOCKS,
    EVERY,
    IN_BLOCKS,
    OF_SHARDS,
    WHOLE,
    arguments,
    check_same,
    expected,
    flat,
    lands,
    operands,
    options_of,
    run_of,
)
from tests.ops.streams import Everyone, Group, Machine, Queued, WrongOrderError

# `chunked` and `ring` have torch's products and, on a CPU, a sum by torch; the others need their
# kernel.
KERNELS = ("waiting", "tracked", "summing")


def cases(slow: Collection[tuple[str, str]] = ()) -> list[Any]:
    return [
        on("interpreter" if name in KERNELS else "cpu", op, name, slow=(op, name) in slow)
        for op, name in EVERY + IN_BLOCKS
    ]


@functools.cache
def inputs_of(world: int, call: int, rows: int, n: int) -> list[tuple[Tensor, Tensor]]:
    """Made once: a schedule is run many times. Not to be written to."""
    return operands(world, call, rows, n, torch.bfloat16)


@functools.cache
def exact(
    op: str, name: str, options: tuple[tuple[str, Any], ...], made: tuple[int, int, int, int],
    rank: int, average: bool,
) -> list[Tensor]:  # fmt: skip
    """What a rank's call is to give, worked out once, too. made: the arguments of `inputs_of`."""
    return expected(op, name, dict(options), inputs_of(*made), rank, average)


def provoke(
    op: str, ways: list[tuple[str, dict[str, Any]]], world: int, seed: int, calls: int = 4,
    change: Callable[[int, Schedule], Schedule] = lambda rank, schedule: schedule,
    rows: tuple[int, ...] = (1, 9, 20), columns: tuple[int, ...] = (8, 40),
    ops: list[str] | None = None,
) -> None:  # fmt: skip
    """Several calls of several shapes, queued on all ranks, then run in a random order of events.

    Inputs are written on the main stream right before their call and overwritten right after it.
    ways: implementations and their options, in turn. ops: of each way, where these differ.
    """
    source = random.Random(seed)
    sets = [source.randrange(2) for _ in range(99)] if seed % 3 else [seed % 2] * 99
    everyone = Everyone(world)
    machine = Machine(world, sets.__getitem__, change)
    shapes = [(world * source.choice(rows), source.choice(columns)) for _ in range(calls)]
    if op in WHOLE and not any(name == "summing" for name, _ in ways):
        shapes = [(m - source.randrange(world), n) for m, n in shapes]
    outs: dict[tuple[int, int], list[Tensor]] = {}
    wanted: dict[tuple[int, int], list[Tensor]] = {}
    with machine.recording():
        for rank in range(world):
            machine.rank = rank
            group = Group(rank, everyone)
            for call, (m, n) in enumerate(shapes):
                op = ops[call % len(ways)] if ops else op
                per_rank = m // world if op in OF_SHARDS else m
                inputs = inputs_of(world, call, per_rank, n)
                A, B = (torch.full_like(each, torch.nan) for each in inputs[rank])
                average = call % 2 == 1
                machine.main(lambda A=A, mine=inputs[rank][0]: A.copy_(mine))
                machine.main(lambda B=B, mine=inputs[rank][1]: B.copy_(mine))
                given = arguments(op, A, B, average, world)
                name, options = ways[call % len(ways)]
                found = run_of(op, name)(group, *given, **options)
                outs[rank, call] = flat(found)
                machine.main(lambda A=A, B=B: (A.fill_(torch.nan), B.fill_(torch.nan)))
                made = world, call, per_rank, n
                wanted[rank, call] = exact(op, name, tuple(options.items()), made, rank, average)
    machine.execute(source)
    for (rank, call), found in outs.items():
        way = ways[call % len(ways)]
        averaged = way[0] == "ring" and call % 2 == 1
        op = ops[call % len(ways)] if ops else op
        check_same(op, f"{op} {way} {rank, call}", found, wanted[rank, call], averaged)


@pytest.mark.parametrize(("device", "op", "name"), cases())
def test_any_order_of_events_gives_the_sums_in_rank_order(device: str, op: str, name: str) -> None:
    """Bit for bit. A piece read early is NaN or another call's; a wait too much never ends.

    Sets of buffers alternate, or are one and the same, as in a graph of one call.
    """
    for options in options_of(op, name):
        for seed, world in enumerate((2, 3, 4, 5) if name == "chunked" else (2, 3, 4)):
            provoke(op, [(name, options)], world, seed)


@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_implementations_that_share_slots(op: str) -> None:
    """The slots of a ring are in another order, so it waits for all peers, and frees all."""
    names = ("chunked", "ring", *(name for of, name in IN_BLOCKS if of == op))
    ways = [(name, options) for name in names for options in options_of(op, name)]
    for seed in range(12):
        random.Random(seed).shuffle(ways)
        provoke(op, ways, 3 + seed % 2, 3 * seed, 6)  # all calls use the same set


def test_gathers_and_gradients_share_slots() -> None:
    """A gather's own slot is not written by its chunks, that of gradients by a copy, if `whole`."""
    one, other = "all_gather_matmul", SCATTER_BACKWARD
    ways = [(one, each) for each in options_of(one, "chunked")]
    ways += [(other, each) for each in options_of(other, "chunked")]
    for seed in range(12):
        random.Random(seed).shuffle(ways)
        provoke("", [("chunked", options) for _, options in ways], 3 + seed % 2, 3 * seed, 6,
                ops=[op for op, _ in ways])  # fmt: skip


def label(kind: str, options: dict[str, Any]) -> str:
    pairs = ", pairs" if options.get("pairs") else ""
    whole = ", whole" if options.get("whole") else ""
    said = f"{options.get('blocks', 1)} blocks, {options.get('streams', 1)} streams"
    return f"{kind}, {said}{pairs}{whole}"


def check_streams_join(schedule: Schedule) -> None:
    """Each stream begins behind an event of the main one, as a capture needs, and main waits for
    what each did last, before the call's memory may be another's."""
    seen: dict[str, dict[str, int]] = {"main": {}}  # by stream that has begun, what it comes after:
    after: dict[str, dict[str, int]] = {}  # and by event, the last step of each stream
    for n, step in enumerate(schedule):
        if isinstance(step, Follow):
            mine = seen.setdefault(step.stream, {})
            for stream, place in after[step.event].items():
                mine[stream] = max(place, mine.get(stream, -1))
            continue
        assert step.stream in seen, step
        if isinstance(step, Record):
            after[step.event] = dict(seen[step.stream])
        else:
            seen[step.stream][step.stream] = n
    for stream, own in seen.items():
        assert seen["main"].get(stream, -1) >= own.get(stream, -1), stream


def schedules_of(world: int) -> dict[str, Callable[[int], Schedule]]:
    tracks, kept = (all_to_all(2 * world, 2, world, 1, keep=keep) for keep in (False, True))
    found: dict[str, Callable[[int], Schedule]] = {
        "waiting": lambda rank: schedules.all_gather(rank, world, waiting=True),
        "waiting, kept": lambda rank: schedules.all_gather(rank, world, waiting=True, keeps=True),
        "tracked": lambda rank: track_schedules.tracked(tracks.compile(rank), world),
        "summing": lambda rank: track_schedules.summing(kept.compile(rank), world),
        "summing spread": lambda rank: track_schedules.summing(
            kept.compile(rank), world, spread=True
        ),
        "tracked landing": lambda rank: track_schedules.tracked(
            tracks.compile(rank), world, waiting=True
        ),
    }
    for options in ({}, {"streams": 2}, *BLOCKS):
        blocks, streams = options.get("blocks", 1), options.get("streams", 1)
        kinds: dict[str, Callable[..., Schedule]] = {
            "scatter": functools.partial(
                schedules.reduce_scatter, world=world, streams=streams, blocks=blocks
            ),
            "spread": functools.partial(
                schedules.all_reduce, world=world, blocks=blocks, streams=streams
            ),
            "push": functools.partial(
                schedules.all_reduce, world=world, blocks=blocks, streams=streams, push=True
            ),
            "blocked": functools.partial(
                schedules.blocked_all_reduce, world=world, blocks=blocks, streams=streams
            ),
            "ring": functools.partial(schedules.ring, world=world, blocks=blocks, streams=streams),
            "ring spread": functools.partial(
                schedules.ring, world=world, blocks=blocks, streams=streams, spread=True
            ),
        }
        if blocks == 1:
            kinds |= {
                "gather": functools.partial(schedules.all_gather, world=world, streams=streams),
                "kept": functools.partial(
                    schedules.all_gather, world=world, streams=streams, keeps=True
                ),
                "landing": functools.partial(
                    schedules.reduce_scatter, world=world, waiting=True, streams=streams
                ),
                "beside": functools.partial(
                    schedules.reduce_scatter, world=world, streams=streams, beside=True
                ),
            }
            for pairs, whole in itertools.product((False, True), repeat=2):
                about = {"pairs": pairs, "whole": whole}
                found[label("adds", {**options, **about})] = functools.partial(
                    gathered_gradients, world=world, streams=streams, **about
                )
            found[label("scatter", {**options, "pairs": True})] = functools.partial(
                schedules.reduce_scatter, world=world, streams=streams, pairs=True
            )
        found |= {label(kind, options): made for kind, made in kinds.items()}
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("name", schedules_of(1))
def test_schedules(name: str, world: int) -> None:
    """Words go back to where they were; streams fork and join; each peer is sent to, by ranks in
    turn."""
    every = [schedules_of(world)[name](rank) for rank in range(world)]
    puts: dict[Any, list[int]] = {}
    for rank, schedule in enumerate(every):
        if world > 1:
            check_streams_join(schedule)
        for step in schedule:
            if isinstance(step, Put):
                puts.setdefault(step.word, []).append(step.value)
            if isinstance(step, Await):
                assert step.word.rank == rank  # no rank polls a peer's memory
            if isinstance(step, Follow):
                recorded = [each for each in schedule if getattr(each, "event", "") == step.event]
                assert recorded.index(step) > 0, step
        blocked = "blocked" in name
        if "push" in name or blocked:  # its programs hold the GPU, which what peers wait for needs
            (pushes,) = [n for n, s in enumerate(schedule) if getattr(s, "action", "") == "push"]
            works = [n for n, s in enumerate(schedule) if getattr(s, "action", "") == "product"]
            assert max(works) < pushes
            for way in COPIES:
                of_way = [getattr(step, "action", "") for step in schedule if step.stream == way]
                behind = of_way[of_way.index("take") :] if "take" in of_way else []
                assert not {"copy", "spread"} & set(behind)
                if behind and blocked:  # of its own stream's words
                    own = [step for step in schedule if step.stream == way]
                    first = next(n for n, s in enumerate(own) if getattr(s, "action", "") == "take")
                    assert own[first - 2] == Await(way, own[first - 1].word)  # type: ignore[union-attr]
                elif behind:  # of blocks before the last, whose arrival says that they are there
                    last = schedule.index(Record("main", "last"))
                    own = [step for step in schedule if step.stream == way]
                    assert own.index(Follow(way, "last")) < of_way.index("take")
                    waits = [n for n, s in enumerate(schedule[:pushes]) if isinstance(s, Await)
                             and s.stream == "main"]  # fmt: skip
                    assert max(waits) < last < pushes
            if "2 streams" in name:
                assert schedule.index(Follow("main", "computed")) in range(max(works), pushes)
        sent = [n for n, s in enumerate(schedule) if getattr(s, "event", "").startswith("sent by")]
        after_sent = schedule[max(sent, default=len(schedule)) + 1 :]
        # Where copies read the slots, too, these are free only when all has been sent.
        assert all(step.word.kind in ("free", "arrived") for step in after_sent)
        copied = any(kind in name for kind in ("ring", "kept", "spread"))
        copied |= ("push" in name or blocked) and "1 blocks" not in name
        assert bool(after_sent) == (copied and world > 1)
        targets = [s.word.rank for s in schedule if isinstance(s, Put) and s.stream in COPIES
                   and s.word.kind == "arrived" and s.value]  # fmt: skip
        whole = "ring" not in name or "spread" in name
        if blocked and "1 blocks" in name:
            assert not targets
            continue
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


def steps_to_lose(op: str, name: str, options: dict[str, Any], world: int = 2) -> list[int]:
    """The steps of rank 0 of `world` without which something must fail."""
    gather = op == "all_gather_matmul"
    kind = "kept" if gather else "landing" if lands(op) else "scatter"
    kind = {GATHER_BACKWARD: "beside", SCATTER_BACKWARD: "adds"}.get(op, kind)
    if op in WHOLE:
        kind = "spread" if name == "chunked" else f"{name} spread"
        kind = "push" if options.get("push") else "blocked" if name == "blocked" else kind
    elif name != "chunked":
        kind = f"{name} landing" if lands(op) else f"{name}, kept" if gather else name
    every = schedules_of(world)
    schedule = (every[kind] if kind in every else every[label(kind, options)])(0)
    found = []
    for n, step in enumerate(schedule):
        # That main waits for copies: see `check_streams_join`.
        ends = isinstance(step, Follow) and step.event.startswith("sent") and not gather
        # A capture needs the copies to begin after the main stream; the count does otherwise.
        begins = isinstance(step, Follow) and step.event == "begun" and name in KERNELS[1:]
        resets = isinstance(step, Put) and step.word.kind == "full" and step.stream == "main"
        # What keeps `push` from holding the GPU too early: see `test_schedules`.
        holds = isinstance(step, Follow) and step.event in ("computed", "last")
        free = ends or begins or resets or (holds and kind in ("push", "blocked"))
        if isinstance(step, Await | Put | Follow) and not free:
            found.append(n)
    return found


# For `make test`, which loses a step at a time of `tracked` by another operator.
COSTLY = (
    ("matmul_reduce_scatter_add_rms_norm", "tracked"), ("matmul_all_reduce", "summing"),
    ("matmul_reduce_scatter", "summing"),
)  # fmt: skip


@pytest.mark.parametrize(("device", "op", "name"), cases(COSTLY))
def test_a_schedule_without_a_step_fails(device: str, op: str, name: str) -> None:
    """Each wait, each word and each event is needed: in some order of events, all else is wrong."""
    for options in options_of(op, name):
        check_each_step(op, name, options, 2)


@pytest.mark.parametrize(
    ("op", "options"),
    [
        pytest.param("matmul_reduce_scatter", {"blocks": 2}, marks=pytest.mark.slow),
        ("matmul_reduce_scatter", {"pairs": True}),
        pytest.param("matmul_all_reduce", {"blocks": 2}, marks=pytest.mark.slow),
        (SCATTER_BACKWARD, {"streams": 2, "pairs": True}),
        pytest.param(
            SCATTER_BACKWARD, {"streams": 2, "pairs": True, "whole": True}, marks=pytest.mark.slow
        ),
    ],
)
def test_a_schedule_of_four_ranks_without_a_step_fails(op: str, options: dict[str, Any]) -> None:
    """The same where copies are on several streams."""
    check_each_step(op, "chunked", options, 4)


@pytest.mark.parametrize(
    ("rank", "world", "groups"),
    [
        (0, 4, [(1,), (2, 3)]), (1, 4, [(2, 3), (0,)]), (2, 4, [(3,), (0, 1)]),
        (3, 4, [(0, 1), (2,)]), (0, 2, [(1,)]), (2, 5, [(3,), (4,), (0, 1)]), (0, 1, []),
    ],
)  # fmt: skip
def test_pairs_are_neighbours_without_this_rank(
    rank: int, world: int, groups: list[tuple[int, ...]]
) -> None:
    schedule = schedules.reduce_scatter(rank, world, pairs=True)
    products = [s for s in schedule if isinstance(s, Work) and s.action in ("product", "both")]
    wanted = [("both" if len(each) > 1 else "product", each[0]) for each in groups]
    assert [(s.action, s.chunk) for s in products] == [*wanted, ("product", rank)]


def check_each_step(op: str, name: str, options: dict[str, Any], world: int) -> None:
    for lost in steps_to_lose(op, name, options, world):

        def change(rank: int, schedule: Schedule, lost: int = lost) -> Schedule:
            return schedule if rank else (*schedule[:lost], *schedule[lost + 1 :])

        found = (fails(op, name, options, seed, change, world) for seed in range(60))
        assert any(found), f"{options} without step {lost}"


@pytest.mark.parametrize(
    ("device", "name"), [on("interpreter", "tracked"), on("interpreter", "summing")]
)
def test_counts_of_own_blocks_are_reset(device: str, name: str) -> None:
    """A block has another number, or its count is another's, in the next shape."""

    def change(rank: int, schedule: Schedule) -> Schedule:
        own = [s for s in schedule if isinstance(s, Put) and s.word.kind == "full"]
        assert any(step.stream == "main" for step in own)
        return tuple(s for s in schedule if s not in own or s.stream != "main")

    (options,) = options_of(op := "matmul_reduce_scatter", name)
    assert any(fails(op, name, options, seed, change) for seed in range(30))


def fails(
    op: str, name: str, options: dict[str, Any], seed: int,
    change: Callable[[int, Schedule], Schedule], world: int = 2,
) -> bool:  # fmt: skip
    try:
        provoke(op, [(name, options)], world, seed, 3, change, (7, 20), (8,))
    except AssertionError:
        return True
    return False


def test_an_unfinished_wait_is_seen() -> None:
    """The executor of these tests itself: a word that nobody sets."""
    machine = Machine(1, lambda n: 0)
    space = mock.Mock()
    space.words.by_rank = [torch.zeros(2, 3, 256, dtype=torch.int32)]
    machine._push("main", Queued(1, Await("main", Word(0, "free", 0)), space))
    with pytest.raises(WrongOrderError, match="waits for ever"):
        machine.execute(random.Random(0))
