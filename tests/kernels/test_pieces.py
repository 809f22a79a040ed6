"""Inputs in pieces of 8 bits, which landings make, and products of them, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels import LandingJob, decode_shapes, land, new_landing, project
from ladder.kernels.landing import _chunk, with_pieces
from ladder.kernels.limits import CHUNK
from ladder.kernels.pieces import LOWS, new_pieces, split_reference
from ladder.models.eight_bits import BLOCK
from ladder.models.quantised import quantise
from ladder.models.storage import QUANTISED, dequantise
from tests.kernels.products import EPS, empty_slots
from tests.kernels.support import _poisoned_memory, assert_close, on  # noqa: F401  (fixtures)

CASES = [on("cpu"), on("interpreter"), on("cuda")]
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
KINDS = pytest.mark.parametrize("kind", [E4M3, INT8], ids=["e4m3", "int8"])


def of_any_size(rows: int, size: int, device: str) -> Tensor:
    """Rows of very different sizes, each of elements of very different sizes."""
    exponents = torch.randint(-60, 60, (rows, 1), device=device)
    exponents = exponents + torch.randint(-20, 1, (rows, size), device=device)
    return (torch.randn(rows, size, device=device) * 2.0**exponents).bfloat16()


def landed(x: Tensor, kind: torch.dtype) -> LandingJob:
    job = with_pieces(new_landing(x), kind)
    land(job)
    return job


def joined(job: LandingJob) -> Tensor:
    assert job.pieces is not None
    high, low = job.pieces.values.double()
    return (high + low / LOWS[job.pieces.values.dtype]) * job.pieces.factors.double()[:, None]


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("size", [96, 1030, 4096])
def test_the_pieces_of_an_element_are_the_element(device: str, size: int) -> None:
    """But for elements below 2^-13 of the row's largest, off by 2^-21 of it at most."""
    x = of_any_size(7, size, device)
    x[3] = 0
    found, exact = joined(landed(x, E4M3)), x.double()
    top = exact.abs().amax(1, keepdim=True)
    large = exact.abs() >= 2.0**-13 * top
    assert torch.equal(found[large], exact[large])
    assert bool(((found - exact).abs() <= 2.0**-21 * top).all())


@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize("size", [96, 1030, 4096])
def test_the_pieces_in_int8_are_near_each_element(device: str, size: int) -> None:
    """Off by half a 254th of a 127th of the row's largest, and by what float32 rounds."""
    x = of_any_size(7, size, device)
    x[3], x[4, 5] = 0, -(2.0**90)  # an outlier
    x[5] *= 2.0**-20
    job, exact = landed(x, INT8), x.double()
    top = exact.abs().amax(1, keepdim=True)
    assert bool(((joined(job) - exact).abs() <= top / (2 * 254 * 127) * 1.01).all())
    assert job.pieces is not None
    assert int(job.pieces.values.int().abs().max()) == 127  # -128 has no opposite


@KINDS
@pytest.mark.parametrize("device", CASES)
def test_a_row_that_is_not_finite_has_no_factor(device: str, kind: torch.dtype) -> None:
    x = torch.randn(4, 70, device=device).bfloat16()
    x[0, 3], x[1, 69], x[2, 0] = torch.nan, torch.inf, -torch.inf
    job = landed(x, kind)
    assert job.pieces is not None
    assert job.pieces.factors.isnan().tolist() == [True, True, True, False]


@KINDS
@pytest.mark.parametrize("device", CASES)
@pytest.mark.parametrize(("world", "size"), [(4, 96), (3, 1100), (8, 2500), (8, 4200)])
def test_a_landing_makes_pieces_of_its_sum(
    device: str, world: int, size: int, kind: torch.dtype
) -> None:
    """The reference's bits, and everything else that a landing does; of rows that are landed at
    once, by 4, 8 and 16 warps, and of one in turns."""
    residual, own = torch.randn(2, 5, size, device=device).bfloat16()
    slots = torch.randn(world, 5, size, device=device).bfloat16()
    own[3] = residual[3] = slots[:, 3] = 0
    plain, job = (new_landing(residual, sums=[slots.clone()], owns=[(own, 0.5)]) for _ in range(2))
    job = with_pieces(job, kind)
    land(plain)
    land(job)
    assert torch.equal(job.out, plain.out)
    assert job.squares.shape == (5, 1)
    torch.testing.assert_close(job.squares, plain.squares.sum(1, keepdim=True))
    assert all(empty_slots(taken) for taken in job.sums)
    assert job.pieces is not None
    expected = new_pieces(residual, kind)
    split_reference(job.out, expected)
    if kind == INT8:  # torch and Triton divide and multiply by other instructions
        torch.testing.assert_close(job.pieces.factors, expected.factors, rtol=1e-6, atol=0)
        assert_same_values(job.pieces.values, expected.values)
        return
    for one, other in zip(job.pieces, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_same_values(found: Tensor, expected: Tensor) -> None:
    """Within one unit of the second pieces, of nearly all elements none."""
    units = [high.int() * 254 + low.int() for high, low in (found, expected)]
    off = (units[0] - units[1]).abs()
    assert int(off.max()) <= 1
    assert float(off.float().mean()) < 0.01


@pytest.mark.parametrize(
    ("size", "world", "sums", "dtype", "warps", "found"),
    [
        (96, 4, 1, torch.bfloat16, 4, 1024), (1100, 8, 1, torch.bfloat16, 8, 2048),
        (2048, 8, 2, torch.bfloat16, 8, 2048), (2500, 8, 1, torch.bfloat16, 16, 4096),
        (4200, 0, 0, torch.bfloat16, 16, 8192), (4200, 4, 1, torch.bfloat16, 16, 8192),
        (8192, 3, 1, torch.bfloat16, 16, 8192), (4096, 4, 1, torch.float32, 16, 4096),
        # In turns:
        (4200, 8, 1, torch.bfloat16, 16, 4096), (4096, 8, 2, torch.bfloat16, 16, 2048),
        (2048, 8, 2, torch.float32, 8, 1024), (4096, 8, 2, torch.float32, 16, 1024),
    ],
)  # fmt: skip
def test_a_program_lands_no_more_at_once_than_its_threads_hold(
    size: int, world: int, sums: int, dtype: torch.dtype, warps: int, found: int
) -> None:
    x, slots = torch.zeros(2, size, dtype=dtype), [torch.zeros(world, 2, size, dtype=dtype)] * sums
    job = new_landing(x, sums=slots)
    assert _chunk(with_pieces(job, E4M3), world, warps) == found
    assert _chunk(job, world, warps) == CHUNK


@pytest.mark.parametrize(
    ("device", "m", "n", "k", "mean"),
    [
        *(
            on("interpreter", *shape, mean, slow=shape[0] == 9 and mean == 0)
            for shape in ((2, 33, 300), (9, 70, 1100))
            for mean in (0.0, 0.5)
        ),
        on("interpreter", 17, 264, 96, 0.0),
        on("interpreter", 33, 130, 520, 0.5),
        on("interpreter", 20, 70, 1280, 0.5),  # five steps, in three shares
        on("interpreter", 17, 8456, 96, 0.0, slow=True),
        on("interpreter", 33, 2050, 520, 0.5, slow=True),
        *(
            on("cuda", m, n, k, mean)
            for mean in (0.0, 0.5)
            for ms, shapes in (
                ((2, 8, 16, 33, 64), ((71, 200), (1536, 4096), (3584, 4096), (6144, 4096))),
                ((5, 64), ((8456, 1024),)),
                ((4, 16, 64), ((1280, 8192), (400, 16384), (1024, 2304))),
            )
            for m in ms
            for n, k in shapes
        ),
    ],
)
@pytest.mark.parametrize("weights", [*QUANTISED])
def test_products(device: str, m: int, n: int, k: int, mean: float, weights: str) -> None:
    """As near to float64 as products of bfloat16's elements, of rows of any size, and of elements
    that have one sign more often, of whose sums tensor cores cut more."""
    assert decode_shapes.by_pieces(m)
    rows = 4.0 ** torch.randint(-3, 3, (2, n, 1), device=device)
    exact = (torch.randn(2, n, k, device=device) + mean / 2) / k**0.5 * rows
    if weights == "fp8-block":  # blocks of very different sizes, each another one of each row
        blocks = torch.arange(k, device=device) // BLOCK + torch.arange(n, device=device)[:, None]
        exact *= 2.0 ** -(blocks % 5)
    (gate, one), (up, other) = (quantise(each, weights, "w") for each in exact)
    wide = [dequantise(gate, one, torch.float64), dequantise(up, other, torch.float64)]
    sizes = 4.0 ** (torch.arange(m, device=device) % 5)[:, None]
    x = ((torch.randn(m, k, device=device) + mean) * sizes).bfloat16()
    x[1, 3] = 2.0**9  # an outlier
    job = landed(x, QUANTISED[weights])
    add = torch.randn(m, n, device=device).bfloat16()
    arrived = torch.zeros(n, dtype=torch.int32, device=device)
    for gated, normed, adds in ((0, 1, 0), (1, 1, 0), (0, 0, 1)):
        results = []
        for kind in (torch.float64, torch.bfloat16):
            kept = F.rms_norm(x.to(kind), (k,), None, EPS) if normed else x.to(kind)
            y = F.linear(kept, wide[0].to(kind))
            y = F.silu(y) * F.linear(kept, wide[1].to(kind)) if gated else y
            results.append(y - add.to(kind) / 4 if adds else y)
        options: dict[str, Any] = {"squares": job.squares, "eps": EPS} if normed else {}
        options |= {"add": add, "factor": -0.25} if adds else {}
        options |= {"pieces": job.pieces, "scales": (one, other if gated else None)}
        options |= {"arrived": arrived}  # programs may share a tile, but not gated ones
        found = project(x, gate, up if gated else None, **options)
        assert found is not None
        assert_close(found, *results)
        again = project(x, gate, up if gated else None, **options)
        assert torch.equal(found, again)
        assert not arrived.any()


@KINDS
@pytest.mark.parametrize("device", CASES[1:])  # the reference multiplies x
def test_pieces_are_what_is_multiplied(device: str, kind: torch.dtype) -> None:
    """A kernel that reads x, or leaves one piece out, fails."""
    x = torch.randn(9, 300, device=device).bfloat16()
    weights, least, most = ("int8", 1e-3, 1e-2) if kind == INT8 else ("fp8", 0.01, 0.05)
    weight, scales = quantise(torch.randn(40, 300, device=device), weights, "w")
    job = landed(x, kind)
    assert job.pieces is not None
    whole = project(x, weight, pieces=job.pieces, scales=(scales, None))
    nothing = torch.zeros_like(x)
    assert torch.equal(project(nothing, weight, pieces=job.pieces, scales=(scales, None)), whole)
    job.pieces.values[1] = 0
    part = project(x, weight, pieces=job.pieces, scales=(scales, None))
    assert part is not None
    assert whole is not None
    error = (part.double() - whole.double()).square().mean().sqrt() / whole.double().std()
    assert least < error < most  # of 4 bits, or 7
