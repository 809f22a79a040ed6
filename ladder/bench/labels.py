"""Where labels beside points go, so that they overlap neither each other nor what is drawn.

Lengths are in points; a rectangle is (left, bottom, right, top), a segment its two ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Rectangle = tuple[float, float, float, float]
Segment = tuple[float, float, float, float]

BESIDE = 9.0  # from a point to a label beside it
NEAR = 12.0  # a label farther from its point is connected with it by a line
STEP, REACH = 7.5, 120.0  # places are tried up and down, STEP apart, as far as REACH
SIDEWAYS = (0.0, 22.0, 45.0, 70.0)  # beyond BESIDE, to the left and to the right
TRIED, PASSES = 60, 8
# Costs of a place, each as the distance in points that costs the same.
OUTSIDE, ON_LABEL, ON_MARK, LINE_ON_LABEL, LINE_ON_MARK, LINES, ON_LINE, LEFT = (
    900, 500, 250, 60, 40, 25, 20, 4,
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A place of a label: its rectangle, the line to its point, if any, and its own cost."""

    box: Rectangle
    line: Segment | None
    cost: float


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]],
    marks: Sequence[Rectangle], inside: Rectangle, lines: Sequence[Segment] = (),
) -> list[Place]:  # fmt: skip
    """A place within `inside` for the label of each point. sizes: the labels' widths and heights.

    marks: rectangles that labels must not cover, with the points' own marks. lines: segments that
    they should not cover. The labels take turns: each moves to the place that costs least while
    the others stay, until none moves.
    """
    tried = [
        sorted(places(point, size, marks, inside, lines), key=lambda each: each.cost)[:TRIED]
        for point, size in zip(points, sizes, strict=True)
    ]
    found = [each[0] for each in tried]
    for _ in range(PASSES):
        before = list(found)
        for i, candidates in enumerate(tried):
            others = found[:i] + found[i + 1 :]
            found[i] = min(candidates, key=lambda each: each.cost + among(each, others))
        if found == before:
            break
    return found


def places(
    point: tuple[float, float], size: tuple[float, float], marks: Sequence[Rectangle],
    inside: Rectangle, lines: Sequence[Segment],
) -> Iterator[Place]:  # fmt: skip
    """The places that are tried for a label, the nearest first."""
    (x, y), (width, height) = point, size
    count = int(REACH / STEP)
    for n in sorted(range(-count, count + 1), key=abs):
        low = y + n * STEP - height / 2
        lefts = [(x + BESIDE + more, 0) for more in SIDEWAYS]
        lefts += [(x - BESIDE - more - width, LEFT) for more in SIDEWAYS]
        if abs(n * STEP) > height:
            lefts.append((x - width / 2, LEFT))
        for left, extra in lefts:
            box = (left, low, left + width, low + height)
            end = min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3])
            distance = ((end[0] - x) ** 2 + (end[1] - y) ** 2) ** 0.5
            line = (x, y, *end) if distance > NEAR else None
            cost = distance + extra
            cost += OUTSIDE * (not within(box, inside))
            cost += ON_MARK * sum(overlap(box, mark) for mark in marks)
            cost += ON_LINE * sum(crosses(each, box) for each in lines)
            if line:
                own = (x - 1, y - 1, x + 1, y + 1)
                hit = [m for m in marks if not overlap(own, m) and crosses(line, m)]
                cost += LINE_ON_MARK * len(hit)
            yield Place(box, line, cost)


def among(own: Place, others: Sequence[Place]) -> float:
    """The cost of overlaps and crossings between a place and the others."""
    cost = 0.0
    for each in others:
        cost += ON_LABEL * overlap(own.box, each.box)
        if own.line:
            cost += LINE_ON_LABEL * crosses(own.line, each.box)
        if each.line:
            cost += LINE_ON_LABEL * crosses(each.line, own.box)
        if own.line and each.line:
            cost += LINES * intersect(own.line, each.line)
    return cost


def within(box: Rectangle, outer: Rectangle) -> bool:
    return box[0] >= outer[0] and box[1] >= outer[1] and box[2] <= outer[2] and box[3] <= outer[3]


def overlap(one: Rectangle, other: Rectangle) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def crosses(line: Segment, box: Rectangle) -> bool:
    """Whether a segment has a point within a rectangle, by clipping it to both pairs of sides."""
    first, last = 0.0, 1.0
    for begin, end, low, high in (
        (line[0], line[2], box[0], box[2]), (line[1], line[3], box[1], box[3]),
    ):  # fmt: skip
        if begin == end:
            if not low < begin < high:
                return False
            continue
        ends = sorted(((low - begin) / (end - begin), (high - begin) / (end - begin)))
        first, last = max(first, ends[0]), min(last, ends[1])
    return first < last


def intersect(one: Segment, other: Segment) -> bool:
    """Whether two segments cross."""
    return side(one, other[:2]) != side(one, other[2:]) and side(other, one[:2]) != side(
        other, one[2:]
    )


def side(line: Segment, point: tuple[float, ...]) -> bool:
    """On which side of a segment's line a point is."""
    (x, y), (a, b, c, d) = point, line
    return (c - a) * (y - b) > (d - b) * (x - a)
