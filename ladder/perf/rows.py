"""The times of products of several rows, by a machine's curves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ladder.perf.machine import Machine


def between(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x: linear between points, and above them that of the last point."""
    for (low, one), (high, two) in pairwise(points):
        if low <= x <= high:
            return one + (two - one) * (x - low) / (high - low)
    return points[-1][1]


def more_rows(machine: Machine, rows: float) -> float:
    """Microseconds that `rows` rows add to a product of one row, at a size where both are known."""
    places = [x for x, _ in machine.family("product")[-1].points]
    middle = places[len(places) // 2]
    more = machine.between("product", "rows", rows, middle)
    return max(0.0, more.us - machine.curve("product", rows=1).at(middle).us)


def rows_measured(machine: Machine) -> bool:
    """Whether products of more rows than one were measured at several sizes."""
    return any(
        each.where["rows"] != 1 and len(each.points) > 1 for each in machine.family("product")
    )
