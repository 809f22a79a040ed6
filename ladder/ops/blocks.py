"""The options of products by chunks: their streams, and the blocks of each rank's rows."""

from __future__ import annotations

from typing import NamedTuple

from ladder.models.errors import UserError
from ladder.ops.steps import LANES

MAX_BLOCKS, MAX_RATIO = 8, 8
WHOLE_ROWS = 128  # of one of cuBLAS's tiles
READ_ROWS = 256  # a product of fewer rows takes about as long: its weight has to be read
STREAMS = ("streams",)
BLOCKS = ("blocks", "ratio", *STREAMS)


class Options(NamedTuple):
    blocks: int
    ratio: int
    streams: int


WHOLE = Options(4, 2, 2)  # the defaults where a block is one product


class Blocks:
    """Each rank's rows in blocks. All rows lie block by block, and within a block rank by rank.

    rows: of all ranks together; the last rank's last blocks may have fewer, or none. ratio: each
    block is 1/ratio as high as the one before, rounded to whole tiles if there are enough rows.
    whole: a block is one product of all ranks' rows, at least READ_ROWS of them if there are enough
    (the last ranks may have fewer).
    """

    def __init__(self, rows: int, world: int, blocks: int, ratio: int, whole: bool = False) -> None:
        if not 1 <= blocks <= MAX_BLOCKS:
            raise UserError(f"blocks={blocks}; expected 1 to {MAX_BLOCKS}")
        if not 1 <= ratio <= MAX_RATIO:
            raise UserError(f"ratio={ratio}; expected 1 to {MAX_RATIO}")
        self.rows, self.world, self.height = rows, world, -(-rows // world)
        weights = [ratio ** (blocks - 1 - block) for block in range(blocks)]
        step = -(-READ_ROWS // world) if whole else WHOLE_ROWS
        if self.height < step * (blocks if whole else sum(weights)):
            step = 1
        self.starts = [
            (2 * self.height * sum(weights[:block]) + sum(weights) * step)
            // (2 * sum(weights) * step) * step
            for block in range(blocks)
        ]  # fmt: skip
        if whole and self.height >= blocks:  # rounding leaves each block a step
            most = [(self.height // step - blocks + block) * step for block in range(blocks)]
            self.starts = [min(each) for each in zip(self.starts, most, strict=True)]
        self.starts.append(self.height)

    def whole(self, block: int) -> slice:
        """The rows of all ranks in a block."""
        start, end = (self.world * each for each in self.starts[block : block + 2])
        return slice(min(start, self.rows), min(end, self.rows))

    def part(self, block: int, rank: int) -> slice:
        """The rows of a rank in a block, among all rows."""
        start, end = self.starts[block : block + 2]
        first = self.world * start + rank * (end - start)
        return slice(min(first, self.rows), min(first + end - start, self.rows))

    def place(self, block: int, rank: int, kind: int = 0) -> slice:
        """The same rows among the rank's own ones, behind `kind` times the height of all blocks."""
        part, start = self.part(block, rank), kind * self.height + self.starts[block]
        return slice(start, start + part.stop - part.start)


def check_streams(streams: int) -> None:
    if streams not in range(1, len(LANES) + 1):
        raise UserError(f"streams={streams}; expected 1 to {len(LANES)}")
