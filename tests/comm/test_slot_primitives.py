"""Slots whose data is its own flag: each primitive, and mutations of it, which its test sees.

In Triton's interpreter; what only a GPU can see of them is in tests.kernels.test_compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from ladder.comm import primitives
from ladder.comm.primitives import EMPTY
from tests import primitives as kernels
from tests.comm.scripted import arriving, weakened
from tests.interpreter import addresses
from tests.kernels.support import on

WORLD, RANK, BLOCK, INSIDE = 3, 1, 64, 60
META = {"BLOCK": BLOCK, "WORLD": WORLD, "EMPTY": EMPTY[4]}
OUTSIDE = 77  # what lies in memory that nobody may touch


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.int32)


def slots() -> Tensor:
    """A rank's, [WORLD, BLOCK] words, of which INSIDE are empty, and the others are no slots."""
    made = torch.full((WORLD, BLOCK), EMPTY[4], dtype=torch.int32)
    made[:, INSIDE:] = OUTSIDE
    return made


def check_push(kernel: Any = kernels.push_kernel, **more: int) -> None:
    """The words are at this rank's part of every rank's slots, and none of them is empty."""
    values = torch.randn(BLOCK)
    values[::7], values[1::7] = -0.0, 0.0
    memories = [slots() for _ in range(WORLD)]
    kernel[(1,)](addresses(memories), bits_of(values), INSIDE, RANK, **META, **more)
    for memory in memories:
        part = memory[RANK, :INSIDE]
        assert not torch.any(part == EMPTY[4]), "a word that was sent is empty"
        assert torch.equal(part.view(torch.float32), values[:INSIDE]), "other words"
        memory[RANK, :INSIDE] = EMPTY[4]
        assert torch.equal(memory, slots()), "words in other places"


def fill(memory: Tensor, words: Tensor, rank: int, start: int, end: int) -> None:
    memory[rank, start:end] = words[rank, start:end]


def arrivals(memory: Tensor, words: Tensor, reads: int, first: int, last: int) -> dict[int, Any]:
    """What comes before which read: of two ranks, the last word of `last` comes last.

    reads: of one look at all slots.
    """
    return {
        reads + 1: lambda: fill(memory, words, first, 0, 1),
        2 * reads + 1: lambda: fill(memory, words, last, 0, INSIDE - 1),
        3 * reads + 1: lambda: fill(memory, words, first, 1, INSIDE),
        4 * reads + 1: lambda: fill(memory, words, last, INSIDE - 1, INSIDE),
    }


def check_cleared(memory: Tensor, kept: Tensor) -> None:
    assert torch.equal(memory, kept), "slots are not clear, or others are"


def check_receive() -> None:
    """All ranks' words when the last of them has come; then the peers' slots are clear."""
    for first, last in ((0, 2), (2, 0)):
        words, memory = bits_of(torch.randn(WORLD, BLOCK)), slots()
        memory[RANK] = OUTSIDE  # this rank's part, which is no slot either
        out = torch.full((WORLD, BLOCK), OUTSIDE, dtype=torch.int32)
        with arriving(arrivals(memory, words, WORLD, first, last)):
            kernels.exchange_kernel[(1,)](
                memory, words[RANK], out, INSIDE, RANK, **META, LIMIT=kernels.LIMIT
            )
        assert torch.equal(out[:, :INSIDE], words[:, :INSIDE]), "words from before they came"
        kept = slots()
        kept[RANK] = OUTSIDE
        check_cleared(memory, kept)


def check_receive_sum() -> None:
    """The sum of all ranks' words, each once, when the last has come; then all slots are clear."""
    for first, last in ((0, 2), (2, 0)):
        values, addend, memory = torch.randn(WORLD, BLOCK), torch.randn(BLOCK), slots()
        words, out = bits_of(values), torch.full((BLOCK,), torch.nan)
        fill(memory, words, RANK, 0, INSIDE)
        with arriving(arrivals(memory, words, WORLD, first, last)):
            kernels.collect_kernel[(1,)](memory, addend, out, INSIDE, **META, LIMIT=kernels.LIMIT)
        total = addend.clone()
        for each in values:
            total += each
        assert torch.equal(out[:INSIDE], total[:INSIDE]), "words from before they came"
        check_cleared(memory, slots())


CHECKS: dict[str, Callable[[], None]] = {
    "push": check_push, "push across": partial(check_push, kernels.across_kernel, WP=4),
    "receive": check_receive, "receive_sum": check_receive_sum,
}  # fmt: skip

MISSING = "        missing = (tl.min(least) == EMPTY).to(tl.int32)"
FIRST_WORD, LEAST = MISSING.replace("tl.min", "tl.max"), "tl.minimum(least, "
REPLACED = "tl.where(bits == EMPTY, 0, bits)"
CLEARED = "EMPTY, mask=inside & (rank != other))"
EARLY, SENT, NOT = "words from before", "a word that was sent is empty", "slots are not clear"
# The check that must fail, the primitive, its text, what stands in its place, and how it fails.
MUTATIONS: dict[str, tuple[str, Any, str, str, str]] = {
    "sendable: -0.0 is sent": ("push", primitives.sendable, REPLACED, "bits", SENT),
    "push_to_slots: -0.0 is sent": (
        "push", primitives.push_to_slots, "    bits = sendable(bits, EMPTY)\n", "", SENT,
    ),
    "push_to_slots: not to the own slots": (
        "push", primitives.push_to_slots, "static_range(WORLD)", "static_range(1, WORLD)",
        SENT,
    ),
    "push_across: -0.0 is sent": (
        "push across", primitives.push_across, "sendable(bits, EMPTY)", "bits", SENT,
    ),
    "push_across: what is outside": (
        "push across", primitives.push_across, "inside & there", "there", "words in other places",
    ),
    "peers_across: not the last rank": (
        "push across", primitives.peers_across, "ranks < WORLD", "ranks < WORLD - 1", SENT,
    ),
    "receive: no wait": ("receive", primitives.receive, MISSING, "        missing = 0", EARLY),
    "receive: waits for the first word": (
        "receive", primitives.receive, MISSING, FIRST_WORD, EARLY,
    ),
    "receive: waits for the last rank": (
        "receive", primitives.receive, LEAST, "(", EARLY,
    ),
    "receive: waits for the first rank": (
        "receive", primitives.receive, LEAST + "arrived[other]", LEAST + "arrived[0]", EARLY,
    ),
    "receive_sum: no wait": (
        "receive_sum", primitives.receive_sum, MISSING, "        missing = 0", EARLY,
    ),
    "receive_sum: waits for the first word": (
        "receive_sum", primitives.receive_sum, MISSING, FIRST_WORD, EARLY,
    ),
    "receive_sum: waits for the last rank": (
        "receive_sum", primitives.receive_sum, LEAST, "(", EARLY,
    ),
    "receive_sum: adds each look": (
        "receive_sum", primitives.receive_sum, "        arrived = total\n", "", EARLY,
    ),
    "clear: nothing": (
        "receive", primitives.clear, CLEARED, "EMPTY, mask=inside & (other < 0))", NOT,
    ),
    "clear: nothing of a sum": (
        "receive_sum", primitives.clear, CLEARED, "EMPTY, mask=inside & (other < 0))", NOT,
    ),
    "clear: not the last rank": (
        "receive", primitives.clear, "static_range(WORLD)", "static_range(WORLD - 1)", NOT,
    ),
    "clear: zeros": ("receive", primitives.clear, CLEARED, CLEARED.replace("EMPTY", "0"), NOT),
    "clear: also the part of this rank": (
        "receive", primitives.clear, "inside & (rank != other)", "inside", NOT,
    ),
    "clear: what is outside": (
        "receive_sum", primitives.clear, "inside & (rank != other)", "rank != other", NOT,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("device", "what"), [on("interpreter", what) for what in CHECKS])
def test_slots_fill_are_awaited_and_cleared(what: str, device: str) -> None:
    CHECKS[what]()


@pytest.mark.parametrize(("device", "mutation"), [on("interpreter", each) for each in MUTATIONS])
def test_a_mutation_is_seen(mutation: str, device: str) -> None:
    """The test above fails by what the mutation breaks, and by nothing else."""
    check, primitive, old, new, words = MUTATIONS[mutation]
    with weakened(primitive, old, new), pytest.raises(AssertionError, match=words):
        CHECKS[check]()
