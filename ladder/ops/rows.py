"""Rows that go to the rank that owns them: all_to_all_rows, return_rows, matmul_all_to_all.

How many rows a rank sends to each other one is known on the device only. So every rank has room for
`capacity` rows of each of the T ranks, shapes do not depend on the data, and the owner counts what
did not fit. Rows keep their order: row j of piece q is the j-th row of rank q that this rank owns.

`return_rows` is the adjoint of `all_to_all_rows`: rows go back to where they came from, and those
that were not sent get zeros. So it also brings back what experts computed, and the gradient of
either is the other.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models.errors import UserError
from ladder.ops import exchange
from ladder.ops.calls import execute, operator, size_of
from ladder.ops.checks import check_dims, check_dtype, check_like, check_shape, check_whole
from ladder.ops.registry import MOVABLE, define, implement

Sent = tuple[Tensor, Tensor, Tensor]  # rows [T, capacity, D], counts [T], overflow []


def _check_capacity(capacity: int) -> None:
    if capacity < 1:
        raise UserError(f"capacity={capacity}; expected 1 row or more")


def _check_returned_gradient(ranks: int, grad: Tensor, h: Tensor, W: Tensor) -> None:
    _check_matrices(h, W)
    check_like("h", h, grad=grad)
    check_dims("grad", grad, 3)
    expected = [ranks, grad.shape[1], W.shape[2]]
    check_shape("grad", grad, expected, "rows of each rank, of as many columns as W")


def _check_sent(ranks: int, x: Tensor, capacity: int) -> None:
    check_dtype("x", x, MOVABLE)
    check_dims("x", x, 2)
    _check_capacity(capacity)


def _check_returned(ranks: int, rows: Tensor) -> None:
    check_dtype("rows", rows, MOVABLE)
    check_dims("rows", rows, 3)
    check_shape("rows", rows, [ranks, *rows.shape[1:]], f"a piece for each of {ranks} ranks")


def _check_matrices(h: Tensor, W: Tensor) -> None:
    check_like("h", h, W=W)
    check_dims("h", h, 2)
    check_dims("W", W, 3)
    check_shape("W", W, [W.shape[0], h.shape[1], W.shape[2]], "[experts, columns of h, n]")


def _check_products(ranks: int, h: Tensor, W: Tensor, capacity: int) -> None:
    _check_capacity(capacity)
    _check_matrices(h, W)


SIZES = ("capacity", "columns")
define("all_to_all_rows", SIZES, lambda ranks, x, capacity: (capacity, x[-1]), _check_sent)
define("return_rows", SIZES, lambda ranks, rows: (rows[1], rows[2]), _check_returned)
define(
    "matmul_all_to_all",
    ("capacity", "n", "k", "experts"),
    lambda ranks, h, W, capacity: (capacity, W[2], W[1], W[0]),
    _check_products,
)
define(
    "matmul_all_to_all_backward",
    ("capacity", "n", "k", "experts"),
    lambda ranks, grad, h, W: (grad[1], W[2], W[1], W[0]),
    _check_returned_gradient,
)


# -- staged -----------------------------------------------------------------------------------


def slots(owners: Tensor, ranks: int, capacity: int) -> tuple[Tensor, Tensor]:
    """(slot of each row among [T x capacity], the number of rows of each owner [T]).

    A row that nobody owns, or that does not fit, has the slot T x capacity. Nothing here waits for
    the device.
    """
    mine = owners.unsqueeze(1) == torch.arange(ranks, device=owners.device)  # [m, T]
    position = (mine.cumsum(0) - 1).masked_fill(~mine, 0).sum(1)
    fits = mine.any(1) & (position < capacity)
    slot = torch.where(fits, owners * capacity + position, ranks * capacity)
    return slot, mine.sum(0)


@implement("all_to_all_rows", "staged")
def staged_all_to_all_rows(
    group: dist.ProcessGroup, x: Tensor, owners: Tensor, capacity: int
) -> Sent:
    ranks, columns = dist.get_world_size(group), x.shape[1]
    slot, counts = slots(owners, ranks, capacity)
    outgoing = x.new_zeros(ranks * capacity + 1, columns)  # the last row takes what is not sent
    outgoing.index_copy_(0, slot, x)
    rows = exchange.all_to_all(outgoing[:-1].view(ranks, capacity, columns), group)
    counts = exchange.all_to_all(counts.unsqueeze(1), group).squeeze(1)
    return rows, counts, (counts - capacity).clamp(min=0).sum()


@implement("return_rows", "staged")
def staged_return_rows(group: dist.ProcessGroup, rows: Tensor, owners: Tensor) -> Tensor:
    ranks, capacity, columns = rows.shape
    returned = exchange.all_to_all(rows, group).flatten(0, 1)
    slot, _ = slots(owners, ranks, capacity)
    return torch.cat((returned, returned.new_zeros(1, columns)))[slot]


def expert_rows(offsets: Tensor, rows: int) -> list[slice]:
    """The rows of each expert; the host waits for the device here.

    Raises UserError unless offsets ascend from 0 to at most `rows`.
    """
    ends = offsets.tolist()
    if ends[0] != 0 or any(a > b for a, b in pairwise(ends)) or ends[-1] > rows:
        raise UserError(f"offsets={ends} of h with {rows} rows; expected to ascend from 0 on")
    return [slice(a, b) for a, b in pairwise(ends)]


@implement("matmul_all_to_all", "staged")
def staged_matmul_all_to_all(
    group: dist.ProcessGroup, h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, capacity: int
) -> Sent:
    experts = expert_rows(offsets, len(h))
    y = h.new_zeros(len(h), W.shape[2])
    for expert, matrix in zip(experts, W, strict=True):
        y[expert] = h[expert] @ matrix
    return staged_all_to_all_rows(group, y, owned(owners, offsets), capacity)


@implement("matmul_all_to_all_backward", "staged")
def staged_matmul_all_to_all_backward(
    group: dist.ProcessGroup, grad: Tensor, h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor,
    needs_h: bool, needs_W: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_y = staged_return_rows(group, grad, owned(owners, offsets))
    of_h, of_W = _gradients(h, W, needs_h, needs_W)
    for n, expert in enumerate(expert_rows(offsets, len(h))):
        if needs_h:
            of_h[expert] = of_y[expert] @ W[n].t()
        if needs_W:
            of_W[n] = h[expert].t() @ of_y[expert]
    return of_h, of_W


def _gradients(h: Tensor, W: Tensor, needs_h: bool, needs_W: bool) -> tuple[Tensor, Tensor]:
    """Zeros for the gradients of h and W; [0] for one that is not needed."""
    return h.new_zeros(h.shape if needs_h else 0), W.new_zeros(W.shape if needs_W else 0)


def owned(owners: Tensor, offsets: Tensor) -> Tensor:
    """The owners of the experts' rows; -1 for the rows behind these."""
    at = torch.arange(len(owners), device=owners.device)
    return torch.where(at < offsets[-1], owners, -1)


# -- the operators ----------------------------------------------------------------------------


def _check_owners(owners: Tensor, rows: int, like_name: str, like: Tensor) -> None:
    check_whole("owners", owners, like_name, like)
    check_shape("owners", owners, [rows], f"one for each row of {like_name}")


def _check_owner_values(owners: Tensor, group_name: str) -> None:
    """Raise UserError for an owner that is no rank, on a CPU.

    On a GPU the host would wait for the values; there such rows are not sent.
    """
    ranks = size_of(group_name)
    if owners.device.type != "cpu" or not len(owners):
        return
    least, most = map(int, owners.aminmax())
    if least < -1 or most >= ranks:
        raise UserError(
            f"owners has a {least if least < -1 else most}; expected ranks of the group, 0 to "
            f"{ranks - 1}, or -1 for a row that is not sent"
        )


def received(ranks: int, capacity: int, columns: int, like: Tensor) -> Sent:
    counts = like.new_empty(ranks, dtype=torch.int64)
    overflow = like.new_empty((), dtype=torch.int64)
    return like.new_empty(ranks, capacity, columns), counts, overflow


def _check_all_to_all_rows(x: Tensor, owners: Tensor, capacity: int, group_name: str) -> int:
    ranks = size_of(group_name)
    _check_sent(ranks, x, capacity)
    _check_owners(owners, x.shape[0], "x", x)
    return ranks


@operator("all_to_all_rows")
def all_to_all_rows(
    x: Tensor, owners: Tensor, capacity: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Send each row of x to its owner: (rows, counts, overflow).

    x: [m, D], of int32 or int64 as well; m may differ between ranks. owners: [m] int32 or int64, a
    rank of the group, or -1 for a row that is not sent. capacity: the room for rows of each sender,
    the same on all ranks. rows: [T, capacity, D], piece q from rank q in its order, zeros behind.
    counts: [T] int64, the rows that rank q had for this one, also those that did not fit. overflow:
    [] int64, how many rows for this rank did not, from all ranks; the sum over the ranks is the
    number of all lost rows. Adjoint: return_rows.
    """
    _check_all_to_all_rows(x, owners, capacity, group_name)
    _check_owner_values(owners, group_name)
    return execute("all_to_all_rows", group_name, x, (x.shape, capacity), x, owners, capacity)


@all_to_all_rows.register_fake
def _(x: Tensor, owners: Tensor, capacity: int, group_name: str) -> Sent:
    ranks = _check_all_to_all_rows(x, owners, capacity, group_name)
    return received(ranks, capacity, x.shape[1], x)


def _all_to_all_rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, owners, _, ctx.group = inputs
    ctx.save_for_backward(owners)
    ctx.mark_non_differentiable(output[1], output[2])


def _all_to_all_rows_backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Any, ...]:
    return return_rows(grad, ctx.saved_tensors[0], ctx.group), None, None, None


all_to_all_rows.register_autograd(_all_to_all_rows_backward, setup_context=_all_to_all_rows_setup)


def _check_return_rows(rows: Tensor, owners: Tensor, group_name: str) -> None:
    _check_returned(size_of(group_name), rows)
    check_dims("owners", owners, 1)
    _check_owners(owners, owners.shape[0], "rows", rows)


@operator("return_rows")
def return_rows(rows: Tensor, owners: Tensor, group_name: str) -> Tensor:
    """Bring rows back to where all_to_all_rows took them from: [m, D].

    rows: [T, capacity, D]. owners: [m], as they were given there. A row that was not sent, or did
    not fit, is 0. Adjoint: all_to_all_rows.
    """
    _check_return_rows(rows, owners, group_name)
    _check_owner_values(owners, group_name)
    return execute("return_rows", group_name, rows, (rows.shape,), rows, owners)


@return_rows.register_fake
def _(rows: Tensor, owners: Tensor, group_name: str) -> Tensor:
    _check_return_rows(rows, owners, group_name)
    return rows.new_empty(owners.shape[0], rows.shape[2])


def _return_rows_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    rows, owners, ctx.group = inputs
    ctx.capacity = rows.shape[1]
    ctx.save_for_backward(owners)


def _return_rows_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return all_to_all_rows(grad, ctx.saved_tensors[0], ctx.capacity, ctx.group)[0], None, None


return_rows.register_autograd(_return_rows_backward, setup_context=_return_rows_setup)


def _check_experts(h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor) -> None:
    _check_matrices(h, W)
    check_whole("offsets", offsets, "h", h)
    check_shape("offsets", offsets, [W.shape[0] + 1], "one more than W has experts")
    _check_owners(owners, h.shape[0], "h", h)


def _check_matmul_all_to_all(
    h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, capacity: int, group_name: str
) -> int:
    _check_capacity(capacity)
    _check_experts(h, W, offsets, owners)
    return size_of(group_name)


@operator("matmul_all_to_all")
def matmul_all_to_all(
    h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, capacity: int, group_name: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply each expert's rows by its matrix, and send them to their owners.

    h: [m, k], sorted by expert. W: [experts, k, n], this rank's experts, as many on each rank.
    offsets: [experts + 1] int32 or int64: rows offsets[e] to offsets[e + 1] - 1 are of expert e;
    rows from offsets[-1] on are of none and not sent. owners, capacity, and what is returned: as
    for all_to_all_rows. Adjoint: return_rows, then the products' gradients.
    """
    _check_matmul_all_to_all(h, W, offsets, owners, capacity, group_name)
    _check_owner_values(owners, group_name)
    return execute(
        "matmul_all_to_all", group_name, h, (h.shape, W.shape, capacity),
        h, W, offsets, owners, capacity,
    )  # fmt: skip


@matmul_all_to_all.register_fake
def _(
    h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, capacity: int, group_name: str
) -> Sent:
    ranks = _check_matmul_all_to_all(h, W, offsets, owners, capacity, group_name)
    return received(ranks, capacity, W.shape[2], h)


def _check_product_gradients(
    grad: Tensor, h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, group_name: str
) -> None:
    _check_experts(h, W, offsets, owners)
    _check_returned_gradient(size_of(group_name), grad, h, W)


@operator("matmul_all_to_all_backward")
def matmul_all_to_all_backward(
    grad: Tensor, h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, group_name: str,
    *, needs_h: bool = True, needs_W: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of h and W from that of the rows that matmul_all_to_all returned.

    grad: [T, capacity, n]. needs_h, needs_W: whether each is computed; else it is an empty tensor.
    The rest: as for matmul_all_to_all. It has no gradient itself.
    """
    _check_product_gradients(grad, h, W, offsets, owners, group_name)
    shapes = grad.shape, h.shape, W.shape
    return execute(
        "matmul_all_to_all_backward", group_name, grad, shapes, grad, h, W, offsets, owners,
        needs_h, needs_W,
    )  # fmt: skip


@matmul_all_to_all_backward.register_fake
def _(
    grad: Tensor, h: Tensor, W: Tensor, offsets: Tensor, owners: Tensor, group_name: str,
    *, needs_h: bool = True, needs_W: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_product_gradients(grad, h, W, offsets, owners, group_name)
    return _gradients(h, W, needs_h, needs_W)


def _matmul_all_to_all_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    h, W, offsets, owners, _, ctx.group = inputs
    ctx.save_for_backward(h, W, offsets, owners)
    ctx.mark_non_differentiable(output[1], output[2])


def _matmul_all_to_all_backward(ctx: Any, grad: Tensor, *others: Any) -> tuple[Any, ...]:
    needs_h, needs_W = ctx.needs_input_grad[:2]
    of_h, of_W = matmul_all_to_all_backward(
        grad, *ctx.saved_tensors, ctx.group, needs_h=needs_h, needs_W=needs_W
    )
    return of_h if needs_h else None, of_W if needs_W else None, None, None, None, None


matmul_all_to_all.register_autograd(
    _matmul_all_to_all_backward, setup_context=_matmul_all_to_all_setup
)
