"""Helpers of several kernels: adding and norming, and launching."""

from __future__ import annotations

import importlib
from importlib.util import module_from_spec, spec_from_file_location
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F

from ladder import jit
from ladder.kernels import add_rms_norm
from tests.kernels.support import DTYPES, _poisoned_memory, assert_close, on  # noqa: F401  (a fixture)

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
    residual, weight = torch.randn(rows, size, device=device), torch.rand(size, device=device) + 0.5
    residual, weight = residual.to(dtype), weight.to(dtype)
    kinds = [dtype, torch.float32]
    addends = [
        (torch.randn(rows, size, device=device).to(kinds[n % 2]), (1.0, 0.5, -1.7)[n % 3])
        for n in range(count)
    ]
    exact = residual.double()
    plain = residual.clone()
    for addend, factor in addends:
        exact = exact + addend.double() * factor
        plain = plain + (addend * factor).to(dtype)
    normed = F.rms_norm(exact, (size,), weight.double(), 1e-5)
    landed, found = add_rms_norm(residual, addends, weight, 1e-5)
    assert_close(landed, exact, exact.to(dtype))
    assert_close(found, normed, F.rms_norm(plain, (size,), weight, 1e-5))
    if count == 0:
        assert torch.equal(landed, residual)
    add_rms_norm(residual, addends, weight, 1e-5, out=(residual, found))  # in place
    assert torch.equal(residual, landed)


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


def test_a_kernel_without_a_kind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And two of one name are: a trace could not tell them apart."""
    monkeypatch.setattr(jit, "KERNELS", {})

    def product() -> None: ...

    with pytest.raises(AssertionError, match="product is not declared"):
        jit.launch(product, (1,), torch.device("cpu"), num_warps=1)
    jit.kernel("both")(product)
    assert jit.KERNELS == {"product": "both"}
    with pytest.raises(AssertionError, match="two kernels are called product"):
        jit.kernel("both")(product)


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
