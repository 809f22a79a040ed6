"""Collectives and copies between ranks, by size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.bench.communication import PUSHED, Candidate, check_sums
from ladder.comm import symmetric
from ladder.comm.collectives import all_gather, reduce_scatter
from ladder.comm.push import PushAllReduce
from ladder.comm.two_shot import TwoShotAllReduce
from ladder.perf.calibration.sizes import Part, Point, Sizes
from ladder.perf.calibration.timing import Work, microseconds


def parts(
    sizes: Sizes, group: dist.ProcessGroup, device: torch.device, push: bool
) -> Iterator[Part]:
    """push: whether the ranks can write to peer memory."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    for name in [backend, *(("push", "two-shot") if push else ())]:
        run = partial(_all_reduces, sizes, name, group, device)
        yield Part("all-reduce", {"algorithm": name}, run)
    if push:
        yield Part("peer copy", {}, partial(_peer_copies, sizes, group, device))
        if dist.get_world_size(group) > 2:  # with two ranks there is one peer
            yield Part("copies to all", {}, partial(_copies_to_all, sizes, group, device))
    for kind, call in (("all-gather", _gather), ("reduce-scatter", _scatter)):
        yield Part(kind, {"algorithm": backend}, partial(_whole, sizes, call, group, device))


def _all_reduces(
    sizes: Sizes, name: str, group: dist.ProcessGroup, device: torch.device
) -> list[Point]:
    found: list[Point] = []
    two_shot = None
    if name == "two-shot":
        two_shot = TwoShotAllReduce(max(sizes.messages), group, device)
    for nbytes in sizes.messages:
        count = nbytes // sizes.dtype.itemsize
        source = torch.zeros(count, dtype=sizes.dtype, device=device)
        call: Callable[[], Tensor] = partial(_in_place, source, group)
        if two_shot is not None:
            call = partial(two_shot, source, True)
        elif name == "push":
            if nbytes * (dist.get_world_size(group) - 1) > PUSHED:
                break
            call = partial(PushAllReduce(count, sizes.dtype, group, device), source, True)
        if device.type == "cuda":
            check_sums(name, Candidate(source, call), group)
            source.zero_()
        found.append((nbytes, microseconds([call], sizes.calls, device)))
    return found


def _in_place(source: Tensor, group: dist.ProcessGroup) -> Tensor:
    dist.all_reduce(source, group=group)
    return source


def to_next(sizes: Sizes, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> Work:
    """A copy to the next rank's memory."""
    return partial(_copy, *_peer_memory(sizes, nbytes, group, device))


def _peer_memory(
    sizes: Sizes, nbytes: int, group: dist.ProcessGroup, device: torch.device
) -> tuple[symmetric.SymmetricTensor, Tensor]:
    """Memory of each rank that the others can write, and what to copy there."""
    count = nbytes // sizes.dtype.itemsize
    memory = symmetric.allocate((count,), sizes.dtype, group, device)
    return memory, torch.zeros(count, dtype=sizes.dtype, device=device)


def _copy(memory: symmetric.SymmetricTensor, source: Tensor, step: int = 1) -> None:
    memory.by_rank[(memory.rank + step) % len(memory.by_rank)].copy_(source)


def _peer_copies(sizes: Sizes, group: dist.ProcessGroup, device: torch.device) -> list[Point]:
    """Every GPU copies to the next one's memory, at the same time."""
    found: list[Point] = []
    for nbytes in sizes.messages:
        work = to_next(sizes, nbytes, group, device)
        found.append((nbytes, microseconds([work], sizes.calls, device)))
    return found


def _copies_to_all(
    sizes: Sizes, group: dist.ProcessGroup, device: torch.device
) -> dict[str, float]:
    """The rate of copies to all others in turn over that to the next GPU alone; all GPUs copy."""
    memory, source = _peer_memory(sizes, max(sizes.messages), group, device)
    ranks = len(memory.by_rank)
    works = [partial(_copy, memory, source, step) for step in range(1, ranks)]
    calls = sizes.calls // len(works) * len(works) or len(works)
    one = microseconds(works[:1], calls, device)
    return {"copies_to_all": one / microseconds(works, calls, device)}


def _gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    all_gather(whole, part, group=group)


def _scatter(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> None:
    reduce_scatter(part, whole, group=group)


def _whole(
    sizes: Sizes, call: Callable[[Tensor, Tensor, dist.ProcessGroup], None],
    group: dist.ProcessGroup, device: torch.device,
) -> list[Point]:  # fmt: skip
    """A collective's times by the bytes of the whole tensor, of which each rank has a part."""
    found: list[Point] = []
    world = dist.get_world_size(group)
    for nbytes in sizes.messages:
        part = nbytes // sizes.dtype.itemsize // world
        whole = torch.zeros(part * world, dtype=sizes.dtype, device=device)
        mine = torch.zeros(part, dtype=sizes.dtype, device=device)
        work = partial(call, whole, mine, group)
        found.append((nbytes, microseconds([work], sizes.calls, device)))
    return found
