"""benchmarks/products.py: what its ways launch, and what its comparison finds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from ladder import kernels
from ladder.models.quantised import quantise
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import products
from kernels import SHAPES, layer


@pytest.mark.parametrize("way", products.WAYS, ids=lambda way: way.name)
def test_ways_fit_a_gpu(way: products.Way) -> None:
    """Every row is there; lean tiles keep to their share of shared memory."""
    seen = 0
    for shape in ("8B/TP4", "2B/TP4", "70B/TP4"):
        for rows in (1, 4, 16, 33, 64):
            for each in (products.Product(*product) for product in layer(SHAPES[shape])):
                if (cut := way.blocks(rows, each)) is None:
                    continue
                seen += 1
                assert cut.padded >= rows
                if way.name.startswith("lean"):
                    stage = (cut.padded + cut.block * (1 + each.gated)) * cut.step * 2
                    assert (cut.stages - 1) * stage <= 100 * 1024
    assert seen


@pytest.mark.parametrize("weights", ["bf16", "fp8-block"])
def test_a_products_cut_is_its_ways(weights: str) -> None:
    """However `ladder.kernels.decode.project` asks for it."""
    product = products.Product("QKV", 1536, 4096, True, False, weights)
    for way in products.WAYS:
        with products.chosen(way, 64, product):
            asked = products.decode_shapes.blocks(64, 1536, 4096, False, 2, scaled=0, shared=True)
        assert asked == way.blocks(64, product)
    assert asked != products.decode_shapes.blocks(4, 1536, 4096, False, 2)


@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda y: y, None),
        (lambda y: y.index_put((torch.tensor(1), torch.tensor(2)), y.new_tensor(9.0)), "off by"),
        (lambda y: y.index_put((torch.tensor(0), torch.tensor(0)), y.new_tensor(torch.nan)), "off"),
        (lambda y: y + 1e-3 * torch.randn_like(y), "differ"),
    ],
)
def test_a_wrong_element_is_found(
    change: Callable[[Tensor], Tensor], found: str | None, eight_bits: bool
) -> None:
    product = products.Product("gate and up", 32, 64, True, True)
    x, exact = torch.randn(3, 64).bfloat16(), torch.randn(64, 64).bfloat16() / 8
    weight = products.Matrix(*(quantise(exact, "fp8", "w") if eight_bits else (exact, None)))
    read = products.Input(x, {"squares": x.float().square().sum(1, keepdim=True), "eps": 1e-5})
    project = kernels.project
    with mock.patch.object(kernels, "project", lambda *a, **k: change(project(*a, **k))):
        error = products.wrong(products.WAYS[0], product, read, weight)
    assert error is None if found is None else error is not None and found in error
