"""Our all-reduces on GPUs, provoked; what is picked; `ladder bench comm`; a rank that dies."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.bench.communication import TABLE_SIZES
from ladder.cli import main
from ladder.comm.push import PushAllReduce, reference_all_reduce
from ladder.comm.two_shot import TwoShotAllReduce
from ladder.models.ranks import Ranks
from ladder.parallel import launch
from ladder.parallel.dispatch import Dispatch, load_dispatch
from ladder.parallel.reducers import PushReducer
from tests.infer.engines import pushing_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

WORLDS = [world for world in (2, 4) if world <= torch.cuda.device_count()]
KIB, MIB = 1024, 2**20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# (elements, type): single vectors, one chunk, ragged last shards and chunks, many chunks
SIZES = {
    "push": [(8, BF16), (64, BF16), (4096, BF16), (2056, BF16), (65536, FP32), (262144, BF16),
             (2056, FP16)],
    "two-shot": [(8, BF16), (2056, BF16), (65536, BF16), (100_004, FP32), (1_000_008, BF16),
                 (4 * MIB, BF16), (2 * MIB, FP32), (8, FP16), (1_000_008, FP16)],
}  # fmt: skip
LIMIT = 60.0  # seconds, processes started and all


def fill(partial: Tensor, source: torch.Generator) -> None:
    """Fresh numbers, some of them -0.0, alone and as whole words, some infinite or NaN."""
    partial.copy_(torch.randn(partial.shape, generator=source, device=partial.device))
    partial[::7] = -0.0
    partial[2::16] = partial[3::16] = -0.0
    partial[8::32], partial[9::32] = 0.0, -0.0  # in 16 bits the word of an empty slot
    partial[4::61] = 6e4  # whose sum is infinite in float16
    partial[5::131] = torch.inf
    partial[6::257] = torch.nan


def check(what: object, partial: Tensor, total: Tensor) -> None:
    """`total` is the sum in rank order, exactly, and bit for bit the same on all ranks."""
    parts = [torch.empty_like(partial) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, partial)
    expected = reference_all_reduce(parts)
    same = (total == expected) | (total.isnan() & expected.isnan())
    assert same.all(), (what, int((~same).sum()), same.logical_not().nonzero()[:5].flatten())
    assert not total[~expected.isnan()].isnan().any()
    bits = total.view(torch.uint8)
    others = [torch.empty_like(bits) for _ in parts]
    dist.all_gather(others, bits)
    assert all(torch.equal(bits, each) for each in others), what


def kernels_of(which: str, programs: int, device: torch.device) -> dict[Any, Callable[..., Tensor]]:
    group = dist.group.WORLD
    if which == "push":
        return {key: PushAllReduce(*key, group, device) for key in SIZES[which]}
    return dict.fromkeys(SIZES[which], TwoShotAllReduce(8 * MIB, group, device, programs))


def poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan)


def provoke(which: str, programs: int) -> int:
    """Sizes that change, ranks that come late, many in flight; then thousands in graphs."""
    device = launch.join("cuda")
    rank = launch.rank()
    source = torch.Generator(device=device).manual_seed(10 + rank)
    same, own = random.Random(1), random.Random(100 + rank)
    kernels = kernels_of(which, programs, device)
    keys = list(kernels)
    for turn in range(300):
        in_flight = []
        for _ in range(6):
            key = same.choice(keys)
            partial = torch.empty(key[0], dtype=key[1], device=device)
            fill(partial, source)
            if own.random() < 0.3:
                torch.cuda._sleep(own.randrange(400_000))
            before = partial.clone()
            with mock.patch.object(torch, "empty_like", poisoned):
                total = kernels[key](partial, turn % 2 == 0)
            in_flight.append((key, partial, before, total))
        if turn % 10 == 0:
            for key, partial, before, total in in_flight:
                assert torch.equal(partial.view(torch.uint8), before.view(torch.uint8))
                check((which, key, turn), partial, total)

    order = [same.choice(keys) for _ in range(9)]
    partials = [torch.empty(key[0], dtype=key[1], device=device) for key in order]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        totals = []
        for i, (key, partial) in enumerate(zip(order, partials, strict=True)):
            if i % 4 == rank:
                torch.cuda._sleep(30_000)
            totals.append(kernels[key](partial, i % 3 == 0))
    for replay in range(1000):  # the sets of slots rotate out of step with the graph
        if replay % 50 == 0:
            for partial, total in zip(partials, totals, strict=True):
                fill(partial, source)
                total.fill_(torch.nan)
        if own.random() < 0.1:
            torch.cuda._sleep(own.randrange(400_000))
        graph.replay()
        if replay % 50 in (0, 49):
            for key, partial, total in zip(order, partials, totals, strict=True):
                check((which, key, "graph"), partial, total)
    return 0


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("which", "programs"), [("push", 0), ("two-shot", 32), ("two-shot", 3)])
def test_all_reduces_survive_provocation(which: str, programs: int, world: int) -> None:
    """A set of slots cleared too late, or read too early, gives another sum or a hang."""
    assert launch.run(provoke, (which, programs), nproc=world) == 0


def reduce_by_size() -> int:
    """The push reducer over messages of all ranges, several in flight; virtual ranks beside."""
    device = launch.join("cuda")
    world, rank = launch.world_size(), launch.rank()
    table = Dispatch(((64 * KIB, "push"), (4 * MIB, "two-shot")), "a test")
    source = torch.Generator(device=device).manual_seed(10 + rank)
    expected = {8 * KIB: "push", 64 * KIB: "push", MIB: "two-shot", 8 * MIB: "nccl", 24: "nccl"}
    for held in (1, 2):
        reducer = PushReducer(Ranks(held * world, held * rank, held), dist.group.WORLD, table)
        for turn in range(20):
            sums = []
            for size in expected:
                partial = torch.randn(2, size // 4, generator=source, device=device).to(BF16)
                if (turn + rank) % 3 == 0:
                    torch.cuda._sleep(200_000)
                in_flight = reducer.reduce(partial.clone(), turn % 2 == 0)
                sums.append((size, partial, in_flight))
            mine = torch.randn(2, 4096, generator=source, device=device).to(BF16)
            check("sum", mine.flatten(), reducer.sum(mine.clone()).flatten())  # others in flight
            for size, partial, in_flight in reversed(sums):
                total = in_flight.wait()
                assert total.shape == partial.shape
                if expected[size] == "nccl":
                    parts = [torch.empty_like(partial) for _ in range(world)]
                    dist.all_gather(parts, partial)
                    wanted = reference_all_reduce(parts)
                    torch.testing.assert_close(total, wanted, rtol=0.05, atol=0.1)
                else:
                    check(size, partial.flatten(), total.flatten())
        assert reducer.picked == {**expected, 16 * KIB: "push"}
        assert reducer.in_flight == 0
    return 0


@pytest.mark.parametrize("world", WORLDS)
def test_the_push_reducer_picks_by_size(world: int) -> None:
    """Two calls that share slots and run at once, or virtual ranks summed twice, fail."""
    assert launch.run(reduce_by_size, (), nproc=world) == 0


def lose_a_rank(which: str, end: str) -> int:
    """The last rank leaves as `end` says; the others wait for it on their GPUs."""
    device = launch.join("cuda")
    partial = torch.randn(4096, device=device).to(BF16)
    kernel: Any = lambda x, _: dist.all_reduce(x)  # noqa: E731
    if which == "push":
        kernel = PushAllReduce(4096, BF16, dist.group.WORLD, device)
    elif which == "two-shot":
        kernel = TwoShotAllReduce(MIB, dist.group.WORLD, device)
    elif which == "decode":
        _, engine = pushing_engine("ladder", device)
        kernel = lambda *_: engine.generate([[3, 1]], max_new_tokens=8)  # noqa: E731
    for _ in range(3):
        kernel(partial, True)
    torch.cuda.synchronize()
    dist.barrier()
    if launch.rank() == launch.world_size() - 1:
        time.sleep(0.5)  # the others are waiting by now
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(int(end))
    for _ in range(3):
        kernel(partial, True)
    torch.cuda.synchronize()
    return 0


@pytest.mark.parametrize("world", WORLDS[-1:])
@pytest.mark.parametrize("which", ["push", "two-shot", "nccl", "decode"])
@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("killed", 1, "error: rank {} was killed by signal 9 (SIGKILL)"),
        ("7", 7, "error: rank {} ended with exit code 7 and no message"),
    ],
)
def test_a_dead_rank_ends_the_job_and_is_named(
    which: str, end: str, code: int, words: str, world: int, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    assert launch.run(lose_a_rank, (which, end), nproc=world) == code
    assert time.monotonic() - begun < LIMIT
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert errors == [words.format(world - 1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bench_comm(dtype: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a table, which is of the default sizes in bfloat16."""
    file, whole = tmp_path / "table.json", dtype == "bfloat16"
    sizes = TABLE_SIZES if whole else (8192, MIB)
    more = ["--write-table", str(file)] if whole else []
    command = ["bench", "comm", "--nproc", str(WORLDS[-1]), "--sizes", *map(str, sizes),
               "--out", str(tmp_path), "--dtype", dtype, *more]  # fmt: skip
    assert main(command) == 0, capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "comm.jsonl").read_text().splitlines()]
    assert all(line["result"]["us"] > 0 for line in lines)
    times: dict[int, dict[str, float]] = {size: {} for size in sizes}
    for line in lines:
        times[line["point"]["size"]][line["point"]["algorithm"]] = line["result"]["us"]
    assert all(len(times[size]) == 5 for size in (8192, MIB))
    assert "auto" in capfd.readouterr().out
    if not whole:
        return
    table = load_dispatch(torch.cuda.get_device_name(), WORLDS[-1], file)
    for size, row in times.items():
        ours = [name for name in ("nccl", "push", "two-shot") if name in row]
        best = min(ours, key=row.__getitem__)
        assert table.pick(size) == best
