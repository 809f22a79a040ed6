"""Products of tiles, beside which landings and sends ride: their thread blocks, and first bytes."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ladder.costs import BF16, MULTIPROCESSORS
from ladder.kernels.decode_shapes import EARLY, FULL, Ride, blocks, ride, rows_each

SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that thread blocks can have

Rides = Literal["beside", "inside", "behind"]


class Kernels(NamedTuple):
    """What sets the kernels of a recorded decode step apart from today's. rides: where what rides
    on tiles may be, besides behind them: beside and inside of them, or inside alone. even: gated
    products are spread evenly over multiprocessors."""

    rides: Rides = "beside"
    even: bool = True


TODAY = Kernels()


def room(
    rows: int, outputs: int, inputs: int, gated: bool, stored: str = "bf16", pieces: bool = False
) -> int:
    """How many thread blocks of a product run at once: of tiles, or, as of few rows of weights in
    8 bits, so small that all run. gated: of two matrices, of so many outputs each. pieces: of the
    input (`ladder.kernels.pieces`)."""
    narrow = stored != "bf16"
    cut = blocks(rows, outputs, inputs, gated, BF16, narrow, pieces)
    if cut.stages == 0:
        return MULTIPROCESSORS + -(-outputs // cut.block)
    weight = cut.block * (2 if gated else 1) * (1 if narrow else BF16)
    held = cut.stages * cut.step * (BF16 * cut.padded + weight)
    return MULTIPROCESSORS * max(1, SHARED_MEMORY // held)


def rides(
    kernels: Kernels, sends: bool, chunks: int, rows: int, outputs: int, inputs: int, gated: bool,
    stored: str = "bf16", pieces: bool = False,
) -> Ride:  # fmt: skip
    """How a send or landing of `chunks` for each row rides on a product of tiles, which is given as
    for `room`."""
    narrow = stored != "bf16"
    block = blocks(rows, outputs, inputs, gated, BF16, narrow, pieces).block
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


def early_bytes(rows: int, outputs: int, inputs: int, gated: bool) -> float:
    """Bytes of a matrix in bfloat16 that a product of tiles brings into L2 before its wait."""
    step = blocks(rows, outputs, inputs, gated, BF16).step
    return BF16 * EARLY * step * outputs * (2 if gated else 1)
