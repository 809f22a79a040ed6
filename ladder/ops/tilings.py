"""The options of products by our own kernel: the shape of its tiles, and their order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ladder.kernels.gemm import GROUP, Tiling
from ladder.models.errors import UserError

TILING = ("tile", "stages")
ORDERED = (*TILING, "group_m")


def tiling_of(tile: str | None, stages: int | None, group_m: int = GROUP) -> Tiling:
    """A Tiling from a table's options. tile: rows x columns x depth, such as 128x256x64.

    group_m: rows of tiles, see `Tiling`.
    """
    if group_m < 1:
        raise UserError(f"group_m={group_m}; expected 1 or more rows of tiles")
    found = Tiling(stages=stages or Tiling.stages, group_m=group_m)
    if tile is None:
        return found
    sizes = [int(size) if size.isdecimal() else 0 for size in tile.split("x")]
    if len(sizes) != 3 or any(size < 16 or size & (size - 1) for size in sizes):
        raise UserError(
            f"tile={tile!r}; expected rows x columns x depth, powers of two from 16 on, such as "
            f"128x256x64"
        )
    return replace(found, rows=sizes[0], columns=sizes[1], depth=sizes[2])


def tile_of(options: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of the tile that these options ask for."""
    found = tiling_of(options.get("tile"), None)
    return found.rows, found.columns
