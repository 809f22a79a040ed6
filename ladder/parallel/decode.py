"""The pass of a decode step, whose products push their partials to all ranks.

Its operators have two types of their own. `read` returns, and `column` takes, a `Read`: the
residual before its norm, with the sums of its squares. `row` returns, and `write` takes, a
`Product`: a matmul that has not run yet, since only `write` knows the target of its result.

A product pushes its result, and a landing is a kernel of its own. In a CUDA graph, sublayers that
need nothing of each other run beside each other, so that only the kernels of its own sublayer wait
for a landing (`ladder.parallel.chains`). If a plan needs both the sum of a group and the own part
of its last product, that product pushes the sum and keeps its own part. The sum lands on the base,
and a kernel after it adds the own parts that the base lacks.

Slots: pushes use sets of slots in rotation. Let L be the plan's largest lag. Before a rank pushes
output m it has landed all outputs up to m - L - 1, so every other rank has pushed output m - L - 1,
and before that has landed, and cleared the slots of, all up to m - 2L - 2. So with 2L + 2 sets no
rank writes to a set that another has not cleared; where not every sublayer pushes, sets come round
later still. Between two passes the embedding's all-reduce keeps the order: it ends only when every
rank has begun its next pass. Sets are counted from 0 in each pass, so graphs and eager passes can
mix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ladder.comm import capture, symmetric
from ladder.comm.primitives import EMPTY
from ladder.comm.symmetric import SymmetricTensor
from ladder.kernels import decode_shapes
from ladder.kernels.landing import (
    LandingJob,
    PushTarget,
    SendJob,
    land,
    new_landing,
    send,
    with_pieces,
)
from ladder.kernels.limits import MAX_OWNS, MAX_SUMS
from ladder.kernels.pieces import Pieces
from ladder.models.forward_pass import Landed, Norm, Operators, Output, Pass
from ladder.models.in_flight import InFlight
from ladder.models.layers import RMSNorm
from ladder.models.plan import Landing, Plan
from ladder.models.reducer import Reducer
from ladder.parallel.chains import Chains, overlaps
from ladder.parallel.matrix import Matrix
from ladder.parallel.reducers import PushReducer

if TYPE_CHECKING:
    from ladder.models.runtime import Runtime


@dataclass
class Read:
    """A sublayer's input: residual [M, D] before `norm`, whose weight is folded into matrices.

    squares, pieces: of the residual, from its landing.
    """

    residual: Tensor
    squares: Tensor
    pieces: Pieces | None
    norm: RMSNorm

    def project(self, weight: Matrix, beside: bool, arrived: Tensor | None = None) -> Tensor:
        """The normed residual times `weight`: [M, 1, N], or N / 2 if it is gated. beside, arrived:
        see `ladder.kernels.decode.project`; gated products, which may run beside others, take no
        `arrived`."""
        y = weight.project(
            self.residual, squares=self.squares, pieces=self.pieces, eps=self.norm.eps,
            beside=beside, arrived=None if weight.gated else arrived,
        )  # fmt: skip
        assert y is not None
        return y.unsqueeze(1)


@dataclass
class Product:
    """A partial that is not yet computed: x [M, K] times weight [D, K], plus `others`."""

    x: Tensor
    weight: Matrix
    others: list[Product] = field(default_factory=list)

    def __add__(self, other: Product) -> Product:
        return Product(self.x, self.weight, [*self.others, other, *other.others])


class DecodeReducer:
    """Makes passes over one token of each of a few sequences, for fused modules.

    base: the reducer for everything else. If it is a PushReducer, the products push their results;
    otherwise it reduces them. splits: landings also split residuals into pieces of this dtype, that
    of the weights.
    """

    def __init__(self, base: Reducer, plan: Plan, splits: torch.dtype | None = None) -> None:
        assert base.ranks.held == 1
        self.splits = splits
        self.base, self.ranks = base, base.ranks
        self.pushes = isinstance(base, PushReducer) and base.ranks.processes > 1
        self.sets = 2 * plan.longest_flight + 2
        self.memory: dict[tuple[int, int, torch.dtype], SymmetricTensor] = {}
        self.arrived: Tensor | None = None

    def begin(
        self, runtime: Runtime, plan: Plan, norms: Sequence[Norm], shape: torch.Size
    ) -> DecodePass:
        return DecodePass(runtime, self, plan, norms)

    def counters(self, like: Tensor) -> Tensor:
        """The counters of programs that share tiles of QKV (`ladder.kernels.decode.project`), on
        the device of `like`. No two layers' attention runs at once (`Plan.beside`), so all layers
        use the same. They are made on first use, outside a graph capture."""
        if self.arrived is None:
            assert not capture.capturing(), "run it once before a capture"
            self.arrived = torch.zeros(decode_shapes.FEW, dtype=torch.int32, device=like.device)
        return self.arrived

    def slots(self, like: Tensor) -> SymmetricTensor:
        """The slots for residuals of the shape and dtype of `like`: [sets, world, M, D].

        They are made on first use, on all ranks and outside a graph capture.
        """
        rows, size = like.shape
        key = (rows, size, like.dtype)
        if key not in self.memory:
            assert isinstance(self.base, PushReducer)
            shape = (self.sets, self.ranks.processes, rows, size)
            self.memory[key] = symmetric.allocate(
                shape, like.dtype, self.base.group, like.device, EMPTY[like.element_size()]
            )
        return self.memory[key]


class DecodePass(Pass):
    """A pass over one token of each of M sequences; its residual is [M, D].

    If products push, an output in flight is this rank's slots, [world, M, D], for which a landing's
    kernel waits.
    """

    def __init__(
        self, runtime: Runtime, decode: DecodeReducer, plan: Plan, norms: Sequence[Norm]
    ) -> None:
        super().__init__(runtime, decode.base, plan, norms)
        self.decode = decode
        self.turn = 0  # outputs pushed so far
        self.newest: Read | None = None
        self.partials: list[Tensor] = []  # this rank's partials of the open group
        self.chains = Chains()
        self.overlaps: tuple[bool, ...] = ()
        self.columns = 0  # calls of `column` for the newest read
        self.beside = False  # whether other kernels may run beside the sublayer's
        self.arrived: Tensor | None = None  # see `DecodeReducer.counters`; None for the head
        # What both streams may read of the last two sublayers: see `Chains`.
        self.held: deque[Any] = deque(maxlen=2)

    # -- the loop -------------------------------------------------------------------------------

    def start(self, embedded: Tensor) -> None:
        self.overlaps = overlaps(self.plan, len(embedded))
        if embedded.is_cuda and any(self.overlaps) and capture.mode() == "captured":
            device = embedded.device.index
            streams = torch.cuda.current_stream(device), capture.side_stream(device)
            self.chains = Chains(streams, torch.cuda.set_stream)
        super().start(embedded)

    def read(self, n: int) -> Any:
        last = n == len(self.plan.sublayers)
        if last:
            self.chains.join()
        else:
            self.chains.turn(self.plan.beside[n])
        self.beside = not last and self.overlaps[n]
        found = super().read(n)
        self.chains.read()
        self.columns = 0
        self.arrived = None if last else self.decode.counters(found.residual)
        return found

    def write(self, n: int, partial: Any) -> None:
        self.held.append((self.newest, self.partials))
        super().write(n, partial)
        self.chains.end()

    # -- operators ------------------------------------------------------------------------------

    def operators(self, n: int) -> Operators:
        return self

    def column(self, x: Read, weights: Sequence[nn.Module]) -> tuple[Tensor, ...]:
        self.columns += 1
        if self.columns > 1 and self.beside:  # an MLP beside attention
            self.chains.branch()
        return tuple(x.project(weight, self.beside, self.arrived) for weight in weights)

    def row(self, x: Tensor, weight: nn.Module) -> Product:
        assert isinstance(weight, Matrix)
        return Product(x.flatten(0, 1), weight)

    def logits(self, head: nn.Module) -> Tensor:
        if self.plan.final_mean:  # the mean is a Tensor and not a Read
            logits: Tensor = head(self.read(len(self.plan.sublayers)))
            return logits
        return super().logits(head)

    # -- landing ------------------------------------------------------------------------------

    def land(
        self, n: int, arrivals: Sequence[tuple[Landing, Output]], norm: Norm
    ) -> InFlight[Landed]:
        assert isinstance(norm, RMSNorm)
        same = self.newest
        if same is not None and not arrivals:  # the residual does not change
            kept = same.residual, same.squares, same.pieces
            return InFlight((), lambda _: self._read(*kept, norm))

        def finish(_: Landed) -> Landed:
            for job in self._jobs(arrivals):
                land(job)
            return self._read(job.out, job.squares, job.pieces, norm)

        return InFlight((), finish)

    def _read(
        self, residual: Tensor, squares: Tensor, pieces: Pieces | None, norm: RMSNorm
    ) -> Landed:
        self.newest = Read(residual, squares, pieces, norm)
        return residual, self.newest

    def _final(self, normed: Read) -> Any:
        if not self.plan.final_mean:
            return normed
        whole = normed.norm(normed.residual.unsqueeze(1))
        return self.reducer.sum(whole) / self.ranks.degree

    def _jobs(self, arrivals: Sequence[tuple[Landing, Output]]) -> list[LandingJob]:
        """The landings of one read, in order, divided to fit the kernel's limits."""
        start = self._rows(self.residual)
        jobs: list[LandingJob] = []
        sums: list[Tensor] = []
        owns: list[tuple[Tensor, float]] = []
        replaces = False

        def close() -> None:
            nonlocal start, sums, owns, replaces
            jobs.append(new_landing(start, sums=sums, owns=owns, replaces=replaces))
            start, sums, owns, replaces = jobs[-1].out, [], [], False

        for i, (landing, output) in enumerate(arrivals):
            pushed = landing.summed and self.decode.pushes
            more = int(landing.summed and not pushed) + int(landing.own != 0)
            if len(sums) + pushed > MAX_SUMS or len(owns) + more > MAX_OWNS:
                close()
            if landing.replaces:
                assert not jobs
                assert not sums, "a residual is replaced with outputs in flight"
                owns, replaces = [], True
            if landing.on_base:  # these are the first of a read
                assert not sums
                assert not owns
                start = self._rows(self.base)
            if landing.summed:
                assert output.total is not None
                total = output.total.wait()
                if pushed:
                    sums.append(total)
                else:
                    owns.append((total.view(start.shape), 1.0))
            if landing.own:
                assert output.own is not None
                owns.append((output.own.view(start.shape), landing.own))
            if landing.on_base and i + 1 < len(arrivals):
                close()
                self.base = start
        if sums or owns or not jobs:
            close()
        if self.decode.splits is not None and decode_shapes.by_pieces(len(start)):
            jobs[-1] = with_pieces(jobs[-1], self.decode.splits)
        return jobs

    def _rows(self, whole: Tensor) -> Tensor:
        """A residual [M, D] or [M, 1, D] as [M, D]."""
        return whole.reshape(-1, whole.shape[-1])

    # -- outputs ------------------------------------------------------------------------------

    def reduce(self, n: int, partial: Product) -> Output:
        record, keep_own = self.plan.sublayers[n], self.plan.own_needed[n]
        if record.reduce == "none":
            own = self._run(partial)
            assert own is not None
            if self.plan.group_begins[n] is not None:
                self.partials = [*self.partials, own]
            return Output(None, own)
        add, share = None, 1.0
        if self.partials:
            self.chains.wait_for_newest()
            add, self.partials = self._sum(self.partials), []
        if record.reduce == "residual":
            add, share = self.residual, 1 / self.ranks.degree
        # Only a product that is alone can push its result with `add` and keep it without.
        several = keep_own and partial.others
        if self.decode.pushes:
            arriving, push = self._new_slots()
            if not several:
                return Output(arriving, self._run(partial, add, share, push, keep_own))
        apart = keep_own and add is not None
        own = whole = self._run(partial, None if apart else add, share)
        assert whole is not None
        if apart:
            whole = self._sum([add, whole])
        if self.decode.pushes:
            send(SendJob(whole, push))
            return Output(arriving, own if keep_own else None)
        if self.ranks.processes == 1:
            return Output(InFlight(whole), own)
        if not apart:  # the base reduces in place
            own = whole.clone() if keep_own else None
        return Output(self.reducer.reduce(whole, self.plan.blocking[n]), own)

    def _run(
        self, product: Product, add: Tensor | None = None, factor: float = 1.0,
        push: PushTarget | None = None, keep: bool = True,
    ) -> Tensor | None:  # fmt: skip
        """Compute a product. factor * `add` is added to the pushed result, but not to the one that
        is kept beside it; without `push`, to the returned one."""
        for other in product.others:
            assert not keep or push is None, "the kept result would lack the other products"
            # This is down of `parallel`. The cuts for one and two rows beside other kernels were
            # found in steps of a ladder. For two rows, this one made steps of `parallel` 1 %
            # longer.
            beside = self.beside and len(other.x) > decode_shapes.MAX_VECTOR_ROWS
            add = other.weight.project(other.x, add=add, factor=factor, beside=beside)
            factor = 1.0
        self.chains.merge()  # the last of several products runs alone
        return product.weight.project(
            product.x, add=add, factor=factor, push=push, keep=keep,
            beside=self.beside and not product.others,
        )  # fmt: skip

    def _sum(self, partials: Sequence[Tensor]) -> Tensor:
        """The sum of a group's partials, in as few kernels as it takes."""
        total = partials[0]
        for i in range(1, len(partials), MAX_OWNS):
            job = new_landing(total, owns=[(each, 1.0) for each in partials[i : i + MAX_OWNS]])
            land(job)
            total = job.out
        return total

    def _new_slots(self) -> tuple[InFlight[Tensor], PushTarget]:
        """This rank's slots for the next output, and all ranks' slots as a target."""
        assert isinstance(self.reducer, PushReducer)
        size = self.residual.numel() * self.residual.element_size()
        self.reducer.note(size, "pushed by the product")
        memory = self.decode.slots(self.residual)
        slots = memory.own
        chosen = self.turn % self.decode.sets
        self.turn += 1
        start = chosen * slots[chosen].numel()
        push = PushTarget(memory.addresses, start, self.ranks.process, self.ranks.processes)
        return InFlight(slots[chosen]), push
