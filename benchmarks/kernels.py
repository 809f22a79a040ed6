"""Times of the kernels on one GPU, beside the floor and cuBLAS or plain PyTorch.

    python benchmarks/kernels.py [--check] [--shapes 8B/TP4 ...] [--rows 1 8 64]
    python benchmarks/kernels.py [--check] --rows 1 16 --contexts 8192 32768 131072 [--splits 32 64]

Each time is the median over replays of one CUDA graph of many calls, divided by the calls. Every
call has its own weights (or cache, or prompt), together larger than the L2 cache, except for
`tiny`, whose calls measure the launch. The floor is the bytes that must move divided by the
bandwidth of a large copy (read + write) in the same run; where it is negligible, none is given.
"plain" is, in the same run and also in a graph:

- project: F.linear (cuBLAS). `norm` includes the norm of the input, which plain excludes; `gated`
  includes SwiGLU, plain in one matmul of both halves.
- land: the sum of the residual and an output, and F.rms_norm, which `norm` excludes.
- add_rms_norm: the same. swiglu: F.silu and a product. rotary_prompt: its reference.
- decode_attention: F.scaled_dot_product_attention alone, of rotated queries and stored keys, over
  the used part of the cache without a mask; nothing for a cache in e4m3.

--contexts times decode_attention alone, over caches full of so many tokens, in bfloat16 and in
e4m3. Each line says how it is cut into programs; --splits times other numbers of splits beside it.

The last line is JSON.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from ladder import jit, kernels
from ladder.bench.floors import bandwidth, matrix_rate
from ladder.bench.inference.command import machine
from ladder.kernels import attention as decode
from ladder.kernels import attention_shapes
from ladder.kernels.limits import MAX_ROWS
from ladder.parser import Parser, parse_words

SHAPES = {  # on one rank: hidden_size, query heads, KV heads, head_dim, intermediate_size
    "8B/TP4": (4096, 8, 2, 128, 3584),
    "70B/TP4": (8192, 16, 2, 128, 7168),
    "1B/TP4": (2048, 8, 2, 64, 2048),
    "2B/TP4": (2304, 4, 2, 128, 2048),
    "8B/TP1": (4096, 32, 8, 128, 14336),
    "tiny": (96, 8, 4, 12, 256),
}
EPS = 1e-5
OWN_BYTES = 256e6  # of the weights of one graph: several times any L2 cache
Call = Callable[[], object]


class Case(NamedTuple):
    name: str
    bytes: float
    ours: list[Call]
    plain: list[Call]
    same: Callable[[], float]  # relative error against the reference


def captured(calls: list[Call]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    return graph


def replayed(graph: torch.cuda.CUDAGraph) -> float:
    """Microseconds of a replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def timed(calls: list[Call], replays: int = 30) -> float:
    """Microseconds for one call."""
    graph = captured(calls)
    times = [replayed(graph) for _ in range(replays + 3)]
    return statistics.median(times[3:]) / len(calls)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def copies(of_bytes: float) -> range:
    return range(max(16, min(256, int(OWN_BYTES / of_bytes) + 1)))


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def layer(shape: tuple[int, int, int, int, int]) -> list[tuple[str, int, int, bool, bool]]:
    """The products of a layer: name, outputs, inputs, whether a norm precedes it, whether gated."""
    hidden, heads, kv, size, inner = shape
    return [
        ("qkv", (heads + 2 * kv) * size, hidden, True, False),
        ("o", hidden, heads * size, False, False),
        ("gate and up", inner, hidden, True, True),
        ("down", hidden, inner, False, False),
    ]


def product(rows: int, label: str, n: int, k: int, normed: bool, gated: bool) -> Case:
    x, size = random(rows, k), n * k * 2 * (1 + gated)
    weights = [random(n * (1 + gated), k, scale=k**-0.5) for _ in copies(size)]
    norm = {"squares": landed(x).squares, "eps": EPS} if normed else {}
    read = F.rms_norm(x, (k,), None, EPS) if normed else x

    def ours(function: Callable[..., Tensor], weight: Tensor) -> Tensor:
        gate, up = weight.chunk(2) if gated else (weight, None)
        return function(x, gate, up, **norm)

    def plain(weight: Tensor) -> Tensor:
        y = F.linear(read, weight)
        return F.silu(y[:, :n]) * y[:, n:] if gated else y

    flags = " norm" * normed + " gated" * gated
    return Case(
        f"project {label}{flags} [{n * (1 + gated)}, {k}] M {rows}",
        size,
        [partial(ours, kernels.project, w) for w in weights],
        [partial(plain, w) for w in weights],
        lambda: error(
            ours(kernels.project, weights[0]), ours(kernels.project_reference, weights[0])
        ),
    )


def landed(residual: Tensor, *outputs: Tensor) -> kernels.LandingJob:
    job = kernels.new_landing(residual, owns=[(output, 1.0) for output in outputs])
    kernels.land(job)
    return job


def landings(rows: int, size: int) -> Iterator[Case]:
    residual, output, weight = random(rows, size), random(rows, size), random(size)

    def plain() -> Tensor:
        return F.rms_norm(residual + output, (size,), weight, EPS)

    def same_landing() -> float:
        job = kernels.new_landing(residual, owns=[(output, 1.0)])
        kernels.land_reference(job)
        found = landed(residual, output)
        return max(error(found.out, job.out), error(found.squares, job.squares))

    ours = partial(kernels.add_rms_norm, residual, [(output, 1.0)], weight, EPS)
    wanted = kernels.add_rms_norm_reference(residual, [(output, 1.0)], weight, EPS)
    shape, many = f"[{rows}, {size}]", [plain] * 64
    yield Case(f"land {shape}", 0, [partial(landed, residual, output)] * 64, many, same_landing)
    yield Case(
        f"add_rms_norm {shape}", 0, [ours] * 64, many, lambda: max(map(error, ours(), wanted))
    )


def attention(
    batch: int, heads: int, kv: int, size: int, length: int, used: int, e4m3: bool = False,
    splits: int | None = None,
) -> Case:  # fmt: skip
    """splits: the number of splits; None: the number that `chosen` gives."""
    bytes_read = 2 * batch * kv * used * (size + 1 if e4m3 else 2 * size)
    # No more than 8 GB of caches: at such sizes a few of them exceed L2.
    count = min(len(copies(bytes_read)), max(2, int(8e9 / (bytes_read * length / used))))
    caches = [random(2, batch, kv, length, size) for _ in range(count)]
    exponents = None
    if e4m3:
        caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
        small = torch.randint(124, 128, (2, batch, kv, length), device="cuda", dtype=torch.uint8)
        exponents = small[0], small[1]
    positions = torch.full((batch,), used - 1, device="cuda")
    qkv, q = random(batch, (heads + 2 * kv) * size), random(batch, heads, 1, size)
    shared = qkv, rotary(length, size), positions
    arrived = torch.zeros(batch * kv, dtype=torch.int32, device="cuda")
    extra = {"exponents": exponents}
    block, number, *rest = chosen(batch * kv, length, size, heads // kv, e4m3)
    number = splits or number

    def ours(cache: Tensor) -> Tensor:
        with mock.patch.object(decode, "shape", return_value=(block, number, *rest)):
            return kernels.decode_attention(*shared, *cache, heads, size**-0.5, arrived, **extra)

    def plain(cache: Tensor) -> Tensor:
        keys, values = cache[:, :, :, :used]
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=heads != kv)

    def same() -> float:
        wanted = kernels.decode_attention_reference(*shared, *caches[0], heads, size**-0.5, **extra)
        return error(ours(caches[0]), wanted)

    return Case(
        f"decode_attention B {batch}, {heads}/{kv} heads of {size}, {used} of {length}"
        f"{', e4m3' * e4m3}, {number} splits, blocks of {block}",
        bytes_read,
        [partial(ours, cache) for cache in caches],
        [] if e4m3 else [partial(plain, cache) for cache in caches],
        same,
    )


def chosen(
    sequences_and_heads: int, length: int, size: int, group: int, e4m3: bool = False
) -> tuple[int, int, int, int]:
    """How `decode_attention` is cut into programs, in bfloat16. e4m3: the cache is in e4m3."""
    dims = max(16, jit.triton.next_power_of_2(size))
    pairs = e4m3 and attention_shapes.in_pairs(torch.bfloat16, size, group)
    return attention_shapes.shape(sequences_and_heads, length, dims, 2 * dims, e4m3, pairs=pairs)


def contexts(
    shape: tuple[int, int, int, int, int], batches: list[int], lengths: list[int], splits: list[int]
) -> Iterator[Case]:
    heads, kv, size = shape[1:4]
    for batch, length, e4m3 in itertools.product(batches, lengths, (False, True)):
        own = chosen(batch * kv, length, size, heads // kv, e4m3)[1]
        for number in (own, *(each for each in splits if each != own)):
            yield attention(batch, heads, kv, size, length, length, e4m3, number)


def rotary(length: int, size: int) -> Tensor:
    angles = torch.rand(length, size // 2, device="cuda") * 6.28
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def prompts(tokens: int, heads: int, kv: int, size: int, inner: int) -> Iterator[Case]:
    both = [random(tokens, 2 * inner) for _ in copies(tokens * 2 * inner * 2)]

    def plain(packed: Tensor) -> Tensor:
        return F.silu(packed[:, :inner]) * packed[:, inner:]

    yield Case(
        f"swiglu [{tokens}, {2 * inner}]",
        3 * tokens * inner * 2,
        [partial(kernels.swiglu, packed) for packed in both],
        [partial(plain, packed) for packed in both],
        lambda: error(kernels.swiglu(both[0]), kernels.swiglu_reference(both[0])),
    )
    batch, length = max(1, tokens // 1024), min(tokens, 1024)
    width = (heads + 2 * kv) * size
    packed = [random(batch, length, width) for _ in copies(tokens * width * 2)]
    table, cache = rotary(length, size), random(2, batch, kv, length, size)

    def turn(function: Callable[..., tuple[Tensor, ...]], qkv: Tensor) -> tuple[Tensor, ...]:
        return function(qkv, table, *cache, heads, kv)

    def same() -> float:
        found = [part.clone() for part in turn(kernels.rotary_prompt, packed[0])]
        return max(map(error, found, turn(kernels.rotary_prompt_reference, packed[0])))

    yield Case(
        f"rotary_prompt [{batch}, {length}, {width}]",
        2 * tokens * width * 2,
        [partial(turn, kernels.rotary_prompt, qkv) for qkv in packed],
        [partial(turn, kernels.rotary_prompt_reference, qkv) for qkv in packed],
        same,
    )


def cases(shape: tuple[int, int, int, int, int], batches: list[int]) -> Iterator[Case]:
    hidden, heads, kv, size, inner = shape
    for rows in batches:
        yield from (product(rows, *each) for each in layer(shape))
        yield from landings(rows, hidden)
    for batch, length, used in ((1, 8192, 1024), (1, 8192, 8192), (64, 2048, 1024)):
        yield attention(batch, heads, kv, size, length, used)
    for tokens in (1024, 8192):
        yield from prompts(tokens, heads, kv, size, inner)


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="first compare with the references")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--rows", nargs="+", type=int, default=[1, 8, 64], help=f"batch, 1 to {MAX_ROWS}"
    )
    parser.add_argument("--contexts", nargs="+", type=int, help="attention alone, at these tokens")
    parser.add_argument("--splits", nargs="+", type=int, default=[], help="beside the chosen one")
    args = parse_words(parser)
    if not torch.cuda.is_available():
        parser.error("no CUDA device: there is nothing to measure")
    device, results, wrong = torch.device("cuda"), [], []
    rate = bandwidth(device)
    print(f"{torch.cuda.get_device_name()}: copy {rate / 1e12:.2f} TB/s; microseconds")
    for name in args.shapes:
        shape = SHAPES[name]
        found = cases(shape, args.rows)
        if args.contexts:
            found = contexts(shape, args.rows, args.contexts, args.splits)
        for case in found:
            if args.check and not (off := case.same()) < 0.01:
                wrong.append(f"{name} {case.name}: relative error {off}")
                print("WRONG", wrong[-1], flush=True)
            floor = case.bytes / rate * 1e6
            ours, plain = timed(case.ours), timed(case.plain) if case.plain else None
            row = {"shape": name, "kernel": case.name, "us": ours, "floor": floor, "plain": plain}
            results.append(row)
            print(f"{name:8} {case.name:60} {ours:8.2f}  floor {floor:8.2f}", end="")
            print(f"  plain {plain:8.2f}  x{plain / ours:.2f}" if plain else "", flush=True)
    record = machine(device, rate, matrix_rate(device)) | {
        "command": " ".join(["python", *sys.argv]),
        "triton": jit.triton.__version__,
        "wrong": wrong,
        "results": results,
    }
    print(json.dumps(record))
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
