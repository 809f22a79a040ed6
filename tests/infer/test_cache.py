"""Keys and values in 8 bits: the plain path, the fused modules, evaluation, options."""

from __future__ import annotations

import pytest
import torch

from ladder.eval.scoring import Request, score
from ladder.infer.cache import Cache, reading
from ladder.infer.engine import Engine
from ladder.infer.sampling import Sampling
from ladder.models import Transformer, UserError
from ladder.models.storage import ROUNDING, powers
from ladder.parallel.sharding import shard_model
from tests.samples import SAME_AT_ANY_T, full_model, small_config

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6]]
TOKENS = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))


def tokens(model: Transformer, fused: bool, cache: str) -> list[list[int]]:
    results = Engine(model, fused=fused, cache=cache).generate(PROMPTS, max_new_tokens=12)
    return [result.tokens for result in results]


@pytest.mark.parametrize("name", ["standard", "parallel", "ladder", "desync-3x"])
def test_fused_modules_generate_as_the_plain_ones(name: str) -> None:
    """An engine keeps its cache for the next call, whose prompts are longer or shorter."""
    config = small_config(name, 1, name not in SAME_AT_ANY_T, qkv_bias=True)
    plain, fused = (full_model(config, 5, torch.float32) for _ in range(2))
    found = tokens(plain, False, "fp8")
    engine = Engine(fused, fused=True, cache="fp8")
    for _ in range(2):
        again = engine.generate(PROMPTS, max_new_tokens=12)
        assert [each.tokens for each in again] == found
    session = engine.session(3, 12, Sampling())
    assert {each.itemsize for each in session.cache.tensors()} == {1}


@pytest.mark.parametrize(("name", "degree"), [("ladder", 1), ("desync-3x", 2)])
def test_a_pass_reads_what_is_stored(name: str, degree: int) -> None:
    """`auto` is the pass without a cache; fp8's first layer holds keys and values, rounded."""
    model = full_model(small_config(name, degree, degree > 1), 5, torch.float32)
    caches = [Cache(model, 2, 9, kind) for kind in ("auto", "fp8")]
    places = torch.arange(9).expand(2, -1)
    logits = []
    with torch.no_grad():
        exact = model(TOKENS)
        for cache in caches:
            cache.at(places, 9)
            logits.append(model(TOKENS, positions=places, cache=cache, mask=cache.mask()))
        again = model(TOKENS, **reading(model, TOKENS, "fp8"))
    assert torch.allclose(logits[0], exact, atol=1e-5)
    assert torch.equal(again, logits[1])
    assert reading(model, TOKENS, "auto") == {}
    # 4 layers of 2 roundings; errors that are independent, and at worst uniform within 1/16
    assert 1e-3 < (again - exact).norm() / exact.norm() < 8**0.5 / 16 / 3**0.5
    relative, absolute = ROUNDING["fp8"]
    wide, small = caches
    for one, other, scales in (
        (wide.keys, small.keys, small.key_exponents),
        (wide.values, small.values, small.value_exponents),
    ):
        assert scales is not None
        scale = powers(scales[0])[..., None]
        error = (other[0].float() * scale - one[0]).abs()
        assert (error <= relative * one[0].abs() + absolute * scale).all()
        assert error.max() > 0
    small.clear()
    assert not any(each.view(torch.uint8).any() for each in small.tensors())


def test_scores_read_what_is_stored() -> None:
    """Also of a request that is shorter than its neighbours."""
    model = full_model(small_config(), 5, torch.float32)
    asked = [Request([3, 1, 4], [1, 5]), Request([9], [2]), Request([6, 5], [3, 5, 8, 9])]
    exact = score(model, asked, 3)
    found = score(model, asked, 3, cache="fp8")
    with torch.no_grad():
        given = torch.tensor([[9]])
        logits = model(given, **reading(model, given, "fp8"))
    assert found[1].loglikelihood == pytest.approx(float(logits.log_softmax(-1)[0, 0, 2]), abs=1e-5)
    for one, other in zip(found, exact, strict=True):
        assert 0 < abs(one.loglikelihood - other.loglikelihood) < 0.5


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UserError, match=r"unknown type of --cache 'fp4'.* known: auto, fp8"):
        Engine("nowhere", cache="fp4")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_engine_on_a_gpu() -> None:
    """Graphs and kernels, with the CPU's tokens."""
    whole, model = (full_model(small_config("ladder"), 5, torch.float32) for _ in range(2))
    shard_model(model, device="cuda")
    assert tokens(model, True, "fp8") == tokens(whole, False, "fp8")
