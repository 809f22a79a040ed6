"""How far a prediction may be from the time that is measured, from the errors on recorded passes.

errors.json has the predicted microseconds and measured / predicted of every recorded pass to which
nothing was fitted, by GPU, phase, reducer and model (`python benchmarks/prediction_errors.py`
writes it). An interval holds the middle 80 % of the ratios of the NEAREST passes, those whose
predicted times are nearest to the prediction's by their ratio, since errors depend on how long
kernels take. It covers what the simulation gets wrong on a machine whose curves are measured, and
not what is wrong with the machine's own file.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "errors.json"
NEAREST = 20
FEW = 10  # of fewer ratios, an interval holds all
COVERS = 0.8
FAR = 2.0  # beyond the shortest and the longest recorded pass, by this factor, nothing is like it


@dataclass(frozen=True)
class Interval:
    """Factors of a predicted time, or None where no such pass was recorded. source: whose errors
    they are. far: of other GPUs, another TP degree, or much shorter or longer passes."""

    low: float | None
    high: float | None
    source: str
    far: bool = False

    def of(self, us: float) -> tuple[float, float] | None:
        return None if self.low is None or self.high is None else (self.low * us, self.high * us)


@functools.cache
def recorded() -> tuple[Mapping[str, Any], ...]:
    """The entries of errors.json."""
    return tuple(json.loads(FILE.read_text(encoding="utf-8"))["entries"])


def interval(phase: str, gpu: str, gpus: int, reducer: str, us: float) -> Interval:
    """That of a pass predicted to take `us` on so many GPUs. reducer: "" for one GPU alone."""
    alike = [
        each for each in recorded() if each["phase"] == phase and reducer in ("", each["reducer"])
    ]
    here = [each for each in alike if (each["gpu"], each["gpus"]) == (gpu, gpus)]
    found = here or alike
    if not found:
        return Interval(None, None, "no record")
    points = [(float(time), float(ratio)) for each in found for time, ratio in each["points"]]
    low, high = middle(points, us)
    times = [time for time, _ in points]
    far = not here or not min(times) / FAR <= us <= max(times) * FAR
    machines = sorted({f"{each['gpus']} x {each['gpu']}" for each in found})
    kind = f"{phase}, {reducer}" if reducer else phase
    models = len({each["model"] for each in found})
    said = f"{len(points)} records of {models} models ({kind}, {', '.join(machines)})"
    return Interval(low, high, said, far)


def middle(points: Sequence[tuple[float, float]], us: float) -> tuple[float, float]:
    """The interval of the middle COVERS of the ratios of the passes nearest to `us`."""
    nearest = sorted(points, key=lambda each: abs(math.log(each[0] / us)))[:NEAREST]
    ratios = sorted(ratio for _, ratio in nearest)
    outside = int(len(ratios) * (1 - COVERS) / 2 + 1e-9) if len(ratios) >= FEW else 0
    return ratios[outside], ratios[-1 - outside]
