"""DDP, FSDP and HSDP, alone and with TP: shards, gradients and norms, and resuming under others."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ladder.checkpoint import full
from ladder.config import build, model_config
from ladder.models.errors import UserError
from ladder.parallel.apply import make_model
from ladder.parallel.data import data_parallel, reduce_gradients
from ladder.parallel.mesh import make_mesh
from ladder.parallel.sharding import initialise, local_parameters, local_tensor
from ladder.train import loop
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from ladder.train.optim import clip_gradients
from tests.distributed import Pools
from tests.parallel.layouts import LAYOUTS, curve
from tests.samples import sample_tokens
from tests.train.runs import recipe, run_on_ranks, untimed, weights

CPU = torch.device("cpu")


def resume_all(rank: int, world: int, settings: dict[str, Any]) -> None:
    """One run, each quarter of it under another layout."""
    for n, (tp, dp_shard, _) in enumerate(LAYOUTS[world][:5]):
        changes = {"tp": tp, "dp_shard": dp_shard}
        config = build(TrainConfig, settings | changes, "test recipe")
        train(config, device="cpu", resume=n > 0, stop_after=4 * (n + 1))


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    """Catches shards that are saved in part, or moments read into the wrong rows."""
    alone = recipe(corpus, tmp_path / "alone", plan="ladder", steps=20, batch_size=8, lr=3e-3)
    train(alone, device="cpu")
    pools(4).run(resume_all, alone.to_dict() | {"out": str(tmp_path / "run")})
    assert curve(tmp_path / "run")[0] == pytest.approx(curve(tmp_path / "alone")[0], abs=1e-4)


RESUMED: dict[str, dict[str, Any]] = {
    "DDP": {"micro_batch_size": 1},
    "FSDP": {"dp_shard": 0, "micro_batch_size": 1},
    "TP + SP": {"tp": 2, "sequence_parallel": True},
}


def stop_and_go_on(rank: int, world: int, settings: dict[str, Any]) -> None:
    for name, changes in RESUMED.items():
        for stop in (None, 4):
            out = {"out": f"{settings['out']}/{name}, {stop}"}
            run_on_ranks(rank, world, settings | changes | out, stop)


def test_resume_on_ranks_is_bitwise(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    """As on one process. Catches a moment that is saved rounded, or of another rank."""
    settings = recipe(corpus, tmp_path, plan="ladder", eval_interval=3).to_dict()
    pools(2).run(stop_and_go_on, settings)
    for name in RESUMED:
        whole, stopped = (tmp_path / f"{name}, {stop}" for stop in (None, 4))
        assert untimed(stopped) == untimed(whole), name
        after = weights(stopped)
        for parameter, value in weights(whole).items():
            assert torch.equal(value, after[parameter]), (name, parameter)


def made(mesh: Any, dtype: torch.dtype) -> Any:
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_heads": 4, "num_kv_heads": 2}
    shape |= {"qk_norm": True}
    config = model_config(
        {"name": "tiny", "num_layers": 2, "tie_embeddings": False, **shape}, "ladder", None,
        vocab_size=301,
    )  # fmt: skip
    model = make_model(config, dtype, mesh, CPU)
    initialise(model, 3)
    return model


def shards(rank: int, world: int) -> dict[str, Any]:
    """How much this rank holds under FSDP and TP 2, and which weights are not those of one
    process: put together by FSDP, which has its own idea of the rows."""
    mesh = make_mesh(CPU, 2, 0)
    model = made(mesh, torch.float32)
    whole = dict(made(None, torch.float32).named_parameters())
    held = {name: local.numel() for name, local, _ in local_parameters(model)}
    ranks, wrong = model.reducer.ranks, []
    for name, parameter in model.named_parameters():
        part = model.specs[name].slices(whole[name].shape, ranks)
        if not torch.equal(full(parameter), whole[name][part]):
            wrong.append(name)
    return {"held": held, "wrong": wrong, "data": data_parallel(mesh)}


def test_each_rank_holds_its_share_of_the_same_weights(pools: Pools) -> None:
    """Catches weights that depend on the layout, shards at wrong rows, and whole copies; 301 rows
    and 24 wide norms divide unevenly."""
    expected = dict(made(None, torch.float32).named_parameters())
    found = pools(4).run(shards)
    assert [each["data"] for each in found] == [(2, 0), (2, 0), (2, 1), (2, 1)]
    assert [each["wrong"] for each in found] == [[], [], [], []]
    for name, value in expected.items():
        held = [each["held"][name] for each in found]
        assert sum(held) == value.numel() * (2 if "norm" in name else 1), name
        assert max(held) < value.numel() * 0.6, name


def half_precision(rank: int, world: int, dp_shard: int) -> tuple[float, float]:
    """The error of bfloat16 gradients, of one process and of these ranks."""
    tokens = torch.randint(0, 301, (8, 2, 17), generator=torch.Generator().manual_seed(5))
    mesh = make_mesh(CPU, 1, dp_shard)

    def gradients(dtype: torch.dtype, mesh: Any) -> dict[str, torch.Tensor]:
        model = made(mesh, dtype)
        share = tokens if mesh is None else tokens.chunk(world)[rank]
        for n, part in enumerate(share, 1):
            reduce_gradients(model, now=n == len(share))
            (model(part[:, :-1], part[:, 1:]).sum() / share.numel()).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.dtype == torch.float32, name
            assert local_tensor(parameter.grad).dtype == torch.float32, name
            assert mesh is None or isinstance(parameter.grad, DTensor), name
        return {name: full(p.grad) for name, p in model.named_parameters()}

    exact = gradients(torch.float32, None)

    def error(found: dict[str, torch.Tensor]) -> float:
        return max(
            float((found[name] - value).norm() / value.norm()) for name, value in exact.items()
        )

    return error(gradients(torch.bfloat16, None)), error(gradients(torch.bfloat16, mesh))


@pytest.mark.parametrize(("world", "dp_shard"), [(2, 1), (2, 0), (4, 2)])
def test_bfloat16_gradients_are_reduced_in_float32(pools: Pools, world: int, dp_shard: int) -> None:
    """DDP, FSDP, HSDP. Catches gradients that are missing, or summed over micro-batches or ranks in
    bfloat16."""
    for alone, sharded in pools(world).run(half_precision, dp_shard):
        assert 0 < alone < 0.05
        assert sharded < 1.5 * alone


def reduces_without_tp(rank: int, world: int) -> list[int]:
    """All-reduces over the TP group of a forward and a backward pass, at TP 1 and 2."""
    found = []
    for tp in (1, 2):
        model = made(make_mesh(CPU, tp, 1), torch.float32)
        tokens = sample_tokens(model.config, 1, 2, 8)
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            model(tokens, tokens).mean().backward()
        groups = [call.kwargs.get("group") for call in reduced.call_args_list]
        found.append(sum(dist.get_world_size(group) == tp for group in groups))
    return found


def test_a_tp_group_of_one_communicates_nothing(pools: Pools) -> None:
    for without, with_tp in pools(2).run(reduces_without_tp):
        assert without == 0
        assert with_tp > 0


def clipped(rank: int, world: int) -> list[float]:
    """The norms that `clip_gradients` finds under TP 2 x FSDP 2: before it clips to 0.5, after it,
    and after a limit that they keep."""
    mesh = make_mesh(CPU, 2, 0)
    model = made(mesh, torch.float32)
    source = torch.Generator().manual_seed(0)
    wholes = {n: torch.randn(shape, generator=source) for n, shape in model.shapes.items()}
    for name, _, part in local_parameters(model):
        parameter = dict(model.named_parameters())[name]
        parameter.grad = torch.zeros_like(parameter)
        local_tensor(parameter.grad).copy_(wholes[name][part])
    exact = float(torch.stack([g.double().square().sum() for g in wholes.values()]).sum().sqrt())
    return [exact, *(clip_gradients(model, limit, mesh) for limit in (0.5, 9.0, 9.0))]


def test_gradients_are_clipped_by_the_norm_of_the_whole_mesh(pools: Pools) -> None:
    for exact, before, after, kept in pools(4).run(clipped):
        assert before == pytest.approx(exact, rel=1e-5)
        assert after == pytest.approx(0.5, rel=1e-4)
        assert kept == pytest.approx(0.5, rel=1e-4)


def test_a_layout_that_does_not_divide_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="dp_shard=-1 must be 0 or more"):
        recipe(corpus, tmp_path / "run", dp_shard=-1)
    with pytest.raises(UserError, match=r"dp_shard=2 does not divide the 1 data-parallel ranks"):
        train(recipe(corpus, tmp_path / "run", dp_shard=2), device="cpu")
    monkeypatch.setattr(loop.launch, "world_size", lambda: 6)
    with pytest.raises(UserError, match=r"dp_shard=2 does not divide the 3 .*\(6 processes, tp=2"):
        make_mesh(CPU, 2, 2)
    assert not (tmp_path / "run").exists()
