"""Reducers over torch.distributed: asynchronous all-reduce handles on NCCL or gloo."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.models.reducer import Ranks, Reducer


@dataclass
class Exchange:
    """One output's two all-reduces: forward of its partial, backward of its gradient."""

    group: dist.ProcessGroup
    work: Any = None

    def start(self, value: Tensor) -> None:
        self.work = dist.all_reduce(value, group=self.group, async_op=True)

    def finish(self) -> None:
        self.work.wait()
        self.work = None


class _Post(torch.autograd.Function):
    """Forward: start the all-reduce of the partial, in place. Backward: wait for the gradient's.

    Between `_Land.backward`, which starts the gradient's all-reduce, and this node's backward,
    autograd runs whatever was created between the two in the forward pass: with a lag, the
    backward of the sublayer that ran under the forward's reduce.
    """

    @staticmethod
    def forward(ctx: Any, partial: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        ctx.mark_dirty(partial)
        exchange.start(partial)
        return partial

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.exchange.finish()
        return grads[0], None


class _Land(torch.autograd.Function):
    """Forward: wait for the all-reduce. Backward: start the gradient's, and return at once."""

    @staticmethod
    def forward(ctx: Any, reduced: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return reduced.view_as(reduced)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy: the same gradient goes on along the residual stream.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.exchange.start(grad)
        return grad, None


def _writable(partial: Tensor) -> Tensor:
    """A tensor that may be reduced in place: contiguous, and no view.

    In-place work on a view would have autograd copy the gradient before `_Post.backward` has
    waited for it. Matmuls make no views; hooks on a module and some fused biases do.
    """
    partial = partial.contiguous()
    return partial.clone() if partial._is_view() else partial


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, size: int, ranks: Ranks, group: Any) -> Tensor:
        chunk = math.ceil(size / ranks.processes)
        ctx.bounds = ranks.process * chunk, logits.shape[-1]
        mine = torch.nn.functional.pad(logits, (0, chunk - logits.shape[-1])).contiguous()
        parts = [torch.empty_like(mine) for _ in range(ranks.processes)]
        dist.all_gather(parts, mine, group=group)
        return torch.cat(parts, dim=-1)[..., :size]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].narrow(-1, *ctx.bounds), None, None, None


class AsyncReducer(Reducer):
    """All-reduces by torch.distributed that are waited for where their output lands.

    On NCCL `wait` makes the current stream wait, on gloo the process.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup) -> None:
        super().__init__(ranks)
        self.group = group

    def post(self, partial: Tensor) -> tuple[Tensor, Exchange]:
        exchange = Exchange(self.group)
        return _Post.apply(_writable(self.sum_held(partial)), exchange), exchange

    def wait(self, handle: tuple[Tensor, Exchange]) -> Tensor:
        return _Land.apply(*handle)

    def sum(self, partial: Tensor) -> Tensor:
        exchange = Exchange(self.group)
        return self.wait((_Post.apply(_writable(partial), exchange), exchange))

    def sum_(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.group)
        return value

    def max_(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def gather(self, logits: Tensor, size: int) -> Tensor:
        return _Gather.apply(logits, size, self.ranks, self.group)
