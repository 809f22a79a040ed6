"""Our all-reduce kernels in real processes, through Triton's interpreter on a CPU.

Symmetric memory is files that all ranks map: see tests.comm.mapped.
tests/comm/test_gpu.py provokes the compiled kernels.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.primitives import EMPTY
from ladder.comm.push import PushAllReduce, reference_all_reduce
from ladder.comm.two_shot import TwoShotAllReduce, shard_words
from tests.comm.mapped import shared_memory
from tests.distributed import Pools
from tests.interpreter import interpreting
from tests.kernels.support import on

WHICH = ("push", "push, shared slots", "two-shot")
KEYS = [
    (64, torch.bfloat16), (2056, torch.bfloat16), (1500, torch.float32), (72, torch.float16),
    (8, torch.bfloat16),
]  # fmt: skip


def partial_of(turn: int, elements: int, dtype: torch.dtype, rank: int) -> Tensor:
    """What `rank` adds in this turn: zeros of both signs, and infinity, among other numbers, whose
    sums depend on their order."""
    source = torch.Generator().manual_seed(1000 * turn + elements + rank)
    value = torch.randn(elements, generator=source) * 10 ** torch.randn(elements, generator=source)
    value[turn % 7 :: 7] = -0.0
    value[3::11] = -0.0  # neighbours on all ranks: whole words
    value[4::11] = -0.0
    value[0::22] = 0.0  # in 16 bits with its neighbour the word of "not yet written"
    value[1::22] = -0.0
    value[5::13] = 6e4  # whose sum is infinite in float16
    value[turn % elements] = float("inf")
    return value.to(dtype)


def provoke(
    rank: int, world: int, folder: str, which: str, turns: int
) -> tuple[int, list[str]]:  # fmt: skip
    """Calls of changing sizes by ranks that come late; how many totals are wrong, what ran."""
    device, group = torch.device("cpu"), dist.group.WORLD
    wrong = 0
    with (
        interpreting() as ran,
        shared_memory(rank, world, folder),
        mock.patch.object(PushAllReduce, "BLOCK", 512),
        mock.patch.object(TwoShotAllReduce, "SMALL", (64, 4)),
        mock.patch.object(TwoShotAllReduce, "LARGE", (128, 4)),
    ):
        if which == "push":
            kernels: dict = {key: PushAllReduce(*key, group, device) for key in KEYS}
        elif which == "push, shared slots":
            most = {dtype: PushAllReduce(2056, dtype, group, device) for _, dtype in KEYS}
            kernels = {key: most[key[1]] for key in KEYS}
        else:
            kernels = dict.fromkeys(KEYS, TwoShotAllReduce(8192, group, device, programs=2))
        schedule = [KEYS[turn // 3 % len(KEYS)] for turn in range(turns)]
        if (
            "shared" in which
        ):  # each set gets large messages after small ones, and small after large
            schedule = random.Random(7).choices(KEYS, k=turns)
        partials = [partial_of(turn, *key, rank) for turn, key in enumerate(schedule)]
        nothing = mock.patch.object(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
        with nothing:  # one call right after another
            totals = [kernels[k](x, True) for k, x in zip(schedule, partials, strict=True)]
        for turn, key in enumerate(schedule):
            parts = [partial_of(turn, *key, each) for each in range(world)]
            wrong += not torch.equal(totals[turn], reference_all_reduce(parts))
            wrong += not torch.equal(partials[turn], parts[rank])
        dist.barrier()  # no rank pushes any more
        wrong += sum(left_over(each) for each in kernels.values() if which != "two-shot")
    return wrong, ran


def left_over(push: PushAllReduce) -> int:
    """The words that are not empty in the sets that the last call has not used."""
    found, size = 0, push.BLOCK
    sets = push.slots.own.view(3, push.world, push.stride)
    for program, following in enumerate(push.epochs.tolist()):
        piece = sets[:, :, program * size : (program + 1) * size]
        others = [piece[n] for n in range(3) if n != (following - 1) % 3]
        found += sum(int((each != EMPTY[4]).sum()) for each in others)
    return found


@pytest.mark.parametrize(
    ("device", "which", "world", "turns"),
    [
        on("interpreter", which, *s, slow=s[0] == 4 and which != "two-shot")
        for which in WHICH
        for s in ((2, 24), (4, 12))
    ],
)
def test_totals_are_the_sum_in_rank_order(
    pools: Pools, tmp_path: Path, interpreted: list[str], device: str, which: str, world: int,
    turns: int,
) -> None:  # fmt: skip
    """A slot read too early or cleared too late gives another sum or no end; so does any hole."""
    for wrong, ran in pools(world).run(provoke, str(tmp_path), which, turns):
        assert wrong == 0
        interpreted += ran


def test_shards_cover_the_message_and_are_aligned() -> None:
    for words, world in itertools.product((1, 4, 15, 16, 64, 65, 1000, 2**20 + 4), (1, 2, 3, 8)):
        shard = shard_words(words, world)
        assert shard % 16 == 0
        assert shard * world >= words
        assert (shard - 16) * world < words
