"""Declaring, launching and checking Triton kernels.

CPU tensors run the plain PyTorch reference, CUDA tensors the Triton kernel. With TRITON_INTERPRET=1
in the environment, CPU tensors also run the Triton kernel, through Triton's interpreter, for tests.

Triton comes with PyTorch's CUDA builds; this module can be imported without it. A build of PyTorch
without CUDA does not import Triton: it could not run kernels, and the import is slow.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Literal, no_type_check

import torch
from torch import Tensor

from ladder.models.errors import UserError

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

triton: Any = None
tl: Any = None
gdc_launch_dependents: Any = None
gdc_wait: Any = None
_asked = os.environ.get("TRITON_INTERPRET") == "1"
if _asked or torch.backends.cuda.is_built():
    with contextlib.suppress(ImportError):
        _cuda = import_module("triton.language.extra.cuda")
        gdc_launch_dependents, gdc_wait = _cuda.gdc_launch_dependents, _cuda.gdc_wait
        triton, tl = import_module("triton"), import_module("triton.language")

INTERPRETED = _asked and triton is not None


def interpreted() -> bool:
    """Whether CPU tensors run the kernels, through Triton's interpreter."""
    return INTERPRETED


# The kind of a kernel. A landing waits for the peers' data, sums it, adds the residual and norms.
# `both`: a kernel that computes and communicates, such as a product that pushes its result.
Kind = Literal["communication", "computation", "landing", "both"]
KERNELS: dict[str, Kind] = {}  # the kinds of all imported kernels, by their names in a trace
_PLACES: dict[str, str] = {}  # where each is declared


def jit(function: Callable[..., Any]) -> Any:
    """Decorate a Triton function that kernels call; without Triton it is left unchanged."""
    return function if triton is None else triton.jit(function)


def kernel(kind: Kind) -> Callable[[Callable[..., None]], Any]:
    """Decorate a Triton kernel for `launch`, and register its kind.

    The same kernel may come again, when its module is reloaded.
    """

    def declare(function: Callable[..., None]) -> Any:
        name = function.__name__
        place = f"{function.__qualname__} in {function.__code__.co_filename}"
        if name in KERNELS and (KERNELS[name], _PLACES.get(name)) != (kind, place):
            raise UserError(
                f"two kernels are called {name}, which a trace could not tell apart: "
                f"{_PLACES.get(name)} ({KERNELS[name]}) and {place} ({kind}); rename one"
            )
        KERNELS[name], _PLACES[name] = kind, place
        return jit(function)

    return declare


@jit
@no_type_check
def begin(PDL: tl.constexpr):
    """Begin a kernel under programmatic dependent launch; nothing is read or written before this.

    Every program of every kernel must call this, even a program without work; a kernel that may
    read something earlier (weights) waits by itself instead. The wait covers only the previous
    kernel, and kernels of other streams whose events come between. Older kernels are known to have
    ended only because these kernels waited for them.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


def element(dtype: torch.dtype) -> Any:
    """Triton's type of a tensor's elements."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def multiplied(dtype: torch.dtype) -> Any:
    """The Triton type in which `dtype` is multiplied; the interpreter cannot multiply bfloat16."""
    return tl.float32 if interpreted() else element(dtype)


@functools.cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether `device` has programmatic dependent launch: compute capability 9 and above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def device_name(device: torch.device) -> str:
    """The name of a device in tables: "cpu", or the GPU's."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def multiprocessors(device: torch.device, interpreter: int) -> int:
    """The number of SMs of a GPU; for a CPU, which runs programs one by one, `interpreter`."""
    if device.type == "cpu":
        return interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernel runs on `tensor`, and not the PyTorch reference.

    Raises UserError for a CUDA tensor if Triton is missing: there is no silent fallback.
    """
    if tensor.device.type == "cpu":
        return interpreted()
    if triton is None:
        raise UserError(
            f"ladder's kernels need Triton on {tensor.device}, and it cannot be "
            f"imported; install the one that your PyTorch build names (pip install triton), or "
            f"choose the plain PyTorch path"
        )
    return True


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one inside a `with`: new streams, events and captures belong to it.

    A capture on another GPU would record none of a model's work. Entering torch's own context takes
    longer than checking whether it is needed.
    """
    here = device.type != "cuda" or device.index is None
    here = here or device.index == torch.cuda.current_device()
    return contextlib.nullcontext() if here else torch.cuda.device(device)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    *args: Any,
    num_warps: int,
    dependent: bool = True,
    **meta: Any,
) -> None:
    """Launch a kernel, registered by the decorator `kernel`, on `device`'s current stream.

    dependent: use programmatic dependent launch, if the device supports it.
    """
    assert kernel.__name__ in KERNELS, f"{kernel.__name__} is not declared by @kernel"
    if device.type == "cpu":
        kernel[grid](*args, PDL=False, num_warps=num_warps, **meta)
        return
    dependent = dependent and has_dependent_launch(device)
    with on_device(device):
        compiled = kernel[grid](
            *args, PDL=dependent, num_warps=num_warps, launch_pdl=dependent, **meta
        )
        for watch in _watchers:
            watch(compiled, math.prod(grid), device)


# Arguments: a compiled Triton kernel, its number of programs, the device it was launched on.
Watch = Callable[[Any, int, torch.device], None]
_watchers: list[Watch] = []


@contextlib.contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Within, `watch` is called after each launch on a GPU."""
    _watchers.append(watch)
    try:
        yield
    finally:
        _watchers.remove(watch)


def check_tensor(name: str, tensor: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Raise UserError unless `tensor` has that shape, is contiguous, and is on `like`'s device."""
    if tuple(tensor.shape) != shape:
        raise UserError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if not tensor.is_contiguous():
        raise UserError(f"{name} {shape} is not contiguous; call .contiguous() once, at load")
    if tensor.device != like.device:
        raise UserError(f"{name} is on {tensor.device}, the rest on {like.device}; move it there")


def check_dtype(**tensors: Tensor) -> None:
    """Raise UserError unless all are of one dtype, bfloat16, float16 or float32."""
    found = {name: tensor.dtype for name, tensor in tensors.items()}
    first = next(iter(found.values()))
    if first not in DTYPES or any(dtype != first for dtype in found.values()):
        raise UserError(f"dtypes {found}; expected one of {DTYPES} for all of them")
