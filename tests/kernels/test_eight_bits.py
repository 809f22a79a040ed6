"""Conversions to and from 8 bits, and products of many rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ladder.kernels import eight_bits
from ladder.kernels.eight_bits import linear, product_refusal, round_rows, unpack
from ladder.models.quantised import error_bound, quantise
from ladder.models.storage import QUANTISED, dequantise, rounded
from tests.kernels.support import _poisoned_memory, on  # noqa: F401  (fixtures)


@pytest.mark.parametrize("kind", [*QUANTISED])
@pytest.mark.parametrize(
    ("device", "n", "k"),
    [on("interpreter", 9, 300), on("interpreter", 2, 1100), on("cuda", 515, 5000)],
)
def test_unpacked_weights_have_the_stored_values(device: str, n: int, k: int, kind: str) -> None:
    """Bit for bit; rows and blocks of very different sizes."""
    weight = torch.randn(n, k) * 4.0 ** torch.randint(-6, 6, (n, 1))
    weight[:, : k // 2] *= 16
    stored, scales = quantise(weight, kind, "w")
    for dtype in (torch.bfloat16, torch.float32):
        found = unpack(stored.to(device), scales.to(device), dtype)
        assert torch.equal(found.cpu(), dequantise(stored, scales, dtype))


@pytest.mark.parametrize(
    ("device", "m", "k"),
    [on("interpreter", 70, 200), on("interpreter", 3, 5000), on("cuda", 300, 5000)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_by_torch(device: str, m: int, k: int, dtype: torch.dtype) -> None:
    """All of e4m3's values, what lies between two of them, zeros, the least and largest rows."""
    x = torch.randn(m, k) * 2.0 ** torch.randint(-30, 30, (m, 1))
    values = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x[0] = 0
    x[0, :127] = values
    x[1] = 0
    x[1, :126] = (values[1:] + values[:-1]) / 2  # ties
    x[1, 126] = 448
    x[2] = 0
    x = x.to(dtype)
    small, scales = round_rows(x.to(device))
    expected, factors = rounded(x, "fp8")
    assert torch.equal(scales.cpu(), factors)
    assert torch.equal(small.cpu().float(), expected.float())
    assert torch.equal(small[0, :127].cpu().float(), values)
    for bad in (torch.nan, torch.inf):
        broken = x.clone()
        broken[0, 5] = bad
        small, _ = round_rows(broken.to(device))
        assert rounded(broken, "fp8")[0][0, 5].float().isnan()
        assert small[0, 5].float().isnan()
        assert not small[1:].float().isnan().any()


@pytest.mark.parametrize("kind", [*QUANTISED])
@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
def test_products_of_many_rows(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces, the last of them smaller, also into memory of the caller's."""
    weight, x = torch.randn(75, 144, device=device), torch.randn(70, 144, device=device).bfloat16()
    stored, scales = quantise(weight, kind, "w")
    exact = F.linear(x.double(), dequantise(stored, scales, torch.float64))
    # The weight in bfloat16 is rounded (int8), and the sum.
    spare = x.double().abs() @ dequantise(stored, scales, torch.float64).abs().t()
    bound = 2.0**-8 * exact.abs() + (2.0**-9 if kind == "int8" else 0) * spare + 1e-5 * spare
    unpacked = []
    original = eight_bits.unpack
    monkeypatch.setattr(
        eight_bits, "unpack", lambda *args: unpacked.append(len(args[0])) or original(*args)
    )
    for piece in (2**26, 32 * 144):
        monkeypatch.setattr(eight_bits, "PIECE", piece)
        out = torch.empty(70, 75, dtype=x.dtype, device=device)
        for found in (linear(x, stored, scales), linear(x, stored, scales, out)):
            assert ((found.double() - exact).abs() <= bound).all()
        assert found is out
    assert unpacked == [75, 75, 32, 32, 11, 32, 32, 11]


@pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
def test_products_in_e4m3(device: str) -> None:
    """The error against exact activations is at most that of e4m3; torch's product is the same."""
    weight = torch.randn(80, 144, device=device)
    x = torch.randn(70, 144, device=device) * 2.0 ** torch.arange(-35, 35, device=device)[:, None]
    x = x.bfloat16()
    stored, scales = quantise(weight, "fp8", "w")
    wide = dequantise(stored, scales, torch.float64)
    found = linear(x, stored, scales, rounds=True)
    small, factors = round_rows(x)
    rows = dequantise(small, factors, torch.float64)
    assert ((rows - x.double()).abs() <= error_bound(x, factors, "fp8")).all()
    product, spare = rows @ wide.t(), rows.abs() @ wide.abs().t()
    rest = 2.0**-8 * product.abs() + 1e-5 * spare  # bfloat16, and float32's sums
    assert ((found.double() - product).abs() <= rest).all()
    bound = error_bound(x, factors, "fp8") @ wide.abs().t() + rest
    assert ((found.double() - x.double() @ wide.t()).abs() <= bound).all()
    assert (found.double() - x.double() @ wide.t()).abs().max() > rest.max()
    into = torch.empty_like(found)
    assert torch.equal(linear(x, stored, scales, into, rounds=True), found)
    assert product_refusal(stored, torch.bfloat16) is None
    if device == "cpu":  # the call of GPUs, which torch has on CPUs, too
        same = torch._scaled_mm(
            small, stored.t(), scale_a=factors[:, None], scale_b=scales[None], out_dtype=x.dtype
        )
        assert ((same.double() - product).abs() <= rest).all()
