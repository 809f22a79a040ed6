"""All-reduces in 8 bits on gloo ranks: their error, what stays exact, what is refused."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ladder.infer.graphs import capture_graph
from ladder.models import UserError
from ladder.models.in_flight import InFlight
from ladder.models.ranks import Ranks
from ladder.models.storage import ROUNDING, rounded
from ladder.parallel import launch
from ladder.parallel.choose import REDUCERS
from ladder.parallel.eight_bits import EightBitReducer
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.gpu import WORLDS
from tests.samples import full_model, relative_error, sample_tokens, small_config

KINDS = ["fp8", "int8"]


def bound(values: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    """The largest error of a message's values."""
    relative, absolute = ROUNDING[kind]
    # and a float32's rounding of the quotient, of the largest values of int8
    return values.abs() * (relative + 2.0**-22) + absolute * scales.double()[..., None]


def summed(everyone: torch.Tensor, kind: str) -> torch.Tensor:
    """The sums of all ranks' rows [T, M, D], bit for bit: each rank adds its share of the rows.

    Of two ranks, both add all rows, and round no sum.
    """
    world, rows, size = everyone.shape
    if world == 2:
        small, scales = rounded(everyone, kind)
        one, other = small.float() * scales[..., None]
        return (one + other).to(everyone.dtype)
    share = -(-rows // world)
    total = torch.zeros(rows, size)
    for rank in range(world):
        small, scales = rounded(everyone[rank], kind)
        part = small.float() * scales[:, None]
        own = slice(rank * share, (rank + 1) * share)
        part[own] = everyone[rank, own].float()  # not rounded
        total += part
    small, scales = rounded(total, kind)
    return (small.float() * scales[:, None]).to(everyone.dtype)


def sums(rank: int, world: int, kind: str, rows: int, dtype: torch.dtype) -> None:
    """Within the two roundings of a sum: of the other ranks' partials, and of itself.

    Tokens of very different sizes. All ranks have the same bits, also where the rows do not divide.
    """
    mesh = tp_mesh(world)
    model = full_model(small_config(), 5, torch.float32)
    shard_model(model, mesh, reducer=f"async-{kind}")
    reducer = model.reducer
    generator = torch.Generator().manual_seed(3)
    everyone = torch.randn(world, 2, rows // 2, 40, generator=generator)
    everyone *= 4.0 ** torch.randint(-9, 9, (1, 2, rows // 2, 1), generator=generator)
    everyone = everyone.to(dtype)
    exact = everyone.double().sum(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # as torch 2.13 has for older names
        given = everyone[rank].clone()
        found = reducer.reduce(given).wait()
        assert torch.equal(given, everyone[rank])
        _, scales = rounded(everyone, kind)
        error = bound(everyone.double(), scales, kind).sum(0)
        # of the sum's rounding, whose scale is its own, of a sum that is off by `error`
        most = exact.abs() + error
        if world > 2:
            _, scales = rounded(most, kind)
            error += bound(most, scales, kind)
        error += torch.finfo(dtype).eps * (most + error) + 1e-6 * most
        assert found.dtype == dtype
        assert found.shape == exact.shape
        assert ((found.double() - exact).abs() <= error).all()
        assert torch.equal(found, summed(everyone.flatten(1, 2), kind).view(found.shape))
        apart = found.double() - exact
        assert relative_error(found.double(), exact) > 1e-4
        assert apart.abs().max() > 0
        copies = [torch.empty_like(found) for _ in range(world)]
        dist.all_gather(copies, found, group=mesh.get_group())
        assert all(torch.equal(each, found) for each in copies)
        for bad in (torch.nan, torch.inf):
            given = everyone[rank].clone()
            if rank == 1:
                given[1, 2, 3] = bad
            total = reducer.reduce(given).wait()
            assert not total[1, 2, 3].isfinite()
            assert total[0].isfinite().all()
        error = world * torch.finfo(dtype).eps * everyone.double().abs().sum(0)
        few = everyone[rank][:, :8].contiguous()  # a decode step
        total = reducer.reduce(few).wait()
        assert ((total.double() - exact[:, :8]).abs() <= error[:, :8]).all()
        total = reducer.sum(everyone[rank].clone())
        assert ((total.double() - exact).abs() <= error).all()


@pytest.mark.parametrize(
    ("world", "kind", "rows", "dtype"),
    [(2, "fp8", 100, torch.float32), (2, "int8", 66, torch.bfloat16),
     (4, "fp8", 70, torch.bfloat16), (4, "int8", 102, torch.float32)],
)  # fmt: skip
def test_sums(pools: Pools, world: int, kind: str, rows: int, dtype: torch.dtype) -> None:
    pools(world).run(sums, kind, rows, dtype)


def sums_on_gpus(kind: str) -> int:
    """In flight beside other work, two at a time, as a ladder's; in a graph, with new inputs.

    A rank is late at random. What the reducer has been given is freed at once, and its memory
    written over: a sum that still reads it, or that is read before it is there, has other bits.
    """
    device, late = launch.join("cuda"), random.Random(dist.get_rank())
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = make_mesh(device, world)
    assert mesh is not None
    reducer = EightBitReducer(Ranks(world, rank), mesh["tp"].get_group(), kind)
    count, rows, size = 6, 101, 4096
    given = torch.empty(count, rows, size, dtype=torch.bfloat16, device=device)
    wanted = torch.empty_like(given)

    def fill(turn: int) -> None:
        source = torch.Generator().manual_seed(turn)
        everyone = torch.randn(world, count, rows, size, generator=source)
        everyone *= 4.0 ** torch.randint(-9, 9, (world, count, rows, 1), generator=source)
        everyone = everyone.bfloat16()
        given.copy_(everyone[rank])
        for n in range(count):
            wanted[n] = summed(everyone[:, n], kind)

    def work() -> list[torch.Tensor]:
        flying: list[InFlight[torch.Tensor]] = []
        found = []
        for each in given:
            flying.append(reducer.reduce(each.clone()))
            torch.full_like(each, torch.nan)
            torch.cuda._sleep(late.randrange(2_000_000))
            if len(flying) > 1:
                found.append(flying.pop(0).wait() + 0)
                torch.full_like(each, torch.nan)
        return [*found, flying.pop().wait() + 0]

    with torch.inference_mode():
        for turn in range(3):
            fill(turn)
            assert all(map(torch.equal, work(), wanted)), turn
        graph, found = capture_graph(work)
        for turn in range(3, 8):
            fill(turn)
            graph.replay()
            assert all(map(torch.equal, found, wanted)), turn
    return 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("kind", KINDS)
def test_sums_on_gpus(kind: str) -> None:
    assert launch.run(sums_on_gpus, (kind,), nproc=WORLDS[-1]) == 0


def logits(rank: int, world: int, plan: str, kind: str) -> dict[str, Any]:
    config = small_config(plan)
    tokens = sample_tokens(config, 1, 3, 40)
    found = []
    for reducer in ("async", f"async-{kind}"):
        model = full_model(config, 4, torch.float32)
        shard_model(model, tp_mesh(world), reducer=reducer)
        with torch.no_grad():
            found.append((model(tokens), model(tokens[:, :8])))
    (exact, short), (small, same) = found
    return {"long": relative_error(small, exact), "short": relative_error(same, short)}


@pytest.mark.parametrize(("plan", "kind"), [("standard", "fp8"), ("ladder", "int8")])
def test_models(pools: Pools, plan: str, kind: str) -> None:
    """Prompts of 120 tokens are off by the roundings, of 24 by none."""
    for each in pools(2).run(logits, plan, kind):
        # 8 sums of 2 roundings; independent errors, at worst uniform within 1/16
        assert 1e-4 < each["long"] < 16**0.5 / 16 / 3**0.5
        assert each["short"] < 1e-6


def refused(rank: int, world: int) -> None:
    config = small_config("desync-2x", world, True)
    model = full_model(config, 4, torch.float32)
    shard_model(model, tp_mesh(world), reducer="async-int8")
    with pytest.raises(UserError, match="reducer=async-int8 with plan 'desync-2x': some sublayers"):
        model(sample_tokens(config, 1, 1, 4))


def test_residuals_are_not_rounded(pools: Pools) -> None:
    pools(2).run(refused)
    assert [name for name, each in REDUCERS.items() if each.rounds] == ["async-fp8", "async-int8"]
