"""What a machine's curves leave out, fitted to records of a model without communication."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.models.eight_bits import EIGHT_BITS
from ladder.models.errors import UserError
from ladder.perf.cost import DecodeCost
from ladder.perf.machine import Curve, Machine, Value
from ladder.perf.prediction.eras import era_of
from ladder.perf.prediction.records import (
    CALIBRATED,
    context_of,
    inference_times,
    is_calibration,
    is_training_calibration,
    predicted,
    training_times,
)
from ladder.perf.rows import more_rows
from ladder.perf.simulate import simulate

# If a fitted value is below these, the curves and the records are not of one machine. A step may
# take a little less time than its curves.
LEAST = {"step_stretch": 0.8, "prompt_gap_us": -2.0}
LONG = 16 * 1024  # tokens of prompts that show the power limit
Steps = dict[InferencePoint, float]  # milliseconds


def calibrated(machine: Machine, *files: Path) -> Machine:
    """The machine with fitted values, which come from records of CALIBRATED alone.

    These are the values of `fit_steps`, `fit_prompts` and `fit_training`.
    """
    return fit_training(fit_prompts(fit_steps(machine, files), files), files)


def fit_training(machine: Machine, files: Iterable[Path]) -> Machine:
    """The machine with `training_bytes`, if there are training steps of CALIBRATED that keep all
    activations: the median of the values that explain these steps."""
    files = tuple(files)
    said = ", ".join(file.name for file in files)
    found = [
        _fit(machine, "training_bytes", "train", run, ms, (20.0, 40.0), said)
        for run, ms in training_times(files, machine).items()
        if is_training_calibration(run, machine) and run.checkpointing == "none"
    ]
    found.sort(key=lambda each: each.value("training_bytes"))
    return found[(len(found) - 1) // 2] if found else machine


def fit_steps(
    machine: Machine, files: Iterable[Path], model: str = CALIBRATED[0], older: bool | None = None
) -> Machine:
    """The machine with what is fitted to decode steps of `model`, plan none.

    `step_stretch` comes from the step of one sequence, `more rows` from steps of more sequences,
    and `converted` by `fit_converted`. older: see `calibrations`.
    """
    files = tuple(files)
    said = ", ".join(file.name for file in files)
    steps = calibrations(files, machine, "decode", model, older=older)
    if not any(each.batch == 1 for each in steps):
        raise UserError(
            f"--calibrate={said} has no decode step of {model}, plan {CALIBRATED[1]}, batch 1, at "
            f"TP {machine.gpus} on {machine.gpu}; measure it: ladder bench inference --model "
            f"{model} --plans {CALIBRATED[1]} --nproc {machine.gpus}"
        )
    first, *others = sorted(steps, key=lambda each: each.batch)
    stretch = _solve(1e3 * steps[first], partial(_with_stretch, machine, first))
    machine = _fitted(machine, "step_stretch", stretch, first, steps[first], said)
    about = f"fitted: the same of more sequences; {said}"
    curve = Curve("more rows", {}, (), about)
    machine = _with_points(machine, curve, {each: steps[each] for each in others},
                           lambda each: more_rows(machine, each.batch))  # fmt: skip
    return fit_converted(machine, files, model, older)


def fit_converted(
    machine: Machine, files: Iterable[Path], model: str, older: bool | None = None
) -> Machine:
    """The machine with `converted`, fitted to steps of `model`, plan none, with weights in 8 bits,
    for each type that was recorded. older: see `calibrations`."""
    files = tuple(files)
    said = ", ".join(file.name for file in files)
    for kind in EIGHT_BITS:
        stored = calibrations(files, machine, "decode", model, kind, older)
        about = f"fitted: the same with weights in {kind}; {said}"
        curve = Curve("converted", {"weights": kind}, (), about)
        machine = _with_points(machine, curve, stored, lambda _: 1.0)
    return machine


def fit_prompts(machine: Machine, files: Iterable[Path], model: str = CALIBRATED[0]) -> Machine:
    """The machine with what is fitted to the prefill of `model`, plan none, if there are any.

    `prompt_gap_us` comes from the prefill with the fewest tokens, and `power_limit` from the one
    with the most, if they are enough to reach the limit.
    """
    files = tuple(files)
    said = ", ".join(file.name for file in files)
    prompts = calibrations(files, machine, "prefill", model)
    by_length = sorted(prompts.items(), key=lambda each: each[0].batch * each[0].prompt)
    for _ in range(2 if by_length else 0):  # twice: each value depends a little on the other
        short, long = by_length[0], by_length[-1]
        machine = _fit(machine, "prompt_gap_us", "prefill", *short, (3.0, 6.0), said)
        if long[0].batch * long[0].prompt > LONG:
            machine = _fit(machine, "power_limit", "prefill", *long, (0.6, 0.65), said)
    return machine


def _with_points(
    machine: Machine, curve: Curve, steps: Steps, begin: Callable[[InferencePoint], float]
) -> Machine:
    """The machine with a fitted curve over rows, to which each step adds a point. Without steps,
    the machine as it was."""
    points = []
    for each in sorted(steps, key=lambda one: one.batch):
        us = _solve(1e3 * steps[each], partial(_with_point, machine, curve, each), begin(each))
        points.append((float(each.batch), max(1e-3, round(us, 3))))
    return _with_curve(machine, replace(curve, points=tuple(points))) if points else machine


def _with_curve(machine: Machine, curve: Curve) -> Machine:
    curves = tuple(each for each in machine.curves if str(each) != str(curve))
    return replace(machine, curves=(*curves, curve))


def _with_point(machine: Machine, curve: Curve, point: InferencePoint, value: float) -> float:
    """Microseconds of a step if the curve consisted of this point alone."""
    tried = replace(curve, points=((float(point.batch), value),))
    return _step(_with_curve(machine, tried), point)


def _with_stretch(machine: Machine, point: InferencePoint, value: float) -> float:
    tried = Value(value, "fitted: tried")
    return _step(replace(machine, values={**machine.values, "step_stretch": tried}), point)


def _step(machine: Machine, point: InferencePoint) -> float:
    config = resolve(point)
    cost = DecodeCost(config, machine, point.tp, point.reducer, point.batch, context_of(point),
                      point.weights)  # fmt: skip
    return simulate(cost.lowered(config.plan), cost).total


def _solve(us: float, time: Callable[[float], float], begin: float = 1.0) -> float:
    """The value at which `time` is `us`. `time` is linear, since no collective is hidden in it."""
    one, two = time(begin), time(begin + 1)
    return begin + (us - one) / (two - one)


def calibrations(
    files: Iterable[Path], machine: Machine, phase: str, model: str = CALIBRATED[0],
    weights: str = "bf16", older: bool | None = None,
) -> Steps:  # fmt: skip
    """The recorded times of a model without communication, one for each batch and prompt. older:
    whether to take steps of older kernels or of newer ones; None: all."""
    found: dict[tuple[int, int], tuple[InferencePoint, list[float]]] = {}

    def of(about: Mapping[str, Any]) -> bool:
        return older in (None, era_of(about) == "older")

    for point, ms in inference_times(files, machine, phase, of=of).items():
        this = (point.model, point.weights) == (model, weights)
        if this and is_calibration(point, machine):
            found.setdefault((point.batch, point.prompt), (point, []))[1].append(ms)
    return {point: statistics.median(times) for point, times in found.values()}


def _fit(
    machine: Machine, name: str, phase: str, point: Any, ms: float, begin: tuple[float, float],
    said: str,
) -> Machine:  # fmt: skip
    """The machine with the value that explains a pass, by the secant method from two guesses."""

    def off(value: float) -> float:
        tried = replace(machine, values={**machine.values, name: Value(value, "fitted: tried")})
        return predicted(phase, point, tried) - ms

    one, two = begin
    low, high = off(one), off(two)
    for _ in range(4):
        if abs(high) < 1e-5 * ms or low == high:
            break
        one, two, low = two, two - high * (two - one) / (high - low), high
        if two <= 0.0:  # the curves alone take as long, or longer
            break
        high = off(two)
    return _fitted(machine, name, two, point, ms, said)


def _fitted(
    machine: Machine, name: str, value: float, point: object, ms: float, said: str
) -> Machine:
    if value < LEAST.get(name, 0.0):
        raise UserError(
            f"--calibrate={said}: {point} takes {ms:.3f} ms, less than the machine's "
            f"curves say; measure both again on one machine"
        )
    value = max(value, 1e-4)  # a file has positive numbers alone
    text = f"fitted: {point} takes {ms:.3f} ms; {said}"
    return replace(machine, values={**machine.values, name: Value(round(value, 4), text)})
