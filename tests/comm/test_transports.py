"""Copies between the GPUs' memories, on threads in place of GPUs."""

from __future__ import annotations

import ctypes
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.comm import barriers, driver, symmetric, transports
from ladder.comm.driver import MemoryOperation
from ladder.models import Ranks, UserError, resolve_plan
from ladder.models.layers import RMSNorm
from ladder.models.runtime import Runtime
from ladder.parallel.sharded import ShardedReducer
from tests.comm.threads import FAKE, FakeDriver, Machine, Thread, shared
from tests.kernels.support import _poisoned_memory  # noqa: F401  (a fixture)
from tests.samples import (
    SAME_AT_ANY_T,
    relative_error,
)


def test_peer_memory_that_is_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve_plan("ladder", 4, 4)
    monkeypatch.setattr(transports, "push_refusal", lambda processes: "it needs GPUs")
    monkeypatch.setattr(transports, "dist", FAKE)
    with pytest.raises(UserError, match=r"transport=copy cannot run here.*transport=collective"):
        ShardedReducer(Ranks(4, 1, 1), Thread(1, Machine(4)), plan, "copy")


def passes(
    reducer: ShardedReducer, plan: Any, batches: list[Tensor], in_buffer: bool
) -> list[Tensor]:
    """The model's loop with sublayers that say n and rank; the last normed residual of each pass.

    batches: the residual that each pass starts with. A sublayer's partial on rank r is (r + 1) / 40
    times a function of what it reads: small beside the residual, so that rounding does not grow
    from one sublayer to the next and a tight tolerance holds for any batch.
    """
    results = []
    rank, norm = reducer.ranks.process, RMSNorm(8, 1e-5)
    torch.nn.init.ones_(norm.weight)
    for batch in batches:
        norms = [norm] * (len(plan.sublayers) + 1)
        run = reducer.begin(Runtime(reducer), plan, norms, batch.shape[:2])
        run.residual = batch
        for n in range(len(plan.sublayers)):
            partial = (rank + 1) / 40 * torch.sin(run.read(n) + n)
            out = run.partial_buffer(tuple(partial.shape), partial) if in_buffer else None
            if out is not None:
                assert run.partial_buffer(tuple(partial.shape), partial) is None
                partial = out.copy_(partial)
            run.write(n, partial)
        results.append(run.read(len(plan.sublayers)).clone())
    return results


def expected_of(plan: Any, batch: Tensor, world: int) -> Tensor:
    """The same without reducers, in float64, with all outputs summed outright."""
    residual, outputs = batch.double(), list[Tensor]()
    for n, read in enumerate(plan.landings):
        for landing in read:
            residual = residual + outputs[landing.output]
        normed = F.rms_norm(residual, (8,), eps=1e-5)
        outputs.append(sum(range(1, world + 1)) / 40 * torch.sin(normed + n))
    return normed


@pytest.mark.parametrize("in_buffer", [False, True])
@pytest.mark.parametrize("transport", ["copy", "direct"])
@pytest.mark.parametrize("plan", ["standard", "ladder", "ladder@1-3", "lag 2"])
def test_copies_meet_and_reuse_their_buffers(
    plan: str, transport: str, in_buffer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four threads with random delays: what a rank reads too early is NaN, or a former pass's.

    One set of buffers less, a barrier left out, a piece or row of another rank, flags that are not
    cleared: all change a result, trip over a flag, or wait for ever. Passes of several sizes, the
    largest not first.
    """
    world, machine = 4, Machine(4)
    for module in (barriers, transports):
        monkeypatch.setattr(module, "dist", FAKE)
    monkeypatch.setattr(symmetric, "allocate", shared)
    monkeypatch.setattr(transports, "KernelBarrier", barriers.StreamBarrier)
    monkeypatch.setattr(transports, "push_refusal", lambda processes: None)
    monkeypatch.setattr(transports, "MIN_ROWS", 4)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    local = threading.local()
    monkeypatch.setattr(driver, "driver", lambda: local.driver)
    resolved = resolve_plan(SAME_AT_ANY_T[plan], 4, world)
    shapes = [(1, 4), (2, 3), (3, 3), (1, 1), (2, 9), (2, 3)] * 2
    batches = [torch.randn(*shape, 8) for shape in shapes]
    results: dict[int, list[Tensor]] = {}
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        local.driver = FakeDriver(random.Random(rank))
        try:
            group: Any = Thread(rank, machine)
            reducer = ShardedReducer(Ranks(world, rank, 1), group, resolved, transport)
            with torch.no_grad():
                results[rank] = passes(reducer, resolved, batches, in_buffer)
        except BaseException as error:
            failures.append(error)
            machine.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]
    for n, batch in enumerate(batches):
        wanted = expected_of(resolved, batch, world)
        for rank in range(world):
            assert relative_error(results[rank][n], wanted) < 2e-6, (n, rank)


def test_memory_operations_have_the_drivers_layout() -> None:
    """cuda.h: a union of six 64-bit words; the address at 8, the value at 16, the flags at 24."""
    kind = MemoryOperation
    assert ctypes.sizeof(kind) == 48
    assert [getattr(kind, name).offset for name in ("operation", "address", "value", "flags")] == [
        0,
        8,
        16,
        24,
    ]
