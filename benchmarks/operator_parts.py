"""What a rank computes in an operator of `ladder bench ops`, on one GPU and beside torch's.

    python benchmarks/operator_parts.py [--ranks 4] [--shapes flux-gpt3 llama-3-8b dlrm ..]
        [--ops all_gather_matmul ..] [--m 1024 8192] [--tables N] [--pooling N ..]
        [--implementations waiting waiting:stages=3,group_m=16 tracked ..]

The shapes are those of `ladder bench ops` on so many ranks; nothing is exchanged. For a gather and
a reduce-scatter the ways are cuBLAS's product of all rows, its products of the ranks' chunks, and
our persistent products: `waiting` waits for flags that are set, `tracked` writes to slots in this
GPU's memory, and `summing` also adds the other ranks' slots there to its own tiles. For embedding
bags they are torch's lookups, and the kernel's with one rank. Times are in microseconds, in CUDA
graphs: medians of rounds that shuffle the ways. A way whose result is wrong is named, not timed,
and makes the exit status 1.

The floor is the operations over the rate of a large matmul, or the bytes over the bandwidth of a
large copy, in the same run; a table's row counts once, however often it is looked up. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.bench.floors import bandwidth, matrix_rate
from ladder.bench.ops.measure import TOLERANCE, Ready, Way, compare, measure, repeat
from ladder.bench.ops.points import (
    BAGS,
    FLOATS,
    TABLE_ROWS,
    OpPoint,
    Variant,
    calls_of,
    check_options,
    expand,
    sizes_of,
    variants,
)
from ladder.infer.graphs import capture_graph
from ladder.kernels.bags import pool_bags
from ladder.kernels.gemm import Addition, Arrivals, Tiling, Track, gemm
from ladder.kernels.slots import SlotArrivals
from ladder.operator_names import GATHER, SCATTER
from ladder.ops.overlapped import arrival_order, tracked_map
from ladder.ops.tilings import tiling_of
from ladder.parallel import launch
from ladder.parser import Parser, parse_words
from ladder.records import facts

OPS = (GATHER, SCATTER, BAGS)
OWN = {GATHER: ("waiting",), SCATTER: ("tracked", "summing")}
RANK = 0


class Part(NamedTuple):
    """A way to compute. call: is timed. result: the same call; returns all it has computed."""

    call: Callable[[], object]
    result: Callable[[], Tensor]


def one(call: Callable[[], Tensor]) -> Part:
    return Part(call, call)


def waiting(a: Tensor, b: Tensor, ranks: int, tiling: Tiling) -> Part:
    """The product that waits for each shard's flag; all flags are set."""
    order = arrival_order(len(a), b.shape[1], ranks, RANK, tiling)
    tiles = torch.tensor(order, dtype=torch.int32, device=a.device)
    arrivals = Arrivals(torch.ones(ranks, dtype=torch.int32, device=a.device), RANK)
    out = a.new_empty(len(a), b.shape[1])
    return one(lambda: gemm(a, b, tiles, tiling=tiling, shards=ranks, out=out, arrivals=arrivals))


def tracked(
    a: Tensor, b: Tensor, ranks: int, tiling: Tiling, pieces: int = 1, summing: bool = False
) -> Part:
    """The product of a reduce-scatter. Its own shard goes to its slot; the other shards stay in the
    output, from which copy engines would send them.

    summing: the own shard is added to the other ranks' slots, which are zeros.
    """
    shard, n, device = len(a) // ranks, b.shape[1], a.device
    program = tracked_map(shard, n, ranks, tiling, pieces, keep=summing)[0].compile(RANK)
    out, slots = a.new_empty(len(a), n), a.new_zeros(len(a), n)
    counters = program.count.to(device, torch.int32)
    tables = program.target, program.counter, program.chunk, program.peer
    bases, counts = (
        torch.full((ranks,), each.data_ptr(), device=device) for each in (slots, counters)
    )
    track = Track(*(each.to(device) for each in tables), bases, counts)
    order, own = program.order.to(device), slice(RANK * shard, (RANK + 1) * shard)
    total, addition = a.new_empty(shard, n), None
    if summing:
        there = torch.ones(1, dtype=torch.int32, device=device)
        table = torch.zeros(1, ranks, dtype=torch.int32, device=device)
        arrivals = SlotArrivals(there, table, shard)
        addition = Addition(total, slots.view(ranks, shard, n), arrivals, RANK)

    def result() -> Tensor:
        before = counters.clone()
        found = call().clone()
        found[own] = total if summing else slots[own]
        assert int((counters - before).sum()) == len(order), "tiles that were not counted"
        return found

    call = partial(
        gemm, a, b, order, tiling=tiling, shards=ranks, out=out, track=track, addition=addition
    )
    return Part(call, result)


def products(
    point: OpPoint, asked: list[Variant] | None, device: torch.device
) -> tuple[dict[str, Part], Tensor, float]:
    """The ways to compute a product, the exact result and the floating-point operations."""
    m, n, k = sizes_of(point)
    dtype = FLOATS[point.dtype]
    a, weight = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device)
    weight = (weight * k**-0.5).to(dtype)
    b, whole, parts = weight.t(), a.new_empty(m, n), a.new_empty(m, n)
    pieces = list(zip(a.chunk(point.ranks), parts.chunk(point.ranks), strict=True))

    def in_chunks() -> Tensor:
        for piece, into in pieces:
            torch.mm(piece, b, out=into)
        return parts

    found = {"cuBLAS": one(lambda: torch.mm(a, b, out=whole)), "in chunks": one(in_chunks)}
    own = OWN[point.op]
    for variant in asked or [Variant(name) for name in own]:
        if variant.name in own:
            options = dict(variant.options)
            more = {"pieces": options.pop("pieces")} if "pieces" in options else {}
            tiling = tiling_of(options.pop("tile", None), options.pop("stages", None), **options)
            if variant.name == "waiting":
                part = waiting(a, b, point.ranks, tiling)
            else:
                part = tracked(a, b, point.ranks, tiling, **more, summing=variant.name == "summing")
            found[str(variant)] = part
    return found, a.double() @ b.double(), 2.0 * m * n * k


def lookups(point: OpPoint, device: torch.device) -> tuple[dict[str, Part], Tensor, float]:
    """The ways to look up embedding bags, the exact result and the bytes that are moved."""
    tables, batch, dtype = point.tables, point.m, FLOATS[point.dtype]
    joined = torch.randn(tables * TABLE_ROWS, point.k, device=device).to(dtype)
    weights = list(joined.split(TABLE_ROWS))
    looked = torch.randint(TABLE_ROWS, (tables, batch, point.pooling), device=device)
    offsets = torch.arange(tables * batch + 1, device=device) * point.pooling
    indices = looked.reshape(-1)
    rows = looked + torch.arange(tables, device=device).view(tables, 1, 1) * TABLE_ROWS
    by_sample = rows.transpose(0, 1).reshape(-1)
    table = torch.tensor([each.data_ptr() for each in weights], device=device)

    def by_torch() -> Tensor:
        options: dict[str, Any] = {"mode": "sum", "include_last_offset": True}
        return F.embedding_bag(by_sample, joined, offsets, **options).view(batch, -1)

    kernel = partial(pool_bags, weights, indices, offsets, "sum", table)
    found = {"torch": one(by_torch), "kernel": one(kernel)}
    exact = [
        F.embedding_bag(own, weight.double(), mode="sum")
        for own, weight in zip(looked, weights, strict=True)
    ]
    once = len(rows.unique()) + tables * batch  # rows that are read and written
    moved = once * point.k * joined.itemsize + indices.nbytes + offsets.nbytes
    return found, torch.cat(exact, dim=1), float(moved)


@torch.no_grad()
def main(options: argparse.Namespace) -> int:
    options.ops = options.ops or list(OPS)
    check_options(options)
    asked = variants(options.implementations, options.ops)
    points = expand(options, options.ranks, cpu=False)[0]
    device = launch.join("cuda")
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl", device_id=device, **alone)
    memory, matrices = bandwidth(device), matrix_rate(device)
    rows, wrong = [], False
    for point in points:
        torch.manual_seed(1)
        if point.op == BAGS:
            (ways, exact, bytes_), flops = lookups(point, device), 0.0
        else:
            (ways, exact, flops), bytes_ = products(point, asked, device), 0.0
        floor, calls, ready = 1e6 * max(bytes_ / memory, flops / matrices), calls_of(point), []
        for name, part in ways.items():
            error = compare([part.result()], [exact])
            if not error <= TOLERANCE[point.dtype]:
                print(f"{point} by {name}: wrong, its error is {error:.1g} of the largest value")
                wrong = True
                continue
            graph = capture_graph(partial(repeat, part.call, calls))[0]
            way = Way(name, "alone", part.call)
            ready.append(Ready(way, "captured", graph.replay, calls, error))
        times = measure(ready, device)
        us = {name: round(statistics.median(turns.us), 1) for (name, _), turns in times.items()}
        clocks = {name: turns.mhz for (name, _), turns in times.items()}
        said = ", ".join(f"{name} {each:.1f}" for name, each in us.items())
        print(f"{point}: floor {floor:.1f} us, {said}", flush=True)
        rows.append({**vars(point), "floor_us": round(floor, 1), "us": us, "mhz": clocks})
        del ways, part, exact, ready, graph, way
        torch.cuda.empty_cache()
    about = facts(torch.cuda.get_device_name(device)) | {
        "gpus": 1, "command": " ".join(["python", *sys.argv]), "copy_tb_s": memory / 1e12,
        "tflops": matrices / 1e12, "points": rows,
    }  # fmt: skip
    print(json.dumps(about))
    dist.destroy_process_group()
    return int(wrong)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="The parts of operators that compute, on one GPU.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ops", nargs="+", choices=OPS)
    parser.add_argument("--shapes", nargs="+", default=["flux-gpt3", "dlrm"])
    parser.add_argument("--m", nargs="+", type=int)
    parser.add_argument("--tables", nargs="+", type=int)
    parser.add_argument("--pooling", nargs="+", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--implementations", nargs="+")
    parser.set_defaults(tune=False, budget=None)
    return parse_words(parser, words)


if __name__ == "__main__":
    given = parse()
    sys.exit(launch.run(main, (given,), 1))
