"""Checks of the operators' arguments, for real and for traced tensors alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ladder.models.errors import UserError
from ladder.ops.registry import DTYPES


def resolve(group_name: str) -> dist.ProcessGroup:
    """The process group of this name, as torch's symmetric-memory operators find it."""
    if not isinstance(group_name, str):
        raise UserError(f"group_name={group_name!r} is no name; give group.group_name")
    try:
        return _resolve_process_group(group_name)
    except RuntimeError as error:
        raise UserError(
            f"group_name={group_name!r} names no process group; call "
            f"torch.distributed.init_process_group first and give a group's group_name"
        ) from error


def check_backend(group_name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise UserError unless the group can communicate tensors on `device`."""
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise UserError(
            f"group_name={group_name!r} has no backend for tensors on {device}; give tensors on "
            f"its device, or make the group with backend='cpu:gloo,cuda:nccl'"
        ) from error


def check_like(first: str, like: Tensor, **others: Tensor) -> None:
    """Raise UserError unless all have a dtype in DTYPES, the same one, and are on one device."""
    check_dtype(first, like, DTYPES)
    for name, tensor in others.items():
        if tensor.dtype != like.dtype:
            raise UserError(f"{name} is {tensor.dtype} and {first} {like.dtype}; convert one")
        if tensor.device != like.device:
            raise UserError(f"{name} is on {tensor.device} and {first} on {like.device}; move it")


def check_dtype(name: str, tensor: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise UserError(f"{name} is {tensor.dtype}; expected {names}")


def check_matrix(name: str, matrix: Tensor, like_name: str, like: Tensor, dim: int = 0) -> None:
    """Raise UserError unless it has two dimensions, of which `dim` is as long as `like`'s last."""
    check_rows(like_name, like)
    if matrix.dim() != 2 or matrix.shape[dim] != like.shape[-1]:
        expected = f"[{like.shape[-1]}, n]" if dim == 0 else f"[n, {like.shape[-1]}]"
        raise UserError(
            f"{name} has shape {list(matrix.shape)}; expected {expected}, since {like_name} has "
            f"shape {list(like.shape)}"
        )


def check_product(A: Tensor, B: Tensor) -> None:
    """Raise UserError unless A [..., k] times B [k, n] is a product."""
    check_like("A", A, B=B)
    check_matrix("B", B, "A", A)


def check_products(name: str, x: Tensor, Bs: Sequence[Tensor]) -> None:
    """Raise UserError unless x [..., k] times each of Bs [k, n_i] is a product, and Bs has one."""
    check_rows(name, x)
    if not Bs:
        raise UserError("Bs is empty; give a matrix or more, or call all_gather")
    check_like(name, x, **{f"Bs[{n}]": B for n, B in enumerate(Bs)})
    for n, B in enumerate(Bs):
        check_matrix(f"Bs[{n}]", B, name, x)


def check_rows(name: str, x: Tensor) -> None:
    if x.dim() < 2:
        raise UserError(f"{name} has shape {list(x.shape)}; expected two dimensions or more")


def check_dims(name: str, tensor: Tensor, dims: int) -> None:
    if tensor.dim() != dims:
        raise UserError(f"{name} has shape {list(tensor.shape)}; expected {dims} dimensions")


def check_shape(name: str, tensor: Tensor, expected: list[int], why: str) -> None:
    if list(tensor.shape) != expected:
        raise UserError(f"{name} has shape {list(tensor.shape)}; expected {expected}, {why}")


def check_dim(name: str, dim: int, tensor_name: str, tensor: Tensor) -> None:
    """Raise UserError unless `dim` is a dimension of the rows, that is any but the last."""
    if not 0 <= dim < tensor.dim() - 1:
        raise UserError(
            f"{name}={dim} of {tensor_name} {list(tensor.shape)}; expected 0 to {tensor.dim() - 2}"
        )


def check_divisible(name: str, length: int, dim: int, ranks: int) -> None:
    if length % ranks:
        raise UserError(
            f"{name} has {length} rows in dimension {dim}, which {ranks} ranks do not divide; pad "
            f"it"
        )


def check_scatters(name: str, x: Tensor, ranks: int) -> None:
    """Raise UserError unless its rows can be scattered along some dimension."""
    check_rows(name, x)
    if all(length % ranks for length in x.shape[:-1]):
        check_divisible(name, x.shape[0], 0, ranks)


def check_reduce_op(reduce_op: str) -> None:
    if reduce_op not in ("sum", "avg"):
        raise UserError(f"reduce_op={reduce_op!r}; expected 'sum' or 'avg'")


def check_switch(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r}; expected true or false")


def check_whole(name: str, tensor: Tensor, like_name: str, like: Tensor) -> None:
    """Raise UserError unless it has whole numbers and is on `like`'s device."""
    check_dtype(name, tensor, (torch.int32, torch.int64))
    if tensor.device != like.device:
        raise UserError(f"{name} is on {tensor.device} and {like_name} on {like.device}; move it")
