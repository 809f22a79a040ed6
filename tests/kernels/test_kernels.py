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


@pytest.mark.parametrize(
    ("device", "size"),
    [on("cpu", 40), on("interpreter", 40), on("cuda", 40), on("cuda", 4096)],
)
def test_addends_of_fewer_rows(device: str, size: int) -> None:
    """A sum of ranks, and partials of each of three: rows of the former are added in turns."""
    residual, own = torch.randn(2, 6, size, device=device)
    total, weight = torch.randn(2, size, device=device), torch.rand(size, device=device)
    addends = [(own, 0.5), (total, 1.0), (total.clone(), -2.0)]
    exact = residual.double() + own.double() * 0.5 - total.double().repeat(3, 1)
    landed, found = add_rms_norm(residual, addends, weight, 1e-5)
    assert_close(landed, exact, exact.to(landed.dtype))
    normed = F.rms_norm(exact, (size,), weight.double(), 1e-5)
    assert_close(found, normed, normed.to(found.dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("device", "rows", "size"),
    [*(on(where, *s) for where in ("cpu", "interpreter") for s in ((1, 40), (4, 200))),
     *(on("cuda", *s) for s in ((1, 4096), (16, 4096), (33, 200)))],
)  # fmt: skip
def test_a_weight_for_each_rank(device: str, rows: int, size: int, dtype: torch.dtype) -> None:
    """Three virtual ranks' residuals, each with a weight of its own, and a sum for all."""
    residual, weight = torch.randn(3 * rows, size, device=device), torch.rand(3, size) + 0.5
    residual, weight = residual.to(dtype), weight.to(device, dtype)
    total = torch.randn(rows, size, device=device).to(dtype)
    exact = residual.double().view(3, rows, size) + 0.5 * total.double()
    landed, found = add_rms_norm(residual, [(total, 0.5)], weight, 1e-5)
    assert_close(landed.view_as(exact), exact, exact.to(dtype))
    normed = F.rms_norm(exact, (size,), eps=1e-5) * weight.double()[:, None]
    assert_close(found.view_as(exact), normed, normed.to(dtype))


def test_what_does_not_fit_a_norm_is_refused() -> None:
    x, weight = torch.randn(9, 16), torch.randn(16)
    with pytest.raises(ValueError, match="at most 8"):
        add_rms_norm(x, [(x, 1.0)] * 9, weight, 1e-5)
    with pytest.raises(ValueError, match=r"weight has shape \(15,\); expected \(16,\)"):
        add_rms_norm(x, [], weight[:15], 1e-5)
    with pytest.raises(ValueError, match=r"\(2, 16\): its 2 ranks must divide .* 9 rows"):
        add_rms_norm(x, [], torch.randn(2, 16), 1e-5)
    with pytest.raises(ValueError, match=r"weight has shape \(3, 15\); expected \(3, 16\)"):
        add_rms_norm(x, [], torch.randn(3, 15), 1e-5)
    with pytest.raises(ValueError, match=r"addends\[1\] .* is not contiguous"):
        add_rms_norm(x, [(x, 1.0), (torch.randn(16, 9).t(), 1.0)], weight, 1e-5)
    with pytest.raises(ValueError, match="dtypes"):
        add_rms_norm(x, [], weight.half(), 1e-5)
    for few in ([x[:2]], [x[:1], x[:3]]):  # do not divide 9 rows; are not equally many
        with pytest.raises(ValueError, match=r"for a residual of 9: .* equally many, and divide"):
            add_rms_norm(x, [(each, 1.0) for each in few], weight, 1e-5)


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
    jit.kernel("both")(product)  # a reloaded module declares it again
    with pytest.raises(ValueError, match="two kernels are called product"):
        jit.kernel("communication")(product)


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


# KiB of a program's shared memory; programs; the percentage of 228 KiB that they need, each with a
# KiB of the system's, on 132 SMs; and what the driver is asked for in a step of 16 rows.
@pytest.mark.parametrize(
    ("shared", "programs", "needed", "wanted"),
    [
        (0, 16, 1, 28),
        (0, 512, 2, 28),
        (36, 128, 17, 28),
        (36, 144, 33, 33),
        (80, 112, 36, 36),
        (120, 128, 54, 54),
        (70, 256, 63, 63),  # attention
        (113, 264, 100, 100),
        (120, 1002, -1, None),  # the head
        (227, 132, 100, 100),
        (227, 136, -1, None),
    ],
)
def test_a_kernel_prefers_the_shared_memory_that_its_programs_need_if_spread_evenly(
    shared: int, programs: int, needed: int, wanted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set once, in the first launch; the driver's choice needs no call."""
    launches, compiled = Launches(monkeypatch), compiled_kernel(shared * 1024)
    assert carveout.needed(shared * 1024, programs, torch.device("cuda")) == needed
    launches.launch(compiled, programs)
    assert not launches.asked, "nobody has asked for it"
    with carveout.carveout(carveout.least(16)):
        for _ in range(3):
            launches.launch(compiled, programs)
    set_once = [] if wanted is None else [(compiled.function, wanted)]
    assert launches.asked == set_once
    launches.launch(compiled, programs)
    assert launches.asked == set_once


def test_steps_on_two_streams_leave_shared_memory_to_the_driver_from_eight_rows_on() -> None:
    rows = (1, 2, 3, 7, 8, 64, 65)
    apart = [carveout.least(each) for each in rows]
    assert apart == [0, 0, *[carveout.LEAST] * 4, carveout.DRIVERS]
    beside = [carveout.least(each, True) for each in rows]
    assert beside == [*apart[:4], *[carveout.DRIVERS] * 3]
    assert [carveout.least(each, False, True) for each in rows] == apart
    in_8_bits = [carveout.least(each, True, True) for each in rows]
    assert in_8_bits == [*[carveout.LEAST] * 4, *[carveout.DRIVERS] * 3]


def test_what_a_kernel_prefers_is_the_most_of_the_newest_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the order of its launches; one whose programs do not all fit stays the driver's."""
    launches = Launches(monkeypatch)
    small, large = compiled_kernel(0), compiled_kernel(113 * 1024)
    for rows in (4, 1, 64, 65):
        launches.asked.clear()
        with carveout.carveout(carveout.least(rows)):
            for programs in (132, 264, 100, 396, 132):
                launches.launch(small, programs)
                if rows != 64 or programs < 396:
                    launches.launch(large, programs)
        of = {each.function: [p for f, p in launches.asked if f == each.function]
              for each in (small, large)}  # fmt: skip
        assert (
            of
            == {
                4: {small.function: [28], large.function: [50, 100, -1]},
                1: {small.function: [1, 2], large.function: [50, 100, -1]},
                64: {small.function: [28], large.function: [50, 100]},
                65: {small.function: [-1], large.function: [-1]},
            }[rows]
        )


@pytest.mark.parametrize("device", [on("cuda")])
def test_a_gpu_takes_what_a_kernel_prefers(device: str) -> None:
    x, weight = torch.randn(4, 512, device=device), torch.randn(64, 512, device=device)
    compiled: list[Any] = []
    needs: list[int] = []
    before = project(x, weight)
    assert before is not None
    gpu = torch.device(device)

    def keep(launched: Any, programs: int, _: torch.device) -> None:
        compiled.append(launched)
        needs.append(carveout.needed(launched.metadata.shared, programs, gpu))

    for at_least in (carveout.LEAST, carveout.DRIVERS):
        with carveout.carveout(at_least), jit.watched(keep):
            found = project(x, weight)
        assert found is not None
        assert torch.equal(found, before)
        value, handle = ctypes.c_int(), ctypes.c_void_p(compiled[-1].function)
        assert driver().cuFuncGetAttribute(ctypes.byref(value), carveout.ATTRIBUTE, handle) == 0
        asked = at_least != carveout.DRIVERS and jit.has_dependent_launch(gpu)
        assert value.value == (max(at_least, needs[-1]) if asked else carveout.DRIVERS)


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
