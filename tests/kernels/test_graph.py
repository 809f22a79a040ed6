"""On a GPU: the decode kernels in a CUDA graph, one after another, as an engine launches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ladder.kernels import (
    LandingJob,
    PushTarget,
    SendJob,
    decode_attention,
    land,
    new_landing,
    project,
    send,
    swiglu,
)
from tests.samples import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LAYERS, SIZE, HEADS, KV, DIM, INNER, LENGTH, EPS = 12, 1024, 8, 2, 128, 1536, 2048, 1e-5
SETS = 3  # of slots, in rotation, as in ladder.parallel.decode
Wait = Callable[[], None]


@dataclass
class Chain:
    """Twelve layers, the sublayers of which read the residual without the `lag` newest outputs.

    pushes: outputs go to slots, [SETS, 1, rows, SIZE], and land from there; else they land from
    where the product left them.
    """

    rows: int
    lag: int
    pushes: bool

    def __post_init__(self) -> None:
        make = {"device": "cuda", "dtype": torch.bfloat16}
        shapes = ((HEADS + 2 * KV) * DIM, SIZE), (SIZE, HEADS * DIM), (2 * INNER, SIZE)
        self.weights = [
            [torch.randn(s, **make) / s[1] ** 0.5 for s in (*shapes, (SIZE, INNER))]
            for _ in range(LAYERS)
        ]
        angles = torch.rand(LENGTH, DIM // 2, device="cuda") * 6.28
        self.table = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.caches = torch.randn(LAYERS, 2, self.rows, KV, LENGTH, DIM, **make)
        self.x = torch.randn(self.rows, SIZE, **make)
        self.positions = torch.zeros(self.rows, device="cuda").long()
        self.arrived = torch.zeros(self.rows * KV, dtype=torch.int32, device="cuda")
        self.slots = torch.full((SETS, 1, self.rows, SIZE), -0.0, **make)
        self.buffers = torch.tensor([self.slots.data_ptr()], device="cuda")

    def step(self, wait: Wait, rides: bool) -> Tensor:
        """The residual in the end.

        rides: with a lag, sends ride on the next sublayer's first product and landings on its last,
        as in ladder.parallel.decode; else each is launched by itself.
        """
        read = new_landing(self.x)
        self._land(read, wait)
        flying: list[Tensor | SendJob] = []
        for turn in range(2 * LAYERS):
            while len(flying) > self.lag:
                read = self._landing(read, flying)
                self._land(read, wait)
            sending = flying[-1] if flying and isinstance(flying[-1], SendJob) else None
            following = None
            if self.lag and len(flying) == self.lag:
                following = self._landing(read, flying)
            if rides:
                output = self._sublayer(turn, read, sending, following, wait)
            else:
                output = self._sublayer(turn, read, None, None, wait)
                if following is not None:
                    self._land(following, wait)
            if isinstance(output, SendJob) and not rides:
                send(output)
                wait()
            flying.append(output)
            read = read if following is None else following
        if isinstance(flying[-1], SendJob) and not flying[-1].launched:
            send(flying[-1])
            wait()
        while flying:
            read = self._landing(read, flying)
            self._land(read, wait)
        return read.out

    def _land(self, job: LandingJob, wait: Wait) -> None:
        land(job)
        wait()

    def _landing(self, read: LandingJob, flying: list[Tensor | SendJob]) -> LandingJob:
        """The landing of the oldest output in flight."""
        output = flying.pop(0)
        if not self.pushes:
            assert isinstance(output, Tensor)
            return new_landing(read.out, owns=[(output, 1.0)])
        if isinstance(output, SendJob):
            output = self.slots[output.push.start // output.partial.numel()]
        return new_landing(read.out, sums=[output])

    def _sublayer(
        self,
        turn: int,
        read: LandingJob,
        first: SendJob | None,
        last: LandingJob | None,
        wait: Wait,
    ) -> Tensor | SendJob:
        """Attention and MLP in turn. first, last: what their first and last product carry.

        The output is a tensor, slots where it was pushed, or yet to be sent.
        """
        qkv, o, both, down = self.weights[turn // 2]
        norm = {"squares": read.squares, "eps": EPS, "rider": first}
        if turn % 2 == 0:
            y = project(read.out, qkv, **norm)
            wait()
            keys, values = self.caches[turn // 2]
            y = decode_attention(
                y, self.table, self.positions, keys, values, HEADS, DIM**-0.5, self.arrived
            )
        else:
            y = project(read.out, *both.chunk(2), **norm)
        wait()
        slots = self.slots[turn % SETS]
        push = PushTarget(self.buffers, turn % SETS * slots.numel(), 0, 1)
        at_once = self.pushes and self.lag == 0
        partial = project(
            y, down if turn % 2 else o, rider=last, push=push if at_once else None, keep=not at_once
        )
        wait()
        if partial is None:
            return slots
        return SendJob(partial, push) if self.pushes else partial


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("pushes", [False, True])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_a_graph_of_dependent_launches_equals_eager_calls(
    rows: int, pushes: bool, lag: int
) -> None:
    """In one graph, buffers reused, against the same calls with a wait after each.

    What is read before the kernel that makes it has ended, or cleared, or written over while
    another reads it, is seen here. And nearly the same comes out where sends and landings are
    launched by themselves (sums of squares may be added in another order).
    """
    chain = Chain(rows, lag, pushes)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain.step(torch.cuda.synchronize, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = chain.step(lambda: None, True)
    before = chain.caches.clone()
    for turn in range(20):
        chain.x.normal_()
        chain.positions.random_(LENGTH)
        graph.replay()
        first, after = found.clone(), chain.caches.clone()
        graph.replay()
        assert torch.equal(found, first)
        chain.caches.copy_(before)
        wanted = chain.step(torch.cuda.synchronize, True)
        assert not wanted.isnan().any()
        assert torch.equal(first, wanted)
        assert torch.equal(chain.caches, after)
        assert not chain.arrived.any()
        assert bool(((chain.slots == 0) & torch.signbit(chain.slots)).all())
        if turn == 0:
            chain.caches.copy_(before)
            assert relative_error(chain.step(torch.cuda.synchronize, False), wanted) < 5e-2
            chain.caches.copy_(after)
        before = after


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_weight_may_be_what_the_kernel_before_writes(rows: int) -> None:
    """Which has its dependents start as soon as it runs: a weight that is read before the wait is
    what its memory held, NaN."""
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    for _ in range(20):
        packed = torch.randn(256, 2 * 4096, device="cuda").bfloat16()
        held = torch.full((256, 4096), torch.nan, dtype=torch.bfloat16, device="cuda")
        del held
        torch.cuda._sleep(1_000_000)  # until both are enqueued
        weight = swiglu(packed)
        found = project(x, weight, fixed=False)
        torch.cuda.synchronize()
        assert found is not None
        assert not found.isnan().any()
        assert relative_error(found, x.double() @ weight.double().t()) < 1e-2


def test_a_position_beyond_the_cache_stays_in_its_row() -> None:
    """The sequence's result is undefined; other heads, sequences and memory must not change.

    The engine never asks for one; a kernel cannot raise, and must not write elsewhere.
    """
    positions = torch.tensor([LENGTH, 5, LENGTH - 1, LENGTH + 1000], device="cuda")
    around = torch.full((2, 6, 2, LENGTH + 8, DIM), 7.0, device="cuda")
    keys, values = around[:, 1:5, :, :LENGTH]
    table = torch.randn(LENGTH, DIM, device="cuda")
    qkv = torch.randn(4, 6 * DIM, device="cuda")
    arrived = torch.zeros(8, dtype=torch.int32, device="cuda")
    out = decode_attention(qkv, table, positions, keys, values, 2, DIM**-0.5, arrived)
    assert not out.isnan().any()
    written = (around != 7.0).nonzero()
    places = {(row, place) for row, place in written[:, [1, 3]].tolist()}
    assert places == {(1, LENGTH - 1), (2, 5), (3, LENGTH - 1), (4, LENGTH - 1)}
    assert len(written) == 2 * 4 * 2 * DIM
