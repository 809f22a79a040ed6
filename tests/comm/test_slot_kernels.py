"""Kernels whose data is its own flag: what each sends, waits for and clears, and mutations of it.

One rank's kernels run in Triton's interpreter; what its peers send comes when it has looked a few
times (tests.comm.scripted). tests.comm.test_all_reduce and others run several ranks, at random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.comm import push, symmetric, two_shot
from ladder.comm.primitives import EMPTY, receive, receive_sum
from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels import collect, landing, push_land
from tests.comm.scripted import ENDLESS, arriving, weakened
from tests.interpreter import addresses
from tests.kernels.support import on
from tests.ops.everyone import in_order

WORLD, RANK, CALLS = 3, 1, 4
PEERS = [rank for rank in range(WORLD) if rank != RANK]
CPU: Any = torch.device("cpu")
GROUP: Any = None


def of_ranks(*shape: int) -> Tensor:
    """A tensor of each rank, with zeros of both signs in the same places."""
    made = torch.randn(WORLD, *shape)
    made[..., ::5], made[..., 1::5] = -0.0, 0.0
    return made


@contextlib.contextmanager
def group() -> Iterator[list[Tensor]]:
    """A group of which this process is one rank; yields the ranks' slots that it allocates."""
    made: list[Tensor] = []

    def allocate(shape: tuple[int, ...], *_: Any, bits: int, **__: Any) -> SymmetricTensor:
        made.extend(torch.full(shape, bits, dtype=torch.int32) for _ in range(WORLD))
        found = [each.view(torch.float32) for each in made]
        return SymmetricTensor(RANK, found, addresses(made))

    with (
        mock.patch.object(symmetric, "allocate", allocate),
        mock.patch("torch.distributed.get_rank", return_value=RANK),
        mock.patch("torch.distributed.get_world_size", return_value=WORLD),
    ):
        yield made


def comes(*steps: Callable[[int], object]) -> dict[int, Any]:
    """What comes before which look. Each step is that of every peer, one after the other."""
    looks: dict[int, Any] = {}
    for number, step in enumerate(steps):
        for turn, peer in enumerate(PEERS):
            looks[4 + 16 * number + 5 * turn] = lambda s=step, p=peer: s(p)
    return looks


def puts(place: Tensor, words: Tensor) -> Callable[[int], object]:
    """A peer's part of what it has sent, of [WORLD, n]; it sends no -0.0."""
    return lambda peer: place[peer].copy_((words[peer] + 0.0).view(torch.int32))


def check_pushed(place: Tensor, words: Tensor) -> None:
    """A peer finds this rank's words, and takes them."""
    assert not torch.any(place == EMPTY[4]), "a word that was sent is empty"
    assert torch.equal(place.view(torch.float32), words), "a peer finds other words"
    place.fill_(EMPTY[4])


def check_out(found: Tensor, wanted: Tensor) -> None:
    assert torch.equal(found, wanted), "other results"


def check_clear(*slots: Tensor) -> None:
    assert all(bool((each == EMPTY[4]).all()) for each in slots), "slots are not clear"


def check_push() -> None:
    """Three sets; what a call has read is cleared in the next one, a smaller one, too."""
    with group() as made, mock.patch.object(push.PushAllReduce, "BLOCK", 32):
        reduce = push.PushAllReduce(60, torch.float32, GROUP, CPU)
    sets = [each.view(push.SETS, WORLD, -1) for each in made]
    for call in range(CALLS):
        size, now = (60, 40)[call % 2], call % push.SETS
        parts = of_ranks(size)
        with arriving(comes(puts(sets[RANK][now, :, :size], parts))):
            out = reduce(parts[RANK], True)
        check_out(out, in_order([*parts]))
        for peer in PEERS:
            check_pushed(sets[peer][now, RANK, :size], parts[RANK])
        check_clear(*(sets[RANK][n] for n in range(push.SETS) if n != now))


def check_two_shot(steps: str) -> None:
    """steps: both, or one of them alone."""
    words = WORLD * 32
    with group() as made, mock.patch.object(two_shot.TwoShotAllReduce, "SMALL", (16, 4)):
        shots = two_shot.TwoShotAllReduce(4 * words, GROUP, CPU, programs=1)
        sets = [each.view(two_shot.SETS, two_shot.KINDS, WORLD, -1) for each in made]
        for call in range(CALLS):
            parts = of_ranks(WORLD, 32)  # [of][to]
            total = in_order([*parts])
            (scatter, gather), own = sets[RANK][call % two_shot.SETS], total
            scattered, gathered = puts(scatter, parts[:, RANK]), puts(gather, total)
            if steps == "both":
                with arriving(comes(scattered, gathered)):
                    check_out(shots(parts[RANK], True), total)
            elif steps == "scatter":
                with arriving(comes(scattered)):
                    check_out(shots.scatter(parts[RANK]), total[RANK])
            else:
                own = parts[0]
                with arriving(comes(puts(gather, own))):
                    check_out(shots.gather(own[RANK]), own)
            for peer in PEERS:
                theirs = sets[peer][call % two_shot.SETS, :, RANK]
                if steps != "gather":
                    check_pushed(theirs[0], parts[RANK, peer])
                if steps != "scatter":
                    check_pushed(theirs[1], own[RANK])
            check_clear(*made)


def check_collect() -> None:
    with group() as made, mock.patch.multiple(collect.Collector, PROGRAMS=2, BLOCK=32):
        collector = collect.Collector(60, torch.float32, GROUP, CPU)
        for call in range(CALLS):
            parts, now = of_ranks(3, 20), call % collect.SETS
            sets = [each[now].view(WORLD, 3, 20) for each in made]
            landing.send(landing.SendJob(parts[RANK], collector.target))
            for peer in PEERS:
                check_pushed(sets[peer][RANK], parts[RANK])
            with arriving(comes(puts(sets[RANK], parts))):
                check_out(collector(3, 20), in_order([*parts]))
            check_clear(*made)


def check_landing() -> None:
    slots = [torch.full((WORLD, 3, 20), EMPTY[4], dtype=torch.int32) for _ in range(WORLD)]
    for _ in range(CALLS):
        parts, residual = of_ranks(3, 20), torch.randn(3, 20)
        target = landing.PushTarget(addresses(slots), 0, RANK, WORLD)
        landing.send(landing.SendJob(parts[RANK], target))
        for peer in PEERS:
            check_pushed(slots[peer][RANK], parts[RANK])
        job = landing.new_landing(residual, sums=[slots[RANK].view(torch.float32)])
        with arriving(comes(puts(slots[RANK], parts))):
            landing.land(job)
        check_out(job.out, residual + parts[0] + parts[1] + parts[2])
        check_clear(*slots)


def check_push_land() -> None:
    rows, size = 4, 20
    with group() as made:
        lands = push_land.PushedLanding(rows * size, torch.float32, GROUP, CPU)
    sets = [each.view(push_land.SETS, WORLD, rows, size) for each in made]
    for call in range(CALLS):
        parts, residual, now = of_ranks(WORLD, rows, size), torch.randn(rows, size), call % 2
        out = torch.empty(rows, size), torch.empty(rows, size)
        with arriving(comes(puts(sets[RANK][now], parts[:, RANK]))):
            lands(parts[RANK].flatten(0, 1), residual, torch.ones(size), 1e-5, out)
        check_out(out[0], in_order([*parts[:, RANK]]) + residual)
        for peer in PEERS:
            check_pushed(sets[peer][now, RANK], parts[RANK, peer])
        check_clear(*made)


CHECKS: dict[str, Callable[[], None]] = {
    "push": check_push, "collect": check_collect, "landing": check_landing,
    "push_land": check_push_land,
    **{f"two-shot: {steps}": lambda s=steps: check_two_shot(s)
       for steps in ("both", "scatter", "gather")},
}  # fmt: skip

PUSH, TWO_SHOT = push._push_all_reduce, two_shot._two_shot_all_reduce
LAND, COLLECT = push_land._push_land_kernel, collect._collect_kernel
SENT, NOT, OTHER = "a word that was sent is empty", "slots are not clear", "other results"
ALL, ROW = (
    "tl.load(partial + offsets, mask=inside, other=0)",
    "tl.load(place, mask=inside, other=0)",
)
MISSING = "missing = (tl.min(least) == EMPTY).to(tl.int32)"
CLEARS = {
    "push": "clear(own + previous, stride, offsets, offsets < stride, rank, WORLD, EMPTY)",
    "scatter": "clear(own + scatter, stride, offsets, inside, rank, WORLD, EMPTY)",
    "gather": "tl.store(own + gather + peer * stride + offsets, EMPTY, mask=theirs)",
    "push_land": "clear(own, stride, at, inside, rank, WORLD, EMPTY)",
    "collect": "clear(own + i, count, 0, inside, -1, WORLD, EMPTY)",
    "landing": "clear(slots[k], M * D, 0, inside, -1, WORLD, EMPTY)",
}
# The check that must fail, the function, its text, what stands in its place, how it fails.
MUTATIONS: dict[str, tuple[str, Any, str, str, str]] = {
    "push: -0.0 is sent": ("push", PUSH, f"sendable({ALL}, EMPTY)", ALL, ENDLESS),
    "push: nothing is cleared": ("push", PUSH, CLEARS["push"], "pass", NOT),
    "push: what has just come is cleared": (
        "push", PUSH, CLEARS["push"], CLEARS["push"].replace("previous", "current"), NOT,
    ),
    "push: only what this call fills is cleared": (
        "push", PUSH, "offsets < stride", "inside", NOT,
    ),
    "two-shot: -0.0 is scattered": (
        "two-shot: both", TWO_SHOT, "(sendable(value, EMPTY),)", "(value,)", SENT,
    ),
    "two-shot: -0.0 is gathered": (
        "two-shot: gather", TWO_SHOT, "total = sendable(value, EMPTY)", "total = value", SENT,
    ),
    "two-shot: the scatter is not cleared": (
        "two-shot: scatter", TWO_SHOT, CLEARS["scatter"], "pass", NOT,
    ),
    "two-shot: the gather is not cleared": (
        "two-shot: both", TWO_SHOT, CLEARS["gather"], "pass", NOT,
    ),
    "push_land: -0.0 is sent": (
        "push_land", LAND, f"value = sendable({ROW}, EMPTY)", f"value = {ROW}", SENT,
    ),
    "push_land: -0.0 of the own row": (
        "push_land", LAND, f"mine = sendable({ROW}, EMPTY)", f"mine = {ROW}", ENDLESS,
    ),
    "push_land: nothing is cleared": ("push_land", LAND, CLEARS["push_land"], "pass", NOT),
    "collect: nothing is cleared": ("collect", COLLECT, CLEARS["collect"], "pass", NOT),
    "landing: nothing is cleared": (
        "landing", landing._land_chunk, CLEARS["landing"], "pass", NOT,
    ),
    **{
        f"{check}: no wait": (check, function, MISSING, "missing = 0", OTHER)
        for function, checks in (
            (receive, ("push", "push_land", "two-shot: scatter", "two-shot: gather")),
            (receive_sum, ("collect", "landing")),
        )
        for check in checks
    },
}  # fmt: skip


@pytest.mark.parametrize(("device", "what"), [on("interpreter", what) for what in CHECKS])
def test_slots_are_filled_awaited_and_cleared(what: str, device: str) -> None:
    CHECKS[what]()


@pytest.mark.parametrize(("device", "mutation"), [on("interpreter", each) for each in MUTATIONS])
def test_a_mutation_is_seen(mutation: str, device: str) -> None:
    """The test above fails by what the mutation breaks, and by nothing else."""
    check, function, old, new, words = MUTATIONS[mutation]
    with weakened(function, old, new), pytest.raises(AssertionError, match=words):
        CHECKS[check]()
