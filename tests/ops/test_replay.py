"""Calls that come again with the same memory: which are enqueued, captured and launched."""

from __future__ import annotations

import os
import random
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.capture import as_captured
from ladder.ops import overlapped, replay, spread
from ladder.ops.products import transposed_product
from ladder.ops.registry import OPERATORS
from ladder.ops.replay import Replays, memory_of
from ladder.ops.workspace import Workspace, workspace
from ladder.parallel import launch
from tests.ops.overlapped import WHOLE, arguments, check_same, flat, operands, run_of
from tests.ops.streams import Everyone, Group, Machine

WAYS = [
    (op, name) for op, each in OPERATORS.items() for name in each.implementations
    if name in ("chunked", "ring", "waiting", "tracked", "summing")
]  # fmt: skip
REPLAYS = int(os.environ.get("LADDER_TEST_REPLAYS", "300"))


def test_the_first_is_enqueued_the_second_captured_and_then_launched() -> None:
    done: list[str] = []

    def record(enqueue: Any) -> Any:
        enqueue("recorded")
        return lambda: done.append("launch")

    replays = Replays(record)
    for _ in range(4):
        replays.run("a", lambda streams: done.append(f"a {streams}"), "own")
    assert done == ["a own", "a recorded", "launch", "launch", "launch"]
    replays.run("b", lambda streams: done.append("b"), "own")
    assert done[5:] == ["b"]


def test_no_more_calls_are_known_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was made the longest ago goes."""
    monkeypatch.setattr(replay, "MOST", 3)
    enqueued: list[int] = []
    replays = Replays(lambda enqueue: lambda: None)
    for key in (0, 1, 2, 0, 3, 0, 1):
        replays.run(key, lambda streams, key=key: enqueued.append(key), None)
    assert enqueued == [0, 1, 2, 3, 1]
    assert list(replays.known) == [3, 0, 1]


def test_memory_is_told_apart() -> None:
    base = torch.zeros(24)
    alike = base.view(4, 6)
    assert memory_of((base, None)) == memory_of((base.detach(), None))
    others = [
        alike, alike.t(), base[:12], base[12:], base.view(torch.int32), base.clone(), None,
    ]  # fmt: skip
    assert len({memory_of((each,)) for each in (base, *others)}) == 1 + len(others)
    assert memory_of((base, None)) != memory_of((None, base))


def keys_of(
    op: str,
    name: str,
    given: tuple[Any, ...],
    options: dict[str, Any],
    fresh: dict[Any, Tensor],
    shots: object = None,
) -> Hashable:
    """What a call gives as its memory and numbers, if the same outputs are allocated each time.

    shots: the memory by which a kernel pushes.
    """
    found: list[Any] = []
    numbered = iter(range(100))

    def new_empty(self: Tensor, *shape: Any, **more: Any) -> Tensor:
        size = shape[0] if isinstance(shape[0], (tuple, list, torch.Size)) else shape
        key = next(numbered), tuple(size), self.dtype
        return fresh.setdefault(key, torch.zeros(size, dtype=self.dtype))

    def empty_like(like: Tensor) -> Tensor:
        return new_empty(like, like.shape)

    def run(
        space: Any, schedule: Any, chosen: int, actions: Any, memory: Any, numbers: Any = ()
    ) -> None:
        found.append((schedule, memory_of(memory), numbers))

    machine = Machine(2, lambda call: 0)
    with (
        machine.recording(),
        mock.patch.object(Workspace, "run", run),
        mock.patch.object(Tensor, "new_empty", new_empty),
        mock.patch.object(torch, "empty_like", empty_like),
        mock.patch.object(spread, "all_shots", return_value=shots),
    ):
        run_of(op, name)(Group(0, Everyone(2)), *given, **options)
    (key,) = found
    return key


def changes(op: str, given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The arguments with one of them changed, each in turn."""
    found = []
    for n, each in enumerate(given):
        if isinstance(each, Tensor):
            other: Any = each.clone()
        elif isinstance(each, list):
            other = [each[0].clone(), *each[1:]]
        elif isinstance(each, float):
            other = 2 * each
        elif isinstance(each, str):
            other = "avg" if each == "sum" else "sum"
        elif isinstance(each, bool):
            other = not each
        else:
            continue  # the dimension, of matrices always 0
        found.append((*given[:n], other, *given[n + 1 :]))
    return found


@pytest.mark.parametrize(("op", "name"), WAYS)
def test_a_call_that_differs_in_anything_is_another(op: str, name: str) -> None:
    """Mutation: leave any tensor, number or option of an operator out of what it says it uses."""
    (A, B), _ = operands(2, 0, 16, 40, torch.bfloat16)
    fresh: dict[Any, Tensor] = {}
    every = [arguments(op, A, B, False, 2)]
    if op == "matmul_all_reduce":
        every.append(arguments(op, A, B, True, 2))  # with an addend
    for given in every:
        known = set(OPERATORS[op].implementations[name].options)
        some = [
            {}, {"streams": 2}, {"blocks": 3}, {"blocks": 3, "ratio": 2}, {"stages": 3},
            {"tile": "128x128x64"}, {"group_m": 2}, {"pieces": 8}, {"push": True},
        ]  # fmt: skip
        if name == "summing":
            known.remove("pieces")  # there is one, since there is one row of tiles
        options = [each for each in some if known >= each.keys()]
        same = keys_of(op, name, given, {}, fresh)
        assert same == keys_of(op, name, given, {}, fresh)
        others = [keys_of(op, name, each, {}, fresh) for each in changes(op, given)]
        others += [keys_of(op, name, given, each, fresh, "shots") for each in options[1:]]
        if "push" in known:
            push = {"push": True}
            others.append(keys_of(op, name, given, push, fresh, "other shots"))
            others += [keys_of(op, name, each, push, fresh, "shots") for each in changes(op, given)]
        assert len(others) > 2
        assert len({same, *others}) == 1 + len(others)
        allocated: dict[Any, Tensor] = {}
        keys_of(op, name, given, {}, allocated)
        assert allocated
        for at in allocated:  # outputs elsewhere
            moved = fresh | {at: torch.zeros_like(fresh[at])}
            assert keys_of(op, name, given, {}, moved) != same, at


def test_slots_of_inference_mode_are_written_outside_of_it() -> None:
    """Views are kept: an evaluation's serve the training after it."""
    (A, B), _ = operands(2, 0, 16, 40, torch.bfloat16)
    machine, group = Machine(2, lambda call: 0), Group(0, Everyone(2))
    with machine.recording():
        with torch.inference_mode():
            run_of("matmul_reduce_scatter", "chunked")(group, A, B, "sum", 0)
        space = workspace(group, "matmul_reduce_scatter", A.device)
        kept = dict(space._views)
        assert kept
        assert not any(each.is_inference() for each in kept.values())
        run_of("matmul_reduce_scatter", "chunked")(
            group, *operands(2, 1, 64, 4096, A.dtype)[0], "sum", 0
        )
        space.reserve(2**23)
    assert not space._views, "those of former slots"


def test_what_tells_calls_apart_beside_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set, the slots, torch's settings; within a capture, or in float32, none is kept."""
    keys: list[Hashable] = []
    space = Workspace.__new__(Workspace)
    space.streams, space._slots, space._enqueue = None, [None], lambda *each: None
    space.replays = SimpleNamespace(run=lambda key, *more: keys.append(key))
    schedule: Any = ()
    memory = (torch.zeros(2, dtype=torch.bfloat16), None)

    def call(chosen: int = 0, of: Any = memory, **more: Any) -> None:
        space.run(schedule, chosen, {}, of, **more)

    call()
    call()
    assert len(set(keys)) == 1
    call(1)
    call(numbers=3)
    space._slots = [None, None]
    call()
    monkeypatch.setattr(replay.torch.backends.cuda, "preferred_blas_library", lambda: "another")
    call()
    assert len(set(keys)) == 5
    with as_captured():
        call()
    call(of=(torch.zeros(2),))
    assert len(keys) == 6


@pytest.mark.parametrize(
    "name", ["allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation"]
)
def test_products_under_other_settings_are_others(name: str) -> None:
    before, matmul = replay.settings(), torch.backends.cuda.matmul
    value = getattr(matmul, name)
    try:
        setattr(matmul, name, not value)
        assert replay.settings() != before
    finally:
        setattr(matmul, name, value)
    assert replay.settings() == before


def test_a_weights_gradient_has_its_layout() -> None:
    x, grad = torch.randn(6, 4), torch.randn(6, 3)
    for matrix in (torch.randn(4, 3), torch.randn(3, 4).t()):
        found = transposed_product(x, grad, matrix)
        assert found.stride() == matrix.stride()
        assert torch.allclose(found, x.t() @ grad, atol=1e-6)


def again_on_gpus(op: str, name: str, options: dict[str, Any]) -> int:
    """Rank 1 enqueues what the others launch. Inputs change between calls, ranks come late."""
    device = launch.join("cuda")
    rank, world, group = launch.rank(), launch.world_size(), dist.group.WORLD
    run, staged, own = run_of(op, name), run_of(op, "staged"), random.Random(launch.rank())
    inputs = [
        tuple(each.to(device) for each in operands(world, call, 512, 1024, torch.bfloat16)[rank])
        for call in range(2)
    ]
    shared = dict.fromkeys(WHOLE, "matmul_all_reduce") | {overlapped.LANDING: overlapped.SCATTER}
    space = workspace(group, shared.get(op, op), device)
    launched = mock.Mock(wraps=space.replays.known.move_to_end)
    if rank == 1:
        space.replays = None
    else:
        space.replays.known.move_to_end = launched
    for turn in range(REPLAYS):
        A, B = inputs[turn % 2]
        A.mul_(2.0 if turn % 4 < 2 else 0.5)
        given = arguments(op, A, B, False, world)
        if own.random() < 0.2:
            torch.cuda._sleep(own.randrange(2_000_000) * (rank + 1))
        found = flat(run(group, *given, **options))
        check_same(op, (op, turn), found, flat(staged(group, *given)))
        for out in found:
            out.fill_(torch.nan)
        if turn % 16 == 15:  # the next outputs are other allocations, with the same addresses
            del found, out, given
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    assert rank == 1 or launched.call_count > REPLAYS // 4, launched.call_count
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize(
    ("op", "name", "options"),
    [
        *((*each, {}) for each in WAYS),
        ("matmul_all_reduce", "chunked", {"push": True}),
        ("matmul_all_reduce", "blocked", {"blocks": 2}),
    ],
)
def test_calls_that_come_again_on_gpus(op: str, name: str, options: dict[str, Any]) -> None:
    assert launch.run(again_on_gpus, (op, name, options), nproc=2) == 0
