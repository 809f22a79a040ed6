"""Reducers for several processes: `AsyncReducer` (NCCL or gloo), `PushReducer` (peer memory)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm.access import push_refusal
from ladder.comm.push import DTYPES, PushAllReduce
from ladder.comm.two_shot import TwoShotAllReduce
from ladder.models.errors import UserError
from ladder.models.in_flight import InFlight
from ladder.models.ranks import Ranks
from ladder.models.reducer import Reducer
from ladder.parallel.dispatch import Dispatch, load_dispatch


@dataclass
class Exchange:
    """The two all-reduces of one output: of its partial forward, of its gradient backward."""

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
    autograd runs the nodes created between the two in the forward pass: with a lag, the backward of
    the sublayer that overlapped with the forward's reduce.
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
    """Forward: wait for the all-reduce. Backward: start the gradient's, without waiting."""

    @staticmethod
    def forward(ctx: Any, reduced: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return reduced.view_as(reduced)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy, since the same gradient also flows along the residual.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.exchange.start(grad)
        return grad, None


def _writable(partial: Tensor) -> Tensor:
    """A tensor that can be reduced in place: contiguous and not a view.

    For a view that was changed in place, autograd would copy the gradient before `_Post.backward`
    has waited for it. Matmuls return no views, but module hooks and some fused biases do.
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
    """Asynchronous all-reduces by torch.distributed; the wait is where an output lands.

    With NCCL the current CUDA stream waits, with gloo the process.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup) -> None:
        super().__init__(ranks)
        self.group = group

    def reduce(self, partial: Tensor, blocking: bool = False) -> InFlight[Tensor]:
        exchange = Exchange(self.group)
        posted = _Post.apply(_writable(partial), exchange)
        return InFlight(posted, lambda posted: _Land.apply(posted, exchange))

    def sum_(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self.group)
        return value

    def max_(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.group)
        return value

    def gather(self, logits: Tensor, size: int) -> Tensor:
        return _Gather.apply(logits, size, self.ranks, self.group)


class PushReducer(AsyncReducer):
    """All-reduces by our kernels over peer memory where they are faster, else NCCL. Inference only.

    dispatch: the algorithm for each message size; None: the measured table for this GPU
    (`ladder.parallel.dispatch`). picked: message bytes -> the algorithm that was used.

    A blocking reduce runs on the current stream; others run on a side stream, concurrently with the
    kernels launched next. All calls share slots and must stay in order, so while a reduce is in
    flight on the side stream, all reduces go there.
    """

    def __init__(
        self, ranks: Ranks, group: dist.ProcessGroup, dispatch: Dispatch | None = None
    ) -> None:
        super().__init__(ranks, group)
        refusal = push_refusal(ranks.processes)
        if refusal:
            raise UserError(f"reducer=push cannot run here: {refusal}; use reducer=async")
        self.dispatch = dispatch or load_dispatch(torch.cuda.get_device_name(), ranks.processes)
        self.picked: dict[int, str] = {}
        self.side_stream = torch.cuda.Stream(priority=-1)
        self.pushes: dict[torch.dtype, PushAllReduce] = {}
        self.two_shot: TwoShotAllReduce | None = None
        self.in_flight = 0

    def reduce(self, partial: Tensor, blocking: bool = False) -> InFlight[Tensor]:
        partial = partial.contiguous()
        kernel = self._kernel(partial)
        if kernel is None:
            return super().reduce(partial, blocking)
        if blocking and not self.in_flight:
            return InFlight(kernel(partial, blocking))
        self.in_flight += 1
        self.side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side_stream):
            total = kernel(partial, blocking)
            done = torch.cuda.Event()
            done.record()

        def arrive(partial: Tensor) -> Tensor:
            torch.cuda.current_stream().wait_event(done)
            self.in_flight -= 1
            return total

        return InFlight(partial, arrive)  # keeps the partial alive until then

    def note(self, size: int, name: str) -> None:
        """Record in `picked` the algorithm for a message of `size` bytes; there may be several."""
        if name not in self.picked.setdefault(size, name).split(" and "):
            self.picked[size] += f" and {name}"

    def _kernel(self, partial: Tensor) -> PushAllReduce | TwoShotAllReduce | None:
        """Our kernel for messages like `partial`, made on first use; None: use NCCL."""
        assert not partial.requires_grad, "the push reducer has no backward"
        size = partial.numel() * partial.element_size()
        name = self.dispatch.pick(size) if partial.dtype in DTYPES else "nccl"
        self.note(size, name)
        if name == "push":
            dtype = partial.dtype
            if dtype not in self.pushes:  # for messages of all sizes
                most = self.dispatch.largest("push") // 16 * 16 // dtype.itemsize
                self.pushes[dtype] = PushAllReduce(most, dtype, self.group, partial.device)
            return self.pushes[dtype]
        if name == "two-shot" and self.two_shot is None:
            limit = self.dispatch.largest("two-shot")
            self.two_shot = TwoShotAllReduce(limit, self.group, partial.device)
        return self.two_shot if name == "two-shot" else None
