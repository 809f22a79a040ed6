"""Recorded inference: what a prediction is calibrated from, and scored against."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.results import read_results
from ladder.kernels.decode import MAX_ROWS
from ladder.models.errors import UserError
from ladder.perf import phases
from ladder.perf.cost import calibrate
from ladder.perf.machine import Machine, Value, shipped
from ladder.perf.machine import load as load_machine

CALIBRATED = ("llama-3-8b", "none")  # on all GPUs: what fitted values may come from
MEASURED = {"decode": "decode_ms", "prefill": "prefill_ms"}
LONG = 16 * 1024  # tokens of prompts that show the power limit


@dataclass(frozen=True)
class Score:
    """A recorded pass (the median of a point's records) and its prediction, in milliseconds."""

    phase: str
    point: Any
    measured: float
    predicted: float
    calibrated: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def inference_times(
    files: Iterable[Path], machine: Machine, phase: str
) -> dict[InferencePoint, float]:
    """Milliseconds of each point that was recorded on this machine's GPUs and that is predicted;
    medians over its records."""
    found: dict[InferencePoint, list[float]] = {}
    names = {each.name for each in fields(InferencePoint)}
    degrees = known_degrees(machine)
    for record in records(files):
        data, gpu = record.get("point", {}), record.get("machine", {}).get("gpu")
        if "new_tokens" not in data or gpu != machine.gpu or not record.get("result"):
            continue
        point = InferencePoint(**{key: data[key] for key in data if key in names})
        fused = point.degree in (0, point.tp) and (phase == "prefill" or point.batch <= MAX_ROWS)
        if point.p2p and fused and point.tp in degrees:
            found.setdefault(point, []).append(record["result"][MEASURED[phase]])
    return {point: statistics.median(times) for point, times in found.items()}


def records(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        if not file.is_file():
            raise UserError(f"{file} does not exist; name the inference.jsonl of a benchmark")
        yield from read_results(file)


def known_degrees(machine: Machine) -> set[int]:
    """The TP degrees whose collectives are known for these GPUs."""
    others = (load_machine(name) for name in shipped())
    return {1, machine.gpus, *(each.gpus for each in others if each.gpu == machine.gpu)}


def context_of(point: InferencePoint) -> int:
    """Halfway through the new tokens."""
    return point.prompt + point.new_tokens // 2


def is_calibration(point: InferencePoint, machine: Machine, phase: str) -> bool:
    """Whether a fitted value comes from it: of decode steps, that of one sequence."""
    one = phase == "prefill" or point.batch == 1
    this = (point.model, point.plan) == CALIBRATED and point.tp == machine.gpus
    return this and one and not point.no_comm


def calibrated(machine: Machine, *files: Path) -> Machine:
    """The machine with its fitted values from the records of CALIBRATED, and from no other.

    `launch_gap_us` from the decode step of one sequence, `prompt_gap_us` from its prefill, and
    `power_limit` from the longest prefill, if it is long enough to show it.
    """
    said = ", ".join(file.name for file in files)
    steps = calibrations(files, machine, "decode")
    prompts = calibrations(files, machine, "prefill")
    if not steps:
        model, plan = CALIBRATED
        raise UserError(
            f"--calibrate={said} has no decode step of {model}, plan {plan}, batch 1, at TP "
            f"{machine.gpus} on {machine.gpu}; measure it: ladder bench inference --model {model} "
            f"--plans {plan} --nproc {machine.gpus}"
        )
    for point, ms in steps.items():
        found = calibrate(
            resolve(point), machine, point.tp, point.reducer, point.batch, context_of(point),
            1e3 * ms,
        )  # fmt: skip
        machine = _fitted(machine, "launch_gap_us", found, point, ms, said)
    by_length = sorted(prompts.items(), key=lambda each: each[0].batch * each[0].prompt)
    if not by_length:
        return machine
    short, long = by_length[0], by_length[-1]
    for _ in range(2):  # each has a little of the other
        machine = _fit_prompts(machine, "prompt_gap_us", *short, (3.0, 6.0), said)
        if long[0].batch * long[0].prompt > LONG:
            machine = _fit_prompts(machine, "power_limit", *long, (0.6, 0.65), said)
    return machine


def calibrations(
    files: Iterable[Path], machine: Machine, phase: str
) -> dict[InferencePoint, float]:
    """What was recorded of CALIBRATED, once for each batch."""
    found: dict[tuple[int, int], tuple[InferencePoint, list[float]]] = {}
    for point, ms in inference_times(files, machine, phase).items():
        if is_calibration(point, machine, phase):
            found.setdefault((point.batch, point.prompt), (point, []))[1].append(ms)
    return {point: statistics.median(times) for point, times in found.values()}


def _fit_prompts(
    machine: Machine, name: str, point: InferencePoint, ms: float, begin: tuple[float, float],
    said: str,
) -> Machine:  # fmt: skip
    """With the value that explains a prefill, from two guesses by secants."""

    def off(value: float) -> float:
        tried = replace(machine, values={**machine.values, name: Value(value, "fitted: tried")})
        return predicted("prefill", point, tried) - ms

    one, two = begin
    low, high = off(one), off(two)
    for _ in range(4):
        if abs(high) < 1e-5 * ms or low == high:
            break
        one, two, low = two, two - high * (two - one) / (high - low), high
        high = off(two)
    return _fitted(machine, name, two, point, ms, said)


def _fitted(
    machine: Machine, name: str, value: float, point: InferencePoint, ms: float, said: str
) -> Machine:
    if value < 0:
        raise UserError(
            f"--calibrate={said}: {point} takes {ms:.3f} ms, less than the machine's "
            f"curves say; measure both again on one machine"
        )
    text = f"fitted: {point} takes {ms:.3f} ms; {said}"
    return replace(machine, values={**machine.values, name: Value(round(value, 4), text)})


def predicted(phase: str, point: InferencePoint, machine: Machine) -> float:
    """Milliseconds."""
    phased = phases.PHASES[phase]
    context = context_of(point) if phase == "decode" else point.prompt
    return phased(resolve(point), machine, point.tp, point.reducer, point.batch, context).us / 1e3


def scores(files: Iterable[Path], machine: Machine, phase: str) -> list[Score]:
    """All recorded passes of a phase with their predictions."""
    return [
        Score(
            phase,
            point,
            ms,
            predicted(phase, point, machine),
            is_calibration(point, machine, phase),
        )
        for point, ms in inference_times(files, machine, phase).items()
    ]


def summary(
    found: Iterable[Score], key: Callable[[Score], tuple[str, ...]]
) -> dict[tuple[str, ...], tuple[int, float, float, float]]:
    """Of each group how many held-out points, and their mean, 90th percentile and largest error
    (%)."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for each in found:
        if not each.calibrated:
            groups.setdefault(key(each), []).append(100 * abs(each.error))
    return {
        name: (len(errors), statistics.mean(errors), quantile(errors, 0.9), max(errors))
        for name, errors in sorted(groups.items())
    }


def quantile(values: Iterable[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
