"""Products of tiles, beside which landings and sends ride: their thread blocks, and first bytes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ladder.costs import BF16, MULTIPROCESSORS
from ladder.kernels.decode_shapes import (
    EARLY,
    FEW,
    FULL,
    MANY,
    Cut,
    Ride,
    blocks,
    by_halves,
    ride,
    rows_each,
)

SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that thread blocks can have

Rides = Literal["beside", "inside", "behind"]


class Kernels(NamedTuple):
    """What sets the kernels of a recorded decode step apart from today's. rides: where what rides
    on tiles may be, besides behind them: beside and inside of them, or inside alone. even: gated
    products are spread evenly over multiprocessors. long: products of 3 to 16 rows have longer
    steps, O of 3 and 4 rows in 8 bits has tiles, and in fp8 O and down take float16."""

    rides: Rides = "beside"
    even: bool = True
    long: bool = True


TODAY = Kernels()


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
