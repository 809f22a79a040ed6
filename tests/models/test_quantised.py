"""Matrices in 8 bits: their values, their error, what is folded in, what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from ladder.models import Transformer, UserError
from ladder.models.eight_bits import BLOCK, EIGHT_BITS, SCALE_BYTES
from ladder.models.quantised import error_bound, quantise, quantise_model
from ladder.models.storage import QUANTISED, dequantise, scale_dtype, scale_shape, widened
from tests.samples import full_model, small_config

KINDS = [*QUANTISED]


def test_names_and_sizes_are_known_without_torch() -> None:
    assert tuple(QUANTISED) == EIGHT_BITS
    assert {kind: scale_dtype(kind).itemsize for kind in KINDS} == SCALE_BYTES


TOKENS = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_values_lie_within_the_bound(kind: str) -> None:
    """Rows from the least to the largest floats, of zeros, of one element, of all values."""
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(60, 33, generator=generator) * 10.0 ** torch.arange(-42.0, 18).view(60, 1)
    weight = torch.cat((rows, torch.zeros(1, 33), torch.full((1, 33), 3e38), -rows[40:41]))
    weight[50, 1:] = 0
    stored, scales = quantise(weight, kind, "w")
    assert stored.dtype == QUANTISED[kind]
    assert (scales.shape, scales.dtype) == (scale_shape(kind, weight.shape), scale_dtype(kind))
    wide = widened(scales, 33)
    exact = stored.double() * wide.double()
    error = (exact - weight.double()).abs()
    assert (error <= error_bound(weight, scales, kind)).all()
    assert torch.equal(exact[60], torch.zeros(33).double())
    assert torch.equal(exact[62], -exact[40])
    again = quantise(weight, kind, "w")
    assert torch.equal(stored.view(torch.uint8), again[0].view(torch.uint8))
    # the scales are as small as may be
    used = stored.double().abs().amax(1)[20:60]
    assert (used >= (126 if kind == "int8" else 224)).all()
    if kind != "int8":
        assert all(math.frexp(scale)[0] == 0.5 for scale in wide[:, 0].tolist())
        kept = dequantise(stored, scales, torch.bfloat16)[20:60]
        assert torch.equal(kept.double(), exact[20:60])
    else:
        assert exact[20:60].abs().amax(1).allclose(weight[20:60].double().abs().amax(1))


def test_blocks_have_scales_of_their_own() -> None:
    """A row's outlier costs the other blocks nothing; the last block is shorter."""
    weight = torch.randn(3, 2 * BLOCK + 5) * 1e-6
    weight[1, BLOCK] = 1e3
    stored, exponents = quantise(weight, "fp8-block", "w")
    assert tuple(exponents.shape) == (3, 3)
    for block in range(3):
        columns = slice(block * BLOCK, (block + 1) * BLOCK)
        alone, scales = quantise(weight[:, columns], "fp8", "w")
        assert torch.equal(alone.float(), stored[:, columns].float())
        found = dequantise(stored, exponents, torch.float32)[:, columns]
        assert torch.equal(found, dequantise(alone, scales, torch.float32))
    whole = dequantise(*quantise(weight, "fp8", "w"), torch.float32)
    assert (whole[1, :BLOCK] == 0).all()  # what one scale for the row costs


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_large_matrix_are_as_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gain = torch.randn(9, 5), torch.rand(5) + 0.5
    whole = quantise(weight * gain, kind, "w")
    monkeypatch.setattr("ladder.models.storage.PIECE", 12)
    for one, other in zip(quantise(weight, kind, "w", gain), whole, strict=True):
        assert torch.equal(one.float(), other.float())
    values = dequantise(*whole, torch.bfloat16)
    monkeypatch.undo()
    assert torch.equal(values, dequantise(*whole, torch.bfloat16))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_refused_by_name(kind: str, bad: float) -> None:
    model = full_model(small_config(), 5, torch.float32)
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[3, 4] = bad
    with pytest.raises(UserError, match=rf"^model.layers.2.mlp.down_proj.weight.*{kind}.*--weight"):
        quantise_model(model, kind)


def of_its_values(model: Transformer, kind: str) -> Transformer:
    """`model` quantised, and a model in float32 that holds the same values."""
    quantise_model(model, kind)
    plain = Transformer(model.config).to(torch.float32)
    with torch.no_grad():
        for name, module in model.named_modules():
            if getattr(module, "bias", None) is not None:
                plain.get_submodule(name).bias.copy_(module.bias)
            if getattr(module, "scales", None) is not None:
                values = module.matrix(torch.float32)
                plain.get_submodule(name).weight = torch.nn.Parameter(values)
            elif getattr(module, "weight", None) is not None:
                plain.get_submodule(name).weight.copy_(module.weight)
    return plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("plan", "degree", "fields"),
    [
        ("ladder", 1, {"tie_embeddings": True}),
        ("parallel", 1, {"qkv_bias": True}),
        ("desync-3x", 4, {}),  # virtual ranks with norms of their own and shared heads
        ("dtp-1", 2, {"qk_norm": True}),
    ],
)
def test_a_model_computes_with_the_stored_values(
    plan: str, degree: int, fields: dict[str, bool], kind: str
) -> None:
    """Bit for bit; and nearly what it computed before, which a norm folded twice is not."""
    shape = small_config(plan, degree, degree > 1, intermediate_size=320, **fields)
    model = full_model(shape, 5, torch.float32)
    before = model(TOKENS)
    plain = of_its_values(model, kind)
    after = model(TOKENS)
    assert torch.equal(after, plain(TOKENS))
    assert 0 < (after - before).norm() / before.norm() < 0.1
    matrices = [m for n, m in model.named_parameters() if n.endswith("proj.weight")]
    assert {m.dtype for m in (*matrices, model.lm_head.weight)} == {QUANTISED[kind]}
    assert model.model.embed_tokens.weight.dtype == torch.float32
    assert not model.cut_parameters()


def test_sublayers_of_ones_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ladder.models import sublayers

    monkeypatch.setitem(sublayers.FEED_FORWARDS, "mine", sublayers.FEED_FORWARDS["swiglu"])
    model = full_model(small_config(feed_forward="mine"), 5, torch.float32)
    with pytest.raises(UserError, match="--weights=int8 with mixer='attention', feed_forward='m"):
        quantise_model(model, "int8")
