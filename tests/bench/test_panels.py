"""Panels of points: what they share, and labels that cover nothing."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from ladder.bench import figures
from ladder.bench.labels import crosses, intersect, overlap, place, within
from ladder.bench.panels import Panel, Spot, colour, panels
from tests.bench.drawing import labels, values


def test_panels_share_the_y_axis_and_a_point_far_above_stands_at_the_edge() -> None:
    spots = [
        Spot("ladder", "ladder, n = 3", 1.0, 0.92, 0.91, 0.93),
        Spot("standard", "standard, n = 1", 2.0, 0.94, 0.94, 0.94, full=False),
        Spot("mine", "mine, n = 1", 2.01, 1.5, 1.5, 1.5, full=False),
    ]
    chosen = [Panel("first", "ms", spots, (1.5, "nothing")), Panel("second", "s", spots[:2])]
    svg = panels(chosen, "bits", title="All", top=1.0)
    assert values(svg) == [
        "All",
        "ladder, n = 3: ms 1, bits 0.92 (0.91 to 0.93)",
        "standard, n = 1: ms 2, bits 0.94 (0.94 to 0.94)",
        "mine, n = 1: ms 2.01, bits 1.5 (1.5 to 1.5)",
        "ladder, n = 3: s 1, bits 0.92 (0.91 to 0.93)",
        "standard, n = 1: s 2, bits 0.94 (0.94 to 0.94)",
    ]
    found = labels(svg)
    assert {"first", "second", "dashed: nothing", "mine, n = 1: 1.500"} <= set(found)
    edge, near = found["mine, n = 1: 1.500"][1], found["first"][1]
    assert near < edge < near + 40
    assert all(x < figures.WIDTH for x, _ in found.values())


def test_a_plan_has_its_own_colour_or_that_of_its_kind() -> None:
    assert colour("desync-2x") != colour("desync-4x") == colour("desync-8x-sqrt")
    assert colour("accumulate-8x-lag4") == figures.COLOURS["accumulate-4x"]
    assert colour("ladder@4-7") == figures.COLOURS["ladder"]
    assert colour("mine") == figures.INK


@pytest.mark.parametrize("seed", range(4))
def test_labels_of_fourteen_points_close_together_cover_nothing(seed: int) -> None:
    """The points of the frontier: close in both, each with a range. Neither another label, nor a
    mark, nor the edge; and they are near what they name."""
    rng, inside = random.Random(seed), (0.0, 0.0, 600.0, 260.0)
    points = [(rng.uniform(150, 400), rng.uniform(60, 200)) for _ in range(14)]
    marks = [(x - 5, y - rng.uniform(5, 20), x + 5, y + rng.uniform(5, 20)) for x, y in points]
    sizes = [(rng.uniform(50, 125), 13.0) for _ in points]
    found = place(points, sizes, marks, inside)
    for one, other in combinations(found, 2):
        assert not overlap(one.box, other.box)
    for each, (x, y), (width, height) in zip(found, points, sizes, strict=True):
        assert within(each.box, inside)
        assert not any(overlap(each.box, mark) for mark in marks)
        assert each.box[2] - each.box[0] == pytest.approx(width)
        assert each.box[3] - each.box[1] == pytest.approx(height)
        across = max(each.box[0] - x, x - each.box[2], 0)
        assert across + max(each.box[1] - y, y - each.box[3], 0) < 120
        if each.line:
            assert each.line[:2] == (x, y)
    assert sum(each.line is None for each in found) >= 4


def test_a_label_of_a_point_alone_is_beside_it_and_at_the_edge_on_its_other_side() -> None:
    inside = (0.0, 0.0, 100.0, 100.0)
    (beside,) = place([(10.0, 50.0)], [(40.0, 12.0)], [], inside)
    assert beside.box == (19, 44, 59, 56)
    (other,) = place([(90.0, 50.0)], [(40.0, 12.0)], [], inside)
    assert other.box == (41, 44, 81, 56)
    line = (30.0, 0.0, 30.0, 100.0)
    (below,) = place([(10.0, 50.0)], [(40.0, 12.0)], [], inside, [line])
    assert below.box == beside.box  # rather on a thin line than far away
    assert below.cost > beside.cost


def test_segments_and_rectangles() -> None:
    box = (10.0, 10.0, 20.0, 20.0)
    assert crosses((0, 15, 30, 15), box)
    assert crosses((12, 12, 14, 14), box)
    assert not crosses((0, 15, 9, 15), box)
    assert not crosses((0, 25, 30, 21), box)
    assert not crosses((5, 0, 5, 30), box)
    assert intersect((0, 0, 10, 10), (0, 10, 10, 0))
    assert not intersect((0, 0, 4, 4), (0, 10, 10, 0))
