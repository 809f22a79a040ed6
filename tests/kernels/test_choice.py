"""The kernels at the two ends of a decode step, against plain PyTorch: see support.py."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

from ladder.comm import symmetric
from ladder.comm.primitives import EMPTY
from ladder.comm.push import SETS
from ladder.comm.symmetric import SymmetricTensor
from ladder.infer.sampling import choose_greedily
from ladder.kernels import choice
from ladder.kernels.choice import GreedyChoice, embed
from ladder.models import Reducer
from tests.comm.scripted import arriving, weakened
from tests.interpreter import addresses
from tests.kernels.support import on


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embed(device: str, dtype: torch.dtype) -> None:
    weight = torch.randn(50, 1100, device=device).to(dtype)
    tokens = torch.tensor([0, 99, 100, 149, 150, 120, -1, 160], device=device)
    found = embed(tokens, weight, 100, 160)
    wanted = torch.stack([weight[t - 100] if 100 <= t < 150 else 0 * weight[0] for t in tokens])
    assert torch.equal(found[:-2], wanted[:-2])
    assert found[-2:].isnan().all()


@pytest.mark.parametrize("device", [on("interpreter"), on("cuda")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [7, 1024, 2100])
def test_the_greedy_choice(device: str, dtype: torch.dtype, size: int) -> None:
    """Equal logits, NaN and infinities at any place; a strided view of logits; places go on."""
    logits = torch.randn(9, size + 3, device=device).to(dtype)[:, :size]
    logits[1, size // 2] = torch.nan
    logits[2, size - 1] = torch.inf
    logits[3] = -torch.inf
    logits[4] = 2.5
    logits[5, [1, size - 1]] = 100.0
    logits[6, size - 1] = 100.0
    out, tokens = (torch.full((9,), 77, device=device) for _ in range(2))
    positions = torch.arange(9, device=device)
    choose = GreedyChoice(9, 0, 1, None, torch.device(device))
    choose(logits, 0, out, tokens, positions, 7)
    wanted = choose_greedily(logits, 0, Reducer())
    assert out.tolist() == wanted.tolist()
    assert tokens.tolist() == wanted.clamp(min=0).tolist()
    assert positions.tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 7]
    choose(logits, 500, out, tokens)
    assert out.tolist() == [500 + token if token >= 0 else -1 for token in wanted.tolist()]
    assert positions[0] == 1


@pytest.mark.parametrize("device", [on("interpreter")])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_greedy_choice_over_ranks(
    device: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks in one process, in turn: the last one finds everything that its peers sent it.

    -0.0 is the likeliest in one row (sent as 0.0: it would read as "not yet written"), equal
    logits lie on several ranks, and NaN and infinities on any. Sets of slots are used again.
    """
    batch, size = 6, 5
    for last in range(world):
        slots = [torch.full((SETS * world * batch * 2,), EMPTY[4], dtype=torch.int32)
                 for _ in range(world)]  # fmt: skip
        where = addresses(slots)
        memory = SymmetricTensor(0, slots, where)
        monkeypatch.setattr(symmetric, "allocate", lambda *_, x=memory, **__: x)
        choices = [GreedyChoice(batch, r, world, None, torch.device(device)) for r in range(world)]
        for turn in range(SETS + 2):
            logits = torch.randn(batch, world * size)
            logits[0] = logits[0].abs().neg()
            logits[0, turn] = -0.0
            logits[1, turn % size :: size] = 9.0
            logits[2, 2 * turn % (world * size)] = torch.nan
            logits[3, 3 * turn % (world * size)] = torch.inf
            logits[4] = -torch.inf
            out, tokens, positions = (torch.full((batch,), turn) for _ in range(3))
            for rank in [*(r for r in range(world) if r != last), last]:
                part = logits[:, rank * size : (rank + 1) * size]
                choices[rank](
                    part, rank * size, out, tokens, positions if rank == last else None, 3
                )
            wanted = choose_greedily(logits, 0, Reducer())
            assert out.tolist() == wanted.tolist()
            assert tokens.tolist() == wanted.clamp(min=0).tolist()
            assert positions.tolist() == [min(turn + 1, 3)] * batch
            empty = (slots[last].view(SETS, -1) == EMPTY[4]).float().mean(-1)
            assert empty.tolist() == [float(n != turn % SETS) for n in range(SETS)]


def check_waits() -> None:
    """Logits come before tokens or after them, one peer's before another's: all are waited for.

    A look reads all logits, then all tokens. The likeliest token is of the peer that comes last.
    """
    world, rank, device = 3, 1, torch.device("cpu")
    for first, last, early, late in ((0, 2, 0, 1), (2, 0, 0, 1), (0, 2, 1, 0)):
        slots = [torch.full((SETS, world, 2), EMPTY[4], dtype=torch.int32) for _ in range(world)]
        own = slots[rank]
        memory = SymmetricTensor(rank, [each.flatten() for each in slots], addresses(slots))
        views = own.view(torch.float32), own  # of the logits, and of the tokens
        order = [(first, early, 10), (last, early, 20), (first, late, 10), (last, late, 20)]
        looks = {
            3 + 2 * n: functools.partial(views[word][0, peer, word].fill_, value)
            for n, (peer, word, value) in enumerate(order)
        }
        with mock.patch.object(symmetric, "allocate", return_value=memory):
            choose = GreedyChoice(1, rank, world, None, device)
        out, tokens = torch.zeros(2, 1, dtype=torch.int64)
        with mock.patch.object(choice, "interpreted", return_value=False), arriving(looks):
            choose(torch.tensor([[1.0, 0.0]]), 5, out, tokens)
        assert out.tolist() == tokens.tolist() == [20], "words from before they came"
        for each in slots:
            assert each.view(torch.float32)[0, rank, 0] == 1.0
            assert each[0, rank, 1] == 5, "a peer was told another token"
        assert torch.all(own[1:] == EMPTY[4])


EMPTY_WORDS = "tl.max(((found == EMPTY) | (where == EMPTY)).to(tl.int32)) > 0"
MUTATIONS = {
    "no wait": (EMPTY_WORDS, "spins < 0"),
    "waits for the logits": (EMPTY_WORDS, "tl.max((found == EMPTY).to(tl.int32)) > 0"),
    "waits for the tokens": (EMPTY_WORDS, "tl.max((where == EMPTY).to(tl.int32)) > 0"),
    "waits for one rank": (EMPTY_WORDS, EMPTY_WORDS.replace("max", "min")),
    "waits for one word of each": (EMPTY_WORDS, EMPTY_WORDS.replace("|", "&")),
    "sends another token": ("tl.store(base + at + 1, token)", "tl.store(base + at + 1, token + 1)"),
}


@pytest.mark.parametrize("device", [on("interpreter")])
def test_a_choice_waits_for_every_word_of_every_rank(device: str) -> None:
    check_waits()


@pytest.mark.parametrize("device", [on("interpreter")])
@pytest.mark.parametrize("what", MUTATIONS)
def test_a_weakened_choice_is_seen(device: str, what: str) -> None:
    with weakened(choice._choose_kernel, *MUTATIONS[what]), pytest.raises(AssertionError):
        check_waits()
