"""Engines with weights in 8 bits: the plain path, the fused modules, ranks, options."""

from __future__ import annotations

import pytest
import torch

from ladder.infer.engine import Engine
from ladder.infer.load import quantise_shards
from ladder.models import Transformer, UserError
from ladder.models.quantised import quantise_model
from ladder.parallel.sharding import shard_model
from tests.distributed import Pools, tp_mesh
from tests.samples import FUSED_PLANS, SAME_AT_ANY_T, full_model, small_config

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]


def tokens(model: Transformer, fused: bool) -> list[list[int]]:
    with torch.inference_mode():
        results = Engine(model, fused=fused).generate(PROMPTS, max_new_tokens=8)
    return [result.tokens for result in results]


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["standard", "parallel", "ladder", "desync-3x", "dtp-1"])
def test_fused_modules_compute_what_the_plain_ones_do(name: str, kind: str) -> None:
    config = small_config(name, 1, name not in SAME_AT_ANY_T, qkv_bias=True)
    plain, fused = (full_model(config, 5, torch.float32) for _ in range(2))
    quantise_model(plain, kind)
    quantise_model(fused, kind)
    found = tokens(plain, False)
    assert tokens(fused, True) == found
    packed = Engine(fused).model
    small = [m.weight for m in packed.modules() if getattr(m, "scales", None) is not None]
    assert len(small) == 4 * 4 + 1
    assert {weight.itemsize for weight in small} == {1}


def check_ranks(rank: int, world: int, name: str) -> None:
    """fp8 has the same values on any number of ranks; an error of one is every rank's.

    Of a plan whose ranks have norms of their own, virtual ranks cannot fold those in.
    """
    config = small_config(FUSED_PLANS[name], world, name not in SAME_AT_ANY_T)
    whole = full_model(config, 5, torch.float32)
    quantise_model(whole, "fp8")
    expected = tokens(whole, False) if name in SAME_AT_ANY_T else None
    for fused in (False, True):
        model = full_model(config, 5, torch.float32)
        shard_model(model, tp_mesh(world))
        quantise_shards(model, "fp8")
        found = tokens(model, fused)
        expected = expected or found
        assert found == expected, (name, fused)
    model = full_model(config, 5, torch.float32)
    shard_model(model, tp_mesh(world))
    if rank == 1:
        with torch.no_grad():
            model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"layers\.1\.self_attn\.o_proj\.weight holds NaN"):
        quantise_shards(model, "int8")


@pytest.mark.parametrize("name", ["ladder", "desync-3x"])
def test_ranks(pools: Pools, name: str) -> None:
    pools(2).run(check_ranks, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_the_engine_on_a_gpu(kind: str) -> None:
    """Graphs and kernels, with the CPU's tokens; the same bytes are stored on both devices."""
    whole, model = (full_model(small_config("ladder"), 5, torch.float32) for _ in range(2))
    quantise_model(whole, kind)
    shard_model(model, device="cuda")
    quantise_model(model, kind)
    for (name, one), other in zip(whole.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(one.float(), other.float().cpu()), name
    assert tokens(model, True) == tokens(whole, False)
