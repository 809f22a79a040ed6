"""Times of other ways to multiply by a decode step's weights, beside the chosen ones, on one GPU.

    python benchmarks/products.py [--shapes 8B/TP4 ...] [--rows 16 64 4 1] [--weights fp8]
        [--ways today late] [--carveouts] [--out FILE] [--budget SECONDS]

For each shape and number of rows: the four products of a layer, each alone and all in a chain, in
CUDA graphs with dependent launch, over weights that no cache holds. All ways take turns, in another
order each round; a time is the median, in microseconds of one product or of a layer. The floor is
the weights' bytes over the bandwidth of a large copy (read + write) in the same run. First every
result is compared with float64: a wrong way is named, not timed, and makes the exit status 1.

today: what `ladder.kernels.decode_shapes.blocks` chooses. late: the same, but without weights
brought into L2 before the wait for the previous kernel. lean: tiles of so little shared memory that
the next kernel's programs start beside them. best: each product's fastest way alone, in a chain.
--carveouts: also the chains in which the driver chooses how much of an SM's L1 is shared memory;
otherwise kernels prefer what they do in a step (`ladder.kernels.carveout`). --out: a line of JSON
for each point.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from kernels import EPS, SHAPES, Call, captured, copies, layer, replayed
from product_ways import WAYS, Product, Way, in_half, in_pieces, usable
from torch import Tensor

from ladder import kernels
from ladder.bench.floors import bandwidth, matrix_rate
from ladder.bench.inference.command import machine
from ladder.kernels import decode, decode_shapes
from ladder.kernels.carveout import DRIVERS, carveout, least
from ladder.kernels.landing import with_pieces
from ladder.kernels.limits import MAX_ROWS
from ladder.models.quantised import quantise
from ladder.models.storage import QUANTISED, dequantise
from ladder.parser import Parser, parse_words

ROUNDS, WARM = 20, 3


class Input(NamedTuple):
    x: Tensor
    norm: dict[str, Any]  # x is a residual before its norm: the results of its landing


class Matrix(NamedTuple):
    stored: Tensor
    scales: Tensor | None  # if stored in 8 bits

    def halves(self) -> tuple[Matrix, Matrix]:
        """The matrices of gate and up, which are stored one after the other."""
        scales = (None, None) if self.scales is None else self.scales.chunk(2)
        first, second = map(Matrix, self.stored.chunk(2), scales)
        return first, second

    def exact(self) -> Tensor:
        if self.scales is None:
            return self.stored.double()
        return dequantise(self.stored, self.scales, torch.float32).double()


@contextlib.contextmanager
def chosen(way: Way, rows: int, product: Product) -> Iterator[None]:
    blocks = way.blocks(rows, product)
    with mock.patch.multiple(decode_shapes, blocks=lambda *_, **__: blocks, EARLY=way.early):
        yield


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Of programs that share a tile: all products of a chain follow one another."""
    return torch.zeros(decode_shapes.FEW, dtype=torch.int32, device=device)


def multiply(way: Way, product: Product, read: Input, weight: Matrix) -> Tensor:
    gate, up = weight.halves() if product.gated else (weight, Matrix(None, None))
    scales = None if gate.scales is None else (gate.scales, up.scales)
    with chosen(way, len(read.x), product):
        y = kernels.project(
            read.x, gate.stored, up.stored, scales=scales, gives=torch.bfloat16,
            arrived=counters(read.x.device), **read.norm,
        )  # fmt: skip
    assert y is not None
    return y


def new_input(rows: int, product: Product) -> Input:
    kind = torch.float16 if in_half(rows, product) else torch.bfloat16
    x = torch.randn(rows, product.inputs, device="cuda", dtype=kind)
    if not product.normed:
        return Input(x, {})
    job = kernels.new_landing(x)
    if in_pieces(rows, product):
        job = with_pieces(job, QUANTISED[product.weights])
    kernels.land(job)
    return Input(x, {"squares": job.squares, "pieces": job.pieces, "eps": EPS})


def wrong(way: Way, product: Product, read: Input, weight: Matrix) -> str | None:
    """What is wrong, or None. Compares a result with float64, and with that of a second call."""
    found, again = (multiply(way, product, read, weight) for _ in range(2))
    x = read.x.double()
    if product.normed:
        x = F.rms_norm(x, (product.inputs,), None, EPS)
    y = F.linear(x, weight.exact())
    if product.gated:
        y = F.silu(y[:, : product.outputs]) * y[:, product.outputs :]
    error = (found.double() - y).abs()
    bound = 2**-7 * y.abs() + 0.02 * y.square().mean().sqrt()
    if not bool((error <= bound).all()):  # NaN is not
        return f"off by up to {float(error.max())}, of {float(y.abs().max())}"
    return None if torch.equal(found, again) else "two calls differ"


def compile_one(job: tuple[str, int, Product]) -> str | None:
    """Compile a job's kernels into Triton's cache, in a process of its own; returns an error."""
    name, rows, product = job
    way = next(each for each in WAYS if each.name == name)
    try:
        multiply(way, product, new_input(rows, product), matrix(product))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{way.name}, {rows} rows, {product}: {str(error).splitlines()[0]}"
    return None


def compiled(jobs: list[tuple[str, int, Product]]) -> list[str]:
    """Fill Triton's cache, by a worker on each core; returns the errors."""
    processes = max(1, min(len(jobs), (os.cpu_count() or 2) - 1))
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        results = pool.map(compile_one, jobs, chunksize=1)
    # After a CUDA error all later jobs of a worker fail: try failed jobs again, each in a new one.
    again = [job for job, error in zip(jobs, results, strict=True) if error]
    if not again:
        return []
    with context.Pool(min(processes, len(again)), maxtasksperchild=1) as pool:
        return [error for error in pool.map(compile_one, again, chunksize=1) if error]


def measured(graphs: dict[tuple[str, str], tuple[torch.cuda.CUDAGraph, int]]) -> dict[tuple, float]:
    """Microseconds of one call of each graph: the median of its replays, over its calls."""
    times: dict[tuple, list[float]] = {key: [] for key in graphs}
    order = list(graphs)
    for number in range(ROUNDS + WARM):
        random.shuffle(order)
        for key in order:
            graph, calls = graphs[key]
            taken = replayed(graph) / calls
            if number >= WARM:
                times[key].append(taken)
    return {key: statistics.median(each) for key, each in times.items()}


def measure(
    rows: int, products: Sequence[Product], ways: Sequence[Way], weights: dict[str, list[Matrix]],
    carveouts: bool,
) -> tuple[dict[str, Any], list[str]]:  # fmt: skip
    """The figures of one number of rows, and the errors of wrong ways.

    times: microseconds by way and name: a product, "chain", or with `carveouts` "chain, driver's".
    best: the fastest way of each product. blocks: the cuts of each way, by product.
    """
    inputs = {each.name: new_input(rows, each) for each in products}
    errors = []
    right = []
    for way in ways:
        found = [
            f"{way.name}, {rows} rows, {each.name}: {error}"
            for each in products
            if (error := wrong(way, each, inputs[each.name], weights[each.name][0]))
        ]
        errors += found
        right += [way] * (not found)
    layers = min(len(each) for each in weights.values())

    def graph(of: dict[str, Way], some: Sequence[Product], count: int, at_least: int) -> Any:
        calls: list[Call] = [
            functools.partial(
                multiply, of[each.name], each, inputs[each.name], weights[each.name][i]
            )
            for i in range(count)
            for each in some
        ]
        with carveout(at_least):
            for first in calls[: len(some)]:  # for what kernels prefer
                first()
            return captured(calls), count

    alone, whole = {}, {}
    for way in right:
        every = {each.name: way for each in products}
        for each in products:
            count = len(weights[each.name])
            alone[way.name, each.name] = graph(every, [each], count, least(rows))
        whole[way.name, "chain"] = graph(every, products, layers, least(rows))
    times = measured(alone)
    best = {
        each.name: min(right, key=lambda way, name=each.name: times[way.name, name])
        for each in products
        if right
    }
    if right:
        whole["best", "chain"] = graph(best, products, layers, least(rows))
    times |= measured(whole)
    if carveouts:
        again = {}
        for way in right:
            every = {each.name: way for each in products}
            again[way.name, "chain, driver's"] = graph(every, products, layers, DRIVERS)
        times |= measured(again)
    table: dict[str, dict[str, float]] = {}
    for (name, what), taken in times.items():
        table.setdefault(name, {})[what] = taken
    return {
        "times": table,
        "best": {name: way.name for name, way in best.items()},
        "blocks": {way.name: {p.name: way.blocks(rows, p) for p in products} for way in right},
    }, errors


def show(title: str, products: Sequence[Product], found: dict[str, Any], rate: float) -> None:
    floors = [each.bytes / rate * 1e6 for each in products]
    print(f"\n{title}: microseconds" + "".join(f"{each.name:>13}" for each in products), end="")
    print(f"{'sum':>9}{'chain':>9} of floor  others")
    print(f"{'floor':{len(title) + 14}}" + "".join(f"{each:13.2f}" for each in floors), end="")
    print(f"{sum(floors):9.2f}{sum(floors):9.2f}")
    for name, times in sorted(found["times"].items(), key=lambda each: each[1]["chain"]):
        alone = [times[each.name] for each in products if each.name in times]
        line = "".join(f"{each:13.2f}" for each in alone) + (f"{sum(alone):9.2f}" if alone else "")
        print(f"{name:{len(title) + 14}}{line:>61}{times['chain']:9.2f}", end="")
        print(f"{sum(floors) / times['chain']:9.0%}", end="")
        shown = {each.name for each in products} | {"chain"}
        others = [f"{what} {taken:.2f}" for what, taken in times.items() if what not in shown]
        print("  " + "; ".join(others))
    print("best: " + ", ".join(f"{name} {way}" for name, way in found["best"].items()), flush=True)


def main() -> None:
    begun = time.monotonic()
    parser = Parser(description=__doc__.split("\n")[0])
    names = [way.name for way in WAYS]
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["8B/TP4"])
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[16, 64, 4, 1], help=f"batch, 1 to {MAX_ROWS}"
    )
    parser.add_argument("--weights", choices=["bf16", *QUANTISED], default="bf16")
    parser.add_argument("--ways", nargs="+", choices=names, default=names)
    parser.add_argument("--carveouts", action="store_true", help="also the driver's carve-outs")
    parser.add_argument("--out", type=Path, help="appended: a line of JSON for each point")
    parser.add_argument("--budget", type=float, help="start no point after so many seconds")
    args = parse_words(parser)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure")
    points = []
    for shape, rows in itertools.product(args.shapes, args.rows):
        products = [Product(*each, args.weights) for each in layer(SHAPES[shape])]
        ways = [way for way in WAYS if way.name in args.ways and usable(way, rows, products)]
        points.append((shape, rows, products, ways))
    jobs = [
        (way.name, rows, product)
        for _, rows, products, ways in points
        for product in products
        for way in ways
    ]
    failed = compiled(jobs)
    print(f"compiled {len(jobs)} products in {time.monotonic() - begun:.0f} s", flush=True)
    device = torch.device("cuda")
    rate = bandwidth(device)
    about = machine(device, rate, matrix_rate(device)) | {
        "command": " ".join(["python", *sys.argv]),
        "triton": decode.triton.__version__,
    }
    print(f"{torch.cuda.get_device_name()}: copy {rate / 1e12:.2f} TB/s")
    for error in failed:
        print("FAILED", error)
    held: tuple[str, dict[str, list[Matrix]]] = ("", {})
    bad = list(failed)
    for shape, rows, products, ways in points:
        if args.budget and time.monotonic() - begun > args.budget:
            print(f"{shape}, {rows} rows: not measured, the budget is spent")
            continue
        if held[0] != shape:
            held = ("", {})
            held = (shape, {each.name: matrices(each) for each in products})
        fit = [
            way
            for way in ways
            if not any(error.startswith(f"{way.name}, {rows} rows, ") for error in failed)
        ]
        found, errors = measure(rows, products, fit, held[1], args.carveouts)
        for error in errors:
            print("WRONG", shape, error)
        bad += errors
        show(f"{shape}, {rows} rows", products, found, rate)
        if args.out:
            record = about | {"shape": shape, "rows": rows, "weights": args.weights}
            record |= {"wrong": errors} | found
            with args.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
    print(f"{time.monotonic() - begun:.0f} s")
    if bad:
        raise SystemExit(1)


def matrix(product: Product) -> Matrix:
    shape = product.outputs * (1 + product.gated), product.inputs
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) * product.inputs**-0.5
    if product.weights == "bf16":
        return Matrix(weight, None)
    return Matrix(*quantise(weight, product.weights, product.name))


def matrices(product: Product) -> list[Matrix]:
    return [matrix(product) for _ in copies(product.bytes)]


if __name__ == "__main__":
    main()
