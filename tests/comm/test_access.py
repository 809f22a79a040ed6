"""Who can reach whose memory: ranks of any GPUs, of neighbours, of several hosts."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ladder.comm import access
from tests.distributed import Pools


def seen(mine: int, visible: list[int], linked: set[frozenset[int]]) -> Any:
    """A process whose current GPU is the `mine`th of those it sees; linked: pairs with access."""

    def properties(index: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"GPU-{visible[index]}")

    def reaches(one: int, other: int) -> bool:
        assert 0 <= one < len(visible), "Invalid device id"
        assert 0 <= other < len(visible), "Invalid peer device id"
        return frozenset({visible[one], visible[other]}) in linked

    return mock.patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        device_count=lambda: len(visible),
        current_device=lambda: mine,
        get_device_properties=properties,
        can_device_access_peer=reaches,
    )


def pairs(*islands: list[int]) -> set[frozenset[int]]:
    return {frozenset({a, b}) for island in islands for a in island for b in island if a != b}


ISLANDS = pairs([0, 1, 2, 3], [4, 5, 6, 7])
EIGHT = [*range(8)]
CASES = {
    "neighbours": ([(0, EIGHT), (1, EIGHT)], ISLANDS, None),
    "any of one island": ([(6, EIGHT), (4, EIGHT)], ISLANDS, None),
    "of two islands": ([(3, EIGHT), (4, EIGHT)], ISLANDS, "GPU 3 has no peer access to GPU 4"),
    "one GPU each": ([(0, [0]), (0, [1])], ISLANDS, "rank 0 does not see the GPU of rank 1"),
    "one GPU for both": ([(0, EIGHT), (0, EIGHT)], ISLANDS, "ranks share a GPU"),
    "in another order": ([(0, [2, 1]), (0, [1, 2])], ISLANDS, None),
    "two hosts": ([(0, EIGHT), (0, [*range(8, 16)])], ISLANDS, "rank 0 does not see the GPU of"),
    "one of two has no link": ([(1, [0, 1]), (0, [0, 1])], set(), "GPU 1 has no peer access to"),
}


def asked(rank: int, world: int) -> None:
    """All ranks have the same reason, and ask once."""
    for name, (ranks, linked, expected) in CASES.items():
        group = dist.new_group([0, 1])
        mine, visible = ranks[rank]
        with (
            seen(mine, visible, linked),
            mock.patch.object(access, "triton", object()),
            mock.patch.object(torch.cuda, "device", contextlib.nullcontext),
        ):
            found = access.group_refusal(group, torch.device("cuda", mine))
        again = access.group_refusal(group, torch.device("cuda", mine))
        everyone: list[str | None] = [None] * world
        dist.all_gather_object(everyone, found)
        assert everyone == [found] * world, name
        assert again == found, name
        assert (found is None) == (expected is None), (name, found)
        assert found is None or str(expected) in found, (name, found)


def test_a_group_of_any_gpus_has_one_answer(pools: Pools) -> None:
    pools(2).run(asked)


@pytest.mark.parametrize(("mine", "ranks"), [(6, 3), (7, 3), (7, 5)])
def test_gpus_without_so_many_neighbours_are_refused(mine: int, ranks: int) -> None:
    with seen(mine, EIGHT, pairs(EIGHT)), mock.patch.object(access, "triton", object()):
        found = access.push_refusal(ranks)
    assert found is not None
    assert f"the 8 GPUs are no whole groups of {ranks}, and GPU {mine} is in none" in found
