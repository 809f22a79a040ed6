"""Prefill: its kernels against float64, and the residual sharded by tokens.

How the kernels are run is in support.py. test_gpu_prefill.py runs the same checks,
and more, on GPUs.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm import barriers, driver, symmetric, transports
from ladder.comm.driver import MemoryOperation
from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels.prefill import land_rows, rotary_prompt, swiglu
from ladder.models import Ranks, UserError, resolve_plan
from ladder.models.layers import RMSNorm
from ladder.models.runtime import Runtime
from ladder.parallel.reducers import AsyncReducer
from ladder.parallel.sharded import ShardedReducer, sharded_refusal
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.kernels.support import (  # noqa: F401  (fixtures)
    DTYPES,
    _poisoned_memory,
    assert_close,
    check_land_rows,
    check_rotary_prompt,
    check_swiglu,
    on,
)
from tests.samples import (
    DEPENDS_ON_T,
    SAME_AT_ANY_T,
    full_model,
    relative_error,
    sample_tokens,
    small_config,
)

ON_A_CPU = pytest.mark.parametrize("device", [on("cpu"), on("interpreter")])

# -- kernels -----------------------------------------------------------------------------------


@ON_A_CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size", "count"), [(3, 96, 4), (1, 200, 0), (5, 1536, 8)])
def test_land_rows(device: str, rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    """A piece or the stream left out or taken twice, a norm of something else, a row beyond."""
    check_land_rows(device, rows, size, count, dtype)


@ON_A_CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "inner"), [(3, 96), (33, 6), (9, 515), (1, 1536)])
def test_swiglu(device: str, rows: int, inner: int, dtype: torch.dtype) -> None:
    check_swiglu(device, rows, inner, dtype)


@ON_A_CPU
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "heads"), [(2, 5, (4, 2, 16)), (1, 37, (3, 1, 12)), (2, 130, (2, 2, 64))]
)
def test_rotary_prompt(
    device: str, batch: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype,
    normed: bool,
) -> None:  # fmt: skip
    """Places counted wrong in a second block or sequence, heads mixed up, values turned or normed,
    a norm of the wrong half, the keys' gain for the queries'."""
    check_rotary_prompt(device, batch, length, heads, dtype, normed)


@ON_A_CPU
def test_land_rows_sums_in_rank_order(device: str) -> None:
    """1e8 + 1 - 1e8 is 0 in float32, in this order alone: no pairwise or reversed sum."""
    size = 64
    values = [torch.full((2, size), value, device=device) for value in (1e8, 1.0, -1e8)]
    stream, weight = torch.full_like(values[0], 0.5), torch.ones(size, device=device)
    landed, _ = land_rows(values, stream, weight, 1e-5)
    assert (landed == 0.5).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: land_rows([x] * 9, x, x[0], 1e-5), "9 pieces"),
        (lambda x: land_rows([x[:1]], x, x[0], 1e-5), r"pieces\[0\] has shape \(1, 8\)"),
        (lambda x: land_rows([x.half()], x, x[0], 1e-5), "dtypes"),
        (lambda x: swiglu(x[:, :7]), r"expected \[M, 2 H\]"),
        (lambda x: swiglu(x[:, :6]), "not contiguous"),
        (
            lambda x: rotary_prompt(
                x.view(1, 2, 8), x.new_zeros(9, 2), *x.new_zeros(2, 1, 1, 1, 2), 2, 1
            ),
            "L of 2 or more",
        ),
        (
            lambda x: rotary_prompt(
                x.view(1, 2, 8), x.new_zeros(1, 2), *x.new_zeros(2, 1, 1, 9, 2), 2, 1
            ),
            "table is",
        ),
    ],
)
def test_refusals(call: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(torch.randn(2, 8))


# -- the sharded stream, on gloo ranks -----------------------------------------------------------


def compared(rank: int, world_size: int, plan: str, batch: int, length: int) -> dict[str, Any]:
    """In a worker: the sharded reducer's logits against AsyncReducer's, and what it called."""
    config = small_config(SAME_AT_ANY_T[plan])
    model = full_model(config, seed=4, dtype=torch.float32)
    shard_model(model, tp_mesh(world_size))
    tokens = sample_tokens(config, 1, batch, length)
    plain = model.reducer
    assert isinstance(plain, AsyncReducer)
    counts = {"all_to_all_single": 0, "all_gather": 0, "all_reduce": 0}
    partials: list[weakref.ref] = []
    alive = 0

    def counted(where: Any, name: str) -> Any:
        original = getattr(where, name)

        def call(*args: Any, **options: Any) -> Any:
            nonlocal alive
            counts[name] += 1
            if name == "all_to_all_single":
                partials.append(weakref.ref(args[1]))
                alive = max(alive, sum(each() is not None for each in partials))
            return original(*args, **options)

        return mock.patch.object(where, name, call)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # as torch 2.13 has for older names
        last = torch.tensor([(3 * n) % length for n in range(batch)])
        border = -(-batch * length // world_size)  # the second rank's first row
        last[border // length] = border % length
        expected = model(tokens), model(tokens, last=last)
        reducer = ShardedReducer(plain.ranks, plain.group, config.plan)
        model.use(replace(model.runtime, reducer=reducer))
        calls = (dist, "all_to_all_single"), (transports, "all_gather"), (dist, "all_reduce")
        with ExitStack() as stack:
            for call in calls:
                stack.enter_context(counted(*call))
            logits = model(tokens)
        found = logits, model(tokens, last=last)
    assert torch.isfinite(logits).all()
    errors = [relative_error(a, b) for a, b in zip(found, expected, strict=True)]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, found)
    same = all(torch.equal(a, b) for each in everyone for a, b in zip(found, each, strict=True))
    return {"error": max(errors), "same": same, "counts": counts, "alive": alive}


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("batch", "length"), [(2, 8), (3, 7), (1, 2)])
@pytest.mark.parametrize("plan", SAME_AT_ANY_T)
def test_a_sharded_stream_computes_the_same(
    pools: Pools, plan: str, batch: int, length: int, world_size: int
) -> None:
    """Rows that T does not divide, fewer rows than ranks, lags that grow and shrink.

    A wrong row or order of landing changes the logits; a collective too many, or partials kept
    until the end of the pass (half of the memory of a large prompt), is counted.
    """
    resolved = resolve_plan(SAME_AT_ANY_T[plan], 4, world_size)
    first = next(n for n, read in enumerate(resolved.landings) if read)
    deepest = 1 + max(record.own_lag for record in resolved.sublayers)
    for result in pools(world_size).run(compared, plan, batch, length):
        assert result["error"] < 1e-5
        assert result["same"]
        sublayers = len(resolved.sublayers)
        assert result["counts"]["all_to_all_single"] == sublayers
        assert result["counts"]["all_gather"] == sublayers + 1 - first
        assert result["counts"]["all_reduce"] == 1  # the embedding
        if (batch * length) % world_size == 0:  # else it is a padded copy that is seen
            assert result["alive"] <= deepest + 1


@pytest.mark.parametrize("plan", DEPENDS_ON_T)
def test_plans_whose_streams_differ_are_refused(plan: str) -> None:
    resolved = resolve_plan(DEPENDS_ON_T[plan], 4, 4)
    ranks = Ranks(4, 1, 1)
    assert sharded_refusal(resolved, ranks)
    with pytest.raises(UserError, match=r"cannot run with its residual sharded.*reducer=async"):
        ShardedReducer(ranks, None, resolved)


def test_ranks_and_transports_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = resolve_plan("ladder", 4, 4)
    assert sharded_refusal(plan, Ranks(4, 1, 1)) is None
    assert "virtual" in str(sharded_refusal(plan, Ranks(4, 0, 2)))
    assert "one process" in str(sharded_refusal(plan, Ranks(1, 0, 1)))
    with pytest.raises(UserError, match=r"did you mean .copy"):
        ShardedReducer(Ranks(4, 1, 1), None, plan, "cpoy")
    monkeypatch.setattr(transports, "push_refusal", lambda processes: "it needs GPUs")
    monkeypatch.setattr(transports, "dist", FAKE)
    with pytest.raises(UserError, match=r"transport=copy cannot run here.*transport=collective"):
        ShardedReducer(Ranks(4, 1, 1), Thread(1, Machine(4)), plan, "copy")


# -- copies between memories, on threads ---------------------------------------------------------


@dataclass
class Machine:
    """Ranks that are threads of this process: every address is everyone's."""

    world: int
    made: list[dict[int, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world)
        self.lock = threading.Lock()


@dataclass
class Thread:
    """One rank's "process group"."""

    rank: int
    machine: Machine
    asked: int = 0


FAKE = SimpleNamespace(
    get_rank=lambda group: group.rank,
    get_world_size=lambda group: group.machine.world,
    barrier=lambda group: group.machine.barrier.wait(20),
    ProcessGroup=dist.ProcessGroup,
)


def shared(
    shape: tuple[int, int], dtype: torch.dtype, group: Any, device: Any, bits: int | None = None
) -> SymmetricTensor:
    """`symmetric.allocate` of ladder.comm; memory that nobody initialised is poisoned."""
    machine = group.machine
    with machine.lock:
        while len(machine.made) <= group.asked:
            machine.made.append({})
        poison = torch.nan if dtype.is_floating_point else 77
        value = poison if bits is None else bits
        machine.made[group.asked][group.rank] = torch.full(shape, value, dtype=dtype)
    machine.barrier.wait(20)
    mine = machine.made[group.asked]
    group.asked += 1
    return SymmetricTensor(
        group.rank, [mine[rank] for rank in range(machine.world)], torch.empty(0)
    )


class FakeDriver:
    """Runs a batch of memory operations at once, in order, on this process's memory."""

    def __init__(self, source: random.Random) -> None:
        self.source = source

    def cuStreamBatchMemOp_v2(self, stream: Any, count: int, batch: Any, flags: int) -> int:
        assert count == len(batch)
        time.sleep(self.source.random() * 2e-3)  # ranks that come late
        for each in batch:
            word = ctypes.c_uint32.from_address(each.address)
            if each.operation == MemoryOperation.WRITE:
                assert word.value != each.value, "set twice: the other's flag was not yet cleared"
                word.value = each.value
                continue
            end = time.monotonic() + 20
            while word.value != each.value:
                assert time.monotonic() < end, "a rank waits for ever"
                time.sleep(1e-5)
        time.sleep(self.source.random() * 2e-3)  # ranks that go on late
        return 0


def passes(reducer: ShardedReducer, plan: Any, batches: list[Tensor], lend: bool) -> list[Tensor]:
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
            out = run.partial_buffer(tuple(partial.shape), partial) if lend else None
            if out is not None:
                assert run.partial_buffer(tuple(partial.shape), partial) is None
                partial = out.copy_(partial)
            run.write(n, partial)
        results.append(run.read(len(plan.sublayers)).clone())
    return results


def expected_of(plan: Any, batch: Tensor, world: int) -> Tensor:
    """The same without reducers, in float64, with all outputs summed outright."""
    stream, outputs = batch.double(), list[Tensor]()
    for n, read in enumerate(plan.landings):
        for landing in read:
            stream = stream + outputs[landing.output]
        normed = F.rms_norm(stream, (8,), eps=1e-5)
        outputs.append(sum(range(1, world + 1)) / 40 * torch.sin(normed + n))
    return normed


@pytest.mark.parametrize("lend", [False, True])
@pytest.mark.parametrize("transport", ["copy", "direct"])
@pytest.mark.parametrize("plan", ["standard", "ladder", "ladder@1-3", "lag 2"])
def test_copies_meet_and_reuse_their_buffers(
    plan: str, transport: str, lend: bool, monkeypatch: pytest.MonkeyPatch
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
                results[rank] = passes(reducer, resolved, batches, lend)
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
