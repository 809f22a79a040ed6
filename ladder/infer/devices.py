"""An engine's device: making it the current one, its free memory, and copies to the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from ladder.costs import BF16, cache_bytes, inference_bytes
from ladder.jit import on_device
from ladder.models.reducer import Reducer
from ladder.models.transformer import Transformer
from ladder.parallel.sharding import local_tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Placed(Protocol):
    """An object that works on one device."""

    device: torch.device


Owner = TypeVar("Owner", bound=Placed)


def device_of(model: Transformer) -> torch.device:
    """The device of the model's weights."""
    return local_tensor(model.model.embed_tokens.weight).device


def on_its_device(
    method: Callable[Concatenate[Owner, Arguments], Result],
) -> Callable[Concatenate[Owner, Arguments], Result]:
    """Decorate a method so that it runs with its owner's `device` as the current one."""

    @functools.wraps(method)
    def run(owner: Owner, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        with on_device(owner.device):
            return method(owner, *args, **options)

    return run


def free_bytes(device: torch.device) -> float:
    """The free bytes of a GPU; infinite for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")


def least_free(device: torch.device, reducer: Reducer) -> float:
    """The free bytes of the rank with the least. Every rank must call this and gets the same."""
    return -float(reducer.max_(torch.tensor(-free_bytes(device), dtype=torch.float64).to(device)))


def release(device: torch.device) -> None:
    """Wait until a GPU has finished, and release the freed memory that torch's allocator keeps."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def pass_bytes(model: Transformer, batch: int, width: int) -> float:
    """A conservative estimate of a pass's bytes, besides the weights and the cache.

    The pass is over `width` tokens of each of `batch` sequences.
    """
    config, processes = model.config, model.reducer.ranks.processes
    whole = inference_bytes(config, processes, batch, width, 0)
    return (whole - inference_bytes(config, processes, 0, 0, 0)) * _itemsize(model) / BF16


def session_bytes(model: Transformer, batch: int, length: int, cache: str) -> float:
    """A conservative estimate of a session's bytes before its first prompt."""
    kind, scale = ("fp8", 1.0) if cache == "fp8" else ("bf16", _itemsize(model) / BF16)
    kept = cache_bytes(model.config, model.reducer.ranks.processes, batch * length, kind)
    return kept * scale + pass_bytes(model, batch, 1)


def _itemsize(model: Transformer) -> int:
    return model.runtime.dtype_of(local_tensor(model.model.embed_tokens.weight)).itemsize


def to_host(tokens: Tensor) -> Callable[[], list[int]]:
    """Start copying tokens to the host; the function returned waits for them."""
    if not tokens.is_cuda:
        values = tokens.tolist()
        return lambda: values
    with on_device(tokens.device):
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

    def wait() -> list[int]:
        event.synchronize()
        return host.tolist()

    return wait
