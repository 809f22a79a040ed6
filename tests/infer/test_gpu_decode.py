"""Decoding on GPUs through products that push: every plan, the heads' bits, late ranks."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.bench.inference.build import random_model
from ladder.bench.inference.memory import STEPS
from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.inference.verify import check_session, reference
from ladder.comm import symmetric
from ladder.comm.symmetric import SymmetricTensor
from ladder.infer.engine import Completion, Engine, generate
from ladder.infer.sampling import Sampling
from ladder.infer.session import Session
from ladder.kernels.limits import MAX_ROWS
from ladder.models.forward_pass import Output
from ladder.parallel import launch
from ladder.parallel.decode import DecodePass, Product
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import shard_model
from tests import samples
from tests.gpu import WORLDS
from tests.infer.engines import fused_config, heads_agree, pushing_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# Every plan takes numbers of rows without tensor cores and with them, of each size of tile, and one
# beyond the products' rows; three take those for which kernels are made apart, too.
COUNTS = (1, 3, 16, 33, MAX_ROWS, MAX_ROWS + 6)
EVERY_COUNT = (1, 2, 3, 12, 16, 33, MAX_ROWS, MAX_ROWS + 6)
TURNS = int(os.environ.get("LADDER_TEST_TURNS", "4"))  # 8 replay 11,040 late steps
FULL = ("standard", "ladder", "a mix of everything")
EQUAL = [name for name in samples.FUSED_PLANS if name not in samples.ADDED_APART]
CHECKED = ("standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x", "accumulate-4x",
           "accumulate-4x-lag2", "dtp-1", "dtp-2", "none")  # fmt: skip
VOCABULARY = 32064  # a quarter of an 8B's, whose reference would take most of the time


def in_parts(names: Iterable[str], count: int) -> list[Any]:
    """Each part a test of its own, so that a limit on time cuts between them."""
    listed = list(names)
    return [pytest.param(listed[n::count], id=f"part{n + 1}of{count}") for n in range(count)]


def short_prompts(count: int, source: torch.Generator) -> list[list[int]]:
    return [torch.randint(0, 67, (1 + n % 9,), generator=source).tolist() for n in range(count)]


def decode_on_gpus(names: list[str]) -> int:
    """Sample plans through fused products that push, in graphs, against the plain CPU."""
    device = launch.join("cuda")
    source = torch.Generator().manual_seed(6)
    for name in names:
        oracle, engine = pushing_engine(name, device)
        for count in EVERY_COUNT if name in FULL else COUNTS:
            prompts = short_prompts(count, source)
            expected = generate(oracle, prompts, max_new_tokens=10)
            for _ in range(3):  # a graph replayed, slots used again
                assert engine.generate(prompts, max_new_tokens=10) == expected, (name, count)
    return 0


@pytest.mark.parametrize("names", in_parts(samples.FUSED_PLANS, 2))
@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_decodes_through_pushing_products(world: int, names: list[str]) -> None:
    """Any lags, kinds, reduces and scales; several numbers of rows. A slot that is written before
    it is clear, or landed twice or not at all, gives other tokens or a hang."""
    assert launch.run(decode_on_gpus, (names,), nproc=world) == 0


def virtual_on_gpus(names: list[str]) -> int:
    """As `decode_on_gpus`, of four ranks, of which each GPU has several."""
    device = launch.join("cuda")
    source = torch.Generator().manual_seed(7)
    for name in names:
        oracle, engine = pushing_engine(name, device, degree=4)
        assert engine.model.reducer.ranks.held == 4 // launch.world_size()
        for count in (1, 3, 33, MAX_ROWS + 6):
            prompts = short_prompts(count, source)
            expected = generate(oracle, prompts, max_new_tokens=10)
            for _ in range(2):
                assert engine.generate(prompts, max_new_tokens=10) == expected, (name, count)
    return 0


@pytest.mark.parametrize("world", [each for each in WORLDS if each < 4])
def test_virtual_ranks_decode_by_fused_kernels(world: int) -> None:
    """Each has its part of every matrix, its norms and its residual."""
    names = [name for name in samples.FUSED_PLANS if name not in samples.SAME_AT_ANY_T]
    assert launch.run(virtual_on_gpus, (names,), nproc=world) == 0


def heads_on_gpus(names: list[str]) -> int:
    """The heads of all ranks read the same bits, in prefill and decode.

    Every plan in float32, whose sums show an order best, with two of the numbers of rows; each
    third one in bfloat16, too.
    """
    device = launch.join("cuda")
    world = launch.world_size()
    mesh = make_mesh(device, world)
    assert mesh is not None
    source = torch.Generator().manual_seed(9)
    counts = (1, 3, 33, MAX_ROWS + 6)
    for name in names:
        place = EQUAL.index(name)
        config = fused_config(name, world, vocab_size=68)  # which ranks cut evenly
        cases = {torch.float32: counts[place // 2 % 2 :: 2]}
        if place % 3 == 0:
            cases[torch.bfloat16] = counts
        for dtype, some in cases.items():
            model = samples.full_model(config, 5, dtype)
            samples.share_head(model, world)
            shard_model(model, mesh["tp"], device=device, reducer="push")
            engine = Engine(model, fused=True)
            for count in some:
                tokens = torch.randint(0, 68, (count, 30), generator=source)
                assert all(heads_agree(engine, tokens, 20)), (name, dtype, count)
    return 0


@pytest.mark.parametrize("names", in_parts(EQUAL, 2))
@pytest.mark.parametrize("world", WORLDS[1:])
def test_what_the_heads_read_is_the_same_on_all_gpus(world: int, names: list[str]) -> None:
    """An all-reduce that adds in another order on some rank shows in the last bits."""
    assert launch.run(heads_on_gpus, (names,), nproc=world) == 0


def check_on_gpus(plans: list[str]) -> int:
    """The benchmark's check, before it times, at an 8B's width: bfloat16."""
    device = launch.join("cuda")
    world = launch.world_size()
    reducer = "async" if world == 1 else "push"
    for plan in plans:
        point = InferencePoint("llama-3-8b", plan, reducer, world, 64, 60, STEPS, layers=4)
        config = replace(resolve(point), vocab_size=VOCABULARY)
        exact = random_model(config, "async", world, device)
        engine = Engine(random_model(config, reducer, world, device))
        with torch.inference_mode():
            for batch in (1, 3, 16, 33, 64):
                expected = reference(exact, batch, 60, STEPS)
                found = check_session(engine.session(batch, 60 + STEPS, Sampling()), expected)
                assert found.passes, (plan, batch, str(found))
                assert found.compared == 2 * batch * (STEPS + 1)
    return 0


@pytest.mark.parametrize("plans", in_parts(CHECKED, 2))
@pytest.mark.parametrize("world", WORLDS)
def test_every_plan_passes_the_check_before_timing(world: int, plans: list[str]) -> None:
    """Errors up to twice the plain path's, the reference's tokens, and every run the same bits."""
    assert launch.run(check_on_gpus, (plans,), nproc=world) == 0


@contextmanager
def late_ranks(late: random.Random) -> Iterator[None]:
    """This rank is late at random: before steps and in the midst of them, and with new memory.

    What a rank does in the midst of a step is part of its graph. New symmetric memory is asked for
    while the default stream is behind.
    """

    def step(session: Session) -> None:
        if late.random() < 0.2:
            torch.cuda._sleep(late.choice((400_000, 400_000, 400_000, 8_000_000)))
        undelayed_step(session)

    def reduce(run: DecodePass, n: int, partial: Product) -> Output:
        if late.random() < 0.2:
            torch.cuda._sleep(late.randrange(100_000))
        return undelayed_reduce(run, n, partial)

    def allocate(*args: Any, **options: Any) -> SymmetricTensor:
        if late.random() < 0.7:
            with torch.cuda.stream(torch.cuda.default_stream()):
                torch.cuda._sleep(late.randrange(40_000_000))
        return undelayed_allocate(*args, **options)

    undelayed_step, undelayed_reduce = Session.step, DecodePass.reduce
    undelayed_allocate = symmetric.allocate
    with (
        mock.patch.object(Session, "step", step),
        mock.patch.object(DecodePass, "reduce", reduce),
        mock.patch.object(symmetric, "allocate", allocate),
    ):
        yield


def decode_late(plans: list[str], engines: int, turns: int) -> int:
    """Sessions in turns, on engines that are dropped at work: the tokens of one process."""
    device = launch.join("cuda")
    source, late = torch.Generator().manual_seed(8), random.Random(launch.rank())
    for name in plans:
        cases = [short_prompts(count, source) for count in (1, 3, 33)]
        expected: list[list[Completion]] = []
        for number in range(engines):
            with late_ranks(late):
                oracle, engine = pushing_engine(name, device)
                if not expected:
                    expected = [generate(oracle, prompts, max_new_tokens=24) for prompts in cases]
                for turn in range(turns):
                    for prompts, wanted in zip(cases, expected, strict=True):
                        found = engine.generate(prompts, max_new_tokens=24)
                        assert found == wanted, (name, number, len(prompts), turn)
                for session in engine.sessions.values():
                    session.step()  # still at work when the engine and its slots are let go
                del engine, session
                if late.random() < 0.5:  # before the other ranks
                    gc.collect()
    return 0


@pytest.mark.parametrize("world", WORLDS[1:])
def test_decoding_survives_provocation(world: int) -> None:
    """Thousands of replays, by graphs that share slots. A slot cleared too late, read too early or
    not empty when it is new gives other tokens, or a hang."""
    plans = ["standard", "ladder", "desync-2x", "desync-2x then ladder", "dtp-2"]
    assert launch.run(decode_late, (plans, 4, TURNS), nproc=world) == 0
