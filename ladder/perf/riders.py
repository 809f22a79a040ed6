"""Riders: landings and sends in products' launches, as they were until 2026-11-28. How much room
the thread blocks of products of tiles leave for them, and how long they take."""

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

# The least tiles of a product inside which a landing may ride; and the SMs that larger tiles leave
# to a rider.
FULL, ROOM = 96, 16
WHOLE_ROWS = 4  # riders of up to this many rows have as few programs for each row as they can
LARGEST = 64  # rows of the weight in a tile
MEASURED = 4  # chunks of a row in the shapes with which ROOM was measured
MOST_CHUNKS = 4  # the most chunks of a row that a program of a send or landing has at once

Rides = Literal["nothing", "beside", "inside", "behind"]


class Kernels(NamedTuple):
    """How the kernels of a recorded decode step differ from today's.

    rides: where sends and landings ride on tiles. behind: only behind them; inside: also inside
    them; beside: also beside them; nothing: they do not ride, and steps have two streams. even:
    whether gated products are spread evenly over multiprocessors. long: whether products of 3 to 16
    rows have longer steps, O of 3 and 4 rows in 8 bits has tiles, and O and down in fp8 take
    float16. branches: up to how many sequences attention and MLP of one sublayer run beside each
    other. wide: whether, beside other kernels, O and down of 3 to 32 rows have tiles of 64 outputs,
    and attention of few sequences has fewer programs.
    """

    rides: Rides = "nothing"
    even: bool = True
    long: bool = True
    branches: int = MOST_BRANCHED
    wide: bool = True


TODAY = Kernels()


class Ride(NamedTuple):
    """How a rider and the product of tiles on which it rides share a launch.

    span: chunks of a row that a program has at once. programs: the rider's programs, behind those
    of the product; 0: the product's first programs do the rider's parts before their tiles. block,
    own: the rows of the weight in a tile, and in each program of the product.
    """

    span: int
    programs: int
    block: int
    own: int


def ride(
    sends: bool, rows: int, chunks: int, outputs: int, block: int, gated: bool, eight_bits: bool
) -> Ride:
    """How a send (`sends`) or a landing rides. rows: its rows; 0: there is none. chunks: of each
    row. block: as from `blocks`. eight_bits: whether the weight is stored in 8 bits.

    Where tiles fill the SMs, programs behind them begin when tiles end. So where tiles leave SMs
    free, fewer programs of more chunks each begin at once. For 33 to 64 chunks, and for sends of
    more than 160, larger tiles leave ROOM SMs free; with 64 rows, each program has 4 rows, one
    after the other. Landings of 133 to 256 chunks are inside the tiles, two chunks at once. All of
    it was measured with rows of 4 chunks, an 8B's at TP 4; only such rows get larger tiles. With
    everything behind the tiles, steps of 4, 16 and 64 rows took 2 to 5 % longer (4x H200,
    benchmarks/results/2026-11-27-riders-beside-h200x4.txt).
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
    """The block, and the rows of each program, of tiles that leave `room` SMs free. They are as
    from `rows_each` if those leave as many."""
    own = rows_each(outputs, block, gated)
    if -(-outputs // own) + room > MULTIPROCESSORS:
        own = -(-outputs // ((MULTIPROCESSORS - room) * 4)) * 4
    return max(block, power_of_2(own)), own


def cut(
    kernels: Kernels, rows: int, outputs: int, inputs: int, gated: bool, stored: str = "bf16",
    pieces: bool = False,
) -> Cut:  # fmt: skip
    """How a product is cut into tiles; the arguments are as for `room`."""
    narrow, short = stored != "bf16", inputs <= 1024
    half = kernels.long and narrow and by_halves(rows) and not pieces
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
    """How many thread blocks can run at once: as many as have room in shared memory. Products of
    few rows with weights in 8 bits have no tiles; their blocks are so small that all run. gated:
    there are two matrices, of `outputs` outputs each. pieces: the input is in pieces
    (`ladder.kernels.pieces`)."""
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
    """How a send or landing with `chunks` chunks in each row rides on a product of tiles; the
    product's arguments are as for `room`."""
    narrow = stored != "bf16"
    block = cut(kernels, rows, outputs, inputs, gated, stored, pieces).block
    if kernels.rides == "beside":
        return ride(sends, rows, chunks, outputs, block, gated, narrow)
    own = rows_each(outputs, block, gated) if kernels.even else block
    if kernels.rides == "inside" and _in_tiles(sends, rows, chunks, -(-outputs // own), narrow):
        return Ride(1 if sends else 2, 0, block, own)
    return Ride(1, rows * chunks, block, own)


def _in_tiles(sends: bool, rows: int, chunks: int, tiles: int, eight_bits: bool) -> bool:
    """Whether a send or landing was inside tiles, in the kernels that allowed it: sends of 33 to 64
    chunks were, and landings of more than 132 chunks, in pairs."""
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
    """By launch, the microseconds that its riders add to it."""
    found: dict[int, float] = {}
    for each in graph.operations:
        if each.rides is not None:
            more = cost.moved(each)
            if cost.tiles:
                more += late(cost, each, graph.operations[each.rides])
            found[each.rides] = found.get(each.rides, 0.0) + more
    return found


def late(cost: DecodeCost, rider: Operation, product: Operation) -> float:
    """Microseconds by which a rider outlasts its product of tiles. The rider's thread blocks come
    after the product's, and take as much shared memory: they run one after the other where the
    product leaves room, and then everywhere. Each takes the time of a small kernel (`launch_us`)
    for each of its parts. A rider inside the tiles runs before them. It takes as long, less the
    time in which the memory brings the tiles' first weights."""
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
