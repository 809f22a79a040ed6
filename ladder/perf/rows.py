"""The times of a decode step's products, by a machine's curves."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ladder.perf.machine import IN_8_BITS, Estimate, Machine

# `converted` by rows for machines without such a curve: that of an H200 with weights in fp8, by
# former kernels.
CONVERTED = ((1.0, 1.22), (2.0, 1.25), (4.0, 1.36), (16.0, 1.49), (64.0, 1.76))


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


def read_rate(machine: Machine) -> float:
    """Bytes a microsecond by which products of one row read more of a large weight: faster than a
    copy, and than a product alone, whose beginning and end are left out. 0 if it was not measured
    at two sizes."""
    points = [point for each in machine.family("product", rows=1) for point in each.points]
    if len(points) < 2:
        return 0.0
    (fewer, before), (more, after) = sorted(points)[-2:]
    return (more - fewer) / (after - before)


def product(machine: Machine, nbytes: float, rows: int, weights: str) -> Estimate:
    """A product that reads `nbytes` of a weight. With several rows: their curve. If that has only
    one size: the time of one row, plus what several rows add at that size, since their kernels take
    longer to begin and end. The curve `more rows`, a fitted one, corrects both.

    weights: how they are stored. Types in 8 bits have curves of their own in newer files.
    """
    if machine.family(IN_8_BITS, weights=weights):
        return machine.between(IN_8_BITS, "rows", rows, nbytes, weights=weights)
    one = machine.curve("product", rows=1)
    found = one.at(nbytes)
    least, us = one.points[0]
    if nbytes < least:  # down to a kernel without bytes
        launch = machine.value("launch_us")
        small = launch + max(0.0, us - launch) * nbytes / least
        found = Estimate(min(small, us), "extrapolated")
    if rows == 1:
        return found
    off = 0.0
    for fitted in machine.family("more rows"):
        points = [(at, us - more_rows(machine, at)) for at, us in fitted.points]
        off = between([(1.0, 0.0), *points], rows)
    if rows_measured(machine):
        more = machine.between("product", "rows", rows, nbytes)
        return Estimate(max(0.0, more.us + off), more.basis)
    more_us = max(0.0, more_rows(machine, rows) + off)
    return Estimate(found.us + more_us, "extrapolated")


def converting(machine: Machine, weights: str, batch: int) -> float:
    """The factor on the time of a product whose weights are converted: by the fitted curve of their
    type. Without products of the type in 8 bits, the curve of fp8 or CONVERTED stands for it."""
    family = {curve.where["weights"]: curve for curve in machine.family("converted")}
    if weights not in family and machine.family(IN_8_BITS, weights=weights):
        return 1.0
    found = family.get(weights) or family.get("fp8")
    return between(found.points if found else CONVERTED, batch)
