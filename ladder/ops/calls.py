"""Running an operator's call, and the shapes of its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import CustomOpDef, Library, custom_op

from ladder.comm.access import group_refusal
from ladder.comm.capture import mode
from ladder.jit import device_name
from ladder.models.errors import UserError
from ladder.ops import choice
from ladder.ops.checks import check_backend, resolve
from ladder.ops.registry import OPERATORS, call_of

P = ParamSpec("P")
R = TypeVar("R")

_ON_CUDA = Library("ladder", "FRAGMENT")


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that autocast converts nothing in it.

    An operator's kernel and its backward formula run with the caller's autocast, which would
    round their products to 16 bits.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def operator(name: str, schema: str | None = None) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Decorate a function, which mutates nothing, as torch.ops.ladder.<name>. schema: see
    custom_op.

    On CUDA the dispatcher calls it directly. torch would check its outputs, as it does on CPUs in
    the tests, and that takes the host as long as the kernels of a small call.
    """

    def define(function: Callable[..., Any]) -> CustomOpDef:
        made = custom_op(f"ladder::{name}", mutates_args=(), schema=schema)(function)
        _ON_CUDA.impl(name, torch.compiler.disable(function), "CUDA")
        return made

    return define


def rows_of(shape: Sequence[int]) -> int:
    """The rows of [..., columns]."""
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows


@without_autocast
def execute(op: str, group_name: str, like: Tensor, shapes: tuple[Any, ...], *args: Any) -> Any:
    """Run `op` on arguments that have been checked. shapes: for the operator's `measure`."""
    _check_reverse_mode()
    group = resolve(group_name)
    check_backend(group_name, group, like.device)
    ranks = group.size()  # dist.get_world_size takes the host 40 times as long
    sizes = OPERATORS[op].measure(ranks, *shapes)
    any_order, about = choice.allows_any_order(group), (device_name(like.device), like.dtype)
    apart = (group_refusal(group, like.device) or "") if like.is_cuda and ranks > 1 else None
    call = call_of(op, *about, ranks, sizes, any_order, mode(), apart)
    return choice.run(call, group, *args)


def allow_any_order(group_name: str, allowed: bool = True) -> None:
    """Let all later calls with this group, also backward passes, add in any order.

    The last bits of results then depend on the backend and on the implementation that is picked.
    All ranks of the group must allow the same. By default, sums are in the order of the ranks.
    """
    groups = choice.any_order_groups
    (groups.add if allowed else groups.discard)(resolve(group_name))


def size_of(group_name: str) -> int:
    """The number of ranks. Every fake implementation asks for it."""
    _check_reverse_mode()  # torch.compile runs the real one after jvp is traced away
    return resolve(group_name).size()


def _check_reverse_mode() -> None:
    """Raise UserError in forward-mode AD, where torch would take the results' tangents for 0."""
    if forward_ad._current_level >= 0:
        raise UserError(
            "ladder's operators have no forward-mode derivative; call them outside of "
            "torch.func.jvp and forward_ad.dual_level, and differentiate by backward()"
        )


def gathered(x: Tensor, dim: int, ranks: int) -> Tensor:
    """An empty tensor in the shape of every rank's `x`, joined along `dim`."""
    shape = list(x.shape)
    shape[dim] *= ranks
    return x.new_empty(shape)


def scattered(x: Tensor, dim: int, ranks: int, columns: int | None = None) -> Tensor:
    """An empty tensor in the shape of one of `ranks` pieces of `x` along `dim`."""
    shape = list(x.shape)
    shape[dim] //= ranks
    shape[-1] = shape[-1] if columns is None else columns
    return x.new_empty(shape)


def rows_first(x: Tensor, dim: int) -> Tensor:
    """[..., k] as a matrix whose rows begin with dimension `dim`."""
    if x.dim() == 2:  # views take the host microseconds
        return x
    return x.movedim(dim, 0).flatten(0, -2)


def rows_back(matrix: Tensor, like: Tensor, dim: int) -> Tensor:
    """A matrix of rows in the order of `rows_first`, in the shape of `like` but for `dim`."""
    if like.dim() == 2:
        return matrix.contiguous()
    rest = like.movedim(dim, 0).shape[1:-1]
    return matrix.unflatten(0, (-1, *rest)).movedim(0, dim).contiguous()
