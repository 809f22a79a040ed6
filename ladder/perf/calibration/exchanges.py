"""Exchanges of a prompt's rows, by the transports of a residual that is sharded by tokens, and
the barriers in them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.comm.barriers import KernelBarrier
from ladder.comm.transports import TRANSPORTS, Transport
from ladder.kernels.prefill import land_rows, land_rows_reference
from ladder.parallel import launch
from ladder.perf.calibration.sizes import Part, Point, Sizes, random
from ladder.perf.calibration.timing import REPEATS, Work, align, slowest_median, turn_of
from ladder.perf.machine import EXCHANGES

CALLS = 10  # of a turn
# How many products run before a turn. Meanwhile the host launches the whole turn, as in prompts,
# where products are long.
HEADS = (64, 256)
EPS = 1e-5
ROUNDING = 2.0**-5  # the allowed error of normed rows, which are near 1, in bfloat16


def parts(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> Iterator[Part]:
    yield Part("barrier", {}, partial(_barrier, sizes, group, device))
    for name in EXCHANGES:
        run = partial(_exchanges, sizes, name, group, device)
        yield Part("exchange", {"transport": name}, run)


def _barrier(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> dict[str, float]:
    barrier = KernelBarrier(group, 1, device)
    return {"barrier_us": _behind(_products(sizes, device), partial(barrier.wait, 0), device)}


def _products(sizes: Sizes, device: torch.device) -> Work:
    rows, outputs, inputs = sizes.together.product
    x, weight = (random(size, inputs, dtype=sizes.dtype, device=device) for size in (rows, outputs))
    return partial(F.linear, x, weight)


def _exchanges(
    sizes: Sizes, name: str, group: dist.ProcessGroup, device: torch.device
) -> list[Point]:
    transport = TRANSPORTS[name](group, 1)
    products = _products(sizes, device)
    gain = torch.ones(sizes.hidden, dtype=sizes.dtype, device=device)
    found: list[Point] = []
    for nbytes in sorted(sizes.exchanges, reverse=True):  # the transport keeps what it has made
        rows = nbytes // sizes.dtype.itemsize // sizes.hidden
        rows -= rows % dist.get_world_size(group)
        mine = random(rows, sizes.hidden, dtype=sizes.dtype, device=device)
        check(transport, mine, gain, group)
        us = _behind(products, partial(exchange, transport, mine, gain, group), device)
        found.append((mine.nbytes, us))
    return found[::-1]


def exchange(
    transport: Transport, partial: Tensor, gain: Tensor, group: dist.ProcessGroup,
    copy: bool = False,
) -> Tensor:  # fmt: skip
    """One exchange: each rank sums its rows of all ranks' partials and norms them. Returns the
    normed rows of all ranks, [rows, D]. copy: exchange `partial`; without it, whatever is in the
    transport's buffer, to which a product would have written the partial."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    assert len(partial) % world == 0, len(partial)
    shard = len(partial) // world
    buffer = transport.partial_buffer(len(partial), partial)
    if buffer is None or copy:
        buffer = partial
    pieces = transport.scatter(buffer, shard)
    residual = partial[rank * shard : (rank + 1) * shard]
    full = transport.gather_buffer(shard, residual)
    out = torch.empty_like(residual), full[rank * shard : (rank + 1) * shard]
    land_rows(pieces, residual, gain, EPS, out, transport.copies(full))
    transport.gather(full)
    return full


def check(transport: Transport, mine: Tensor, gain: Tensor, group: dist.ProcessGroup) -> None:
    """Raise RuntimeError, on every rank, unless an exchange is right."""
    partials = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(partials, mine, group=group)
    residual = torch.cat([each.chunk(len(partials))[n] for n, each in enumerate(partials)])
    _, expected = land_rows_reference(partials, residual, gain, EPS)
    off = (exchange(transport, mine, gain, group, copy=True) - expected).abs().max().item()
    allowed = ROUNDING * expected.abs().max().item()
    if not all(each <= allowed for each in launch.gathered(off)):  # NaN is not
        raise RuntimeError(f"{len(mine)} rows are exchanged wrongly, by {off:.3g}; it is not timed")


def _behind(product: Work, work: Work, device: torch.device) -> float:
    """Microseconds of one call of several that are launched one by one behind products; the same on
    every rank."""
    for count in HEADS:
        head = turn_of([product], count, device)
        found = launch.gathered([_turn(head, work) for _ in range(REPEATS + 1)][1:])
        if all(ahead for each in found for _, ahead in each):
            return slowest_median([[us for us, _ in each] for each in found])
    raise RuntimeError(f"the host does not launch {CALLS} exchanges while {count} products run")


def _turn(head: Work, work: Work) -> tuple[float, bool]:
    """Microseconds of a call, and whether the host had launched all of them before the first."""
    align()
    head()
    work()  # the ranks wait for each other in it
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        work()
    end.record()
    ahead = not start.query()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / CALLS, ahead
