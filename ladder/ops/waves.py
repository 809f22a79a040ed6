"""How much longer a product takes a GPU if its rows are cut into chunks.

An SM computes one tile at a time. So a product takes a whole number of waves, even if its tiles do
not fill the last one, and a tile takes as long as a full one, even if rows are missing. Two chunks
of 257 rows have three rows of tiles each, and all 514 rows together have five: that costs more than
overlap hides. The result depends on shapes alone, so it is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ladder.costs import MULTIPROCESSORS
from ladder.ops.blocks import WHOLE, Blocks
from ladder.ops.registry import Call, Surplus

# cuBLAS's tiles, rows x columns, each with its speed relative to the large ones. A product is taken
# to use the tiles that end first. These are assumptions; the tests compare them with the times of
# products, whole and in two chunks.
CUBLAS = {(128, 256): 1.0, (256, 128): 1.0, (128, 192): 1.0, (128, 128): 0.85}

# Floating-point operations that an H200 does while it reads a byte, by the bytes of a number.
PER_BYTE = {2: 155, 4: 14}

Tile = tuple[int, int]


def count(rows: int, outputs: int, tile: Tile) -> int:
    """The number of tiles of a product."""
    return -(-rows // tile[0]) * -(-outputs // tile[1])


def split(rows: int, outputs: int, tile: Tile) -> int:
    """The number of parts into which a product of few tiles splits its depth."""
    return max(1, MULTIPROCESSORS // count(rows, outputs, tile))


def taken(rows: int, outputs: int, tile: Tile) -> float:
    """How long an SM computes its tiles, one after the other, in elements of large tiles."""
    return _waves(count(rows, outputs, tile), tile) / split(rows, outputs, tile)


def least_taken(rows: int, outputs: int) -> float:
    return min(taken(rows, outputs, each) for each in CUBLAS)


def _waves(tiles: float, tile: Tile) -> float:
    return math.ceil(tiles / MULTIPROCESSORS) * tile[0] * tile[1] / CUBLAS.get(tile, 1.0)


def by_chunks(blocks: int) -> Surplus:
    """The surplus of cuBLAS's products by chunks. blocks: the default of that option."""

    def surplus(call: Call, options: Mapping[str, Any]) -> float:
        pieces = options.get("blocks", blocks)
        cut = Blocks(call.exact[0], call.ranks, pieces, options.get("ratio", 1))
        parts = [cut.part(block, rank) for block in range(pieces) for rank in range(call.ranks)]
        if options.get("pairs"):  # all twos but the own chunk's; the rest are single chunks
            several = 2 * max(0, call.ranks // 2 - 1)
            paired, own = parts[:several], parts[several:]
            twos = zip(paired[::2], paired[1::2], strict=True)
            parts = [*(slice(low.start, high.stop) for low, high in twos), *own]
        return _one_by_one(call, parts, options.get("streams", 1))

    return surplus


def by_blocks(call: Call, options: Mapping[str, Any]) -> float:
    """The surplus of cuBLAS's products by whole blocks."""
    given = WHOLE._replace(**options)
    cut = Blocks(call.exact[0], call.ranks, given.blocks, given.ratio, whole=True)
    return _one_by_one(call, [cut.whole(block) for block in range(given.blocks)], given.streams)


def _one_by_one(call: Call, parts: list[slice], streams: int) -> float:
    """The surplus of products of these rows."""
    outputs = call.exact[1]
    heights = [part.stop - part.start for part in parts if part.stop > part.start]
    if streams == 1:
        return _beyond_one(call, sum(_alone(call, height) for height in heights))
    # The next product's tiles fill up a wave; only the last product's wave may stay unfilled.
    tiles = [min(CUBLAS, key=lambda tile: taken(h, outputs, tile)) for h in heights]
    last = tiles[-1][0] * tiles[-1][1] / CUBLAS[tiles[-1]]
    work = [
        count(h, outputs, t) * t[0] * t[1] / CUBLAS[t] for h, t in zip(heights, tiles, strict=True)
    ]
    read = sum(_read(call, height) for height in heights)
    return _beyond_one(call, max(_waves(sum(work) / last, tiles[-1]), read))


def by_tiles(tile_of: Callable[[Mapping[str, Any]], Tile]) -> Surplus:
    """The surplus of one product by our own kernel, whose tiles each have rows of one rank only.

    tile_of: the tile that options ask for.
    """

    def surplus(call: Call, options: Mapping[str, Any]) -> float:
        rows, outputs = call.exact[:2]
        tile = tile_of(options)
        tiles = call.ranks * count(-(-rows // call.ranks), outputs, tile)
        return _beyond_one(call, _waves(tiles, tile))

    return surplus


def _read(call: Call, rows: int) -> float:
    """How long a product of `rows` rows reads and writes its operands, in the unit of `taken`."""
    (_, outputs, inputs), size = call.exact, call.dtype.itemsize
    bytes_ = size * (outputs * inputs + rows * (outputs + inputs))
    return bytes_ * PER_BYTE.get(size, PER_BYTE[4]) / (2 * MULTIPROCESSORS * inputs)


def _alone(call: Call, rows: int) -> float:
    """How long a product of `rows` rows takes, in the unit of `taken`."""
    return max(least_taken(rows, call.exact[1]), _read(call, rows))


def _beyond_one(call: Call, found: float) -> float:
    """How much longer `found` is than one product of all rows, as a share of that one's time."""
    return found / _alone(call, call.exact[0]) - 1
