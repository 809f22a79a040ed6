"""Helpers of several kernels: adding and norming, and launching."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.nn.functional as F

from ladder import jit
from ladder.comm.driver import driver
from ladder.kernels import add_rms_norm, carveout, project
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


def compiled_kernel(shared: int) -> Mock:
    return Mock(metadata=SimpleNamespace(shared=shared), function=2**40 + shared)


class Launches:
    """Launches on a stand-in for an H200, and what its driver was asked to set: (function, %)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        properties = SimpleNamespace(
            multi_processor_count=132, shared_memory_per_multiprocessor=228 * 1024
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(jit, "has_dependent_launch", lambda device: True)
        monkeypatch.setattr(carveout, "has_dependent_launch", lambda device: True)
        monkeypatch.setattr(jit, "KERNELS", {"product": "both"})
        driver = SimpleNamespace(cuFuncSetAttribute=self.set)
        monkeypatch.setattr(carveout, "driver", lambda: driver)

    def set(self, function: Any, attribute: int, percent: Any) -> int:
        assert attribute == 9
        self.asked.append((function.value, percent.value))
        return 0

    def launch(self, compiled: Mock, programs: int) -> None:
        kernel = MagicMock(__name__="product")
        kernel.__getitem__.return_value = lambda *args, **options: compiled
        jit.launch(kernel, (programs // 4, 4), torch.device("cuda"), num_warps=1)


# Kernels of a step of 16 rows: 8B at TP 4, and where a product has more programs than SMs.
@pytest.mark.parametrize(
    ("shared", "programs", "wanted"),
    [
        (0, 512, 28),
        (36, 128, 28),
        (36, 144, -1),
        (80, 112, 28),
        (80, 176, -1),
        (120, 1000, 28),  # of which an SM has one anyway
        (70, 256, -1),  # attention
    ],
)
def test_a_kernel_prefers_little_shared_memory_where_all_its_programs_still_run(
    shared: int, programs: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set once, in the first launch; the driver's choice needs no call."""
    launches, compiled = Launches(monkeypatch), compiled_kernel(shared * 1024)
    launches.launch(compiled, programs)
    assert not launches.asked, "nobody has asked for it"
    with carveout.carveout(carveout.share(16)):
        for _ in range(3):
            launches.launch(compiled, programs)
    set_once = [(compiled.function, 28)] if wanted == 28 else []
    assert launches.asked == set_once
    launches.launch(compiled, programs)
    assert launches.asked == set_once


def test_what_a_kernel_prefers_is_that_of_the_newest_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that a step of other rows shares goes back; one that once does not fit stays as it is."""
    launches, shared, large = Launches(monkeypatch), compiled_kernel(0), compiled_kernel(36 * 1024)
    for rows in (4, 16, 1, 64, 3):
        with carveout.carveout(carveout.share(rows)):
            for programs in (100, 144, 100):
                launches.launch(shared, programs)
                launches.launch(large, programs)
    of = {each.function: [p for f, p in launches.asked if f == each.function]
          for each in (shared, large)}  # fmt: skip
    assert of == {shared.function: [28, -1, 28], large.function: [28, -1, 28, -1, 28, -1]}


@pytest.mark.parametrize("device", [on("cuda")])
def test_a_gpu_takes_what_a_kernel_prefers(device: str) -> None:
    x, weight = torch.randn(4, 512, device=device), torch.randn(64, 512, device=device)
    compiled: list[Any] = []
    before = project(x, weight)
    assert before is not None
    for percent in (carveout.SHARE, carveout.DRIVERS):
        with carveout.carveout(percent), jit.watched(lambda *each: compiled.append(each[0])):
            found = project(x, weight)
        assert found is not None
        assert torch.equal(found, before)
        value, handle = ctypes.c_int(), ctypes.c_void_p(compiled[-1].function)
        assert driver().cuFuncGetAttribute(ctypes.byref(value), carveout.ATTRIBUTE, handle) == 0
        dependent = jit.has_dependent_launch(torch.device(device))
        assert value.value == (percent if dependent else carveout.DRIVERS)


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
