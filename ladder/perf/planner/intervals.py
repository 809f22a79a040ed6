"""How far a measured time may be from its prediction, by the errors on recorded passes.

errors.json has the predicted microseconds and the ratio measured / predicted of every recorded pass
to which nothing was fitted, by GPU, phase, way and model, with the most tokens of their sequences
(`python benchmarks/prediction_errors.py` writes it). The way is the reducer, or, for a training
step, what its ranks share (`training_way`). An interval goes from the prediction divided by a
factor to the prediction times that factor. 80 % of the NEAREST passes were within the factor; these
passes have predicted times with the smallest ratio to this one, since errors depend on how long
kernels take. For a model without records the interval is wider: by the factor that 80 % of the
recorded passes need when their own model's records are left out. An interval covers the errors of
the simulation on a machine whose curves are measured, not errors in the machine's own file.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.bench.training.points import parse_layout
from ladder.perf.graph import FUSED

FILE = Path(__file__).parent / "errors.json"
NEAREST = 20
LEAST = 8  # with fewer passes, the farthest of them says little about the next one
COVERS = 0.8
# A pass is unlike the records if it is this many times shorter or longer than the shortest or the
# longest of them, or if its sequences are this many times longer.
FAR = 2.0


@dataclass(frozen=True)
class Interval:
    """low, high: factors on a predicted time; None if no such pass was recorded. source: which
    records they come from, and how many. far: the records are few, or of other GPUs, older kernels,
    another TP degree, much shorter or longer passes, or much shorter sequences. wider: they are of
    other models alone."""

    low: float | None
    high: float | None
    source: str
    far: bool = False
    wider: bool = False

    def of(self, us: float) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low * us, self.high * us)


@functools.cache
def recorded() -> tuple[Mapping[str, Any], ...]:
    """The entries of errors.json."""
    return tuple(json.loads(FILE.read_text(encoding="utf-8"))["entries"])


def training_way(layout: str, virtual: bool) -> str:
    """The way of a training step: what the ranks of a layout share; data parallelism beside TP does
    not count. virtual: whether a process computes several of the plan's ranks."""
    found = parse_layout(layout)
    way = "data parallel"
    if found.tp > 1:
        way = f"tp{'+sp' * found.sequence_parallel}{'+fused' * (found.reducer == FUSED)}"
    return f"{way}, virtual ranks" if virtual else way


def interval(
    phase: str, gpu: str, gpus: int, way: str, model: str, us: float, tokens: int = 0
) -> Interval:
    """The interval of a model's pass that is predicted to take `us` microseconds on `gpus` GPUs.
    way: "" for one GPU alone. tokens: of each sequence; 0: as many as were recorded."""
    found, whose, enough, longest = _alike(phase, gpu, gpus, way)
    if not found:
        return Interval(None, None, "no record")
    points = [point for each in found.values() for point in each]
    wide = width(points, us)
    if model not in found:
        wide *= _margin(phase, gpu, gpus, way)
    times = [time for time, _ in points]
    far = not enough or not min(times) / FAR <= us <= max(times) * FAR
    far |= model not in found and len(found) == 1
    far |= tokens > FAR * longest
    models = f"{len(found)} model{'s' if len(found) > 1 else ''}"
    nearest = f"{NEAREST} of {len(points)}" if len(points) > NEAREST else f"{len(points)}"
    where = ", ".join(each for each in (phase, way, whose) if each)
    source = f"{nearest} records of {models} ({where})"
    return Interval(1 / wide, wide, source, far, model not in found)


Points = dict[str, list[tuple[float, float]]]


@functools.cache
def _alike(
    phase: str, gpu: str, gpus: int, way: str, older: bool = False
) -> tuple[Points, str, bool, int]:
    """The records to use: each model's points (predicted us, measured / predicted); a text on their
    origin; whether there are enough of `gpus` of these GPUs with the kernels asked for; and the
    most tokens of their sequences. If there are too few, records of other kernels are added; if
    there are none of these GPUs, those of others are used."""
    alike = [each for each in recorded() if each["phase"] == phase and way in ("", each["way"])]
    here = [each for each in alike if (each["gpu"], each["gpus"]) == (gpu, gpus)]
    now = [each for each in here if each.get("older", False) == older]
    enough = sum(len(each["points"]) for each in now) >= LEAST
    chosen = now if enough else here or alike
    whose = f"{gpus} x {gpu}"
    if not here:
        kinds = sorted({each["gpu"] for each in alike})
        whose = "other numbers of GPUs" if gpu in kinds else ", ".join(kinds)
    elif len(chosen) > len(now):
        whose += ", some with older kernels" if now else ", older kernels"
    found: Points = {}
    for each in chosen:
        points = found.setdefault(each["model"], [])
        points += [(float(time), float(ratio)) for time, ratio in each["points"]]
    return found, whose, enough, max((each["tokens"] for each in chosen), default=0)


@functools.cache
def _margin(phase: str, gpu: str, gpus: int, way: str) -> float:
    """The factor by which intervals from other models' records must be wider at both ends, so that
    they cover the share COVERS of a model's records. Each model has the same weight."""
    found, *_ = _alike(phase, gpu, gpus, way)
    needed: list[tuple[float, float]] = []
    for model, points in found.items():
        others = [point for name, each in found.items() if name != model for point in each]
        for us, ratio in points if others else ():
            wide = width(others, us)
            needed.append((max(1.0, 1 / ratio / wide, ratio / wide), 1 / len(points)))
    total = sum(weight for _, weight in needed)
    held = 0.0
    for factor, weight in sorted(needed):
        held += weight
        if held >= COVERS * total - 1e-9:
            return factor
    return 1.0


def width(points: Sequence[tuple[float, float]], us: float) -> float:
    """The factor within which the share COVERS of the passes nearest to `us` were, and a further
    pass will be: one of n + 1 passes is beyond the k-th farthest with a chance of k / (n + 1)."""
    nearest = sorted(points, key=lambda each: abs(math.log(each[0] / us)))[:NEAREST]
    off = sorted(max(ratio, 1 / ratio) for _, ratio in nearest)
    return off[min(len(off), math.ceil(COVERS * (len(off) + 1))) - 1]


def coverage() -> dict[str, tuple[int, float]]:
    """By phase, the number of recorded passes, and the share of them that are within the interval
    from the other passes."""
    inside: dict[str, list[bool]] = {}
    for each in recorded():
        key = each["phase"], each["gpu"], each["gpus"], each["way"]
        alike, *_ = _alike(*key, each.get("older", False))
        points = [point for some in alike.values() for point in some]
        for us, ratio in each["points"]:
            others = list(points)
            others.remove((float(us), float(ratio)))
            if others:
                wide = width(others, us)
                inside.setdefault(each["phase"], []).append(1 / wide <= ratio <= wide)
    return {phase: (len(found), sum(found) / len(found)) for phase, found in inside.items()}
