"""What the tests of kernels share, and what several kernels use.

They are compared with float64 by the same bodies three ways: on a CPU their references and, through
Triton's interpreter, the kernels (`pytest -m interpreted`: see tests.interpreter); on a GPU the
compiled kernels (`pytest -m gpu`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder import jit
from ladder.kernels import add_rms_norm
from tests.interpreter import refusal

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


def on(where: str, *shape: Any) -> Any:
    """A case (device, *shape). where: "cpu", "cuda", or "interpreter", whose device is "cpu"."""
    marks = {"cpu": [], "interpreter": INTERPRETED, "cuda": GPU}[where]
    device = "cuda" if where == "cuda" else "cpu"
    return pytest.param(device, *shape, marks=marks, id="-".join(str(s) for s in (where, *shape)))


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is NaN, so an element that a kernel leaves out is seen; fresh inputs."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))


def poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: allocate(*args, **kwargs).fill_(torch.nan)


def assert_close(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    """`found` against float64: 1e-5 in float32, else twice the plain path's error and an ulp."""
    assert found.shape == exact.shape
    assert found.dtype == plain.dtype
    error = (found.double() - exact).abs()
    if found.dtype == torch.float32:
        bound = 1e-5 * exact.abs().max().expand_as(exact)
    else:
        allowed = 2 * (plain.double() - exact).abs().max()
        bound = allowed + torch.finfo(found.dtype).eps * exact.abs()
    # Not `error > bound`: a NaN fails.
    assert bool((error <= bound).all()), f"{error.max()} of {exact.abs().max()}"


ROWS = [
    *(
        on(where, *s)
        for where in ("cpu", "interpreter")
        for s in ((1, 96, 0), (3, 200, 1), (2, 1536, 3), (1, 12, 8))
    ),
    *(on("cuda", *s) for s in ((1, 96, 1), (3, 200, 8), (1, 2048, 1), (256, 1536, 2))),
    *(on("cuda", *s) for s in ((1, 4096, 1), (64, 4096, 0), (8, 8192, 4), (4, 12288, 2))),
    on("cuda", 2, 16384, 8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("device", "rows", "size", "count"), ROWS)
def test_add_rms_norm(device: str, rows: int, size: int, count: int, dtype: torch.dtype) -> None:
    stream, weight = torch.randn(rows, size, device=device), torch.rand(size, device=device) + 0.5
    stream, weight = stream.to(dtype), weight.to(dtype)
    kinds = [dtype, torch.float32]
    addends = [
        (torch.randn(rows, size, device=device).to(kinds[n % 2]), (1.0, 0.5, -1.7)[n % 3])
        for n in range(count)
    ]
    exact = stream.double()
    plain = stream.clone()
    for addend, factor in addends:
        exact = exact + addend.double() * factor
        plain = plain + (addend * factor).to(dtype)
    normed = F.rms_norm(exact, (size,), weight.double(), 1e-5)
    landed, found = add_rms_norm(stream, addends, weight, 1e-5)
    assert_close(landed, exact, exact.to(dtype))
    assert_close(found, normed, F.rms_norm(plain, (size,), weight, 1e-5))
    if count == 0:
        assert torch.equal(landed, stream)
    add_rms_norm(stream, addends, weight, 1e-5, out=(stream, found))  # in place
    assert torch.equal(stream, landed)


CACHES = [  # batch, query heads, KV heads, length, head_dim
    *(on("cpu", *s) for s in ((1, 8, 4, 100, 12), (3, 4, 1, 70, 80), (2, 2, 2, 130, 64))),
    *(on("interpreter", *s) for s in ((1, 4, 2, 70, 12), (3, 4, 1, 40, 80), (2, 2, 2, 70, 64))),
    *(on("cuda", *s) for s in ((1, 8, 4, 100, 12), (3, 4, 1, 70, 80), (2, 5, 1, 333, 96))),
    *(on("cuda", *s) for s in ((1, 8, 2, 8192, 128), (1, 16, 2, 4096, 128), (64, 8, 2, 2048, 128))),
    *(on("cuda", *s) for s in ((1, 8, 2, 32768, 64), (256, 8, 2, 512, 128), (4, 6, 6, 1000, 64))),
    on("cuda", 2, 40, 1, 500, 128),
    on("cuda", 2, 4, 2, 300, 256),
]


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


def test_what_does_not_fit_a_norm_is_refused() -> None:
    x, weight = torch.randn(9, 16), torch.randn(16)
    with pytest.raises(ValueError, match="at most 8"):
        add_rms_norm(x, [(x, 1.0)] * 9, weight, 1e-5)
    with pytest.raises(ValueError, match=r"weight has shape \(15,\); expected \(16,\)"):
        add_rms_norm(x, [], weight[:15], 1e-5)
    with pytest.raises(ValueError, match=r"addends\[1\] .* is not contiguous"):
        add_rms_norm(x, [(x, 1.0), (torch.randn(16, 9).t(), 1.0)], weight, 1e-5)
    with pytest.raises(ValueError, match="dtypes"):
        add_rms_norm(x, [], weight.half(), 1e-5)


def test_no_triton_on_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "triton", None)
    with pytest.raises(ValueError, match="need Triton"):
        jit.on_triton(torch.zeros(1, device="meta"))


def test_a_cpu_runs_references_unless_it_is_asked_to_interpret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not jit.on_triton(torch.zeros(1))
    monkeypatch.setattr(jit, "INTERPRETED", True)
    assert jit.on_triton(torch.zeros(1))


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("asked", [False, True])
def test_triton_is_left_alone_where_nothing_can_use_it(
    built: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PyTorch without CUDA runs no kernel, and Triton takes a quarter of a second to import."""
    imported = []
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append(name) or Mock())
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setenv("TRITON_INTERPRET", "1" if asked else "0")
    spec = spec_from_file_location("launch_again", str(jit.__file__))
    assert spec is not None
    assert spec.loader is not None
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    assert (again.triton is not None) == (built or asked) == ("triton" in imported)
    assert again.interpreted() == asked
