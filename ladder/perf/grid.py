"""The rate of products of many rows, from the grid of shapes that was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ladder.perf.machine import Machine

FILL, SQUARE = 128, 8192  # inputs that fill a tile's pipeline; the size for `matrix_tflop_s`


def matrix_rate(machine: Machine, rows: float, outputs: float, inputs: float) -> float | None:
    """The rate of a product in FLOPs a microsecond; None if there are no `matrix` curves.

    Between measured shapes it is linear in the logarithms of outputs and inputs; outside of them it
    is that of the nearest shape.
    """
    rates: dict[tuple[float, float], float] = {}
    for each in machine.family("matrix"):
        shape = float(each.where["outputs"]), float(each.where["inputs"])
        rates[shape] = 2.0 * rows * shape[0] * shape[1] / each.at(rows).us
    if not rates:
        return None
    first, second = (
        _around(sorted({shape[n] for shape in rates}), size)
        for n, size in enumerate((outputs, inputs))
    )
    corners = {(a, b): share * other for a, share in first for b, other in second}
    if corners.keys() <= rates.keys():
        return sum(share * rates[shape] for shape, share in corners.items())
    nearest = min(  # some shapes were left out
        rates,
        key=lambda shape: abs(math.log(shape[0] / outputs)) + abs(math.log(shape[1] / inputs)),
    )
    return rates[nearest]


def _around(places: Sequence[float], value: float) -> list[tuple[float, float]]:
    """The places on both sides of a value, with their shares, linear in the logarithm."""
    if not places[0] < value < places[-1]:
        return [(places[0] if value <= places[0] else places[-1], 1.0)]
    n = next(n for n, place in enumerate(places) if place >= value)
    low, high = places[n - 1], places[n]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]
