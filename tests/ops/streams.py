"""Ranks whose CUDA streams are queues in one process, executed in any order that is allowed."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.symmetric import SymmetricTensor
from ladder.ops import blocked, spread, workspace
from ladder.ops.steps import KINDS, Await, Follow, Put, Record, Schedule, Step, Work
from tests.interpreter import addresses
from tests.ops.everyone import in_order


def pushes(queued: Queued) -> bool:
    return isinstance(queued.step, Work) and queued.step.action == "push"


class WrongOrderError(AssertionError):
    """A stream waits for ever, or a word is written while its last value is still needed."""


@dataclass(eq=False)
class Everyone:
    """The memory of all ranks: one list of tensors for each allocation."""

    world: int
    memory: dict[int, list[Tensor]] = field(default_factory=dict)


@dataclass(eq=False)
class Group:
    """One rank's "process group"; ranks run one after the other, so there are no barriers."""

    rank: int
    everyone: Everyone
    asked: int = 0


def allocate(
    shape: tuple[int, ...], dtype: torch.dtype, group: Any, device: torch.device, bits: int
) -> SymmetricTensor:
    memory = group.everyone.memory
    if group.asked not in memory:
        world = group.everyone.world
        memory[group.asked] = [torch.full(shape, bits, dtype=dtype) for _ in range(world)]
    parts = memory[group.asked]
    group.asked += 1
    return SymmetricTensor(group.rank, parts, addresses(parts))


@dataclass
class Queued:
    """A step of one call of one rank."""

    call: int
    step: Step
    space: Any = None
    chosen: int = 0
    action: Callable[[int], object] | None = None

    @property
    def word(self) -> Tensor:
        word = self.step.word  # type: ignore[union-attr]
        memory = self.space.words.by_rank[word.rank]
        return memory[self.chosen, KINDS.index(word.kind), word.index]


@dataclass(eq=False)
class Shots:
    """In place of the kernel that ends an all-reduce, `push`: of all ranks at once."""

    world: int
    given: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def __call__(self, partial: Tensor, _: bool, out: Tensor) -> None:
        self._put(partial, out, lambda parts: in_order(parts))

    def gather_sums(self, slots: Tensor, rows: int, out: Tensor) -> None:
        self._put(in_order(list(slots)), out, torch.cat)

    def _put(self, part: Tensor, out: Tensor, joined: Callable[[list[Tensor]], Tensor]) -> None:
        self.given.append((part, out))
        if len(self.given) == self.world:
            parts, outs = zip(*self.given, strict=True)
            for each in outs:
                each.copy_(joined(list(parts)))
            self.given.clear()


@dataclass
class Machine:
    """Records the calls of all ranks under `recording`, and then runs them."""

    world: int
    choose: Callable[[int], int]  # the set of the nth call
    change: Callable[[int, Schedule], Schedule] = lambda rank, schedule: schedule
    queues: dict[tuple[int, str], deque[Queued]] = field(default_factory=dict)
    calls: int = 0
    rank: int = 0

    def main(self, action: Callable[[], object]) -> None:
        """Work of the caller, on the main stream of the rank that is now recorded."""
        self._push("main", Queued(-1, Work("main", "own", 0), action=lambda _: action()))

    def _push(self, stream: str, queued: Queued) -> None:
        self.queues.setdefault((self.rank, stream), deque()).append(queued)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        def run(
            space: Any, schedule: Schedule, chosen: int, actions: Any, memory: Any = None,
            numbers: Any = (),
        ) -> None:  # fmt: skip
            self.calls += 1
            for step in self.change(space.rank, schedule):
                action = actions[step.action] if isinstance(step, Work) else None
                self._push(step.stream, Queued(self.calls, step, space, chosen, action))

        def chosen(space: Any) -> int:
            space.calls += 1
            return self.choose(space.calls)

        fake = SimpleNamespace(
            get_rank=lambda group: group.rank,
            get_world_size=lambda group: group.everyone.world,
            barrier=lambda group: None,
        )
        shots = Shots(self.world)
        with (
            mock.patch.object(spread, "all_shots", return_value=shots),
            mock.patch.object(blocked, "all_shots", return_value=shots),
            mock.patch.object(workspace, "dist", fake),
            mock.patch.object(workspace, "CudaStreams"),
            mock.patch.object(symmetric, "allocate", allocate),
            mock.patch.object(workspace.Workspace, "run", run),
            mock.patch.object(workspace.Workspace, "next", chosen),
        ):
            yield

    def execute(self, source: random.Random) -> None:
        """Run all queues in a random order of events, in which some streams are far slower."""
        speed = {key: 10 ** source.uniform(-3, 0) for key in self.queues}
        recorded: set[tuple[int, str]] = set()

        def ready(queued: Queued) -> bool:
            step = queued.step
            if isinstance(step, Await):
                return int(queued.word) == step.value
            if isinstance(step, Follow):
                return (queued.call, step.event) in recorded
            if pushes(queued):  # of all ranks at once, after which none may wait
                mains = [self.queues[rank, "main"] for rank in range(self.world)]
                return all(queue and pushes(queue[0]) for queue in mains)
            if isinstance(step, Work):
                words = [
                    Queued(0, Await("main", w), queued.space, queued.chosen) for w in step.waits
                ]
                return all(int(each.word) == 1 for each in words)
            return True

        while any(self.queues.values()):
            heads = [(key, queue[0]) for key, queue in self.queues.items() if queue]
            can = [key for key, queued in heads if ready(queued)]
            if not can:
                raise WrongOrderError(f"waits for ever: {[(k, q.step) for k, q in heads]}")
            (chosen,) = source.choices(can, [speed[key] for key in can])
            if pushes(self.queues[chosen][0]):
                for rank in range(self.world):
                    each = self.queues[rank, "main"].popleft()
                    assert each.action is not None
                    each.action(each.step.chunk)  # type: ignore[union-attr]
                continue
            queued = self.queues[chosen].popleft()
            step = queued.step
            if isinstance(step, Put):
                if int(queued.word) == step.value:
                    raise WrongOrderError(f"set twice: {step}")
                queued.word.fill_(step.value)
            elif isinstance(step, Record):
                recorded.add((queued.call, step.event))
            elif isinstance(step, Work):
                assert queued.action is not None
                queued.action(step.chunk)
