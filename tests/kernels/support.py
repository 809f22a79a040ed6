"""Helpers of the tests of kernels.

They are compared with float64 by the same bodies three ways: on a CPU their references and, through
Triton's interpreter, the kernels (`pytest -m interpreted`: see tests.interpreter); on a GPU the
compiled kernels (`pytest -m gpu`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.kernels.prefill import land_rows, rotary_prompt, swiglu
from ladder.models.layers import rotary_tables, rotate
from tests.interpreter import refusal
from tests.samples import small_config

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
INTERPRETED = [
    pytest.mark.interpreted,
    pytest.mark.skipif(bool(refusal), reason=f"Triton's interpreter: {refusal}"),
    # NumPy's words on the infinities and NaN that tests put in
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def on(where: str, *shape: Any, slow: bool = False) -> Any:
    """A case (device, *shape). where: "cpu", "cuda", or "interpreter", whose device is "cpu".

    slow: too costly for `make test`, of which a smaller case is there, too.
    """
    marks = {"cpu": [], "interpreter": INTERPRETED, "cuda": GPU}[where]
    marks = [*marks, *([pytest.mark.slow] if slow else [])]
    device = "cuda" if where == "cuda" else "cpu"
    return pytest.param(device, *shape, marks=marks, id="-".join(str(s) for s in (where, *shape)))


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, or the least integer, so an element that a kernel leaves out is seen;
    fresh inputs."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def poison(*args: Any, **kwargs: Any) -> Tensor:
        made = allocate(*args, **kwargs)
        least = None if made.is_floating_point() else torch.iinfo(made.dtype).min
        return made.fill_(torch.nan if least is None else least)

    return poison


def assert_close(
    found: Tensor, exact: Tensor, plain: Tensor, rounded: Tensor | float = 0.0
) -> None:
    """`found` against float64: 1e-5 in float32, else twice the plain path's error and an ulp, also
    of `rounded`: what the result would be if no rounding of its terms cancelled another."""
    assert found.shape == exact.shape
    assert found.dtype == plain.dtype
    error = (found.double() - exact).abs()
    if found.dtype == torch.float32:
        bound = 1e-5 * exact.abs().max().expand_as(exact)
    else:
        allowed = 2 * (plain.double() - exact).abs().max()
        bound = allowed + torch.finfo(found.dtype).eps * (exact.abs() + rounded)
    # Not `error > bound`: a NaN fails.
    assert bool((error <= bound).all()), f"{error.max()} of {exact.abs().max()}"


def check_land_rows(device: str, rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    pieces = list(torch.randn(count, rows, size, device=device).to(dtype))
    residual = torch.randn(rows, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    total = sum((piece.double() for piece in pieces), residual.double())
    exact = F.rms_norm(total, (size,), weight.double(), 1e-5)
    plain = residual.clone()
    for piece in pieces:
        plain = plain + piece
    before = residual.clone()
    landed, normed = land_rows(pieces, residual, weight, 1e-5)
    assert torch.equal(residual, before)
    assert_close(landed, total, plain)
    assert_close(normed, exact, F.rms_norm(plain, (size,), weight, 1e-5))
    around = torch.full((rows + 2, size), 7.0, dtype=dtype, device=device)
    again, same = land_rows(pieces, residual, weight, 1e-5, (residual, around[1:-1]))
    assert again.data_ptr() == residual.data_ptr()  # in place
    assert torch.equal(again, landed)
    assert torch.equal(same, normed)
    assert (around[[0, -1]] == 7.0).all()
    copies = [torch.full((rows + 2, size), 7.0, dtype=dtype, device=device) for _ in range(7)]
    land_rows(pieces, before, weight, 1e-5, (residual, same), [copy[1:-1] for copy in copies])
    for copy in copies:
        assert torch.equal(copy[1:-1], normed)
        assert (copy[[0, -1]] == 7.0).all()


def check_swiglu(device: str, rows: int, inner: int, dtype: torch.dtype) -> None:
    packed = (4 * torch.randn(rows, 2 * inner, device=device)).to(dtype)
    packed[:, 0] = -200  # exp(-gate) is infinite in float32
    gate, up = packed.chunk(2, dim=-1)
    exact = F.silu(gate.double()) * up.double()
    assert_close(swiglu(packed), exact, F.silu(gate) * up)


def check_rotary_prompt(
    device: str, batch: int, length: int, heads: tuple[int, int, int], dtype: torch.dtype,
    normed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """heads: query heads, KV heads, head_dim. Returns what the kernel does."""
    queries, kv, dim = heads
    config = small_config(max_seq_len=length + 5)
    places = torch.arange(length + 5, device=device).unsqueeze(0)
    config = mock.Mock(wraps=config, head_dim=dim, rope_theta=10000.0, rope_scaling=None)
    tables = rotary_tables(config, places, torch.float32)
    table = torch.cat([t[0, 0, :, : dim // 2] for t in tables], dim=-1).contiguous()
    packed = torch.randn(batch, length, (queries + 2 * kv) * dim, device=device).to(dtype)
    packed[0, 0, -1] = torch.inf  # a value: copied, and nothing else touched by it
    # Written to part of a layer of a larger cache.
    caches = torch.full((2, 3, batch, kv, length + 5, dim), 7.0, dtype=dtype, device=device)
    keys, values = caches[0, 1], caches[1, 1]
    split = packed.unflatten(-1, (-1, dim)).transpose(1, 2).split((queries, kv, kv), dim=1)
    before = packed.clone()
    gains = tuple(torch.rand(2, dim, device=device).to(dtype) + 0.5) if normed else None
    q, k, v = rotary_prompt(packed, table, keys, values, queries, kv, gains, 1e-3)
    assert torch.equal(packed, before)
    cut = tables[:, :, :, :length]
    for n, (found, source) in enumerate(((q, split[0]), (k, split[1]))):
        exact, plain = source.double(), source
        if gains is not None:
            exact = F.rms_norm(exact, (dim,), gains[n].double(), 1e-3)
            plain = F.rms_norm(plain, (dim,), gains[n], 1e-3)
        assert_close(found, rotate(exact, cut.double()), rotate(plain, cut.to(dtype)))
    assert torch.equal(v, split[2])
    assert q.transpose(1, 2).is_contiguous()
    assert k.data_ptr() == keys.data_ptr()
    assert v.data_ptr() == values.data_ptr()
    assert (caches[:, :, :, :, length:] == 7.0).all()
    assert (caches[:, [0, 2]] == 7.0).all()
    return q, k, v


def some_positions(batch: int, length: int, device: str) -> list[Tensor]:
    """[batch] each, two at least: the first and last place, the edges of blocks, and random ones.

    All edges are met, so a small batch takes many.
    """
    edges = {n * block + side for n in (1, 2) for block in (16, 32, 64, 128) for side in (-1, 0)}
    chosen = [0, length - 1, *(edge for edge in edges if edge < length)]
    turns = max(2, -(-len(chosen) // batch))
    chosen += torch.randint(length, (turns * batch - len(chosen),)).tolist()
    return list(torch.tensor(chosen, device=device)[torch.randperm(len(chosen))].view(turns, batch))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return ((q @ k.mT * scale).softmax(-1) @ v).squeeze(2)
