"""What a GPU moves to and from its DRAM (Figure 18), counted in chunks of the ring.

The sequential ring is counted step by step, and T3 from the maps of its `TrackMap`: nothing is
fitted. Only the product's reads come from a model, that of the cache (`system.stage_reads`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ops.track import TrackMap
from ladder.perf.t3 import system as closed
from ladder.perf.t3.system import Sublayer, System


@dataclass(frozen=True)
class Accesses:
    """Accesses to the DRAM in chunks. product_reads: by the cache model."""

    product_reads: float
    product_writes: float
    scatter_reads: float
    scatter_writes: float
    gather_reads: float
    gather_writes: float

    @property
    def writes(self) -> float:
        """The writes of the product and of the reduce-scatter."""
        return self.product_writes + self.scatter_writes

    @property
    def counted(self) -> float:
        """All accesses except the product's reads."""
        return self.scatter_reads + self.writes + self.gather_reads + self.gather_writes

    @property
    def total(self) -> float:
        return self.counted + self.product_reads


def sequential(degree: int, product_reads: float = 0.0) -> Accesses:
    reads = writes = 0
    for step in range(degree - 1):  # add the own copy to what came, and send the sum
        reads += 1 if step == 0 else 2
        writes += 1  # what comes from the other neighbour
    reads, writes = reads + 2, writes + 1  # the last reduction
    return Accesses(product_reads, degree, reads, writes, degree - 1, degree - 1)


def tracked(collective: TrackMap, product_reads: float = 0.0) -> Accesses:
    """The accesses of rank 0 under a map whose chunks all have one size, and in an all-gather."""
    maps, world = collective.ranks[0], collective.world
    per_rank = len(collective.chunks) / world
    chunks = range(len(collective.chunks))
    kept = sum(collective.keeps(0, chunk) for chunk in chunks)
    places = range(len(collective.chunks) + len(collective.slots))
    arrive = sum(collective.updates(0, place) for place in places) - kept
    copied = sum(each.dma for each in maps)
    return Accesses(
        product_reads, kept / per_rank, copied / per_rank, arrive / per_rank, world - 1, world - 1
    )


def product_reads(case: Sublayer, system: System, bypass: bool) -> float:
    """The product's reads in chunks, by the cache model."""
    reads = closed.stage_reads(case, system, bypass) * closed.stages(case, system)
    return reads / case.chunk
