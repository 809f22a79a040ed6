"""What is measured, as parts of a few seconds each: every part is one curve, or some values."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.bench.communication import candidates, check_sums
from ladder.comm import symmetric
from ladder.comm.collectives import all_gather, reduce_scatter
from ladder.comm.two_shot import TwoShotAllReduce
from ladder.kernels.attention import decode_attention
from ladder.kernels.decode import project
from ladder.kernels.landing import land, new_landing
from ladder.perf.calibration.timing import Work, host_microseconds, microseconds

Point = tuple[float, float]
HELD = 2 * 10**8  # bytes that calls in turns touch, several times a GPU's L2 cache
MOST_COPIES = 128
KV_GROUP = 4  # query heads for each KV head
PROGRAMS = 32  # thread blocks of our two-shot all-reduce, as `ladder bench comm` takes


@dataclass(frozen=True)
class Sizes:
    """The sizes to measure; `calls` calls are one turn of a short piece of work."""

    dtype: torch.dtype
    calls: int
    copies: tuple[int, ...]  # bytes
    rows: tuple[int, ...]  # of products of a decode step
    hidden: int
    outputs: tuple[int, ...]
    matrix_rows: tuple[int, ...]
    matrices: tuple[tuple[int, int], ...]  # outputs, inputs
    head_dim: int
    keys: tuple[int, ...]
    heads: tuple[int, ...]  # KV heads of all sequences
    landing_hidden: tuple[int, ...]
    messages: tuple[int, ...]  # bytes
    square: int  # of the product whose rate counts


GPU = Sizes(
    torch.bfloat16,
    20,
    tuple(2**n for n in range(14, 32, 2)),
    (1, 2, 4, 16, 32, 64),
    4096,
    (512, 2048, 8192, 28672),
    (128, 512, 2048, 8192),
    ((2048, 2048), (8192, 2048), (2048, 8192), (8192, 8192)),
    128,
    (256, 1024, 4096),
    (2, 8, 32, 128, 512),
    (4096, 8192),
    tuple(2**n for n in range(13, 27)),
    8192,
)
CPU = Sizes(
    torch.float32,
    2,
    (4096, 16384),
    (1, 4),
    32,
    (16, 64),
    (8, 32),
    ((16, 32), (32, 16)),
    8,
    (8, 16),
    (2, 4),
    (32, 64),
    (1024, 4096),
    64,
)


@dataclass(frozen=True)
class Part:
    """One measurement; all ranks run it. name: a curve's, and `where` which; or "values".

    run: the points of the curve; or numbers by the names of values.
    """

    name: str
    where: dict[str, float | str]
    run: Callable[[], Any]

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.where.items())])


def parts(sizes: Sizes, device: torch.device, push: bool) -> Iterator[Part]:
    """All parts, the most useful first. push: whether the ranks can write to peer memory."""
    yield Part("values", {}, partial(_values, sizes, device))
    for rows in sizes.rows:
        yield Part("product", {"rows": rows}, partial(_products, sizes, rows, device))
    for keys in sizes.keys:
        yield Part("attention", {"keys": keys}, partial(_attention, sizes, keys, device))
    for hidden in sizes.landing_hidden:
        yield Part("landing", {"hidden": hidden}, partial(_landings, sizes, hidden, device))
    if dist.is_initialized() and dist.get_world_size() > 1:
        yield from _collectives(sizes, device, push)
    yield Part("copy", {}, partial(_copies, sizes, device))
    for outputs, inputs in sizes.matrices:
        run = partial(_matrix, sizes, outputs, inputs, device)
        yield Part("matrix", {"outputs": outputs, "inputs": inputs}, run)


def random(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(dtype) * 0.05


def copies_of(nbytes: int, device: torch.device) -> int:
    """How many pieces of memory make HELD bytes."""
    if device.type != "cuda":
        return 2
    return max(2, min(MOST_COPIES, -(-HELD // nbytes)))


def _values(sizes: Sizes, device: torch.device) -> dict[str, float]:
    one = torch.zeros(1, device=device)
    tiny = partial(one.add_, 1)
    a, b = (random(sizes.square, sizes.square, dtype=sizes.dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    product = microseconds([partial(torch.mm, a, b, out=out)], 4, device)
    large = max(sizes.copies)
    copied = _copy(large, device)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "memory_gib": memory / 2**30,
        "launch_us": microseconds([tiny], 10 * sizes.calls, device),
        "host_launch_us": host_microseconds(tiny, 10 * sizes.calls, device),
        "matrix_tflop_s": 2 * sizes.square**3 / product / 1e6,
        "copy_tb_s": 2 * large / copied / 1e6,
    }


def _copy(nbytes: int, device: torch.device) -> float:
    count = copies_of(2 * nbytes, device)
    made = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2 * count)]
    works = [partial(a.copy_, b) for a, b in zip(made[::2], made[1::2], strict=True)]
    return microseconds(works, count if nbytes > HELD else max(count, 4), device)


def _copies(sizes: Sizes, device: torch.device) -> list[Point]:
    return [(nbytes, _copy(nbytes, device)) for nbytes in sizes.copies]


def _products(sizes: Sizes, rows: int, device: torch.device) -> list[Point]:
    """A product from `hidden`, then one back to it, each of a weight of its own, in a chain."""
    found: list[Point] = []
    for outputs in sizes.outputs:
        nbytes = outputs * sizes.hidden * sizes.dtype.itemsize
        options = {"dtype": sizes.dtype, "device": device}
        pairs = [
            (random(outputs, sizes.hidden, **options), random(sizes.hidden, outputs, **options))
            for _ in range(-(-copies_of(nbytes, device) // 2))
        ]
        x = random(rows, sizes.hidden, **options)

        works = [partial(_pair, x, *weights) for weights in pairs]
        found.append((nbytes, microseconds(works, max(sizes.calls, len(works)), device) / 2))
    return found


def _pair(x: Tensor, first: Tensor, second: Tensor) -> None:
    inner = project(x, first)
    assert inner is not None
    project(inner, second)


def _matrix(sizes: Sizes, outputs: int, inputs: int, device: torch.device) -> list[Point]:
    found: list[Point] = []
    for rows in sizes.matrix_rows:
        options = {"dtype": sizes.dtype, "device": device}
        weight, x = random(outputs, inputs, **options), random(rows, inputs, **options)
        found.append((rows, microseconds([partial(F.linear, x, weight)], 4, device)))
    return found


def _attention(sizes: Sizes, keys: int, device: torch.device) -> list[Point]:
    """One token of each sequence over `keys` earlier ones, in caches of their own."""
    found: list[Point] = []
    dim = sizes.head_dim
    for heads in sizes.heads:
        held = 2 if heads % 2 == 0 else 1
        batch, length = heads // held, keys + 1
        options = {"dtype": sizes.dtype, "device": device}
        nbytes = 2 * heads * length * dim * sizes.dtype.itemsize
        caches = [
            (
                random(batch, held, length, dim, **options),
                random(batch, held, length, dim, **options),
            )
            for _ in range(copies_of(nbytes, device))
        ]
        packed = random(batch, (KV_GROUP + 2) * held * dim, **options)
        table = torch.ones(length, dim, device=device)
        positions = torch.full((batch,), keys, device=device)
        arrived = torch.zeros(heads, dtype=torch.int32, device=device)

        works = [
            partial(decode_attention, packed, table, positions, *cache, KV_GROUP * held,
                    dim**-0.5, arrived)
            for cache in caches
        ]  # fmt: skip
        found.append((heads, microseconds(works, max(sizes.calls, len(works)), device)))
    return found


def _landings(sizes: Sizes, hidden: int, device: torch.device) -> list[Point]:
    """A landing of one own partial, without a sum for which it would wait."""
    found: list[Point] = []
    for rows in sizes.rows:
        options = {"dtype": sizes.dtype, "device": device}
        residual, own = random(rows, hidden, **options), random(rows, hidden, **options)

        found.append((rows, microseconds([partial(_land, residual, own)], sizes.calls, device)))
    return found


def _land(residual: Tensor, own: Tensor) -> None:
    land(new_landing(residual, owns=[(own, 1.0)]))


# -- between ranks ------------------------------------------------------------------------------


def _collectives(sizes: Sizes, device: torch.device, push: bool) -> Iterator[Part]:
    group = dist.group.WORLD
    assert group is not None
    backend = "nccl" if device.type == "cuda" else "gloo"
    algorithms = ["nccl", "push", "two-shot"] if push else [backend]
    for name in algorithms:
        run = partial(_all_reduces, sizes, name, push, group, device)
        yield Part("all-reduce", {"algorithm": name}, run)
    if push:
        yield Part("peer copy", {}, partial(_peer_copies, sizes, group, device))
    for kind, call in (("all-gather", _gather), ("reduce-scatter", _scatter)):
        yield Part(kind, {"algorithm": backend}, partial(_whole, sizes, call, group, device))


def _all_reduces(
    sizes: Sizes, name: str, push: bool, group: dist.ProcessGroup, device: torch.device
) -> list[Point]:
    found: list[Point] = []
    two_shot = TwoShotAllReduce(max(sizes.messages), group, device, PROGRAMS) if push else None
    for nbytes in sizes.messages:
        if two_shot is None:
            source = torch.zeros(nbytes // sizes.dtype.itemsize, dtype=sizes.dtype, device=device)
            work: Work = partial(dist.all_reduce, source, group=group)
        else:
            made = candidates(nbytes, sizes.dtype, group, device, two_shot)
            if name not in made:  # push: it would send too much
                continue
            check_sums(name, made[name], group)
            work = made[name].call
        found.append((nbytes, microseconds([work], sizes.calls, device)))
    return found


def _peer_copies(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> list[Point]:
    """Every GPU copies to the next one's memory, at the same time."""
    found: list[Point] = []
    for nbytes in sizes.messages:
        count = nbytes // sizes.dtype.itemsize
        memory = symmetric.allocate((count,), sizes.dtype, group, device)
        source = torch.zeros(count, dtype=sizes.dtype, device=device)
        peer = memory.by_rank[(memory.rank + 1) % len(memory.by_rank)]
        work = partial(peer.copy_, source)
        found.append((nbytes, microseconds([work], sizes.calls, device)))
    return found


def _gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    all_gather(whole, part, group=group)


def _scatter(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter(part, whole, group=group)


def _whole(
    sizes: Sizes, call: Callable[[Tensor, Tensor, dist.ProcessGroup], None],
    group: dist.ProcessGroup, device: torch.device,
) -> list[Point]:  # fmt: skip
    """A collective by the bytes of the whole, of which each rank has a part."""
    found: list[Point] = []
    world = dist.get_world_size(group)
    for nbytes in sizes.messages:
        part = nbytes // sizes.dtype.itemsize // world
        whole = torch.zeros(part * world, dtype=sizes.dtype, device=device)
        mine = torch.zeros(part, dtype=sizes.dtype, device=device)
        work = partial(call, whole, mine, group)
        found.append((nbytes, microseconds([work], sizes.calls, device)))
    return found
