"""The kernels of a fused engine's prefill, one operation for each launch.

There are two paths, and `ladder.parallel.choose` picks one. If every rank has the whole residual
(`ladder.models.forward_pass.Pass`), partials are all-reduced: by NCCL on its stream, or by our
kernels, on the main stream where they block. If the residual is sharded by tokens
(`ladder.parallel.sharded`), there are a barrier and pulls of partials, a landing of this rank's
rows, pushes of normed rows and a barrier; all of it is on a side stream where the plan does not
block. With `fused`, exchanges that block are inside products (`ladder.parallel.prefill`): a scatter
in the last product of a sublayer, and a gather in the first product of the next. With a whole
residual it is the all-reduce, in the last product.

From the last attention on, one position of each sequence is computed (`few`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ladder.kernels.limits import MAX_ADDENDS
from ladder.models.errors import unknown
from ladder.models.plan import Landing, Plan
from ladder.parallel.dispatch import PREFILL_TRANSPORTS
from ladder.parallel.refusals import sums_in_products
from ladder.perf.graph import COMM, FUSED, LAST, MAIN, ROUNDED, SIDE, Graph, Loop

FIRST = {"attention": "qkv", "mlp": "gate-up", "attention+mlp": "qkv"}


@dataclass(frozen=True)
class Way:
    """How a prefill reduces. ranks: of the group. transport: of `ladder.comm.transports`; "": every
    rank has the whole residual. large, small: the algorithms that sum partials of all tokens, and
    of one token per sequence: nccl, push, two-shot, or ROUNDED. fused: whether exchanges that block
    are inside products."""

    ranks: int
    transport: str = ""
    large: str = "nccl"
    small: str = "nccl"
    fused: bool = False

    def __post_init__(self) -> None:
        if self.transport not in ("", *PREFILL_TRANSPORTS):
            raise unknown("transport", self.transport, PREFILL_TRANSPORTS)


@functools.lru_cache(maxsize=64)  # the same for all batches that reduce alike
def prefill(plan: Plan, way: Way) -> Graph:
    """The operations of one prefill."""
    return _Prefill(plan, way).run()


class _Prefill(Loop):
    def __init__(self, plan: Plan, way: Way) -> None:
        super().__init__(plan, reduces=way.ranks > 1)
        self.way = way
        self.few = False
        self.split = False  # whether the residual is sharded by now
        self.early: dict[int, int] = {}
        self.side: int | None = None  # the newest work on the side stream
        self.in_flight: set[int] = set()  # outputs that our kernels sum on the stream COMM
        self.sums: int | None = None  # the newest sum of the open group

    @property
    def sharded(self) -> bool:
        return bool(self.way.transport) and not self.few

    def run(self) -> Graph:
        plan, graph = self.plan, self.graph
        last = len(plan.sublayers)
        for n, record in enumerate(plan.sublayers):
            read = self._read(n)
            if self._gathered_in_product(n):
                part = FIRST[record.kind]
                read = graph.add("all-gather", [read], part=part, sublayer=n, algorithm=FUSED)
            inner = []
            for kind in record.kind.split("+"):
                if kind == "attention":
                    packed = graph.add("product", [read], part="qkv", sublayer=n, few=self.few)
                    turned = graph.add("rotary", [packed], sublayer=n, few=self.few)
                    first = graph.add("attention", [turned], sublayer=n, few=self.few)
                else:
                    few = self.few or n == plan.last_attention
                    gated = graph.add("product", [read], part="gate-up", sublayer=n, few=few)
                    first = graph.add("swiglu", [gated], sublayer=n, few=few)
                inner.append((LAST[kind], first))
            narrows = n == plan.last_attention
            few = self.few or narrows
            parts = [
                graph.add("product", [need], part=part, sublayer=n, few=few) for part, need in inner
            ]
            partial = parts[0]
            for other in parts[1:]:
                partial = graph.add("sum", [partial, other], sublayer=n, tensors=3, few=few)
            if narrows:
                self._narrow()
            self._write(n, partial)
        head = graph.add("product", [self._read(last)], part="head", few=True)
        graph.add("choice", [head])
        return graph

    # -- exchanges inside of products ----------------------------------------------------------

    def _sums_in_product(self, n: int) -> bool:
        """Whether a product sums output n: as `FusedPrefillPass.sums` says, or, with a whole
        residual, `sums_in_products`."""
        if not self.way.fused or n >= self.plan.last_attention:  # from there, one position is left
            return False
        if not self.way.transport:
            return sums_in_products(self.plan, n)
        return self.plan.blocking[n] and self.plan.sublayers[n].kind != "attention+mlp"

    def _gathered_in_product(self, n: int) -> bool:
        """Whether a product gathers read n of a sharded residual. The opposite of
        `FusedPrefillPass.gathers`."""
        if not (self.way.fused and self.sharded and self.split) or n == len(self.plan.sublayers):
            return False
        both = self.plan.sublayers[n].kind == "attention+mlp"
        return self.plan.blocking[n - 1] and not (both and n == self.plan.last_attention)

    # -- reads ---------------------------------------------------------------------------------

    def _read(self, n: int) -> int:
        read = self.early.pop(n) if n in self.early else self._land(n)
        narrows = n == self.plan.last_attention
        if self.sharded and n < len(self.plan.sublayers) and self.plan.early[n + 1] and not narrows:
            self.early[n + 1] = self._land(n + 1)
        return read

    def _land(self, n: int) -> int:
        landings = self.plan.landings[n]
        if self.sharded and (self.split or landings):
            self.split = True
            return self._land_rows(n, landings)
        found = self._land_whole(n, landings)
        if self.plan.final_mean and self.way.ranks > 1 and n == len(self.plan.sublayers):
            found = self.graph.add("all-reduce", [found], part="final mean", few=True,
                                   algorithm=self.way.small)  # fmt: skip
        return found

    def _land_whole(self, n: int, landings: tuple[Landing, ...]) -> int:
        """As `Pass.land`: one kernel adds all addends and norms, after a sum for each new base."""
        source: int | None = self.residual
        addends, needs = 0, list[int | None]()
        for i, landing in enumerate(landings):
            if landing.summed:
                start = self.starts[landing.output]
                self.in_flight.discard(landing.output)
                if landing.on_base and i + 1 < len(landings):
                    source = self.base = self._elementwise([self.base, start], 3, n)
                    addends, needs = 0, []
                elif landing.on_base:
                    source, addends, needs = self.base, 1, [start]
                elif landing.replaces:
                    source, addends, needs = start, 0, []
                else:
                    addends += 1
                    needs.append(start)
            if landing.own:
                addends += 1
                needs.append(self.owns[landing.output])
        while addends > MAX_ADDENDS:
            source = self._elementwise([source, *needs], 3, n)
            addends -= 1
        found = self.graph.add("landing", [source, *needs], sublayer=n, landings=landings,
                               tensors=3 + addends, few=self.few)  # fmt: skip
        self.landed(n, found)
        return found

    def _land_rows(self, n: int, landings: tuple[Landing, ...]) -> int:
        """As `ShardedPass.land`: a landing of the rank's rows, and their way to the peers."""
        plan, ranks = self.plan, self.way.ranks
        here = any(plan.blocking[each.output] for each in landings)
        stream = MAIN if here else SIDE
        summed = sum(self._sums_in_product(each.output) for each in landings)
        gathers = not self._gathered_in_product(n)
        apart = len(landings) - summed  # landings whose pieces are in the peers' memory
        direct = self.way.transport == "direct" and bool(apart + gathers)
        remote = (apart + gathers) * (ranks - 1) / ranks if direct else 0.0
        # The rank's own rows move meanwhile, ten times as fast.
        local = 0.0 if direct else (apart * ranks + summed + 3) / ranks
        needs = [self.residual, *self._arrivals(landings), self._joined(stream)]
        if direct:  # the landing's own loads and stores
            far = self.graph.add("peers", needs, sublayer=n, tensors=remote, stream=stream)
            needs = [far]
        found = self.graph.add("landing", needs, sublayer=n, landings=landings, tensors=local,
                               stream=stream)  # fmt: skip
        self.landed(n, found)
        if not gathers:
            return found
        if not direct:
            found = self.graph.add("copies", [found], sublayer=n, stream=stream)
        found = self.graph.add("barrier", [found], sublayer=n, stream=stream)
        if stream == SIDE:
            self.side = found
        return found

    def _arrivals(self, landings: tuple[Landing, ...]) -> list[int]:
        return [self.starts[each.output] for each in landings]

    def _joined(self, stream: str) -> int | None:
        """What the next operation on `stream` waits for. On the main stream: the side stream's
        newest work, if it is in flight. On the side stream: the newest work on the main stream."""
        if stream == MAIN:
            side, self.side = self.side, None
            return side
        return self.newest(MAIN)

    # -- writes --------------------------------------------------------------------------------

    def _write(self, n: int, partial: int) -> None:
        """Add what `Pass.reduce` or `ShardedPass.reduce` does."""
        record, plan = self.plan.sublayers[n], self.plan
        self.owns[n] = partial
        grouped = plan.group_begins[n] is not None
        if grouped and self.sums is not None:
            partial = self._elementwise([self.sums, partial], 3, n)
        if grouped:
            self.sums = partial if record.reduce == "none" else None
        if record.reduce == "none":
            return
        if self.way.ranks == 1:
            self.starts[n] = partial
            return
        if self._sums_in_product(n):
            kind = "reduce-scatter" if self.sharded else "all-reduce"
            self.starts[n] = self.graph.add(
                kind, [partial, self._joined(MAIN)], part=LAST[record.kind], sublayer=n, output=n,
                algorithm=FUSED,
            )  # fmt: skip
            return
        if self.sharded:
            stream = MAIN if plan.blocking[n] else SIDE
            self.starts[n] = self._scatter(n, partial, stream)
            return
        if record.reduce == "residual":
            partial = self._elementwise([partial, self.residual], 3, n)
        elif plan.own_needed[n] and partial == self.owns[n]:
            partial = self._elementwise([partial], 2, n)
        algorithm = self.way.small if self.few else self.way.large
        ours = algorithm not in ("nccl", ROUNDED)
        on_main = ours and plan.blocking[n] and not self.in_flight
        if ours and not on_main:
            self.in_flight.add(n)
        self.starts[n] = self.graph.add(
            "all-reduce", [partial], sublayer=n, output=n, few=self.few, algorithm=algorithm,
            stream=MAIN if on_main else COMM,
        )  # fmt: skip

    def _scatter(self, n: int, partial: int, stream: str) -> int:
        found = self.graph.add(
            "barrier", [partial, self._joined(stream)], sublayer=n, output=n, stream=stream
        )
        if self.way.transport != "direct":
            found = self.graph.add("copies", [found], sublayer=n, stream=stream)
        if stream == SIDE:
            self.side = found
        return found

    def _narrow(self) -> None:
        """As `Pass.narrow`: wait for all sums in flight; sharded rows meet in an all-reduce."""
        sharded, self.few = self.sharded, True
        flying = [self.starts[n] for n in self._flying()]
        if sharded:
            self.residual = self.graph.add(
                "all-reduce", [*flying, self._joined(MAIN)], part="rows", few=True, algorithm="nccl"
            )
            for n in self._flying():
                self.starts[n] = self.residual
        elif flying:
            self.residual = self._elementwise([self.residual, *flying], 0, None)

    def _flying(self) -> list[int]:
        """The outputs whose sums have begun and have not landed."""
        at = self.plan.last_attention + 1
        later = {each.output for read in self.plan.landings[at:] for each in read if each.summed}
        return [n for n in later if n in self.starts]

    def _elementwise(self, needs: list[int | None], tensors: float, n: int | None) -> int:
        return self.graph.add("sum", needs, sublayer=n, tensors=tensors, few=self.few)
