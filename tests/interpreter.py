"""Triton's interpreter for the tests: our kernels on a CPU, as they are.

A kernel is made for the interpreter when its module is imported under TRITON_INTERPRET=1, and so is
Triton. This module does both, so it is imported before anything else of the project: by the
conftest, and by what forks ranks (tests.distributed). Nothing but a test that asks for it runs a
kernel there, since `jit.INTERPRETED` is False in between: CPU tensors take the references.

    @pytest.mark.parametrize("device", [on("cpu"), on("interpreter"), on("cuda")])
    def test_a_kernel(device: str) -> None: ...            # see tests.kernels.support.on

gives one body three ways to run. On a rank of a pool, `with interpreting() as ran` does it. A
process with a GPU runs the compiled kernels, and no interpreter beside them.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any
from unittest import mock

import torch
from torch import Tensor

MODULES = (
    *(f"ladder.kernels.{name}" for name in ("attention", "choice", "decode", "landing", "norm")),
    *(f"ladder.kernels.{name}" for name in ("bags", "collect", "gemm", "grouped", "messages")),
    "ladder.kernels.prefill",
    "ladder.kernels.push_land",
    *(f"ladder.kernels.{name}" for name in ("eight_bits", "pieces", "rows", "slots", "tiles")),
    *("ladder.comm.push", "ladder.comm.two_shot"),
    "tests.primitives",
)

refusal = ""
if torch.cuda.device_count() > 0:  # by NVML: a process that forks ranks must not touch CUDA
    refusal = "a GPU runs the compiled kernels"
elif find_spec("triton") is None:
    refusal = "needs Triton (pip install triton), of which there are wheels for Linux"
else:
    for early in ("triton", "ladder.jit"):
        assert early not in sys.modules, f"{early} was imported before tests.interpreter"
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        importlib.import_module("triton.experimental.gluon")  # Triton imports it at the first call
        for module in MODULES:
            importlib.import_module(module)

from ladder import jit  # noqa: E402

jit.INTERPRETED = False


def kernels() -> set[str]:
    """The names of all kernels: what is launched, and not the functions that kernels call."""
    return set(jit.KERNELS)


@contextlib.contextmanager
def interpreting() -> Iterator[list[str]]:
    """CPU tensors run the kernels; yields the names of those that ran, as they come.

    bfloat16 is rounded to the nearest, as on a GPU: the interpreter itself cuts the digits off. It
    also replaces the language's functions anew in each call of a function by a kernel, which takes
    longer than most of these functions: here once a module and launch. And it works out the same
    types again and again, for a third of its time: here each once.
    """
    from triton import language
    from triton.runtime import interpreter

    ran: list[str] = []
    replaced: set[int] = set()
    execute, replace = interpreter.GridExecutor.__call__, interpreter._patch_lang
    convert, to_numpy = interpreter._convert_float, interpreter._get_np_dtype
    make_block = language.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    elements: dict[str, Any] = {}

    def noted(self: Any, *args: object, **options: object) -> None:
        if self.fn.__name__ not in ran:
            ran.append(self.fn.__name__)
        replaced.clear()
        execute(self, *args, **options)

    def replaced_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in replaced:
            return None
        replaced.add(module)
        return replace(function)

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (language.float32, language.bfloat16):
            return convert(data, source, target, mode)
        wide = torch.from_numpy(data.reshape(-1).view("float32"))
        return wide.bfloat16().view(torch.int16).numpy().view("uint16").reshape(data.shape)

    def block_once(self: Any, element: Any, shape: Any) -> None:
        key = element.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key], element_ty=element)

    def element_once(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in elements:
            elements[name] = to_numpy(dtype)
        return elements[name]

    with (
        mock.patch.object(jit, "INTERPRETED", True),
        mock.patch.object(interpreter.GridExecutor, "__call__", noted),
        mock.patch.object(interpreter, "_patch_lang", replaced_once),
        mock.patch.object(interpreter, "_convert_float", rounded),
        mock.patch.object(language.block_type, "__init__", block_once),
        mock.patch.object(interpreter, "_get_np_dtype", element_once),
    ):
        yield ran


def addresses(tensors: list[Tensor]) -> Tensor:
    """The addresses of tensors, int64 [len(tensors)]: kernels take that for all ranks' memory."""
    return torch.tensor([each.data_ptr() for each in tensors])
