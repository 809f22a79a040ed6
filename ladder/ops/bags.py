"""Embedding bags of tables that are split over the ranks, pooled for the rank that owns the sample.

The model-parallel half of a DLRM: a rank holds whole tables, looks up the bags of all samples in
them, and sends each sample's pooled rows to the rank that computes on that sample.

Bags are in the layout of FBGEMM, table by table: the indices of table t and sample b are
indices[offsets[t B + b] : offsets[t B + b + 1]]. They may have any length; an empty bag gives 0.
They are pooled in float32 in the order of the indices, and rounded once. The gradient of a row is
summed in the order of `indices`, too, so that it is the same in every run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.jit import DTYPES
from ladder.kernels.bags import pool_bags
from ladder.models.errors import UserError
from ladder.ops import exchange
from ladder.ops.calls import execute, operator, size_of
from ladder.ops.checks import check_dims, check_like, check_whole, resolve
from ladder.ops.registry import define, implement

MODES = ("sum", "mean")
SIZES = ("batch", "tables", "dim")


def _measure(ranks: int, weights: Any, offsets: Any, table_counts: Any = None) -> tuple[int, ...]:
    tables = ranks * len(weights) if table_counts is None else sum(table_counts)
    return (offsets[0] - 1) // len(weights), tables, weights[0][1]


def _check_tables(weights: list[Tensor]) -> None:
    if not weights:
        raise UserError("weights is empty; give every rank a table or more")
    first = weights[0]
    check_like("weights[0]", first, **{f"weights[{n}]": each for n, each in enumerate(weights)})
    check_dims("weights[0]", first, 2)
    for n, each in enumerate(weights):
        if each.dim() != 2 or each.shape[1] != first.shape[1]:
            raise UserError(
                f"weights[{n}] has shape {list(each.shape)}; expected [rows, {first.shape[1]}]"
            )


def _check_line(name: str, tensor: Tensor) -> None:
    if tensor.dim() != 1:
        raise UserError(f"{name} has shape {list(tensor.shape)}; expected one dimension")


def _counted(ranks: int, tables: int, offsets: Tensor, table_counts: list[int] | None) -> list[int]:
    """The number of tables of each rank. tables: this rank's number."""
    bags = offsets.shape[0] - 1
    if bags < 1 or bags % (tables * ranks):
        raise UserError(
            f"offsets has shape {list(offsets.shape)}; expected {tables} tables x B + 1, with a B "
            f"that {ranks} ranks divide"
        )
    counts = [tables] * ranks if table_counts is None else list(table_counts)
    if len(counts) != ranks or min(counts) < 1:
        raise UserError(f"table_counts={counts}; expected {ranks} numbers of 1 or more")
    return counts


def _check_shapes(
    ranks: int, weights: list[Tensor], offsets: Tensor, table_counts: list[int] | None = None
) -> None:
    _check_tables(weights)
    _check_line("offsets", offsets)
    _counted(ranks, len(weights), offsets, table_counts)


def _check_pooled_gradient(grad: Tensor) -> None:
    check_like("grad", grad)
    check_dims("grad", grad, 2)


# The lengths of the bags differ between ranks, so they are no sizes.
define("embedding_bag_all_to_all", SIZES, _measure, _check_shapes)
define(
    "embedding_bag_all_to_all_backward",
    ("batch", "columns"),
    lambda ranks, grad: (ranks * grad[0], grad[1]),
    lambda ranks, grad: _check_pooled_gradient(grad),
)


# -- staged -----------------------------------------------------------------------------------


def pool(weights: list[Tensor], indices: Tensor, offsets: Tensor, mode: str) -> Tensor:
    """The bags of these tables, in their dtype: [B, tables, dim].

    On GPUs by a kernel of our own, which takes a quarter of the time of torch's.
    """
    if weights[0].is_cuda and weights[0].dtype in DTYPES:
        return pool_bags(weights, indices, offsets, mode).unflatten(1, (len(weights), -1))
    pooled = [
        _pool(weight, own, ends, mode)
        for weight, (own, ends) in zip(
            weights, by_table(indices, offsets, len(weights)), strict=True
        )
    ]
    return torch.stack(pooled, dim=1)


def _pool(weight: Tensor, indices: Tensor, offsets: Tensor, mode: str) -> Tensor:
    """The bags of one table. offsets: [bags + 1], from 0 to the end of `indices`."""
    if weight.dtype in (torch.float32, torch.float64):
        return F.embedding_bag(indices, weight, offsets, mode=mode, include_last_offset=True)
    # On a CPU, torch's own means of 16 bits are divided after the sum has been rounded.
    looked_up = weight[indices].float()
    at = torch.arange(len(indices), dtype=offsets.dtype, device=indices.device)
    pooled = F.embedding_bag(at, looked_up, offsets, mode=mode, include_last_offset=True)
    return pooled.to(weight.dtype)


def spread(grad: Tensor, indices: Tensor, offsets: Tensor, rows: int, mode: str) -> Tensor:
    """The gradient of a table [rows, dim] from that of its bags: each row sums its bags.

    It is a lookup again: a row looks up all bags that contain it, in the order of `indices`.
    """
    lengths = offsets.diff()
    if mode == "mean":
        grad = grad.to(exchange.wide(grad.dtype)) / lengths.clamp(min=1).unsqueeze(1)
    bag = torch.repeat_interleave(lengths, output_size=len(indices))
    row, order = indices.sort(stable=True)
    starts = torch.searchsorted(row, torch.arange(rows + 1, device=row.device, dtype=row.dtype))
    return pool([grad], bag[order], starts.to(bag.dtype), "sum")[:, 0]


@implement("embedding_bag_all_to_all", "staged")
def staged(
    group: dist.ProcessGroup, weights: list[Tensor], indices: Tensor, offsets: Tensor, mode: str,
    counts: list[int],
) -> Tensor:  # fmt: skip
    ranks, dim = len(counts), weights[0].shape[1]
    pooled = pool(weights, indices, offsets, mode)
    share = len(pooled) // ranks
    pieces = list(pooled.split(share))
    sizes = [share * count * dim for count in counts]
    parts = exchange.all_to_all_uneven(pieces, sizes, group)
    return torch.cat([part.view(share, -1) for part in parts], dim=1)


@implement("embedding_bag_all_to_all_backward", "staged")
def staged_backward(
    group: dist.ProcessGroup, grad: Tensor, indices: Tensor, offsets: Tensor, rows: list[int],
    mode: str, counts: list[int],
) -> list[Tensor]:  # fmt: skip
    dim, tables = grad.shape[1] // sum(counts), len(rows)
    pieces = list(grad.split([count * dim for count in counts], dim=1))
    parts = exchange.all_to_all_uneven(pieces, [len(grad) * tables * dim] * len(counts), group)
    of_bags = torch.cat(parts).view(-1, tables, dim)  # [B, tables, dim]
    return [
        spread(of_bags[:, table].contiguous(), own, ends, rows[table], mode).to(grad.dtype)
        for table, (own, ends) in enumerate(by_table(indices, offsets, tables))
    ]


def by_table(indices: Tensor, offsets: Tensor, tables: int) -> list[tuple[Tensor, Tensor]]:
    """Each table's indices and offsets, which start at 0; the host waits for the device here."""
    batch = (len(offsets) - 1) // tables
    bounds = offsets[::batch].tolist()
    return [
        (indices[start:end], offsets[t * batch : (t + 1) * batch + 1] - start)
        for t, (start, end) in enumerate(pairwise(bounds))
    ]


# -- the operators ----------------------------------------------------------------------------


def _check(
    weights: list[Tensor], indices: Tensor, offsets: Tensor, mode: str, group_name: str,
    table_counts: list[int] | None,
) -> list[int]:  # fmt: skip
    """The number of tables of each rank."""
    _check_tables(weights)
    _check_bags(indices, offsets, mode, "weights[0]", weights[0])
    return _counted(size_of(group_name), len(weights), offsets, table_counts)


def _check_bags(indices: Tensor, offsets: Tensor, mode: str, like_name: str, like: Tensor) -> None:
    for name, tensor in (("indices", indices), ("offsets", offsets)):
        check_whole(name, tensor, like_name, like)
        _check_line(name, tensor)
    if offsets.dtype != indices.dtype:
        raise UserError(f"offsets is {offsets.dtype} and indices {indices.dtype}; convert one")
    if mode not in MODES:
        raise UserError(f"mode={mode!r}; expected 'sum' or 'mean'")


def _check_values(
    weights: list[Tensor], indices: Tensor, offsets: Tensor, counts: list[int], group_name: str
) -> None:
    """Raise UserError for values out of range, on CPUs only: for a GPU the host would wait."""
    own = counts[dist.get_rank(resolve(group_name))]
    if own != len(weights):
        raise UserError(f"table_counts={counts} has {own} for this rank with {len(weights)} tables")
    if indices.device.type != "cpu":
        return
    bounds = int(offsets[0]), int(offsets[-1])
    if bounds != (0, len(indices)) or bool((offsets.diff() < 0).any()):
        raise UserError(f"offsets must ascend from 0 to the {len(indices)} indices")
    for n, (mine, _) in enumerate(by_table(indices, offsets, len(weights))):
        if len(mine) and not 0 <= int(mine.min()) <= int(mine.max()) < len(weights[n]):
            raise UserError(
                f"indices of weights[{n}] are {int(mine.min())} to {int(mine.max())}; expected "
                f"its rows, 0 to {len(weights[n]) - 1}"
            )


@operator("embedding_bag_all_to_all")
def embedding_bag_all_to_all(
    weights: list[Tensor], indices: Tensor, offsets: Tensor, mode: str, group_name: str,
    *, table_counts: list[int] | None = None,
) -> Tensor:  # fmt: skip
    """The pooled rows of this rank's samples in all tables: [B / T, tables x dim].

    weights: this rank's tables, [rows_t, dim] each, with one dim on all ranks. indices: [lookups]
    and offsets: [tables x B + 1], int32 or int64, the bags of all B samples in them. mode: "sum" or
    "mean". table_counts: the number of tables of each rank; None: as many as this one has. Columns
    are in the order of ranks, then tables. Adjoint: an all-to-all, then each row sums the gradients
    of its bags; the gradient of a table is dense.
    """
    counts = _check(weights, indices, offsets, mode, group_name, table_counts)
    _check_values(weights, indices, offsets, counts, group_name)
    shapes = [each.shape for each in weights], offsets.shape, counts
    return execute(
        "embedding_bag_all_to_all", group_name, weights[0], shapes,
        weights, indices, offsets, mode, counts,
    )  # fmt: skip


@embedding_bag_all_to_all.register_fake
def _(
    weights: list[Tensor], indices: Tensor, offsets: Tensor, mode: str, group_name: str,
    *, table_counts: list[int] | None = None,
) -> Tensor:  # fmt: skip
    counts = _check(weights, indices, offsets, mode, group_name, table_counts)
    share = (offsets.shape[0] - 1) // len(weights) // len(counts)
    return weights[0].new_empty(share, sum(counts) * weights[0].shape[1])


@operator("embedding_bag_all_to_all_backward")
def embedding_bag_all_to_all_backward(
    grad: Tensor, indices: Tensor, offsets: Tensor, rows: list[int], mode: str, group_name: str,
    *, table_counts: list[int] | None = None,
) -> list[Tensor]:  # fmt: skip
    """The gradients of this rank's tables, of `rows` rows each: [rows_t, dim].

    grad: [B / T, tables x dim], of the pooled rows. The rest: as for embedding_bag_all_to_all. It
    has no gradient itself.
    """
    counts = _check_gradient(grad, indices, offsets, rows, mode, group_name, table_counts)
    return execute(
        "embedding_bag_all_to_all_backward", group_name, grad,
        (grad.shape,), grad, indices, offsets, rows, mode, counts,
    )  # fmt: skip


def _check_gradient(
    grad: Tensor, indices: Tensor, offsets: Tensor, rows: list[int], mode: str, group_name: str,
    table_counts: list[int] | None,
) -> list[int]:  # fmt: skip
    """The number of tables of each rank."""
    _check_pooled_gradient(grad)
    if not rows:
        raise UserError("rows is empty; give the rows of each table")
    _check_bags(indices, offsets, mode, "grad", grad)
    counts = _counted(size_of(group_name), len(rows), offsets, table_counts)
    share, tables = (offsets.shape[0] - 1) // len(rows) // len(counts), sum(counts)
    if grad.shape[0] != share or grad.shape[1] % tables:
        raise UserError(
            f"grad has shape {list(grad.shape)}; expected {share} rows, of this rank's samples, of "
            f"{tables} tables with as many columns each"
        )
    return counts


@embedding_bag_all_to_all_backward.register_fake
def _(
    grad: Tensor, indices: Tensor, offsets: Tensor, rows: list[int], mode: str, group_name: str,
    *, table_counts: list[int] | None = None,
) -> list[Tensor]:  # fmt: skip
    counts = _check_gradient(grad, indices, offsets, rows, mode, group_name, table_counts)
    dim = grad.shape[1] // sum(counts)
    return [grad.new_empty(each, dim) for each in rows]


def _setup(
    ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Any
) -> None:
    weights, indices, offsets, ctx.mode, ctx.group = inputs
    ctx.counts = keyword_only_inputs["table_counts"]
    ctx.rows = [each.shape[0] for each in weights]
    ctx.save_for_backward(indices, offsets)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    indices, offsets = ctx.saved_tensors
    found = embedding_bag_all_to_all_backward(
        grad, indices, offsets, ctx.rows, ctx.mode, ctx.group, table_counts=ctx.counts
    )
    return found, None, None, None, None


embedding_bag_all_to_all.register_autograd(_backward, setup_context=_setup)
