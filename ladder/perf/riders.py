"""Products of tiles, beside which landings and sends ride: their thread blocks, and first bytes."""

from __future__ import annotations

from typing import NamedTuple

from ladder.costs import BF16, MULTIPROCESSORS
from ladder.kernels.decode_shapes import EARLY, blocks, rows_each

SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that thread blocks can have


class Kernels(NamedTuple):
    """What sets the kernels of a recorded decode step apart from today's. inside: what rides on
    tiles may be in them. even: gated products are spread evenly over multiprocessors."""

    inside: bool = True
    even: bool = True


TODAY = Kernels()


def places(
    rows: int, outputs: int, inputs: int, gated: bool, even: bool = True, stored: str = "bf16",
    pieces: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """How many thread blocks of a product run at once, and how many it has: of tiles, or, as of few
    rows of weights in 8 bits, so small that all run. gated: of two matrices, of so many outputs
    each. even: as of `Kernels`. pieces: of the input (`ladder.kernels.pieces`)."""
    narrow = stored != "bf16"
    cut = blocks(rows, outputs, inputs, gated, BF16, narrow, pieces)
    if cut.stages == 0:
        programs = -(-outputs // cut.block)
        return MULTIPROCESSORS + programs, programs
    weight = cut.block * (2 if gated else 1) * (1 if narrow else BF16)
    held = cut.stages * cut.step * (BF16 * cut.padded + weight)
    own = rows_each(outputs, cut.block, gated) if even else cut.block
    return MULTIPROCESSORS * max(1, SHARED_MEMORY // held), -(-outputs // own)


def early_bytes(rows: int, outputs: int, inputs: int, gated: bool) -> float:
    """Bytes of a matrix in bfloat16 that a product of tiles brings into L2 before its wait."""
    step = blocks(rows, outputs, inputs, gated, BF16).step
    return BF16 * EARLY * step * outputs * (2 if gated else 1)
