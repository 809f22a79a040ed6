"""What `ladder bench ops` compares at a point: the calls, their exact result, the link's bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ladder.bench.ops.points import (
    BAGS,
    COLUMNS,
    DIM,
    EXPERTS,
    FEW,
    FLOATS,
    OF_EXPERTS,
    SEND,
    TABLE_ROWS,
    OpPoint,
)
from ladder.comm import collectives
from ladder.kernels.bags import pool_bags
from ladder.operator_names import GATHER, GATHER_BACKWARD, SCATTER, SCATTER_BACKWARD
from ladder.ops import exchange
from ladder.ops.backend import scattered_sum
from ladder.ops.collectives import staged_all_gather
from ladder.ops.products import transposed_product
from ladder.ops.registry import ANY_ORDER, DEFAULT, OPERATORS

EPS = 1e-5
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """The calls of a point, each on the same inputs.

    arguments: the operator's, without group_name. shapes: for `ladder.ops.explain`. alone: the
    product or lookup without communication, in several forms, by name. collective: the baselines by
    name (or ""): a plain form, then the backend's collective (`plain` for a product). outputs:
    returns the tensors to check in a call's result. expected: their exact values. link_bytes: the
    bytes that each rank must receive. memory_bytes: for embedding bags, the bytes that a rank must
    read and write in its own memory.
    """

    point: OpPoint
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    shapes: tuple[Any, ...]
    alone: dict[str, Call]
    collective: dict[str, Call]
    outputs: Callable[[Any], list[Tensor]]
    expected: list[Tensor]
    link_bytes: float
    group: dist.ProcessGroup
    memory_bytes: float = 0.0

    def operator(self) -> Any:
        """Call torch.ops.ladder.<op>, which runs the implementation that is in use."""
        op = getattr(torch.ops.ladder, self.point.op)
        return op(*self.arguments, self.group.group_name, **self.keywords)


def make_case(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    """Random inputs of this rank, and the calls on them; all ranks must call this."""
    torch.manual_seed(1 + dist.get_rank(group))
    if point.op == BAGS:
        return _bags(point, group, device)
    if point.op == EXPERTS:
        return _experts(point, group, device)
    if point.op in OF_EXPERTS:
        return _moved(point, group, device)
    if point.op == GATHER_BACKWARD:
        return _gather_gradients(point, group, device)
    if point.op == SCATTER_BACKWARD:
        return _scatter_gradients(point, group, device)
    return _columns(point, group, device) if point.op in COLUMNS else _rows(point, group, device)


def _first(result: Any) -> list[Tensor]:
    return [result]


def plain(op: str) -> str:
    """The name of the implementation that is only torch's product and the backend's collective."""
    return ANY_ORDER if ANY_ORDER in OPERATORS[op].implementations else DEFAULT


def _plainly(point: OpPoint, group: dist.ProcessGroup, *arguments: Any) -> dict[str, Call]:
    """The implementation `plain` without the operator around it, as one would write it by hand."""
    run = OPERATORS[point.op].implementations[plain(point.op)].run
    return {"": lambda: run(group, *arguments)}


def _random(point: OpPoint, device: torch.device, *shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(FLOATS[point.dtype])


def _products(x: Tensor, weight: Tensor, out: Tensor, ranks: int) -> dict[str, Call]:
    """x by the transposed weight [n, k], by a copy [k, n], and in the chunks of the ranks.

    cuBLAS may be the fastest with any of them.
    """
    copied = weight.t().contiguous()
    pieces = list(zip(x.chunk(ranks), out.chunk(ranks), strict=True))

    def in_chunks() -> None:
        for piece, into in pieces:
            torch.mm(piece, weight.t(), out=into)

    return {
        "alone": lambda: torch.mm(x, weight.t(), out=out),
        "alone, B contiguous": lambda: torch.mm(x, copied, out=out),
        "alone, in chunks": in_chunks,
    }


def _columns(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    ranks = point.ranks
    shard = _random(point, device, point.m // ranks, point.k)
    weight = _random(point, device, point.n // ranks, point.k, scale=point.k**-0.5)
    read = shard.new_empty(point.m, point.k)
    collectives.all_gather(read, shard, group=group)
    exact = [read.double() @ weight.double().t()]
    arguments = shard, [weight.t()], 0
    return Case(
        point, arguments, {"return_A": False}, (shard.shape, [weight.t().shape]),
        _products(read, weight, read.new_empty(point.m, len(weight)), ranks),
        _plainly(point, group, *arguments, False), lambda result: list(result[1]), exact,
        (ranks - 1) * shard.nbytes, group,
    )  # fmt: skip


def _rows(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    ranks, scattered = point.ranks, "reduce_scatter" in point.op
    x = _random(point, device, point.m, point.k // ranks)
    weight = _random(point, device, point.n, x.shape[1], scale=point.k**-0.5)
    exact = x.double() @ weight.double().t()
    dist.all_reduce(exact, group=group)
    if scattered:
        exact = exact.chunk(ranks)[dist.get_rank(group)]
    arguments: tuple[Any, ...] = (x, weight if point.op == FEW else weight.t())
    shapes: tuple[Any, ...] = tuple(each.shape for each in arguments)
    partial = x.new_empty(point.m, point.n)
    link = (1 if scattered else 2) * (ranks - 1) / ranks * partial.nbytes
    alone = _products(x, weight, partial, ranks)
    if not point.op.endswith("add_rms_norm"):
        arguments += ("sum", 0) if scattered else ()
        baseline = _plainly(point, group, *arguments)
        return Case(
            point, arguments, {}, shapes, alone, baseline, _first, [exact], link, group,
        )  # fmt: skip
    torch.manual_seed(0)  # where there is no scatter, all ranks hold the same residual
    residual = _random(point, device, *exact.shape)
    gain = _random(point, device, point.n)
    exact += residual
    scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPS)
    arguments += (residual, gain, EPS, *((0,) if scattered else ()))
    return Case(
        point, arguments, {}, shapes, alone, _plainly(point, group, *arguments), list,
        [exact, exact * scale * gain.double()], link, group,
    )  # fmt: skip


def _gather_gradients(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    """A gather's backward pass with one matrix [n, k], whose k columns are split over the ranks."""
    whole = _random(point, device, point.m, point.n)
    grad = _random(point, device, point.m, point.k // point.ranks)
    weight = _random(point, device, grad.shape[1], point.n, scale=point.k**-0.5)
    exact = grad.double() @ weight.double()
    dist.all_reduce(exact, group=group)
    exact = exact.chunk(point.ranks)[dist.get_rank(group)]
    of_B = whole.double().t() @ grad.double()
    partial = torch.empty_like(whole)
    products = _products(grad, weight.t(), partial, point.ranks)

    def collective() -> tuple[Tensor, list[Tensor]]:
        own = scattered_sum(group, grad @ weight)
        return own, [transposed_product(whole, grad, weight.t())]

    return Case(
        point, (whole, [weight.t()], [grad], 0), {}, (whole.shape, [weight.t().shape]),
        _with(products, grad.t(), whole, torch.empty_like(weight)), {"": collective},
        lambda result: [result[0], *result[1]], [exact, of_B],
        (point.ranks - 1) / point.ranks * partial.nbytes, group,
    )  # fmt: skip


def _with(products: dict[str, Call], first: Tensor, second: Tensor, out: Tensor) -> dict[str, Call]:
    """Each of the products, followed by first @ second."""

    def both(product: Call) -> Call:
        return lambda: (product(), torch.mm(first, second, out=out))

    return {name: both(product) for name, product in products.items()}


def _scatter_gradients(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    """A scatter's backward pass with a matrix [n, k], whose n rows are split over the ranks."""
    ranks = point.ranks
    grad = _random(point, device, point.m // ranks, point.k)
    x = _random(point, device, point.m, point.n // ranks)
    weight = _random(point, device, point.k, x.shape[1], scale=point.k**-0.5)
    whole = grad.new_empty(point.m, point.k)
    collectives.all_gather(whole, grad, group=group)
    products = _products(whole, weight.t(), torch.empty_like(x), ranks)

    def collective() -> tuple[Tensor, Tensor]:
        gathered = staged_all_gather(group, grad, 0)
        return gathered @ weight, transposed_product(x, gathered, weight.t())

    return Case(
        point, (grad, x, weight.t(), 0), {}, (x.shape, weight.t().shape),
        _with(products, whole.t(), x, torch.empty_like(weight)), {"": collective}, list,
        [whole.double() @ weight.double(), x.double().t() @ whole.double()],
        (ranks - 1) * grad.nbytes, group,
    )  # fmt: skip


def _bags(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    ranks, tables, batch, pooling = point.ranks, point.tables, point.m, point.pooling
    joined = _random(point, device, tables * TABLE_ROWS, DIM)
    weights = list(joined.split(TABLE_ROWS))
    looked = torch.randint(TABLE_ROWS, (tables, batch, pooling), device=device)
    indices = looked.reshape(-1)
    offsets = torch.arange(tables * batch + 1, device=device) * pooling
    # In the order of samples, one lookup in all tables gives [batch, tables, DIM] without a copy.
    first = torch.arange(tables, device=device).view(tables, 1, 1) * TABLE_ROWS
    by_sample = (looked + first).transpose(0, 1).reshape(-1)
    received = joined.new_empty(ranks, batch // ranks, tables * DIM)

    def lookup() -> Tensor:
        return F.embedding_bag(
            by_sample, joined, offsets, mode="sum", include_last_offset=True
        ).view(batch, tables * DIM)

    def by_table() -> list[Tensor]:
        return [
            F.embedding_bag(rows, weight, mode="sum")
            for rows, weight in zip(looked, weights, strict=True)
        ]

    def collective(pooled: Tensor) -> Tensor:
        dist.all_to_all_single(received.view(batch, -1), pooled, group=group)
        return received.transpose(0, 1).reshape(batch // ranks, -1)

    alone: dict[str, Call] = {"alone": lookup, "alone, by table": by_table}
    baselines: dict[str, Call] = {
        "": lambda: collective(lookup()),
        "by table": lambda: collective(torch.stack(by_table(), 1).view(batch, -1)),
    }
    if device.type == "cuda":
        table = torch.tensor([each.data_ptr() for each in weights], device=device)
        pool = functools.partial(pool_bags, weights, indices, offsets, "sum", table)
        alone["alone, our kernel"] = pool
        baselines["our kernel"] = lambda: collective(pool())
    exact = torch.stack(
        [
            F.embedding_bag(rows, weight.double(), mode="sum")
            for rows, weight in zip(looked, weights, strict=True)
        ],
        dim=1,
    )
    parts = exchange.all_to_all(exact.view(ranks, batch // ranks, tables * DIM), group)
    found = sum(len(rows.unique()) for rows in looked)  # each row once, from then on in a cache
    memory = (found * DIM + received.numel()) * joined.element_size()
    memory += indices.nbytes + offsets.nbytes
    return Case(
        point, (weights, indices, offsets, "sum"), {},
        ([each.shape for each in weights], offsets.shape),
        alone, baselines, _first,
        [parts.transpose(0, 1).reshape(batch // ranks, -1)],
        (ranks - 1) / ranks * received.nbytes, group, memory,
    )  # fmt: skip


def _experts(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    """Every expert has the same number of rows, and so has every receiving rank."""
    ranks, experts, capacity = point.ranks, point.experts // point.ranks, point.m // point.ranks
    h = _random(point, device, point.m, point.k)
    W = _random(point, device, experts, point.k, point.n, scale=point.k**-0.5)
    each = point.m // experts
    offsets = torch.arange(experts + 1, device=device) * each
    owners = torch.arange(point.m, device=device)[torch.randperm(point.m, device=device)] % ranks
    order = owners.argsort(stable=True)
    y, received = h.new_empty(point.m, point.n), h.new_empty(point.m, point.n)

    def one_by_one() -> None:
        for n in range(experts):
            torch.mm(h[n * each : (n + 1) * each], W[n], out=y[n * each : (n + 1) * each])

    batched = functools.partial(
        torch.bmm, h.view(experts, each, -1), W, out=y.view(experts, each, -1)
    )

    def collective() -> tuple[Tensor]:
        batched()
        dist.all_to_all_single(received, y[order], group=group)
        return (received.view(ranks, capacity, -1),)

    exact = torch.bmm(h.view(experts, each, -1).double(), W.double()).view(point.m, -1)[order]
    return Case(
        point, (h, W, offsets, owners, capacity), {}, (h.shape, W.shape, capacity),
        {"alone": batched, "alone, one by one": one_by_one}, {"": collective},
        lambda result: [result[0]], [exchange.all_to_all(exact.view(ranks, capacity, -1), group)],
        (ranks - 1) / ranks * received.nbytes, group,
    )  # fmt: skip


def _moved(point: OpPoint, group: dist.ProcessGroup, device: torch.device) -> Case:
    """Moving experts' rows without a product: to their owners, as many to each rank, or back."""
    ranks, capacity = point.ranks, point.m // point.ranks
    x = _random(point, device, point.m, point.n)
    owners = torch.arange(point.m, device=device)[torch.randperm(point.m, device=device)] % ranks
    order = owners.argsort(stable=True)
    back, pieces = order.argsort(), torch.empty_like(x)
    sent = exchange.all_to_all(x[order].view(ranks, capacity, -1), group)
    link = (ranks - 1) / ranks * x.nbytes
    if point.op == SEND:

        def send() -> tuple[Tensor]:
            dist.all_to_all_single(pieces, x[order], group=group)
            return (pieces.view(ranks, capacity, -1),)

        return Case(
            point, (x, owners, capacity), {}, (x.shape, capacity), {"alone": lambda: x[order]},
            {"": send}, lambda result: [result[0]], [sent.double()], link, group,
        )  # fmt: skip

    def bring() -> Tensor:
        dist.all_to_all_single(pieces, sent.view(point.m, -1), group=group)
        return pieces[back]

    return Case(
        point, (sent, owners), {}, (sent.shape,), {"alone": lambda: x[back]}, {"": bring}, _first,
        [x.double()], link, group,
    )  # fmt: skip


def torch_calls(case: Case) -> dict[str, Call]:
    """torch's own fused operators for a case, which need CUDA and symmetric memory."""
    import torch.distributed._symmetric_memory

    name, ops = case.group.group_name, torch.ops.symm_mem
    if case.point.op == GATHER:
        shard, weights, _ = case.arguments
        return {
            "torch fused": lambda: ops.fused_all_gather_matmul(shard, weights, 0, name),
            "torch native": lambda: ops.fused_all_gather_matmul(shard, weights, 0, name),
        }
    if case.point.op == SCATTER:
        x, weight, _, _ = case.arguments
        return {"torch fused": lambda: ops.fused_matmul_reduce_scatter(x, weight, "sum", 0, name)}
    return {}
