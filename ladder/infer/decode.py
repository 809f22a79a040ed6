"""The reducer of a decode step: products push partials, and landings and sends ride on products.

It speaks with the fused modules (`ladder.infer.fused`) in two types of its own. What a sublayer
reads is a `Read`: the stream before its norm, with the sums of its squares. What a sublayer returns
is a `Product`, a matmul not yet done, because only the reducer knows where its result must go.

Where an output blocks, its product pushes it and its landing is launched alone. Where it does not,
it is sent from within the next sublayer's first kernel, and landed within a last one, so that no
rank waits for another's memory. Sublayer n, its first and its last kernel A and B:

    A(n)  carries the send of output n - 1, if that does not block
    B(n)  carries the landing for read n + 1, if that needs nothing of sublayer n; output n is made

Slots. Pushes and sends go to sets of slots in rotation. With a plan whose largest lag is L, and
l = max(L, 1), output m has landed on a rank when B(m + l) has ended, so before that rank sends or
pushes output m + l + 1. A rank has landed that one when its B(m + 2l + 1) has ended, so before it
writes output m + 2l + 2. With 2l + 2 sets nobody writes to a set that another has not cleared.
Between two passes the embedding's all-reduce keeps order: it ends only when every rank has begun
its next pass. Sets are counted from 0 in each pass, so that a captured graph and eager passes mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ladder.comm import symmetric
from ladder.comm.primitives import EMPTY
from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels.decode import project
from ladder.kernels.landing import (
    MAX_OWNS,
    MAX_SUMS,
    LandingJob,
    PushTarget,
    SendJob,
    land,
    new_landing,
    send,
)
from ladder.models.layers import RMSNorm
from ladder.models.plan import Landing, Plan, Sublayer
from ladder.models.reducer import Norm, Pending, Reducer
from ladder.parallel.reducers import PushReducer


@dataclass
class Read:
    """What a sublayer reads: stream [M, D] before `norm`, whose weight is folded into matrices.

    squares: the stream's sums of squares, from its landing. rider: a send that may run within the
    first product of this read.
    """

    stream: Tensor
    squares: Tensor
    norm: RMSNorm
    rider: SendJob | None = None

    def project(self, weight: Tensor, up: Tensor | None = None) -> Tensor:
        """The normed stream times `weight` [N, D], gated by `up` where given: [M, N]."""
        rider = self.rider
        if rider is not None and rider.launched:
            rider = None
        y = project(self.stream, weight, up, squares=self.squares, eps=self.norm.eps, rider=rider)
        assert y is not None
        return y


@dataclass
class Product:
    """A partial that is not yet computed: x [M, K] times weight [D, K], and other such to add."""

    x: Tensor
    weight: Tensor
    others: list[Product] = field(default_factory=list)

    def __add__(self, other: Product) -> Product:
        return Product(self.x, self.weight, [*self.others, other, *other.others])

    def run(
        self, add: Tensor | None = None, factor: float = 1.0, push: PushTarget | None = None,
        keep: bool = True, rider: LandingJob | None = None,
    ) -> Tensor | None:  # fmt: skip
        """Compute it, with factor * `add` in what is pushed (but not in what is kept)."""
        for n, other in enumerate(self.others):
            assert not keep or push is None, "what is kept would lack the other products"
            add = project(other.x, other.weight, add=add, factor=1.0 if n else factor)
            factor = 1.0
        return project(
            self.x, self.weight, add=add, factor=factor, push=push, keep=keep, rider=rider
        )


class DecodeReducer(Reducer):
    """For passes over one token of few sequences, through the fused modules.

    base: the reducer for everything else; where it pushes, so do the products here, and otherwise
    it reduces what they make.
    """

    def __init__(self, base: Reducer, plan: Plan) -> None:
        super().__init__(base.ranks)
        assert base.ranks.held == 1
        self.base, self.plan = base, plan
        self.pushes = isinstance(base, PushReducer)
        lag = max(
            (n - 1 - each.output for n, read in enumerate(plan.landings) for each in read),
            default=0,
        )
        self.sets = 2 * max(lag, 1) + 2
        self.slots: dict[tuple[int, int, torch.dtype], SymmetricTensor] = {}
        self.start()

    def start(self) -> None:
        """Begin a pass."""
        self.turn = 0
        self.read: Read | None = None
        self.landing: LandingJob | None = None  # begun, to be carried by a product
        self.sending: SendJob | None = None  # of the newest output

    # -- landing ------------------------------------------------------------------------------

    def begin_landing(
        self, stream: Tensor, arrivals: Sequence[tuple[Landing, Pending]], norm: Norm
    ) -> Any:
        assert isinstance(norm, RMSNorm)
        if self.read is not None and not arrivals:
            return self.read, norm  # nothing changes
        waits = any(isinstance(p.handle, _Waited) for each, p in arrivals if each.summed)
        if waits:  # on another stream: it cannot ride
            return stream, arrivals, norm
        jobs = _jobs(stream.reshape(-1, stream.shape[-1]), arrivals)
        if len(jobs) == 1:
            self.landing = jobs[0]
        return jobs, norm

    def finish_landing(self, begun: Any) -> tuple[Tensor, Any]:
        norm = begun[-1]
        if isinstance(begun[0], Read):
            return self._reads(begun[0].stream, begun[0].squares, norm)
        jobs = begun[0]
        if isinstance(jobs, Tensor):
            stream, arrivals, _ = begun
            arrived = [
                (each, Pending(self._wait(pending.handle), pending.own) if each.summed else pending)
                for each, pending in arrivals
            ]
            jobs = _jobs(stream, arrived)
        for job in jobs:
            if not job.launched:
                self._flush()  # it may be what the landing waits for
                land(job)
        self.landing = None
        return self._reads(jobs[-1].out, jobs[-1].squares, norm)

    def _reads(self, stream: Tensor, squares: Tensor, norm: RMSNorm) -> tuple[Tensor, Any]:
        self.read = Read(stream, squares, norm, self.sending)
        return stream, self.read

    def _flush(self) -> None:
        """Send by itself what no product has carried."""
        if self.sending is not None and not self.sending.launched:
            send(self.sending)
        self.sending = None

    def _wait(self, handle: Any) -> Tensor:
        return self.base.wait(handle.handle) if isinstance(handle, _Waited) else handle

    # -- outputs ------------------------------------------------------------------------------

    def output(self, partial: Any, stream: Tensor, record: Sublayer, keep_own: bool,
               blocking: bool) -> Pending:  # fmt: skip
        assert isinstance(partial, Product)
        self._flush()
        rider, self.landing = self.landing, None
        add = stream if record.reduce == "stream" else None
        share = 1 / self.ranks.degree
        if record.reduce == "none":
            return Pending(None, partial.run(rider=rider))
        if self.ranks.processes == 1 or not self.pushes:
            whole = partial.run(add, share, rider=rider)
            assert whole is not None
            if self.ranks.processes == 1:
                return Pending(whole, whole)
            own = whole.clone() if keep_own else None  # the base reduces in place
            return Pending(_Waited(self.base.post(whole, blocking)), own)
        assert isinstance(self.base, PushReducer)
        self.base.note(stream.numel() * stream.element_size(), "pushed by the product")
        memory = self._slots(stream)
        slots = memory.own
        chosen = self.turn % self.sets
        self.turn += 1
        start = chosen * slots[chosen].numel()
        push = PushTarget(memory.addresses, start, self.ranks.process, self.ranks.processes)
        # Where the own part is kept and is a sum of products, it must be whole before it is sent.
        if (blocking or add is not None) and not (keep_own and partial.others):
            return Pending(slots[chosen], partial.run(add, share, push, keep_own, rider))
        whole = partial.run(rider=rider)
        assert whole is not None
        self.sending = SendJob(whole, push)
        return Pending(slots[chosen], whole if keep_own else None)

    def _slots(self, stream: Tensor) -> SymmetricTensor:
        """Slots for streams like this one, [sets, world, M, D].

        Made when first asked for, outside a graph capture, by all ranks alike.
        """
        rows, size = stream.shape
        key = (rows, size, stream.dtype)
        if key not in self.slots:
            assert isinstance(self.base, PushReducer)
            shape = (self.sets, self.ranks.processes, rows, size)
            self.slots[key] = symmetric.allocate(
                shape, stream.dtype, self.base.group, stream.device, EMPTY[stream.element_size()]
            )
        return self.slots[key]

    # -- the rest -----------------------------------------------------------------------------

    def sum(self, partial: Any) -> Tensor:
        if isinstance(partial, Read):  # streams that differ to the end: normed, then summed
            partial = partial.norm(partial.stream.unsqueeze(1))
        return self.base.sum(partial)

    def sum_(self, value: Tensor) -> Tensor:
        return self.base.sum_(value)

    def max_(self, value: Tensor) -> Tensor:
        return self.base.max_(value)

    def gather(self, logits: Tensor, size: int) -> Tensor:
        return self.base.gather(logits, size)


@dataclass
class _Waited:
    """A handle of the base reducer."""

    handle: Any


def _jobs(stream: Tensor, arrivals: Sequence[tuple[Landing, Pending]]) -> list[LandingJob]:
    """The landings of one read, each as much as a kernel takes, one after another."""
    jobs: list[LandingJob] = []
    sums: list[Tensor] = []
    owns: list[tuple[Tensor, float]] = []
    replaces = False

    def close() -> None:
        nonlocal sums, owns, replaces
        jobs.append(
            new_landing(jobs[-1].out if jobs else stream, sums=sums, owns=owns, replaces=replaces)
        )
        sums, owns, replaces = [], [], False

    for landing, pending in arrivals:
        if len(sums) == MAX_SUMS or len(owns) >= MAX_OWNS - 1:
            close()
        if landing.summed:
            if landing.replaces:
                assert not sums, "a stream is replaced with outputs in flight"
                owns, replaces = [], True
            # Slots hold every rank's part; anything else is a sum already.
            if pending.handle.dim() == 3 and pending.handle.shape[1:] == stream.shape:
                sums.append(pending.handle)
            else:
                owns.append((pending.handle.view(stream.shape), 1.0))
        if landing.own:
            assert pending.own is not None
            owns.append((pending.own.view(stream.shape), landing.own))
    if sums or owns or not jobs:
        close()
    return jobs
