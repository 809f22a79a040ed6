"""A product and the collective behind it, event by event, on one of many GPUs that do the same.

The other GPUs send the same as this one, at the same times (5.1.1). A product is a sequence of
stages. A stage computes in steps, whose inputs are read one step ahead, and ends with a burst of
writes; then the next stage starts. The collective is a `TrackMap`, the same declaration that
`ladder.ops` compiles for a real kernel: which blocks the product stores to a peer, which blocks a
copy engine moves, and after how many updates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ladder.models.errors import UserError
from ladder.ops.track import TrackMap
from ladder.ops.track_maps import all_to_all, direct_reduce_scatter, ring_reduce_scatter
from ladder.perf.engine import SECOND, Engine, Line, picoseconds
from ladder.perf.t3 import system as closed
from ladder.perf.t3.dram import Dram
from ladder.perf.t3.system import Collective, Sublayer, System

PIECES = 256  # the pieces of a chunk, in the reduce-scatter alone


@dataclass(frozen=True)
class Outcome:
    """product, end: seconds until the end of the product and until the end of everything. memory:
    the DRAM's seconds of service for the product and for communication. trace: see `Dram`."""

    product: float
    end: float
    memory: tuple[float, float]
    trace: tuple[tuple[int, str, int], ...] = ()


@lru_cache
def track_map(kind: Collective, degree: int, blocks: int) -> TrackMap:
    """The collective of a product in `blocks` blocks for each rank; a block is a tile here.

    If each rank sends to all others, a stage computes blocks for all of them (7.1).
    """
    rows = degree * blocks
    if kind == "ring":
        return ring_reduce_scatter(rows, 1, degree, 1)
    if kind == "direct":
        found = direct_reduce_scatter(rows, 1, degree, 1, dma=False, op="add")
    else:
        found = all_to_all(rows, 1, degree, 1, dma=False)
    orders = tuple(
        tuple(
            (rank + distance) % degree * blocks + block
            for block in range(blocks)
            for distance in range(1, degree + 1)
        )
        for rank in range(degree)
    )
    return replace(found, orders=orders)


def threshold(case: Sublayer, system: System) -> int:
    """MCA's threshold, by the share of time that the product alone keeps the DRAM busy (4.5)."""
    count = closed.stages(case, system)
    moved = closed.stage_reads(case, system, bypass=True) * count + case.output
    share = moved / system.burst / closed.gemm(case, system)
    return next(limit for least, limit in system.thresholds if share >= least)


def alone(case: Sublayer, system: System, trace: bool = False) -> Outcome:
    """The product without communication, which stores through the cache."""
    return _Run(case, system, None, None, trace).outcome()


@lru_cache(maxsize=512)
def fused(
    case: Sublayer, system: System, mca: bool, trace: bool = False, kind: Collective = "ring"
) -> Outcome:
    """The product with its collective overlapped: T3, or with `mca` T3-MCA."""
    unnamed = replace(case, model="", kind="")  # the same shape, the same times
    if unnamed != case:
        return fused(unnamed, system, mca, trace, kind)
    limit = threshold(case, system) if mca else None
    return _Run(case, system, track_map(kind, case.degree, system.blocks), limit, trace).outcome()


def scatter(case: Sublayer, system: System) -> float:
    """The seconds of the ring reduce-scatter alone, on compute units, in pieces of each chunk.

    A step begins when the whole chunk of the step before has come and is written.
    """
    engine = Engine()
    dram = Dram(engine, system)
    link = Line(engine, system.link, picoseconds(system.latency))
    size, steps = case.chunk / PIECES, case.degree - 1
    step = written = 0

    def begin() -> None:
        nonlocal written
        written = 0
        copies = 1 if step == 0 else 2  # the own copy, and the one that has come
        for _ in range(PIECES):
            dram.add("communication", "reads", copies * size, 1, lambda: link.send(size, arrive))

    def arrive() -> None:
        dram.add("communication", "writes", size, 1, write)

    def write() -> None:
        nonlocal step, written
        written += 1
        if written < PIECES:
            return
        step += 1
        if step < steps:
            begin()
        else:  # the last reduction: two copies are read, and one is written
            engine.after(picoseconds(3 * case.chunk / system.reduce), lambda: None)

    begin()
    return engine.run() / SECOND


def speedup(case: Sublayer, system: System, mca: bool, kind: Collective = "ring") -> float:
    """The speedup over the product, the collective and the gather one after the other."""
    together = fused(case, system, mca, kind=kind).end + closed.gather(case, system, kind)
    return closed.sequential(case, system, kind) / together


def mirrored(collective: TrackMap) -> list[int]:
    """For each map of rank 0, the place of rank 0 that the same map of a peer writes.

    Ranks must be symmetric: the nth map of each rank does the same for other places.
    """
    found = []
    for n, own in enumerate(collective.ranks[0]):
        places = [
            maps[n].at
            for maps in collective.ranks
            if n < len(maps) and maps[n].peer == 0 and maps[n].dma == own.dma
        ]
        if len(places) != 1:
            raise UserError(
                f"{own}: {len(places)} ranks send rank 0 what their map {n} says; one GPU stands "
                f"for all only where ranks are symmetric"
            )
        found.append(places[0])
    return found


class _Run:
    def __init__(
        self, case: Sublayer, system: System, collective: TrackMap | None, limit: int | None,
        trace: bool,
    ) -> None:  # fmt: skip
        self.case, self.system, self.map = case, system, collective
        self.engine = Engine()
        self.dram = Dram(self.engine, system, limit, trace)
        self.stages = closed.stages(case, system)
        self.steps = max(1, round(case.inner / system.inner))
        reads = closed.stage_reads(case, system, bypass=collective is not None)
        self.slab = reads / self.steps
        self.step = picoseconds(closed.compute(case, system) / self.stages / self.steps)
        self.stage = self.at = self.asked = self.arrived = 0
        self.waiting = False
        self.product_end = 0
        if collective is not None:
            if any(len(tiles) > 1 for tiles in collective.chunks):
                raise UserError("a block that is simulated is one tile; give chunks of one tile")
            self.order = collective.order(0)
            self.links: dict[int, Line] = {}
            for own in collective.ranks[0]:
                at = 0 if system.shared else own.peer
                line = Line(self.engine, system.link, picoseconds(system.latency))
                self.links[own.peer] = self.links.setdefault(at, line)
            self.block = case.output / collective.tiles
            self.owner = {tiles[0]: chunk for chunk, tiles in enumerate(collective.chunks)}
            self.number = {own.chunk: n for n, own in enumerate(collective.ranks[0])}
            self.places = mirrored(collective)
            self.updates: dict[int, int] = {}
            self.computed = 0  # blocks

    def outcome(self) -> Outcome:
        self._begin()
        end = self.engine.run()
        memory = (self.dram.served["product"] / SECOND, self.dram.served["communication"] / SECOND)
        trace = tuple(self.dram.trace or ())
        return Outcome(self.product_end / SECOND, end / SECOND, memory, trace)

    # ---- the product

    def _begin(self) -> None:
        self.at = self.asked = self.arrived = 0
        self._ask()
        self._ask()
        self._compute()

    def _ask(self) -> None:
        if self.asked < self.steps:
            self.asked += 1
            if self.slab:
                self.dram.add("product", "product reads", self.slab, 1, self._arrive)
            else:
                self.arrived += 1

    def _arrive(self) -> None:
        self.arrived += 1
        if self.waiting:
            self._compute()

    def _compute(self) -> None:
        self.waiting = self.arrived <= self.at
        if not self.waiting:
            self.engine.after(self.step, self._computed)

    def _computed(self) -> None:
        self.at += 1
        self._ask()
        if self.at < self.steps:
            self._compute()
        else:
            self._write()

    def _write(self) -> None:
        """Write a stage's output. Blocks that a remote map sends away need no write here."""
        self.stage += 1
        local = self.case.output / self.stages
        kept: list[int] = []  # places
        cost = 1.0
        if self.map is not None:
            upto = self.map.tiles * self.stage // self.stages
            for tile in self.order[self.computed : upto]:
                chunk = self.owner[tile]
                n = self.number.get(chunk)
                own = None if n is None else self.map.ranks[0][n]
                if own is None or own.dma:
                    kept.append(chunk)
                elif own.peer == 0:
                    kept.append(own.at)
                else:
                    self._send(chunk)
            self.computed = upto
            local = len(kept) * self.block
            cost = max((self._cost(place) for place in kept), default=1.0)

        def written() -> None:
            for place in kept:
                self._update(place)
            if self.stage < self.stages:
                self._begin()
            else:
                self.product_end = self.engine.now

        if local:
            self.dram.add("product", "product writes", local, cost, written)
        else:
            self.engine.after(0, written)

    # ---- the collective

    def _cost(self, place: int) -> float:
        """The cost of a write to a place, in stores: a store, or an update near the memory."""
        assert self.map is not None
        return self.system.update if self.map.updates(0, place) > 1 else 1

    def _send(self, chunk: int) -> None:
        """Send a block over the link. A peer's block then arrives at the place of its map."""
        assert self.map is not None
        n = self.number[chunk]
        place = self.places[n]
        self.links[self.map.ranks[0][n].peer].send(self.block, lambda: self._receive(place))

    def _receive(self, place: int) -> None:
        self.dram.add(
            "communication", "updates", self.block, self._cost(place), lambda: self._update(place)
        )

    def _update(self, place: int) -> None:
        """Count an update of a block, and start its copy when it is the last one."""
        assert self.map is not None
        self.updates[place] = self.updates.get(place, 0) + 1
        if self.updates[place] < self.map.updates(0, place):
            return
        if place in self.number:
            self.dram.add("communication", "copy reads", self.block, 1, lambda: self._send(place))
