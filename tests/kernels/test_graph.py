"""On a GPU: the decode kernels in a CUDA graph, one after another, as an engine launches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

    way: outputs are "kept" and land from where the product left them; or they are "pushed" by the
    product, or "sent" by a kernel of its own, to slots [SETS, 1, rows, SIZE], and land from there.
    """

    rows: int
    lag: int
    way: str

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

    def step(self, wait: Wait) -> Tensor:
        """The residual in the end. wait: called after each launch."""
        read = new_landing(self.x)
        flying: list[Tensor] = []

        def land_oldest() -> LandingJob:
            output = flying.pop(0)
            arrived: dict[str, Any] = {"sums": [output]}
            if self.way == "kept":
                arrived = {"owns": [(output, 1.0)]}
            job = new_landing(read.out, **arrived)
            land(job)
            wait()
            return job

        land(read)
        wait()
        for turn in range(2 * LAYERS):
            while len(flying) > self.lag:
                read = land_oldest()
            flying.append(self._sublayer(turn, read, wait))
        while flying:
            read = land_oldest()
        return read.out

    def _sublayer(self, turn: int, read: LandingJob, wait: Wait) -> Tensor:
        """Attention and MLP in turn. The output, or the slots that have it."""
        qkv, o, both, down = self.weights[turn // 2]
        norm = {"squares": read.squares, "eps": EPS}
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
        pushed = self.way == "pushed"
        partial = project(
            y, down if turn % 2 else o, push=push if pushed else None, keep=not pushed
        )
        wait()
        if self.way == "sent":
            assert partial is not None
            send(SendJob(partial, push))
            wait()
        if self.way == "kept":
            assert partial is not None
            return partial
        return slots


@pytest.mark.parametrize("lag", [0, 1, 2])
@pytest.mark.parametrize("way", ["kept", "pushed", "sent"])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_a_graph_of_dependent_launches_equals_eager_calls(rows: int, way: str, lag: int) -> None:
    """In one graph, buffers reused, against the same calls with a wait after each.

    What is read before the kernel that makes it has ended, or cleared, or written over while
    another reads it, is seen here.
    """
    chain = Chain(rows, lag, way)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        chain.step(torch.cuda.synchronize)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = chain.step(lambda: None)
    before = chain.caches.clone()
    for _ in range(20):
        chain.x.normal_()
        chain.positions.random_(LENGTH)
        graph.replay()
        first, after = found.clone(), chain.caches.clone()
        graph.replay()
        assert torch.equal(found, first)
        chain.caches.copy_(before)
        wanted = chain.step(torch.cuda.synchronize)
        assert not wanted.isnan().any()
        assert torch.equal(first, wanted)
        assert torch.equal(chain.caches, after)
        assert not chain.arrived.any()
        assert bool(((chain.slots == 0) & torch.signbit(chain.slots)).all())
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
