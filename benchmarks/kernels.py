"""Times of the decode kernels on one GPU, beside the floor and what plain PyTorch takes.

    python benchmarks/kernels.py [--check] [--tune] [--shapes 8B/TP4 ...]

Each time is the median over replays of one CUDA graph of many calls, divided by the calls. Every
call has weights (or a cache) of its own, together larger than the L2 cache, but for `tiny`, whose
calls measure the launch. The floor is the bytes of weights or cache divided by the bandwidth of a
large copy (read + write) in the same run; where that is nothing to speak of, no floor is given.
"plain" is F.linear (cuBLAS), F.rms_norm and F.scaled_dot_product_attention, in the same run, in a
graph too; for gate and up it has one matmul of both. The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder import kernels
from ladder.infer.bench import bandwidth, commit
from ladder.kernels import launch, linear

SHAPES = {  # on one rank: hidden_size, query heads, KV heads, head_dim, intermediate_size
    "8B/TP4": (4096, 8, 2, 128, 3584),
    "70B/TP4": (8192, 16, 2, 128, 7168),
    "1B/TP4": (2048, 8, 2, 64, 2048),
    "8B/TP1": (4096, 32, 8, 128, 14336),
    "tiny": (96, 8, 4, 12, 256),
}
OWN_BYTES = 256e6  # of the weights of one graph: several times any L2 cache
Call = Callable[[], object]


class Case(NamedTuple):
    name: str
    bytes: float
    ours: list[Call]
    plain: list[Call]
    same: Callable[[], float]  # relative error against the reference


def timed(calls: list[Call], replays: int = 30) -> float:
    """Microseconds for one call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def copies(of_bytes: float) -> range:
    return range(max(16, min(256, int(OWN_BYTES / of_bytes) + 1)))


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def products(label: str, rows: int, n: int, k: int, gated: bool) -> Case:
    x, size = random(rows, k), n * k * 2 * (1 + gated)
    weights = [random(n * (1 + gated), k, scale=k**-0.5) for _ in copies(size)]
    name = f"{label} [{n * (1 + gated)}, {k}] M {rows}"
    if not gated:
        ours: list[Call] = [partial(kernels.skinny_linear, x, w) for w in weights]
        plain: list[Call] = [partial(F.linear, x, w) for w in weights]
        reference = kernels.skinny_linear_reference(x, weights[0])
        return Case(name, size, ours, plain, lambda: error(ours[0](), reference))

    def two(packed: Tensor) -> Tensor:
        gate, up = F.linear(x, packed).chunk(2, dim=-1)
        return F.silu(gate) * up

    ours = [partial(kernels.gate_up, x, w[:n], w[n:]) for w in weights]
    plain = [partial(two, w) for w in weights]
    reference = kernels.gate_up_reference(x, weights[0][:n], weights[0][n:])
    return Case(name, size, ours, plain, lambda: error(ours[0](), reference))


def norm(rows: int, size: int) -> Case:
    stream, addend, weight = random(rows, size), random(rows, size), random(size)
    ours = lambda: kernels.add_rms_norm(stream, [(addend, 1.0)], weight, 1e-5)  # noqa: E731
    plain = lambda: F.rms_norm(stream + addend, (size,), weight, 1e-5)  # noqa: E731
    wanted = kernels.add_rms_norm_reference(stream, [(addend, 1.0)], weight, 1e-5)
    check = lambda: max(map(error, ours(), wanted))  # noqa: E731
    return Case(f"add_rms_norm [{rows}, {size}]", 0, [ours] * 64, [plain] * 64, check)


def cached(batch: int, heads: int, kv: int, size: int, length: int, used: int) -> Iterator[Case]:
    bytes_read = 2 * batch * kv * used * size * 2
    # No more than 8 GB of caches: at such sizes a few of them exceed L2.
    count = min(len(copies(bytes_read)), max(2, int(8e9 / (bytes_read * length / used))))
    caches = [random(2, batch, kv, length, size) for _ in range(count)]
    positions = torch.full((batch,), used - 1, device="cuda")
    qkv, q = random(batch, (heads + 2 * kv) * size), random(batch, heads, size)
    table = torch.randn(length, size, device="cuda")
    shape = f"B {batch}, {heads}/{kv} heads of {size}"

    def rotary(cache: Tensor) -> Tensor:
        keys, values = cache
        return kernels.rotary_cache(qkv, table, positions, keys, values, heads, kv)

    def rotary_plain(cache: Tensor) -> Tensor:
        keys, values = cache
        return kernels.rotary_cache_reference(qkv, table, positions, keys, values, heads, kv)

    def attention_plain(cache: Tensor) -> Tensor:
        keys, values = cache[:, :, :, :used]  # the best case for it: nothing is masked
        return F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=heads != kv)

    def attention(cache: Tensor) -> Tensor:
        keys, values = cache
        return kernels.decode_attention(q, keys, values, positions, size**-0.5)

    def same() -> float:
        keys, values = caches[0]
        wanted = kernels.decode_attention_reference(q, keys, values, positions, size**-0.5)
        return error(attention(caches[0]), wanted)

    if used == 1024:
        yield Case(
            f"rotary_cache {shape}",
            0,
            [partial(rotary, cache) for cache in caches],
            [partial(rotary_plain, cache) for cache in caches],
            lambda: error(rotary(caches[0]), rotary_plain(caches[0])),
        )
    yield Case(
        f"decode_attention {shape}, {used} of {length}",
        bytes_read,
        [partial(attention, cache) for cache in caches],
        [partial(attention_plain, cache) for cache in caches],
        same,
    )


def cases(shape: tuple[int, int, int, int, int], batches: list[int]) -> Iterator[Case]:
    hidden, heads, kv, size, inner = shape
    for rows in batches:
        yield products("qkv", rows, (heads + 2 * kv) * size, hidden, False)
        yield products("o", rows, hidden, heads * size, False)
        yield products("gate_up", rows, inner, hidden, True)
        yield products("down", rows, hidden, inner, False)
        yield norm(rows, hidden)
    for batch, length, used in ((1, 8192, 1024), (1, 8192, 8192), (64, 2048, 1024)):
        yield from cached(batch, heads, kv, size, length, used)


def tune(names: list[str]) -> None:
    """Print the time of every block of `linear.BLOCKS` that keeps 16 bytes a thread."""
    blocks = list(itertools.product((1, 2, 4, 8), ((512, 2), (512, 4), (1024, 4), (2048, 8))))
    for rows, name in itertools.product((1, 2, 4, 8), names):
        hidden, heads, kv, size, inner = SHAPES[name]
        kept = linear.BLOCKS[rows]
        tried = [
            products("qkv", rows, (heads + 2 * kv) * size, hidden, False),
            products("down", rows, hidden, inner, False),
            products("gate_up", rows, inner, hidden, True),
        ]
        for case in tried:
            found = []
            for block, (step, warps) in blocks:
                linear.BLOCKS[rows] = (block, step, warps)
                found.append((timed(case.ours), (block, step, warps)))
            linear.BLOCKS[rows] = kept
            best = ", ".join(f"{block} {time:.2f}" for time, block in sorted(found)[:4])
            own = next(time for time, block in found if block == kept)
            print(f"{name} {case.name}: {best}; table {kept} {own:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="first compare with the references")
    parser.add_argument("--tune", action="store_true", help="try the matrix products' blocks")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8], help="batch, 1 to 8")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure")
    if args.tune:
        tune(args.shapes)
        return
    rate, results, wrong = bandwidth(torch.device("cuda")), [], []
    print(f"{torch.cuda.get_device_name()}: copy {rate / 1e12:.2f} TB/s; microseconds")
    for name in args.shapes:
        for case in cases(SHAPES[name], args.rows):
            if args.check and not (off := case.same()) < 0.01:
                wrong.append(f"{name} {case.name}: relative error {off}")
                print("WRONG", wrong[-1], flush=True)
            floor = case.bytes / rate * 1e6
            ours, plain = timed(case.ours), timed(case.plain)
            row = {"shape": name, "kernel": case.name, "us": ours, "floor": floor, "plain": plain}
            results.append(row)
            print(f"{name:8} {case.name:48} {ours:8.2f}", end="")
            print(f"  floor {floor:8.2f}  plain {plain:8.2f}  x{plain / ours:.2f}", flush=True)
    record = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": launch.triton.__version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "bytes_per_s": rate,
        "wrong": wrong,
        "results": results,
    }
    print(json.dumps(record))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
