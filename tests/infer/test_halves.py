"""Inputs of decode products in float16: bounds, what is undone, and engines that have them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.infer import fused
from ladder.infer.cache import Cache
from ladder.infer.engine import Engine
from ladder.infer.halves import MOST, halve_attention, halve_swiglu
from ladder.models.layers import RMSNorm
from ladder.models.quantised import quantise, quantise_model
from ladder.models.storage import QUANTISED, dequantise
from ladder.parallel.matrix import Matrix
from ladder.parallel.sharding import shard_model
from tests.kernels.support import (
    _poisoned_memory,  # noqa: F401  (a fixture)
    on,
)
from tests.samples import full_model, small_config

D = 160  # a block, and a part of one


def stored(
    rows: int, columns: int, scale: float, gated: bool = False, weights: str = "fp8"
) -> Matrix:
    exact = torch.randn(rows, columns) * scale * 4.0 ** torch.randint(-3, 3, (rows, 1))
    weight, scales = quantise(exact, weights, "w")
    return Matrix(weight, gated, scales)


def values(matrix: Matrix) -> Tensor:
    assert matrix.scales is not None
    return dequantise(matrix.weight, matrix.scales, torch.float64)


def gain_of(kept: bool) -> Tensor:
    """The weight of a norm: some elements are large, or all are folded into the matrix."""
    return 4.0 ** torch.randint(-3, 4, (D,)) if kept else torch.ones(D)


@pytest.mark.parametrize("weights", [*QUANTISED])
@pytest.mark.parametrize(("scale", "kept"), [(1e-4, False), (1.0, True), (1e4, False)])
def test_swiglu_of_any_normed_input_fits_and_down_undoes_it(
    scale: float, kept: bool, weights: str
) -> None:
    """Also of the inputs that come nearest to the bound: rows of gate and up themselves. kept: the
    norm has a weight of its own, as that of each virtual rank."""
    gate_up = stored(2 * 40, D, scale, gated=True, weights=weights)
    down = stored(24, 40, 0.1, weights=weights)
    gate, up = values(gate_up).chunk(2)
    before = values(down)
    gain = gain_of(kept)
    halve_swiglu(gate_up, gain, down)
    near = F.normalize(F.normalize(gate * gain, dim=1) + F.normalize(up * gain, dim=1), dim=1)
    x = torch.cat((near * D**0.5, F.rms_norm(torch.randn(9, D).double(), (D,))))
    x = (x * gain).bfloat16().double()
    inner = gate_up.project(x.bfloat16())
    assert inner is not None
    assert inner.dtype == torch.float16
    assert MOST / 16 < inner.abs().max() <= 2 * MOST
    expected = F.silu(F.linear(x, gate)) * F.linear(x, up)
    scaled = F.silu(F.linear(x, gate)) * F.linear(x, values(gate_up).chunk(2)[1])
    assert torch.equal(F.linear(scaled, values(down)), F.linear(expected, before))
    y = down.project(inner)
    assert y is not None
    assert y.dtype == torch.bfloat16
    exact = F.linear(expected, before)
    assert (y - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("weights", ["fp8", "fp8-block"])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_values_fit_and_the_output_undoes_it(biased: bool, kept: bool, weights: str) -> None:
    qkv = stored(3 * 16, D, 100.0, weights=weights)
    output = stored(24, 16, 0.1, weights=weights)
    bias = torch.randn(3 * 16) * 1e6 if biased else None
    exact = F.linear(values(qkv), torch.eye(D).double())[-16:]
    before, rest = values(output), values(qkv)[:-16]
    shift = torch.zeros(16) if bias is None else bias[-16:].clone()
    gain = gain_of(kept)
    halve_attention(qkv, gain, bias, 16, output)
    assert torch.equal(values(qkv)[:-16], rest)
    scaled = (values(qkv)[-16:] * gain).square().sum(1).sqrt() * D**0.5
    more = torch.zeros(16) if bias is None else bias[-16:]
    assert MOST / 2 < (scaled + more.abs()).max() <= MOST
    factor = values(qkv)[-16:].norm() / exact.norm()
    assert torch.equal(more.double(), shift * factor)
    assert torch.equal(values(output) * factor, before)


@pytest.mark.parametrize("broken", [0.0, torch.nan, torch.inf])
def test_what_has_no_bound_is_not_scaled(broken: float) -> None:
    gate_up, down = stored(8, D, 1.0, gated=True), stored(24, 4, 0.1)
    assert gate_up.scales is not None
    gate_up.scales *= broken
    before = values(down)
    halve_swiglu(gate_up, gain_of(False), down)
    assert torch.equal(values(down), before)


@pytest.mark.parametrize("weights", [*QUANTISED])
@pytest.mark.parametrize("device", [on("cpu"), on("cuda")])
@pytest.mark.parametrize(
    ("name", "rows", "cached"),
    [("standard", 3, "auto"), ("parallel", 65, "auto"), ("ladder", 64, "fp8"),
     ("desync-3x", 1, "auto"), ("desync-3x", 3, "auto")],
)  # fmt: skip
def test_engines_lose_nothing(name: str, rows: int, cached: str, device: str, weights: str) -> None:
    """The logits of a step of several sequences, in bfloat16 with and without inputs in float16,
    beside those of the same weights in float32."""
    ranks = 2 if name == "desync-3x" else 1  # virtual ones
    sizes = {"intermediate_size": 320}
    if ranks > 1 and weights == "fp8-block":  # whole blocks
        sizes = {"intermediate_size": 512, "head_dim": 64}
    config = small_config(name, ranks, ranks > 1, qkv_bias=True, **sizes)
    logits: dict[str, Tensor] = {}
    for way in ("exact", "without", "with"):
        kind = torch.float32 if way == "exact" else torch.bfloat16
        model = full_model(config, 5, torch.bfloat16).to(kind)
        for each in model.modules():  # as of trained models: beyond what an input of length 1 asks
            if isinstance(each, RMSNorm):
                each.weight.data.mul_(64)
        shard_model(model, device=device)
        quantise_model(model, weights)
        pieces = fused._pieces_of if way == "with" else lambda *_: None
        with mock.patch.object(fused, "_pieces_of", pieces):
            engine = Engine(model, fused=True)
        kinds = [type(m).__name__ for m in engine.model.modules()]
        assert "FusedMLP" in kinds
        cache = Cache(engine.model, rows, 4, cached)
        with torch.inference_mode():
            for step in range(4):
                positions = torch.full((rows, 1), step, device=device)
                cache.at(positions, step + 1)
                tokens = (torch.arange(rows, device=device) * 7 + step).unsqueeze(1) % 67
                found = engine.model(tokens, positions=positions, cache=cache, mask=None)
                logits[way] = found.double()
    one, other = ((logits[way] - logits["exact"]).norm() for way in ("with", "without"))
    assert other > 0
    assert one < 1.2 * other
