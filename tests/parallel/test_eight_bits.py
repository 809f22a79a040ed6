"""All-reduces in 8 bits on gloo ranks: their error, what stays exact, what is refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ladder.models import UserError
from ladder.models.storage import ROUNDING, rounded
from ladder.parallel.choose import REDUCERS
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.samples import full_model, relative_error, sample_tokens, small_config

KINDS = ["fp8", "int8"]


def bound(values: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    """The largest error of a message's values."""
    relative, absolute = ROUNDING[kind]
    # and a float32's rounding of the quotient, of the largest values of int8
    return values.abs() * (relative + 2.0**-22) + absolute * scales.double()[..., None]


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
        _, scales = rounded(most, kind)
        error += bound(most, scales, kind)
        error += torch.finfo(dtype).eps * (most + error) + 1e-6 * most
        assert found.dtype == dtype
        assert found.shape == exact.shape
        assert ((found.double() - exact).abs() <= error).all()
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
    with pytest.raises(UserError, match="reducer=async-int8 with plan 'desync-2x': some of its"):
        model(sample_tokens(config, 1, 1, 4))


def test_residuals_are_not_rounded(pools: Pools) -> None:
    pools(2).run(refused)
    assert [name for name, each in REDUCERS.items() if each.rounds] == ["async-fp8", "async-int8"]
