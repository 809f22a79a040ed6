"""The order of the kernels of a decode pass: of reads and writes, of memory, and of slots.

The launches of a pass are recorded here and not run. A rank's kernels run one after another, or on
two streams as `Chains` says; what a kernel writes and clears comes in any order.
"""

from __future__ import annotations

import contextlib
import random
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels.landing import LandingJob, PushTarget, SendJob, new_landing
from ladder.models import Plan, Ranks, UserError, resolve_plan
from ladder.models.layers import RMSNorm
from ladder.models.runtime import Runtime
from ladder.parallel import chains, decode, matrix
from ladder.parallel.chains import MOST_BRANCHED, Chains, overlaps
from ladder.parallel.decode import DecodeReducer
from ladder.parallel.matrix import Matrix
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


@dataclass
class Stream:
    """A stream, or an event `of` one: `after` has a bit for each kernel that has ended by then."""

    after: int = 0
    of: Stream | None = None

    def record_event(self) -> Stream:
        return Stream(self.after, self)

    def wait_event(self, event: Stream) -> None:
        assert event.of is not self, "a wait that is not needed costs time in a graph"
        self.after |= event.after


@dataclass
class Buffer:
    """What a kernel writes: the stream that allocated it, its writer, and all that use it."""

    stream: Stream
    writer: int = 0
    users: int = 0


class Recorder:
    """The kernels of one pass on streams.

    before: of each kernel those that have ended when it begins, a bit for each. writes, clears: the
    sets of slots. counted: the kernels that have used the counters of QKV. A kernel that reads what
    is not there, writes memory that others may still use, or counts beside another, is `wrong`.
    """

    def __init__(self, streams: int) -> None:
        self.streams = [Stream() for _ in range(streams)]
        self.current = self.streams[0]
        self.before: list[int] = []
        self.writes: list[list[int]] = []
        self.clears: list[list[int]] = []
        self.counted = 0
        self.buffers: dict[int, Buffer] = {}  # by address, while they are there
        self.free: list[Buffer] = []
        self.wrong: list[str] = []

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def allocate(self, made: Tensor) -> None:
        address = made.data_ptr()
        self.buffers[address] = Buffer(self.current)
        weakref.finalize(made, lambda: self.free.append(self.buffers.pop(address)))

    def kernel(self, reads: Iterable[Tensor | None], writes: Iterable[Tensor]) -> None:
        number, before = 1 << len(self.before), self.current.after
        for buffer in [each for each in self.free if each.stream is self.current]:
            self.free.remove(buffer)
            if buffer.users & ~before:
                self.wrong.append(f"kernel {len(self.before)} may write what is still read")
        for each in (self.buffers.get(each.data_ptr()) for each in reads if each is not None):
            if each is not None:  # and no weight, nor the embedding
                each.users |= number
                if each.writer & ~before:
                    self.wrong.append(f"kernel {len(self.before)} reads what may not be there")
        for each in map(Tensor.data_ptr, writes):
            self.buffers[each].writer = number
            self.buffers[each].users |= number
        self.before.append(before)
        self.writes.append([])
        self.clears.append([])
        self.current.after |= number

    def project(
        self, x: Tensor, weight: Tensor, up: None, push: PushTarget | None = None,
        squares: Tensor | None = None, add: Tensor | None = None, arrived: Tensor | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        out = torch.empty(ROWS, len(weight))
        self.allocate(out)
        self.kernel((x, squares, add), (out,))
        if push is not None:
            self.writes[-1].append(push.start // OF_A_SET)
        if arrived is not None:
            if self.counted & ~self.before[-1]:
                self.wrong.append(f"kernel {len(self.before) - 1} counts beside another")
            self.counted |= 1 << len(self.before) - 1
        return out

    def new_landing(self, residual: Tensor, **fields: Any) -> LandingJob:
        job = new_landing(residual, **fields)
        self.allocate(job.out)
        self.allocate(job.squares)
        return job

    def land(self, job: LandingJob) -> None:
        owns = [own for own, _ in job.owns]
        self.kernel((job.residual, *owns), (job.out, job.squares))
        self.clears[-1] += [each.storage_offset() // OF_A_SET for each in job.sums]

    def send(self, job: SendJob) -> None:
        self.kernel((job.partial,), ())
        self.writes[-1].append(job.push.start // OF_A_SET)

    def new_slots(self, shape: tuple[int, ...], dtype: torch.dtype, *_: Any) -> SymmetricTensor:
        return SymmetricTensor(0, [torch.empty(shape, dtype=dtype)] * RANKS, torch.empty(0))


@contextmanager
def recorded(streams: int) -> Iterator[Recorder]:
    recorder = Recorder(streams)
    with (
        mock.patch.multiple(
            decode, land=recorder.land, send=recorder.send, new_landing=recorder.new_landing
        ),
        mock.patch.object(matrix, "project", recorder.project),
        mock.patch.object(symmetric, "allocate", recorder.new_slots),
    ):  # fmt: skip
        yield recorder


def record(plan: Plan, streams: int = 2, sets: int | None = None, gated: bool = True) -> Recorder:
    """A pass of `plan`; attention, and an MLP, is the products of its input and of its output.
    gated: whether those of MLPs' inputs are."""
    reducer = DecodeReducer(Silent(), plan)
    reducer.sets = sets or reducer.sets
    weight, norm = Matrix(torch.empty(SIZE, SIZE)), RMSNorm(SIZE, 1e-5)
    gate_up = Matrix(torch.empty(2 * SIZE, SIZE), gated=True) if gated else weight
    sublayers = len(plan.sublayers)
    with recorded(streams) as recorder, torch.no_grad():
        run: Any = reducer.begin(Runtime(), plan, [norm] * (sublayers + 1), torch.Size((ROWS, 1)))
        if streams > 1:
            run.chains = Chains(recorder.streams, recorder.set_stream)
        run.start(torch.empty(ROWS, 1, SIZE))
        for n, each in enumerate(plan.sublayers):
            x = run.read(n)
            products = []
            for kind in each.kind.split("+"):
                (inner,) = run.column(x, (gate_up if kind == "mlp" else weight,))
                products.append(run.row(inner, weight))
            del inner
            run.write(n, sum(products[1:], products[0]))
            del x, products
        run.logits(weight)
        assert recorder.current is recorder.streams[0]
        everything = (1 << len(recorder.before)) - 1
        assert recorder.current.after == everything, "the end waits for no more than a part"
    return recorder


def written_too_early(kernels: Recorder) -> list[tuple[int, int]]:
    """(kernel, set) of each write to a set that another rank may not have cleared.

    A rank whose kernel i begins has run all kernels `before` it. Where those landed what another
    rank's kernel k has written, that rank has run all kernels before k.
    """
    writer: dict[int, list[int]] = defaultdict(list)
    clearer: dict[int, list[int]] = defaultdict(list)
    found = []
    others_ended: list[int] = []  # of each kernel, what all other ranks have run when it ends
    for i, (writes, clears) in enumerate(zip(kernels.writes, kernels.clears, strict=True)):
        known = 0
        for k in range(i):
            if kernels.before[i] >> k & 1:
                known |= others_ended[k]
        for each in writes:
            uses, cleared = len(writer[each]), clearer[each]
            if uses and (len(cleared) < uses or not (known >> cleared[uses - 1] & 1)):
                found.append((i, each))
            writer[each].append(i)
        for each in clears:
            clearer[each].append(i)
            at = writer[each][len(clearer[each]) - 1]
            assert kernels.before[i] >> at & 1, "it may wait for what comes later"
            known |= kernels.before[at]
        others_ended.append(known)
    assert {s: len(uses) for s, uses in writer.items()} == {s: len(c) for s, c in clearer.items()}
    return found


def check(plan: Plan) -> None:
    for streams in (1, 2):
        kernels = record(plan, streams)
        assert kernels.wrong == [], (plan, streams)
        assert written_too_early(kernels) == [], (plan, streams)


@pytest.mark.parametrize("name", FUSED_PLANS)
def test_kernels_are_in_order(name: str) -> None:
    """No kernel reads what is not there or writes what is still read, and no rank writes to a set
    of slots before every other has cleared it."""
    for layers in (4, 12):
        try:
            plan = resolve_plan(FUSED_PLANS[name], layers, RANKS)
        except UserError:  # a plan of four layers
            assert layers > 4
            continue
        check(plan)


def test_kernels_of_random_plans_are_in_order() -> None:
    source = random.Random(5)
    for _ in range(150):
        check(random_plan(source, 10))


@pytest.mark.parametrize(("name", "sets"), [("ladder", 3), ("standard", 1)])
def test_too_few_sets_are_found(name: str, sets: int) -> None:
    assert written_too_early(record(resolve_plan(name, 4, RANKS), sets=sets))


@pytest.mark.parametrize("name", ["ladder", "parallel"])
def test_products_that_count_beside_another_are_found(name: str) -> None:
    """As gate and up would, if they used QKV's counters."""
    plan = resolve_plan(name, 4, RANKS)
    assert record(plan).counted
    assert any("counts beside another" in each for each in record(plan, gated=False).wrong)


def overlapping(plan: str) -> list[tuple[int, int]]:
    """The kernels of which neither waits for the other."""
    before = record(resolve_plan(plan, 4, RANKS)).before
    return [(k, i) for i, ended in enumerate(before) for k in range(i) if not ended >> k & 1]


def test_what_runs_beside_what() -> None:
    """A ladder's sublayers beside their neighbours, the parts of a parallel layer, and no other."""
    # A landing and two products each, but for the second, which reads what the first does.
    of = [(k + (k > 2)) // 3 for k in range(3 * 8)]
    sublayers = {(of[k], of[i]) for k, i in overlapping("ladder") if i < 3 * 8 - 1}
    assert sublayers == {(n, n + 1) for n in range(7)}
    # Of each layer: the landing, QKV, gate and up, down, O.
    assert overlapping("parallel") == [(5 * n + 1, 5 * n + i) for n in range(4) for i in (2, 3)]
    assert overlapping("standard") == []


@pytest.mark.parametrize("name", ["ladder", "hybrid", "standard", "dtp-2", "parallel"])
def test_sublayers_of_many_sequences_have_no_parts_beside_each_other(name: str) -> None:
    """But a ladder's run beside their neighbours, of any number."""
    plan = resolve_plan(name, 4, 4)
    first = plan.beside.index(True) if any(plan.beside) else len(plan.sublayers)
    beside = tuple(n >= first - 1 and any(plan.beside) for n in range(len(plan.sublayers)))
    assert overlaps(plan, MOST_BRANCHED + 1) == beside
    assert overlaps(plan, MOST_BRANCHED) == ((True,) * 4 if name == "parallel" else beside)
    with mock.patch.object(chains, "MOST_BRANCHED", ROWS - 1):
        assert bool(overlapping(name)) == any(beside)


@pytest.mark.parametrize("name", ["turn", "branch", "merge", "join", "wait_for_newest"])
def test_a_wait_less_is_found(name: str) -> None:
    """Without what any one of these waits for, something is out of order."""

    def without(chains: Chains, *args: Any) -> None:
        with mock.patch.object(Chains, "_wait"):
            real(chains, *args)

    real = getattr(Chains, name)
    plans = [resolve_plan(FUSED_PLANS[each], 4, RANKS) for each in ("ladder", "parallel")]
    plans += [random_plan(random.Random(seed), 10) for seed in range(150)]
    with mock.patch.object(Chains, name, without):
        for plan in plans:
            with contextlib.suppress(AssertionError):
                kernels = record(plan)
                if not kernels.wrong and not written_too_early(kernels):
                    continue
            return
    raise AssertionError(f"nothing is wrong without the waits of {name}")
