"""Helpers of the operators' tests, on ranks: inputs, gradcheck over all ranks, opcheck."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models.errors import UserError
from ladder.parallel import launch

# The largest error of a result, in units of the largest exact value: a few roundings.
TOLERANCE = {
    torch.float64: 1e-13,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


Work = tuple[Callable[..., None], tuple[Any, ...]]  # called as function(rank, world_size, *args)


def gpus(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that calls `on_ranks` on two GPUs."""
    few = torch.cuda.device_count() < 2
    return pytest.mark.gpu(pytest.mark.skipif(few, reason="needs two CUDA devices")(test))


def on_ranks(*work: Work, device: str = "cuda") -> None:
    """Do `work` on two ranks of their own, whose default device is a GPU."""
    assert launch.run(_do, (device, *work), nproc=2) == 0


def _do(name: str, *work: Work) -> int:
    with launch.join(name):
        for function, args in work:
            function(dist.get_rank(), dist.get_world_size(), *args)
    return 0


def world() -> str:
    """The name of the group of all ranks."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.group_name


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers that all ranks share, on the default device."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return numbers.to(torch.get_default_device(), dtype)


def in_order(pieces: Sequence[Tensor]) -> Tensor:
    """The sum in rank order, in float32 (of float64 in that), not rounded."""
    total = torch.zeros(pieces[0].shape, dtype=torch.promote_types(pieces[0].dtype, torch.float32))
    for piece in pieces:
        total = total + piece
    return total


class _Mine(torch.autograd.Function):
    """The inputs of all ranks [T, ...], equal on all -> this rank's. Backward: those of all."""

    @staticmethod
    def forward(ctx: Any, everyone: Tensor) -> Tensor:
        return everyone[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _gather(grads[0])


class _Everyone(torch.autograd.Function):
    """This rank's output -> those of all ranks [T, ...]. Backward: the gradient of this rank's."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        return _gather(mine)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0][dist.get_rank()].clone()


def _gather(mine: Tensor) -> Tensor:
    parts = [torch.empty_like(mine.contiguous()) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine.contiguous())
    return torch.stack(parts)


def check_gradients(function: Callable[..., Any], *inputs: Tensor) -> None:
    """gradcheck of all ranks' outputs by all ranks' inputs [T, ...], in float64.

    Each rank perturbs the same element of the same rank's input, and every rank's copy of an output
    counts, as the project's rule for gradients says.
    """

    def whole(*everyone: Tensor) -> tuple[Tensor, ...]:
        outputs = function(*(_Mine.apply(each) for each in everyone))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(_Everyone.apply(each) for each in outputs if each.requires_grad)

    leaves = [each.detach().clone().requires_grad_() for each in inputs]
    assert torch.autograd.gradcheck(whole, leaves)


def check_operator(op: Any, *args: Any, **options: Any) -> None:
    """opcheck: the schema, the fake implementation, autograd's registration, dynamic shapes."""
    found = torch.library.opcheck(op, args, options)
    assert set(found.values()) == {"SUCCESS"}, found


def check_refused(match: str, op: Any, *args: Any, **options: Any) -> None:
    """The call raises UserError, in one line that matches."""
    with pytest.raises(UserError, match=match) as raised:
        op(*args, **options)
    assert "\n" not in str(raised.value), raised.value
