"""What was measured as a short table."""

from __future__ import annotations

from ladder.parallel.dispatch import size_text
from ladder.perf.machine import CURVES, DECLARED, RATIOS, Curve, Machine
from ladder.plans import aligned


def table(machine: Machine) -> str:
    """A line for each value, and one for each curve with its first, middle and last point.

    Beside a value stands the one that is declared for files without it.
    """
    rows = [["value", "measured", "declared otherwise"]]
    for name, found in sorted(machine.values.items()):
        declared = f"{DECLARED[name]:g}" if name in DECLARED else "-"
        rows.append([name, f"{found.value:g}", declared])
    lines = [["curve", "points", "first", "middle", "last"]]
    for curve in machine.curves:
        points = curve.points
        shown = (points[0], points[len(points) // 2], points[-1])
        lines.append([str(curve), str(len(points)), *(_point(curve, *each) for each in shown)])
    return f"{aligned(rows, left=1)}\n\n{aligned(lines, left=1)}\n"


def _point(curve: Curve, x: float, y: float) -> str:
    unit = "" if curve.name in RATIOS else " us"
    quantity = CURVES[curve.name][0]
    return f"{size_text(int(x)) if quantity == 'bytes' else f'{x:g} {quantity}'}: {y:g}{unit}"
