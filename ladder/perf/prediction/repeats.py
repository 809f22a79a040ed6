"""How much records of the same inference differ: no prediction can be closer to all of them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ladder.bench.inference.points import InferencePoint
from ladder.perf.machine import Machine
from ladder.perf.prediction.eras import ERAS, Chosen, every, of_era
from ladder.perf.prediction.records import inference_runs


def repeats(files: Iterable[Path], machine: Machine, phase: str) -> list[str]:
    """Lines on a phase's points with more than one record: how far times are from their median, and
    so are speedups of ladder over standard that were measured in one run. Points that differ only
    in the number of new tokens count as the same, if they ran the same kernels."""
    times: dict[tuple[InferencePoint, int], list[tuple[str, float]]] = {}
    ways: list[tuple[Chosen, bool | None]] = [(of_era(each), None) for each in ERAS]
    if phase != "decode":
        ways = [(every, True), (every, False)]
    for era, (of, inside) in enumerate(ways):
        for point, run, ms in inference_runs(files, machine, phase, of=of, inside=inside):
            times.setdefault((replace(point, new_tokens=0), era), []).append((run, ms))
    lines = []
    off = spread([[ms for _, ms in some] for some in times.values()], relative=True)
    if off:
        lines.append(
            f"points with more than one record: {off[0]}, which are {100 * off[1]:.1f} % from "
            f"their median on average, at most {100 * off[2]:.1f} %"
        )
    gains = []
    for (point, era), some in times.items():
        if point.plan == "ladder" and not point.no_comm:
            # A ladder's prompt by copies may be of the same run as a standard one by operators.
            same = (era,) if phase == "decode" else range(len(ways))
            plain = [
                one for way in same for one in times.get((replace(point, plan="standard"), way), [])
            ]
            gains.append([b / a for run, a in some for other, b in plain if run == other])
    off = spread(gains, relative=False)
    if off:
        lines.append(
            f"speedups of ladder over standard with more than one run: {off[0]}, which are "
            f"{100 * off[1]:.1f} points from their median on average, at most {100 * off[2]:.1f}"
        )
    return lines


def spread(groups: Iterable[list[float]], relative: bool) -> tuple[int, float, float] | None:
    """The number of groups with several values, and how far these are from their group's median:
    the mean and the largest distance."""
    several = [each for each in groups if len(each) > 1]
    off = []
    for each in several:
        middle = statistics.median(each)
        off += [abs(value - middle) / (middle if relative else 1.0) for value in each]
    return (len(several), statistics.mean(off), max(off)) if off else None
