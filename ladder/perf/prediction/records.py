"""Recorded decode steps: what a prediction is calibrated from, and scored against."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.results import read_results
from ladder.kernels.decode import MAX_ROWS
from ladder.models.errors import UserError
from ladder.perf import phases
from ladder.perf.cost import calibrate
from ladder.perf.machine import Machine, Value

CALIBRATED = ("llama-3-8b", "none", 1)  # model, plan, batch


@dataclass(frozen=True)
class Score:
    """A recorded step (the median of a point's records) and its prediction, in milliseconds."""

    point: InferencePoint
    measured: float
    predicted: float
    calibrated: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def decode_times(files: Iterable[Path], machine: Machine) -> dict[InferencePoint, float]:
    """Milliseconds of each point that was recorded on this machine; medians over its records."""
    found: dict[InferencePoint, list[float]] = {}
    names = {each.name for each in fields(InferencePoint)}
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} does not exist; name the inference.jsonl of a benchmark")
        for record in read_results(file):
            data, gpu = record.get("point", {}), record.get("machine", {}).get("gpu")
            if "new_tokens" not in data or gpu != machine.gpu:
                continue
            point = InferencePoint(**{key: data[key] for key in data if key in names})
            fused = point.batch <= MAX_ROWS and point.degree in (0, point.tp)
            if point.p2p and fused and point.tp == machine.gpus:
                found.setdefault(point, []).append(record["result"]["decode_ms"])
    return {point: statistics.median(times) for point, times in found.items()}


def context_of(point: InferencePoint) -> int:
    """Halfway through the new tokens."""
    return point.prompt + point.new_tokens // 2


def is_calibration(point: InferencePoint) -> bool:
    return (point.model, point.plan, point.batch) == CALIBRATED and not point.no_comm


def calibrated(machine: Machine, file: Path) -> Machine:
    """The machine with `launch_gap_us` from the recorded step of CALIBRATED, and from no other."""
    for point, ms in decode_times([file], machine).items():
        if is_calibration(point):
            found = calibrate(
                resolve(point), machine, point.tp, point.reducer, point.batch, context_of(point),
                1e3 * ms,
            )  # fmt: skip
            if found < 0:
                raise UserError(
                    f"--calibrate={file}: {point} takes {ms:.3f} ms, less than the machine's "
                    f"curves say; measure both again on one machine"
                )
            text = f"fitted: {point} takes {ms:.3f} ms; {file.name}"
            return replace(
                machine, values={**machine.values, "launch_gap_us": Value(round(found, 4), text)}
            )
    model, plan, batch = CALIBRATED
    raise UserError(
        f"--calibrate={file} has no decode step of {model}, plan {plan}, batch {batch}, at TP "
        f"{machine.gpus} on {machine.gpu}; measure it: ladder bench inference --model {model} "
        f"--plans {plan} --nproc {machine.gpus}"
    )


def scores(files: Iterable[Path], machine: Machine) -> list[Score]:
    """All recorded decode steps of the machine with their predictions."""
    found = []
    for point, ms in decode_times(files, machine).items():
        step = phases.decode(
            resolve(point), machine, point.tp, point.reducer, point.batch, context_of(point)
        )
        found.append(Score(point, ms, step.us / 1e3, is_calibration(point)))
    return found


def summary(found: Iterable[Score]) -> dict[tuple[str, str], tuple[int, float, float]]:
    """(model, reducer): how many held-out points, their mean and their largest error (%)."""
    groups: dict[tuple[str, str], list[float]] = {}
    for each in found:
        if not each.calibrated:
            key = each.point.model, each.point.reducer
            groups.setdefault(key, []).append(100 * abs(each.error))
    return {
        key: (len(errors), statistics.mean(errors), max(errors))
        for key, errors in sorted(groups.items())
    }
