"""The slots of a decode pass: no rank writes to a set before every other has cleared it.

The order is that of the launches of a pass, which are recorded here and not run. Kernels of a rank
run one after another; what a kernel writes and clears comes in any order.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels.landing import LandingJob, PushTarget, SendJob
from ladder.models import Plan, Ranks, UserError, resolve_plan
from ladder.models.layers import RMSNorm
from ladder.models.runtime import Runtime
from ladder.parallel import decode
from ladder.parallel.decode import DecodeReducer, Matrix, Product
from ladder.parallel.reducers import PushReducer
from tests.samples import FUSED_PLANS, random_plan

ROWS, SIZE, RANKS = 3, 16, 2
OF_A_SET = RANKS * ROWS * SIZE


class Silent(PushReducer):
    """A push reducer whose own sums are left out."""

    def __init__(self) -> None:
        self.ranks, self.group = Ranks(RANKS), None
        self.picked = {}

    def sum(self, partial: Tensor) -> Tensor:
        return partial


class Recorder:
    """The kernels of one pass: the sets of slots that each writes to, and those that it clears."""

    def __init__(self) -> None:
        self.writes: list[list[int]] = []
        self.clears: list[list[int]] = []

    def kernel(self, *parts: PushTarget | SendJob | LandingJob | None) -> None:
        self.writes.append([])
        self.clears.append([])
        for part in parts:
            if isinstance(part, SendJob | LandingJob):
                assert not part.launched
                part.launched = True
            target = part.push if isinstance(part, SendJob) else part
            if isinstance(target, PushTarget):
                self.writes[-1].append(target.start // OF_A_SET)
            if isinstance(part, LandingJob):
                self.clears[-1] += [each.storage_offset() // OF_A_SET for each in part.sums]

    def project(
        self, x: Tensor, weight: Tensor, up: None, push: Any = None, rider: Any = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        self.kernel(push, rider)
        return torch.empty(ROWS, len(weight))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, *_: Any) -> SymmetricTensor:
        return SymmetricTensor(0, [torch.empty(shape, dtype=dtype)] * RANKS, torch.empty(0))


@contextmanager
def recorded() -> Iterator[Recorder]:
    recorder = Recorder()
    with (
        mock.patch.object(decode, "project", recorder.project),
        mock.patch.object(decode, "land", recorder.kernel),
        mock.patch.object(decode, "send", recorder.kernel),
        mock.patch.object(symmetric, "allocate", recorder.allocate),
    ):
        yield recorder


def record(plan: Plan, sets: int | None = None) -> Recorder:
    """A pass of `plan`: a sublayer is the products of its input and of its output."""
    reducer = DecodeReducer(Silent(), plan)
    reducer.sets = sets or reducer.sets
    weight, norm = Matrix(torch.empty(SIZE, SIZE)), RMSNorm(SIZE, 1e-5)
    sublayers = len(plan.sublayers)
    with recorded() as recorder, torch.no_grad():
        run = reducer.begin(Runtime(), plan, [norm] * (sublayers + 1), torch.Size((ROWS, 1)))
        run.start(torch.empty(ROWS, 1, SIZE))
        for n in range(sublayers):
            (x,) = run.column(run.read(n), (weight,))
            run.write(n, Product(x[:, 0], weight))
        run.logits(weight)
    return recorder


def written_too_early(kernels: Recorder) -> list[tuple[int, int]]:
    """(kernel, set) of each write to a set that another rank may not have cleared.

    A rank whose kernel i begins has run all kernels before. Where those landed what another rank's
    kernel k has written, that rank has run all kernels before k.
    """
    writer: dict[int, list[int]] = defaultdict(list)
    clearer: dict[int, list[int]] = defaultdict(list)
    found, others_ended = [], -1  # the last kernel that every other rank is known to have run
    for i, (writes, clears) in enumerate(zip(kernels.writes, kernels.clears, strict=True)):
        for each in writes:
            uses, cleared = len(writer[each]), clearer[each]
            if uses and (len(cleared) < uses or cleared[uses - 1] > others_ended):
                found.append((i, each))
            writer[each].append(i)
        for each in clears:
            clearer[each].append(i)
            assert writer[each][len(clearer[each]) - 1] < i, "it waits for what comes later"
        for each in clears:
            others_ended = max(others_ended, writer[each][len(clearer[each]) - 1] - 1)
    assert {s: len(uses) for s, uses in writer.items()} == {s: len(c) for s, c in clearer.items()}
    return found


@pytest.mark.parametrize("name", FUSED_PLANS)
def test_no_set_of_slots_is_written_before_it_is_clear_on_every_rank(name: str) -> None:
    for layers in (4, 12):
        try:
            plan = resolve_plan(FUSED_PLANS[name], layers, RANKS)
        except UserError:  # a plan of four layers
            assert layers > 4
            continue
        assert written_too_early(record(plan)) == [], layers


def test_slots_of_random_plans() -> None:
    source = random.Random(5)
    for _ in range(150):
        plan = random_plan(source, 10)
        assert written_too_early(record(plan)) == [], plan


@pytest.mark.parametrize(("name", "sets"), [("ladder", 2), ("standard", 1)])
def test_too_few_sets_are_found(name: str, sets: int) -> None:
    assert written_too_early(record(resolve_plan(name, 4, RANKS), sets))
