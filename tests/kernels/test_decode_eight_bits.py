"""Products of a decode step with weights in 8 bits, against float64 and the kernel of 16 bits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels import PushTarget, decode_shapes, project
from ladder.kernels.limits import CHUNK
from ladder.models.eight_bits import BLOCK
from ladder.models.quantised import quantise
from ladder.models.storage import QUANTISED, dequantise
from tests.kernels.support import _poisoned_memory, assert_close, on  # noqa: F401  (fixtures)

EPS = 1e-5
KINDS = ("bf16", *QUANTISED)
BLOCKS = decode_shapes.blocks


def cut_of_8_bits(
    rows: int, outputs: int, size: int, gated: bool, itemsize: int, *_: bool, **__: int
) -> decode_shapes.Cut:
    return BLOCKS(rows, outputs, size, gated, itemsize, eight_bits=True)


def squares_of(x: Tensor) -> Tensor:
    padded = F.pad(x.float().square(), (0, -x.shape[1] % CHUNK))
    return padded.unflatten(1, (-1, CHUNK)).sum(-1)


@pytest.mark.parametrize("kind", [*QUANTISED])
@pytest.mark.parametrize(
    ("device", "m", "n", "k", "dtype"),
    [
        *(on("cpu", *s) for s in ((1, 18, 96, torch.bfloat16), (9, 34, 200, torch.float16))),
        *(
            on("interpreter", *s)
            for s in (
                (1, 18, 96, torch.bfloat16),
                (2, 6, 1100, torch.float32),
                (3, 33, 300, torch.bfloat16),
                (4, 6, 1100, torch.bfloat16),
                (17, 5, 1100, torch.float16),
                (33, 5, 300, torch.bfloat16),
            )
        ),
        *(
            on("cuda", m, n, k, torch.bfloat16)
            for m in (1, 2, 8, 33)  # each is some kernels to compile
            for n, k in ((71, 200), (4096, 3584))
        ),
        on("cuda", 3, 71, 200, torch.float16),
        on("cuda", 4, 1536, 4096, torch.bfloat16),
        *(on("cuda", m, 8456, 1024, torch.bfloat16) for m in (5, 64)),
    ],
)
def test_products(device: str, m: int, n: int, k: int, dtype: torch.dtype, kind: str) -> None:
    """Each branch; rows of very different sizes, so that another row's scale is off by far.

    Scales of fp8 are powers of two, so the bits are those of the product in 16 bits, but on tensor
    cores: there Triton has products of 8 bits add columns in another order.
    """
    # float16 rounds what is below 2^-24, and so the least stored values of rows of small scales.
    least = -1 if dtype == torch.float16 else -3
    # A gate of a large row multiplies the rounding of float32 sums beyond the limit of 1e-5.
    most = 1 if dtype == torch.float32 else 3
    rows = 4.0 ** torch.randint(least, most, (2, n, 1), device=device)
    exact = torch.randn(2, n, k, device=device) / k**0.5 * rows
    if kind == "fp8-block":  # blocks, too
        exact[:, :, : k // 2] /= 4
    (gate, one), (up, other) = (quantise(each, kind, "w") for each in exact)
    wide = [dequantise(gate, one, torch.float64), dequantise(up, other, torch.float64)]
    plain = [each.to(dtype) for each in wide]
    x = torch.randn(m, k, device=device).to(dtype)
    add = torch.randn(m, n, device=device).to(dtype)
    for gated, normed, adds in ((0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 1)):
        results = []
        for weights in (wide, plain):
            kept = x.to(weights[0].dtype)
            kept = F.rms_norm(kept, (k,), None, EPS) if normed else kept
            y = F.linear(kept, weights[0])
            y = F.silu(y) * F.linear(kept, weights[1]) if gated else y
            results.append(y - add.to(y.dtype) / 4 if adds else y)
        options: dict[str, Any] = {"squares": squares_of(x), "eps": EPS} if normed else {}
        options |= {"add": add, "factor": -0.25} if adds else {}
        scales = one, other if gated else None
        found = project(x, gate, up if gated else None, scales=scales, **options)
        assert found is not None
        assert_close(found, *results)
        # The sum of a block is a step's, which a product of 16 bits may not have.
        vectors = decode_shapes.blocks(m, n, k, bool(gated), x.itemsize, True).stages == 0
        if (vectors and kind != "int8") or (kind == "fp8" and device == "cpu"):
            with mock.patch.object(decode_shapes, "blocks", cut_of_8_bits):
                same = project(x, plain[0], plain[1] if gated else None, **options)
            assert torch.equal(found, same)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("device", "kind"), [on(where, kind) for where in ("interpreter", "cuda") for kind in KINDS]
)
def test_rows_of_any_size_and_up_on_either_side(device: str, kind: str, swapped: bool) -> None:
    """Sums of squares near float32's ends and of zero, outliers, infinities and NaN; several steps,
    a last one that is not full, and blocks of different scales; `up` before the gate in memory.

    Rows that are scaled into float16 by another power than the norm's overflow or become zero.
    """
    k, n, eps = 1100, 33, 1e-12
    blocks = torch.arange(k, device=device) // BLOCK
    rows = 2.0 ** torch.randint(-3, 1, (2 * n, 1), device=device)
    exact = torch.randn(2 * n, k, device=device) / k**0.5 * rows * 2.0 ** -(blocks % 3)
    halves, scales = exact.bfloat16().chunk(2), None
    wide = [each.double() for each in halves]
    if kind != "bf16":
        stored, found = quantise(exact, kind, "w")
        halves, scales = stored.chunk(2), found.chunk(2)
        wide = [dequantise(*each, torch.float64) for each in zip(halves, scales, strict=True)]
    order = slice(None, None, -1) if swapped else slice(None)
    (gate, up), wide = halves[order], wide[order]
    x = torch.randn(9, k, device=device) * 2.0 ** torch.tensor(
        [[0], [-59], [-80], [56], [0], [0], [0], [0], [0]], device=device
    )
    x[4] = 0
    x[5, 7] = 2.0**30
    x[6, k - 1], x[7, 3], x[8, 2] = torch.inf, torch.nan, -torch.inf
    x = x.bfloat16()
    squares = squares_of(x)
    assert squares[2].sum() == 0
    normed = x.double() * torch.rsqrt(squares.double().sum(1, keepdim=True) / k + eps)
    for gated in (False, True):
        results = []
        for given in (normed, normed.bfloat16()):
            y = F.linear(given, wide[0].to(given.dtype))
            results.append(F.silu(y) * F.linear(given, wide[1].to(given.dtype)) if gated else y)
        pair = None if scales is None else scales[order] if gated else (scales[order][0], None)
        found = project(x, gate, up if gated else None, squares=squares, eps=eps, scales=pair)
        assert found is not None
        for row in range(6):
            assert_close(found[row], results[0][row], results[1][row])
        assert found[6:].isnan().all()


@pytest.mark.parametrize("kind", [*QUANTISED])
@pytest.mark.parametrize(
    ("device", "rows"), [on("interpreter", 1), on("interpreter", 9), on("cuda", 1), on("cuda", 9)]
)
def test_a_push_is_what_is_returned(device: str, rows: int, kind: str) -> None:
    """With an addend, which is not kept: the slots hold the scaled product."""
    x = torch.randn(rows, 140, device=device).bfloat16()
    add = torch.randn(rows, 70, device=device).bfloat16()
    stored, scales = quantise(torch.randn(70, 140, device=device), kind, "w")
    product = project(x, stored, scales=(scales, None), add=add, factor=0.5)
    assert product is not None
    slots = torch.full((2, rows, 70), -0.0, dtype=torch.bfloat16, device=device)
    push = PushTarget(torch.tensor([slots.data_ptr()] * 2, device=device), 0, 1, 2)
    kept = project(x, stored, scales=(scales, None), add=add, factor=0.5, push=push)
    assert torch.equal(kept, project(x, stored, scales=(scales, None)))
    assert torch.equal(slots[1], product)


@pytest.mark.parametrize(
    ("device", "rows", "n", "k"),
    [
        *(on("cpu", *s) for s in ((1, 18, 96), (9, 34, 200))),
        *(
            on("interpreter", *s)
            for s in ((2, 18, 96), (9, 34, 1100), (20, 70, 300), (33, 18, 300))
        ),
        *(on("cuda", m, *s) for m in (2, 4, 16, 20, 33) for s in ((71, 200), (4096, 3584))),
        *(on("cuda", 16, *s) for s in ((8192, 1056), (4096, 1024))),
    ],
)
@pytest.mark.parametrize("weights", ["fp8", "fp8-block"])
def test_inputs_in_float16_and_results(
    device: str, rows: int, n: int, k: int, weights: str
) -> None:
    """SwiGLU in bfloat16 gives float16, of which a product pushes bfloat16, as it does of bfloat16;
    what a step does (ladder.infer.halves)."""
    exact = torch.randn(3, n, k, device=device) / k**0.5
    exact *= 2.0 ** -(torch.arange(k, device=device) // BLOCK % 3)
    (gate, one), (up, other), (stored, scales) = (quantise(each, weights, "w") for each in exact)
    wide = [dequantise(*each, torch.float64) for each in ((gate, one), (up, other))]
    x = torch.randn(rows, k, device=device).bfloat16()
    inner = project(x, gate, up, scales=(one, other), gives=torch.float16)
    assert inner is not None
    results = []
    for pair in (wide, [each.half() for each in wide]):
        given = x.to(pair[0].dtype)
        results.append(F.silu(F.linear(given, pair[0])) * F.linear(given, pair[1]))
    assert_close(inner, *results)
    x = torch.randn(rows, k, device=device).half()
    weight = dequantise(stored, scales, torch.float64)
    results = [F.linear(x.to(each.dtype), each) for each in (weight, weight.bfloat16())]
    slots = torch.full((2, rows, n), -0.0, dtype=torch.bfloat16, device=device)
    with mock.patch.object(decode_shapes, "FEW", min(n, decode_shapes.FEW)):  # many outputs
        cut = BLOCKS(rows, n, k, False, 2, eight_bits=True, half=True, beside=True)
        found = project(x, stored, scales=(scales, None), gives=torch.bfloat16, beside=True)
    if 16 < rows <= 32:  # the wide tile is among what is tested
        assert cut.block == 64
    assert found is not None
    assert_close(found, *results)
    found = project(x, stored, scales=(scales, None), gives=torch.bfloat16)
    assert found is not None
    assert_close(found, *results)
    if device != "cpu":
        push = PushTarget(torch.tensor([slots.data_ptr()] * 2, device=device), 0, 1, 2)
        options: dict[str, Any] = {"push": push, "keep": False, "gives": torch.bfloat16}
        project(x, stored, scales=(scales, None), **options)
        assert torch.equal(slots[1], found)


def test_weights_in_8_bits_need_their_scales() -> None:
    stored, scales = quantise(torch.randn(4, 16), "fp8", "w")
    x = torch.randn(2, 16)
    wrong: list[tuple[Tensor, Any]] = [
        (stored, None),
        (stored, (scales[:3], None)),
        (stored, (scales.double(), None)),
        (stored, (scales, scales)),
        (stored.double(), (scales, None)),
        (stored, (torch.zeros(4, 2, dtype=torch.uint8), None)),
        (stored, (torch.zeros(4, 1), None)),
    ]
    for weight, given in wrong:
        with pytest.raises(AssertionError):
            project(x, weight, scales=given)
