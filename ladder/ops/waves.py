"""How long a GPU computes a product whose rows are cut into chunks, beside one of all rows at once.

A multiprocessor computes a tile at a time, so a product takes as many waves as its tiles fill, the
last one too, and a tile as long as a full one, even if rows are missing. Chunks of 257 rows have
three rows of tiles each, and all 514 rows together have five: that is more than what overlap hides.
It is arithmetic of shapes alone, and so the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ladder.costs import MULTIPROCESSORS
from ladder.ops.blocks import WHOLE, Blocks
from ladder.ops.registry import Call, Surplus

# Rows x columns of cuBLAS's tiles, each with its rate of the large ones'. A product has those that
# end first. Declared, and compared with products alone, whole and in two chunks: see the tests.
CUBLAS = {(128, 256): 1.0, (256, 128): 1.0, (128, 192): 1.0, (128, 128): 0.85}

# Floating-point operations of a product while a byte is read from memory, by the bytes of a number;
# of H200s.
PER_BYTE = {2: 155, 4: 14}

Tile = tuple[int, int]


def count(rows: int, outputs: int, tile: Tile) -> int:
    """Tiles of a product."""
    return -(-rows // tile[0]) * -(-outputs // tile[1])


def split(rows: int, outputs: int, tile: Tile) -> int:
    """In how many parts of its depth a product is computed that has few tiles."""
    return max(1, MULTIPROCESSORS // count(rows, outputs, tile))


def taken(rows: int, outputs: int, tile: Tile) -> float:
    """The elements of large tiles that take as long as a multiprocessor computes, one tile after
    the other."""
    return _waves(count(rows, outputs, tile), tile) / split(rows, outputs, tile)


def least_taken(rows: int, outputs: int) -> float:
    return min(taken(rows, outputs, each) for each in CUBLAS)


def _waves(tiles: float, tile: Tile) -> float:
    return math.ceil(tiles / MULTIPROCESSORS) * tile[0] * tile[1] / CUBLAS.get(tile, 1.0)


def by_chunks(blocks: int) -> Surplus:
    """Of cuBLAS's products by chunks. blocks: the default of such options."""

    def surplus(call: Call, options: Mapping[str, Any]) -> float:
        pieces = options.get("blocks", blocks)
        cut = Blocks(call.exact[0], call.ranks, pieces, options.get("ratio", 1))
        parts = [cut.part(block, rank) for block in range(pieces) for rank in range(call.ranks)]
        if options.get("pairs"):  # all twos but the own chunk's; of an odd number the last has more
            several = 2 * max(0, call.ranks // 2 - 1)
            paired, own = parts[:several], parts[several:]
            twos = zip(paired[::2], paired[1::2], strict=True)
            parts = [*(slice(low.start, high.stop) for low, high in twos), *own]
        return _one_by_one(call, parts, options.get("streams", 1))

    return surplus


def by_blocks(call: Call, options: Mapping[str, Any]) -> float:
    """Of cuBLAS's products by whole blocks."""
    given = WHOLE._replace(**options)
    cut = Blocks(call.exact[0], call.ranks, given.blocks, given.ratio, whole=True)
    return _one_by_one(call, [cut.whole(block) for block in range(given.blocks)], given.streams)


def _one_by_one(call: Call, parts: list[slice], streams: int) -> float:
    """Of products of these rows."""
    outputs = call.exact[1]
    heights = [part.stop - part.start for part in parts if part.stop > part.start]
    if streams == 1:
        return _beyond_one(call, sum(_alone(call, height) for height in heights))
    # The next product's tiles fill a wave that is not full; only the last one's is left so.
    tiles = [min(CUBLAS, key=lambda tile: taken(h, outputs, tile)) for h in heights]
    last = tiles[-1][0] * tiles[-1][1] / CUBLAS[tiles[-1]]
    work = [
        count(h, outputs, t) * t[0] * t[1] / CUBLAS[t] for h, t in zip(heights, tiles, strict=True)
    ]
    read = sum(_read(call, height) for height in heights)
    return _beyond_one(call, max(_waves(sum(work) / last, tiles[-1]), read))


def by_tiles(tile_of: Callable[[Mapping[str, Any]], Tile]) -> Surplus:
    """Of one product of our own, whose tiles have rows of one rank. tile_of: these options'."""

    def surplus(call: Call, options: Mapping[str, Any]) -> float:
        rows, outputs = call.exact[:2]
        tile = tile_of(options)
        tiles = call.ranks * count(-(-rows // call.ranks), outputs, tile)
        return _beyond_one(call, _waves(tiles, tile))

    return surplus


def _read(call: Call, rows: int) -> float:
    """What reading and writing its operands takes of a product of so many rows, as `taken`."""
    (_, outputs, inputs), size = call.exact, call.dtype.itemsize
    bytes_ = size * (outputs * inputs + rows * (outputs + inputs))
    return bytes_ * PER_BYTE.get(size, PER_BYTE[4]) / (2 * MULTIPROCESSORS * inputs)


def _alone(call: Call, rows: int) -> float:
    """What a product of so many rows takes, as `taken`."""
    return max(least_taken(rows, call.exact[1]), _read(call, rows))


def _beyond_one(call: Call, found: float) -> float:
    """What `found` is above one product of all rows, as a share of it."""
    return found / _alone(call, call.exact[0]) - 1
