"""Landings and sends that ride in products' launches, as they did until 2026-11-28: the thread
blocks of products of tiles, beside which these ride, and how long they take."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from ladder.costs import BF16, MULTIPROCESSORS
from ladder.kernels.decode_shapes import (
    EARLY,
    FEW,
    MANY,
    Cut,
    blocks,
    by_halves,
    power_of_2,
    rows_each,
)
from ladder.kernels.limits import CHUNK
from ladder.parallel.chains import MOST_BRANCHED
from ladder.perf.graph import Graph, Operation

if TYPE_CHECKING:
    from ladder.perf.cost import DecodeCost

SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that thread blocks can have

# Tiles of a product in which a landing may ride; and SMs that larger tiles leave to a rider.
FULL, ROOM = 96, 16
WHOLE_ROWS = 4  # riders of so many rows have as few programs for each as they can
LARGEST = 64  # rows of the weight in a tile
MEASURED = 4  # chunks of a row, of the shapes with which ROOM was measured
MOST_CHUNKS = 4  # of a row, that a program of a send or landing has at once

Rides = Literal["nothing", "beside", "inside", "behind"]


class Kernels(NamedTuple):
    """What sets the kernels of a recorded decode step apart from today's. rides: where what rides
    on tiles may be, besides behind them: beside and inside of them, or inside alone; or that
    nothing rides, and steps have two streams. even: gated products are spread evenly over
    multiprocessors. long: products of 3 to 16 rows have longer steps, O of 3 and 4 rows in 8 bits
    has tiles, and in fp8 O and down take float16. branches: of how many sequences at most attention
    and MLP of one sublayer run beside each other. wide: beside other kernels O and down of 3 to 32
    rows have tiles of 64 outputs, and attention of few sequences fewer programs."""

    rides: Rides = "nothing"
    even: bool = True
    long: bool = True
    branches: int = MOST_BRANCHED
    wide: bool = True


TODAY = Kernels()


class Ride(NamedTuple):
    """How a rider and the product of tiles on which it rides share a launch.

    span: chunks of a row that a program has at once. programs: of the rider, behind those of the
    product; 0: it has none, and the product's first ones do its parts before their tiles. block,
    own: the rows of the weight in a tile, and those that each program of the product has.
    """

    span: int
    programs: int
    block: int
    own: int


def ride(
    sends: bool, rows: int, chunks: int, outputs: int, block: int, gated: bool, eight_bits: bool
) -> Ride:
    """rows, chunks: of a send, or of a landing, and of each row; 0: there is none. block: of
    `blocks`. eight_bits: the weight is stored in so many.

    Where tiles fill the SMs, programs behind them begin when tiles end. So fewer, of more chunks
    each, begin at once where tiles leave SMs free. For 33 to 64 chunks, and sends of more than 160,
    larger tiles leave ROOM free; programs of 64 rows have 4, one after the other. Landings of 133
    to 256 are in the tiles, two at once. All of it was measured with rows of 4 chunks, an 8B's at
    TP 4; only the first is done with others. Behind the tiles steps of 4, 16 and 64 rows took 2 to
    5 % longer (4x H200, benchmarks/results/2026-11-27-riders-beside-h200x4.txt).
    """
    own = rows_each(outputs, block, gated)
    tiles, parts = -(-outputs // own), rows * chunks
    widest = min(MOST_CHUNKS, power_of_2(max(1, chunks)))
    spans = [span for span in (1, 2, 4) if span <= widest]
    for span in spans[-1:] if 0 < rows <= WHOLE_ROWS else spans:
        programs = rows * -(-chunks // span)
        if tiles + programs <= MULTIPROCESSORS:
            return Ride(span, programs, block, own)
    some = 32 < parts <= 64 and not eight_bits
    if (some or (sends and parts > 160)) and chunks == MEASURED and tiles <= MULTIPROCESSORS:
        larger, fewer = leaving(ROOM, outputs, block, gated)
        if larger == block or (larger <= LARGEST and not gated):
            return Ride(widest, min(ROOM, programs), larger, fewer)
    in_pairs = rows * -(-chunks // 2) <= min(tiles, MULTIPROCESSORS) and tiles >= FULL
    if in_pairs and parts > MULTIPROCESSORS and not (sends or eight_bits):
        return Ride(2, 0, block, own)
    return Ride(1, parts, block, own)


def leaving(room: int, outputs: int, block: int, gated: bool) -> tuple[int, int]:
    """The block, and the rows that each program has, of tiles that leave so many SMs free: as of
    `rows_each` where these do."""
    own = rows_each(outputs, block, gated)
    if -(-outputs // own) + room > MULTIPROCESSORS:
        own = -(-outputs // ((MULTIPROCESSORS - room) * 4)) * 4
    return max(block, power_of_2(own)), own


def cut(
    kernels: Kernels, rows: int, outputs: int, inputs: int, gated: bool, stored: str = "bf16",
    pieces: bool = False,
) -> Cut:  # fmt: skip
    """How a product is, given as for `room`."""
    narrow, short = stored != "bf16", inputs <= 1024
    half = kernels.long and stored == "fp8" and by_halves(rows) and not pieces
    found = blocks(rows, outputs, inputs, gated, BF16, narrow, pieces, half)
    if kernels.long or not 2 < rows <= 16 or gated or pieces:
        return found
    if narrow and short and rows <= 4 and outputs >= FEW:
        return Cut(4, 2, 512, 2, 0)
    if narrow or short or outputs >= MANY:
        return found
    if outputs >= FEW:
        return Cut(16, 32, 256, 4, 6)
    return Cut(16, 16, 256, 4, 7, 4) if rows >= 8 else Cut(16, 32, 512, 4, 4)


def room(
    kernels: Kernels, rows: int, outputs: int, inputs: int, gated: bool, stored: str = "bf16",
    pieces: bool = False,
) -> int:  # fmt: skip
    """How many thread blocks of a product run at once: of tiles, or, as of few rows of weights in
    8 bits, so small that all run. gated: of two matrices, of so many outputs each. pieces: of the
    input (`ladder.kernels.pieces`)."""
    found = cut(kernels, rows, outputs, inputs, gated, stored, pieces)
    if found.stages == 0:
        return MULTIPROCESSORS + -(-outputs // found.block)
    weight = found.block * (2 if gated else 1) * (BF16 if stored == "bf16" else 1)
    held = found.stages * found.step * (BF16 * found.padded + weight)
    return MULTIPROCESSORS * max(1, SHARED_MEMORY // held)


def rides(
    kernels: Kernels, sends: bool, chunks: int, rows: int, outputs: int, inputs: int, gated: bool,
    stored: str = "bf16", pieces: bool = False,
) -> Ride:  # fmt: skip
    """How a send or landing of `chunks` for each row rides on a product of tiles, which is given as
    for `room`."""
    narrow = stored != "bf16"
    block = cut(kernels, rows, outputs, inputs, gated, stored, pieces).block
    if kernels.rides == "beside":
        return ride(sends, rows, chunks, outputs, block, gated, narrow)
    own = rows_each(outputs, block, gated) if kernels.even else block
    if kernels.rides == "inside" and _in_tiles(sends, rows, chunks, -(-outputs // own), narrow):
        return Ride(1 if sends else 2, 0, block, own)
    return Ride(1, rows * chunks, block, own)


def _in_tiles(sends: bool, rows: int, chunks: int, tiles: int, eight_bits: bool) -> bool:
    """Whether of the kernels in which what rides may be inside of tiles it was: sends of 33 to 64
    chunks, and landings of more than 132, in pairs."""
    if eight_bits or tiles < FULL:
        return False
    if sends:
        return 32 < rows * chunks <= min(tiles, 64)
    pairs = rows * -(-chunks // 2)
    return rows * chunks > MULTIPROCESSORS and pairs <= min(tiles, MULTIPROCESSORS)


def early_bytes(kernels: Kernels, rows: int, outputs: int, inputs: int, gated: bool) -> float:
    """Bytes of a matrix in bfloat16 that a product of tiles brings into L2 before its wait."""
    step = cut(kernels, rows, outputs, inputs, gated).step
    return BF16 * EARLY * step * outputs * (2 if gated else 1)


def added(cost: DecodeCost, graph: Graph) -> dict[int, float]:
    """The microseconds that what rides on a launch adds to it, by the launch."""
    found: dict[int, float] = {}
    for each in graph.operations:
        if each.rides is not None:
            more = cost.moved(each)
            if cost.tiles:
                more += late(cost, each, graph.operations[each.rides])
            found[each.rides] = found.get(each.rides, 0.0) + more
    return found


def late(cost: DecodeCost, rider: Operation, product: Operation) -> float:
    """Microseconds by which what rides on a product of tiles outlasts it. Its thread blocks come
    after the product's, with as much shared memory: they run one after the other where the product
    leaves room, and then everywhere. Each takes what a small kernel takes for each of its parts; so
    does what rides in the tiles, before them, but for the time in which the memory brings their
    first weights."""
    # O and down have no landing whose pieces they could read.
    pieces = cost.lands_pieces and product.part not in ("output", "down")
    outputs, inputs, gated = cost.matrix(product.part)
    shape = cost.batch, outputs, inputs, gated
    chunks = -(-cost.config.hidden_size // CHUNK)
    sends = rider.kind == "send"
    if cost.lands_pieces and not sends:
        chunks = 1  # a thread block lands a row
    way = rides(cost.kernels, sends, chunks, *shape, cost.stored, pieces)
    if not way.programs:
        return max(0.0, cost.small - early_bytes(cost.kernels, *shape) / cost.memory)
    at_once = room(cost.kernels, *shape, cost.stored, pieces)
    free = max(0, at_once - -(-outputs // way.own))
    alone, parts = cost.alone(product).us, cost.batch * -(-chunks // way.span)
    if way.programs <= free:
        return max(0.0, cost.small * -(-parts // way.programs) - alone)
    parts -= free * int(alone / cost.small)
    return cost.small * math.ceil(max(0, parts) / at_once)
