"""Choosing tokens from a vocabulary that is split over ranks, against the whole in one process."""

from __future__ import annotations

import math
from itertools import chain

import pytest
import torch
from torch import Tensor

from ladder.infer.sampling import (
    Sampling,
    _draw,
    _keys,
    _lowest_kept,
    choose_greedily,
    choose_parallel,
    choose_tokens,
    draws,
    probabilities,
)
from ladder.models import Ranks, Reducer
from ladder.models.layers import vocabulary_start
from ladder.parallel import launch
from ladder.parallel.reducers import AsyncReducer
from tests.distributed import Pools, tp_mesh

VOCABULARY = 131  # 4 ranks hold 33, 33, 33 and 32
KINDS = [
    Sampling(1.0),
    Sampling(0.3),
    Sampling(1.7, top_k=1),
    Sampling(0.9, top_k=7),
    Sampling(1.0, top_k=40),  # more than a rank of four holds
    Sampling(1.0, top_k=130),
    Sampling(1.0, top_k=1000),
    Sampling(1.0, top_p=0.7),
    Sampling(0.5, top_p=0.01),  # one token as a rule
    Sampling(3.0, top_p=0.999),
    Sampling(1.0, top_k=1000, top_p=0.4),
    Sampling(0.8, top_k=20, top_p=0.6),
    Sampling(1.0, top_k=5, top_p=0.999),
]


def tied_logits(batch: int) -> Tensor:
    """Wide logits of few different values (as bfloat16's are), 0 and -0 among them, some -inf."""
    generator = torch.Generator().manual_seed(batch)
    logits = (
        torch.randn(batch, VOCABULARY, generator=generator) * 6
    ).round() / 2  # rounds to -0, too
    logits[1, 33:66] = -torch.inf  # all that one rank of four holds
    return logits


def uniforms_for(batch: int) -> Tensor:
    uniforms = torch.rand(batch, generator=torch.Generator().manual_seed(9))
    uniforms[0], uniforms[1], uniforms[2] = 0.0, 1 - 2**-24, 0.5
    return uniforms


def part(logits: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    first = vocabulary_start(VOCABULARY, ranks)
    return logits[:, first : first + math.ceil(VOCABULARY / ranks.processes)], first


def on_rank(rank: int, world: int, logits: Tensor, uniforms: Tensor) -> list[list[int]]:
    ranks = Ranks(world, rank, 1)
    reducer = Reducer() if world == 1 else AsyncReducer(ranks, tp_mesh(world).get_group())
    mine, first = part(logits, ranks)
    found = [choose_greedily(mine, first, reducer).tolist()]
    for sampling in KINDS:
        tokens = choose_parallel(mine, first, uniforms, sampling, reducer, VOCABULARY)
        assert tokens.dtype == torch.int64
        found.append(tokens.tolist())
    return found


def assert_chosen(tokens: list[int], logits: Tensor, uniforms: Tensor, sampling: Sampling) -> None:
    """`choose_tokens`'s tokens; where not, the draw lies on the border between the two."""
    expected = choose_tokens(logits, uniforms, sampling).tolist()
    chances = probabilities(logits.double(), sampling).double()
    ends = chances.cumsum(-1) / chances.sum(-1, keepdim=True)
    for b, (token, wanted, u) in enumerate(zip(tokens, expected, uniforms.tolist(), strict=True)):
        assert chances[b, token] > 0, (sampling, b)
        start, end = float(ends[b, token] - chances[b, token]), float(ends[b, token])
        assert start - 1e-6 <= u < end + 1e-6, (sampling, b, token, wanted)
        near = min(abs(u - start), abs(u - end)) < 1e-6
        assert token == wanted or near, (sampling, b, token, wanted)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_split_vocabulary_chooses_as_the_whole(pools: Pools, world: int) -> None:
    """A wrong share of a rank, a wrong order of ties, or a draw from the wrong end fails this."""
    batch = 200
    logits, uniforms = tied_logits(batch), uniforms_for(batch)
    answers = [on_rank(0, 1, logits, uniforms)]
    if world > 1:
        answers = pools(world).run(on_rank, logits, uniforms)
    assert all(answer == answers[0] for answer in answers)  # bit for bit on every rank
    assert answers[0][0] == choose_tokens(logits, uniforms, Sampling()).tolist()
    for tokens, sampling in zip(answers[0][1:], KINDS, strict=True):
        assert_chosen(tokens, logits, uniforms, sampling)
        same = torch.tensor(tokens) == choose_tokens(logits, uniforms, sampling)
        assert same.sum() >= batch - 1, sampling  # no draw but one is near a border


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_frequencies(pools: Pools, world: int) -> None:
    """The frequencies of many draws match the probabilities of all ranks' tokens."""
    count = 20_000 if world == 1 else 4_000  # ranks send 16 KiB a draw for top_p
    row = tied_logits(2)[:1] / 3
    uniforms = draws(Sampling(1.0, seed=5), 1, count)[:, 0]
    logits = row.expand(count, -1).contiguous()
    answers = [on_rank(0, 1, logits, uniforms)]
    if world > 1:
        answers = pools(world).run(on_rank, logits, uniforms)
    for tokens, sampling in zip(answers[-1][1:], KINDS, strict=True):
        share = torch.bincount(torch.tensor(tokens), minlength=VOCABULARY) / count
        chances = probabilities(row[0], sampling)
        error = (share - chances).abs() / (chances * (1 - chances) / count).sqrt().clamp(min=1e-9)
        assert error[chances > 0].max() < 5, sampling  # standard errors
        assert share[chances == 0].sum() == 0, sampling


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
def test_what_is_not_finite_is_no_token_on_any_rank(pools: Pools, world: int, value: float) -> None:
    """A NaN on one rank alone must reach the others; its neighbours in the batch are sound."""
    logits = tied_logits(4)
    logits[0, 3] = logits[2, 130] = value
    logits[3] = -torch.inf
    uniforms = uniforms_for(4)
    answers = [on_rank(0, 1, logits, uniforms)]
    if world > 1:
        answers = pools(world).run(on_rank, logits, uniforms)
    for answer in answers:
        for tokens in answer:
            assert [tokens[0], tokens[2], tokens[3]] == [-1, -1, -1]
            assert tokens[1] >= 0


def kept_on_rank(rank: int, world: int, scores: Tensor, top_p: float) -> list[list[int]]:
    """The tokens of this rank that top_p keeps, row by row."""
    ranks = Ranks(world, rank, 1)
    reducer = Reducer() if world == 1 else AsyncReducer(ranks, tp_mesh(world).get_group())
    mine, first = part(scores, ranks)
    keys = _keys(mine, first)
    kept = keys >= _lowest_kept(mine, keys, top_p, reducer)
    return [(row.nonzero()[:, 0] + first).tolist() for row in kept]


def nucleus(row: list[float], top_p: float) -> list[int]:
    """The smallest set of likeliest tokens that reaches top_p, equal ones from the lowest on."""
    order = sorted(range(len(row)), key=lambda token: (-row[token], token))
    masses = torch.tensor([row[token] for token in order]).sub(max(row)).exp().double()
    reached = masses.cumsum(0)
    return sorted(order[: int((reached < top_p * reached[-1]).sum()) + 1])


def few_likely() -> Tensor:
    """Rows that lie on the borders of what top_p may keep."""
    scores = torch.zeros(5, VOCABULARY)
    scores[0, [0, 40, 130]] = -torch.inf  # 128 equal ones: halves are exact
    scores[1, 70] = 50.0  # one token has all
    scores[2] = -torch.inf
    scores[2, 130] = -3e38  # and here there is no other
    scores[3, 1::2] = -0.0  # equal to 0
    scores[4] = torch.arange(VOCABULARY) * 1e-3  # close to one another, in the other order
    return scores


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_top_p_keeps_the_nucleus_of_all_ranks(pools: Pools, world: int) -> None:
    """A digit that is off by one, a mass of one rank alone, or ties in another order fail this."""
    scores = torch.cat((few_likely(), tied_logits(40)))
    for top_p in (1e-9, 0.25, 0.5, 0.9, 1 - 1e-12):
        answers = [kept_on_rank(0, 1, scores, top_p)]
        if world > 1:
            answers = pools(world).run(kept_on_rank, scores, top_p)
        found = [list(chain.from_iterable(parts)) for parts in zip(*answers, strict=True)]
        assert found == [nucleus(row, top_p) for row in scores.tolist()], top_p
        if top_p == 0.5:
            assert found[0] == [*range(1, 40), *range(41, 66)]
        if top_p > 0.9:
            assert found[4] == list(range(VOCABULARY))  # it spans all


def test_a_nucleus_that_is_met_exactly_takes_no_more() -> None:
    """0.25 + 0.25 reaches 0.5: the third of four equal tokens is out, in both ways to choose."""
    logits, sampling = torch.zeros(8, 4), Sampling(1.0, top_k=4, top_p=0.5)
    for one in (sampling, Sampling(1.0, top_p=0.5)):
        assert probabilities(logits, one)[0].tolist() == [0.5, 0.5, 0.0, 0.0]
    uniforms = torch.arange(8) / 8
    expected = [0] * 4 + [1] * 4
    assert choose_tokens(logits, uniforms, sampling).tolist() == expected
    found = choose_parallel(logits, 0, uniforms, sampling, Reducer(), 4)
    assert found.tolist() == expected


def test_a_draw_that_is_rounded_up_to_the_whole_takes_what_has_a_chance() -> None:
    """uniforms * the whole may round to the whole: then the last token above 0, none beyond it."""
    reached = torch.tensor([[0.5, 1.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    assert _draw(reached, torch.tensor([1.0, 1.0], dtype=torch.float64)).tolist() == [1, 2]


def test_the_nucleus_of_what_is_not_a_number_is_all() -> None:
    """A NaN is kept, so that the later check finds it; its neighbour's nucleus does not change."""
    scores = torch.zeros(2, VOCABULARY)
    scores[0, 5] = math.nan
    answer = kept_on_rank(0, 1, scores, 1e-9)
    assert answer == [list(range(VOCABULARY)), [0]]


class Counting(Reducer):
    """One process of four as far as sizes go: counts the bytes that it hands over."""

    def __init__(self) -> None:
        super().__init__(Ranks(4, 0, 1))
        self.bytes = 0

    def gather(self, logits: Tensor, size: int) -> Tensor:
        self.bytes += logits.nbytes
        return logits.repeat_interleave(4, -1)[..., :size] if size > 4 else logits

    def sum_(self, value: Tensor) -> Tensor:
        self.bytes += value.nbytes
        return value

    max_ = sum_


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(1.0), 3 * 8),
        (Sampling(1.0, top_k=50), 50 * 8),
        (Sampling(1.0, 50, 0.9), 50 * 8),
        (Sampling(1.0, top_p=0.9), 8 * 256 * 8 + 4 * 8),
    ],
)
def test_what_is_communicated_does_not_grow_with_the_vocabulary(
    sampling: Sampling, allowed: int
) -> None:
    reducer = Counting()
    logits = torch.randn(3, 8000)
    choose_parallel(logits, 0, torch.rand(3), sampling, reducer, 32000)
    assert 0 < reducer.bytes <= 3 * allowed


def test_of_equal_scores_top_k_keeps_the_lowest_tokens() -> None:
    """bfloat16 logits have ties at the k-th place as a rule: all of them would be too many."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 0.0]])
    kept = probabilities(logits, Sampling(1.0, top_k=3))[0] > 0
    assert kept.tolist() == [True, True, False, False, True, False]
    zeros = torch.tensor([[-1.0, -0.0, 0.0, -0.0]])  # equal, though their bits are not
    for k, token in ((1, 1), (2, 2), (3, 3)):
        uniforms, sampling = torch.tensor([0.999]), Sampling(1.0, top_k=k)
        assert choose_tokens(zeros, uniforms, sampling).tolist() == [token]
        assert choose_parallel(zeros, 0, uniforms, sampling, Reducer(), 4).tolist() == [token]


def test_every_bit_of_a_seed_counts() -> None:
    """torch's generator reads 32 of them. Texts of smaller seeds stay as they were."""
    for seed in (0, 7, 2**32 - 1):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + 1)
        found = [draws(Sampling(1.0, seed=seed + n * 2**32), 2, 5) for n in (0, 1, 2, 2**31 - 1)]
        assert torch.equal(found[0][:, 1], torch.rand(5, generator=generator))
        assert len({tuple(each.flatten().tolist()) for each in found}) == len(found)


def on_gpus() -> int:
    """In a CUDA graph with NCCL: the plain path's tokens, again under replay with other input."""
    device = launch.join("cuda")
    world, rank = launch.world_size(), launch.rank()
    ranks = Ranks(world, rank, 1)
    group = torch.distributed.group.WORLD if world > 1 else None
    reducer = Reducer() if group is None else AsyncReducer(ranks, group)
    for sampling in KINDS:
        mine, first = part(tied_logits(64).to(device), ranks)
        mine, uniforms = mine.contiguous(), uniforms_for(64).to(device)

        def work(mine=mine, first=first, uniforms=uniforms, sampling=sampling) -> Tensor:
            return choose_parallel(mine, first, uniforms, sampling, reducer, VOCABULARY)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            tokens = work()
        for seed in range(3):
            logits = tied_logits(64).roll(seed, 0)
            draw = uniforms_for(64).roll(-seed, 0)
            mine.copy_(part(logits, ranks)[0])
            uniforms.copy_(draw)
            graph.replay()
            launch.agree({"tokens": tokens.tolist()})
            assert_chosen(tokens.tolist(), logits, draw, sampling)
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("world", [1, 2, 4])
def test_sampling_in_graphs(world: int) -> None:
    """Waiting for the device cannot be captured; stale buffers would give an older draw's token."""
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} CUDA devices")
    assert launch.run(on_gpus, (), nproc=world) == 0
