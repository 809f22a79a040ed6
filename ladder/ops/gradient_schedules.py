"""The schedule of gradients that read all ranks' rows; `ladder.ops.schedules` has the rules."""

from __future__ import annotations

import functools

from ladder.ops.schedules import _fork, _groups, _join, _release, _send, _take, others
from ladder.ops.steps import ALL, LANES, Follow, Record, Schedule, Step, Work


@functools.cache
def gathered_gradients(
    rank: int, world: int, streams: int = 1, pairs: bool = False, whole: bool = False
) -> Schedule:
    """As `all_gather`, with two products of each shard, one of which is a sum over the shards.

    Actions: `copy` q and `product` q as in `all_gather`; `add` q adds the part of shard q to the
    sum, the own shard's first. streams: 2: the sum is on the second one. pairs: `both` q and `add
    both` q are the products of shards q and q + 1: see `reduce_scatter`. whole: `own` puts the own
    shard into its slot, by the copies stream, and one `product` multiplies all shards, behind the
    sum or, with two streams, beside its last part.
    """
    steps: list[Step] = [Record("main", "begun"), Follow("copies", "begun")]
    for peer in others(rank, world, -1):
        steps += _send(rank, peer, peer, rank)
    if whole:
        steps += [Work("copies", "own", rank), Record("copies", "own")]
    steps += _fork(streams)
    lane, groups = LANES[streams - 1], [(rank,), *_groups(rank, world, pairs)]
    for number, shards in enumerate(groups):
        q, both, here = shards[0], " both" if len(shards) > 1 else "", f"shard {shards[0]}"
        if number > 0:
            steps += _take(rank, list(shards), lane if whole else "main")
            if streams > 1 and not whole:
                steps += [Record("main", here), Follow("second", here)]
        if not whole:
            steps.append(Work("main", both.strip() or "product", q))
        elif streams > 1 and shards == groups[-1]:
            steps += [Record("second", here), Follow("main", here)]
        steps.append(Work(lane, f"add{both}", q))
    if whole:
        steps += [Follow("main", "own"), Work("main", "product", ALL)]
    return (*steps, *_join(streams), *_release(rank, world))
