"""Recorded inference and training: what a prediction is calibrated from, and scored against."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.results import read_results
from ladder.bench.training.points import TrainingPoint, is_virtual, parse_layout, shape_of
from ladder.kernels.decode import MAX_ROWS
from ladder.models.errors import UserError
from ladder.perf import phases
from ladder.perf.cost import WAY, calibrate
from ladder.perf.graph import FUSED
from ladder.perf.machine import Curve, Machine, Value
from ladder.perf.nodes import relatives, without_peers

CALIBRATED = ("llama-3-8b", "none")  # on all GPUs: what fitted values may come from
MEASURED = {"decode": "decode_ms", "prefill": "prefill_ms", "train": "step_ms"}
TP_DEGREE = 4  # T of recorded training steps of plans that depend on it, the default of bench train
# Below these, curves and records are not of one machine. A step may take a little less than curves.
LEAST = {"step_stretch": 0.8, "prompt_gap_us": -2.0}
LONG = 16 * 1024  # tokens of prompts that show the power limit


@dataclass(frozen=True)
class Run(TrainingPoint):
    """A recorded training step, on `gpus` GPUs."""

    gpus: int = 1

    def __str__(self) -> str:
        plan = f"{self.plan} no_comm" if self.no_comm else self.plan
        layers = f", {self.layers} layers" if self.layers else ""
        return (
            f"{plan}, {self.model}{layers}, {self.layout} on {self.gpus} GPUs, {self.batch} "
            f"({self.micro_batch}) x {self.seq_len} tokens"
        )

    @property
    def virtual(self) -> bool:
        """Whether a process computes several ranks of the plan's T."""
        return is_virtual(self, TP_DEGREE)


@dataclass(frozen=True)
class Score:
    """A recorded pass and its prediction, in milliseconds. Of a point's records the median counts,
    and of training steps the least: some machines' hosts were slow, and no GPU too fast."""

    phase: str
    point: Any
    measured: float
    predicted: float
    calibrated: bool

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def inference_times(
    files: Iterable[Path], machine: Machine, phase: str, left_out: Counter[str] | None = None
) -> dict[InferencePoint, float]:
    """Milliseconds of each point that was recorded on this machine's GPUs and that is predicted;
    medians over its records."""
    found: dict[InferencePoint, list[float]] = {}
    for point, _, ms in inference_runs(files, machine, phase, left_out):
        found.setdefault(point, []).append(ms)
    return {point: statistics.median(times) for point, times in found.items()}


def inference_runs(
    files: Iterable[Path], machine: Machine, phase: str, left_out: Counter[str] | None = None
) -> Iterator[tuple[InferencePoint, str, float]]:
    """Each record of a point that is predicted: the point, what tells the run of the benchmark from
    others (commit and command), and milliseconds. left_out: gets how many are not, by why."""
    left_out = Counter() if left_out is None else left_out
    names = {each.name for each in fields(InferencePoint)}
    degrees = known_degrees(machine)
    for record in records(files):
        data, about = record.get("point", {}), record.get("machine", {})
        if "new_tokens" not in data:
            continue
        if _elsewhere(record, machine, left_out):
            continue
        try:
            point = InferencePoint(**{key: data[key] for key in data if key in names})
            ms = record["result"][MEASURED[phase]]
        except (KeyError, TypeError) as error:
            raise _cut(files, error) from error
        reason = _inference_refusal(point, phase, degrees, not without_peers(machine))
        if reason:
            left_out[reason] += 1
        else:
            yield point, f"{about.get('commit')} {about.get('command')}", ms


def _elsewhere(record: Mapping[str, Any], machine: Machine, left_out: Counter[str]) -> bool:
    """Whether a record is of other GPUs, or of a point that failed."""
    gpu = record.get("machine", {}).get("gpu")
    if not record.get("result"):
        left_out["failed when they were measured"] += 1
    elif gpu != machine.gpu:
        left_out[f"on {'CPUs' if gpu == 'none' else gpu}"] += 1
    else:
        return False
    return True


def _inference_refusal(point: InferencePoint, phase: str, degrees: set[int], peers: bool) -> str:
    """Why an inference point is not predicted, or nothing. peers: whether the machine's GPUs can
    access each other's memory."""
    able = (*WAY, FUSED) if phase == "prefill" else tuple(WAY)
    if point.tp > 1 and point.p2p != peers:
        return f"with{'' if point.p2p else 'out'} access to peers' memory"
    if point.tp not in degrees:
        return f"on {point.tp} GPUs, of which no machine's file has collectives"
    if {point.activations, point.cache} != {"bf16"} or point.reducer not in able:
        return "with activations, a cache or reduces in 8 bits"
    if point.degree not in (0, point.tp):
        return "of virtual ranks"
    return (
        f"of more than {MAX_ROWS} sequences"
        if phase != "prefill" and point.batch > MAX_ROWS
        else ""
    )


def training_times(
    files: Iterable[Path], machine: Machine, left_out: Counter[str] | None = None
) -> dict[Run, float]:
    """Milliseconds of each training step that was recorded on this machine's GPUs; the least.
    left_out: as of `inference_runs`."""
    left_out = Counter() if left_out is None else left_out
    names = {each.name for each in fields(TrainingPoint)}
    found: dict[Run, float] = {}
    degrees = known_degrees(machine)
    for record in records(files):
        data, about = record.get("point", {}), record.get("machine", {})
        if "layout" not in data or _elsewhere(record, machine, left_out):
            continue
        try:
            kept = {key: data[key] for key in data if key in names}
            run, ms = Run(**kept, gpus=about["ranks"]), record["result"]["step_ms"]
        except (KeyError, TypeError) as error:
            raise _cut(files, error) from error
        if run.gpus not in degrees:
            left_out[f"on {run.gpus} GPUs, of which no machine's file has collectives"] += 1
        elif run.dtype != "bfloat16" or not run.compile:
            left_out["of steps that are not compiled, or not in bfloat16"] += 1
        else:
            found[run] = min(ms, found.get(run, math.inf))
    return found


def _cut(files: Iterable[Path], error: Exception) -> UserError:
    said = ", ".join(map(str, files))
    return UserError(
        f"{said}: a record lacks a field, or has one that is unknown ({error}); name files that "
        f"this version of `ladder bench` has written"
    )


def records(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        if not file.is_file():
            raise UserError(
                f"{file} does not exist, or is a folder; name the inference.jsonl of a benchmark"
            )
        yield from read_results(file)


def known_degrees(machine: Machine) -> set[int]:
    """The TP degrees whose collectives are known for these GPUs."""
    return {1, machine.gpus, *(each.gpus for each in relatives(machine))}


def context_of(point: InferencePoint) -> int:
    """Halfway through the new tokens."""
    return point.prompt + point.new_tokens // 2


def is_calibration(point: InferencePoint, machine: Machine) -> bool:
    """Whether a fitted value comes from it, or could."""
    this = (point.model, point.plan) == CALIBRATED and point.tp == machine.gpus
    return this and not point.no_comm and point.weights == "bf16"


def is_training_calibration(run: Run, machine: Machine) -> bool:
    """The step of `none` is recorded as that of standard without its reduces."""
    this = (run.model, run.plan, run.no_comm) == (CALIBRATED[0], "standard", True)
    return this and parse_layout(run.layout).tp == run.gpus == machine.gpus


def calibrated(machine: Machine, *files: Path) -> Machine:
    """The machine with its fitted values from the records of CALIBRATED, and from no other.

    `step_stretch` from the decode step of one sequence, `more rows` from those of more,
    `prompt_gap_us` from the prefill of one, `power_limit` from the longest prefill, if it is long
    enough to show it, and `training_bytes` from a training step, if there is one.
    """
    said = ", ".join(file.name for file in files)
    steps = calibrations(files, machine, "decode")
    prompts = calibrations(files, machine, "prefill")
    if not any(each.batch == 1 for each in steps):
        model, plan = CALIBRATED
        raise UserError(
            f"--calibrate={said} has no decode step of {model}, plan {plan}, batch 1, at TP "
            f"{machine.gpus} on {machine.gpu}; measure it: ladder bench inference --model {model} "
            f"--plans {plan} --nproc {machine.gpus}"
        )
    point = min(steps, key=lambda each: each.batch)
    taken = [(each.batch, context_of(each), 1e3 * ms) for each, ms in steps.items()]
    stretch, more = calibrate(resolve(point), machine, point.tp, point.reducer, taken)
    machine = _fitted(machine, "step_stretch", stretch, point, steps[point], said)
    if more:
        points = tuple((rows, max(1e-3, round(us, 3))) for rows, us in more)
        about = f"fitted: the same of more sequences; {said}"
        curves = tuple(each for each in machine.curves if each.name != "more rows")
        machine = replace(machine, curves=(*curves, Curve("more rows", {}, points, about)))
    by_length = sorted(prompts.items(), key=lambda each: each[0].batch * each[0].prompt)
    for _ in range(2 if by_length else 0):  # each has a little of the other
        short, long = by_length[0], by_length[-1]
        machine = _fit(machine, "prompt_gap_us", "prefill", *short, (3.0, 6.0), said)
        if long[0].batch * long[0].prompt > LONG:
            machine = _fit(machine, "power_limit", "prefill", *long, (0.6, 0.65), said)
    for run, ms in training_times(files, machine).items():
        if is_training_calibration(run, machine):
            machine = _fit(machine, "training_bytes", "train", run, ms, (20.0, 40.0), said)
    return machine


def calibrations(
    files: Iterable[Path], machine: Machine, phase: str
) -> dict[InferencePoint, float]:
    """What was recorded of CALIBRATED, once for each batch."""
    found: dict[tuple[int, int], tuple[InferencePoint, list[float]]] = {}
    for point, ms in inference_times(files, machine, phase).items():
        if is_calibration(point, machine):
            found.setdefault((point.batch, point.prompt), (point, []))[1].append(ms)
    return {point: statistics.median(times) for point, times in found.values()}


def _fit(
    machine: Machine, name: str, phase: str, point: Any, ms: float, begin: tuple[float, float],
    said: str,
) -> Machine:  # fmt: skip
    """With the value that explains a pass, from two guesses by secants."""

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


def predicted(phase: str, point: Any, machine: Machine) -> float:
    """Milliseconds."""
    if isinstance(point, Run):
        found = phases.train(
            shape_of(point, TP_DEGREE), machine, point.layout, point.seq_len, point.batch,
            point.micro_batch, point.checkpointing, point.no_comm, point.gpus,
        )  # fmt: skip
        return found.us / 1e3
    phased = phases.PHASES[phase]
    context = context_of(point) if phase == "decode" else point.prompt
    found = phased(
        resolve(point), machine, point.tp, point.reducer, point.batch, context,
        weights=point.weights,
    )  # fmt: skip
    return found.us / 1e3


def scores(
    files: Iterable[Path], machine: Machine, phase: str, left_out: Counter[str] | None = None
) -> list[Score]:
    """All recorded passes of a phase with their predictions. left_out: gets how many records there
    are besides, by why they have none."""
    left_out = Counter() if left_out is None else left_out
    times: dict[Any, float] = {}
    if phase == "train":
        times |= training_times(files, machine, left_out)
    else:
        times |= inference_times(files, machine, phase, left_out)
    found = []
    for point, ms in times.items():
        if isinstance(point, Run):
            seen = is_training_calibration(point, machine)
        else:
            seen = is_calibration(point, machine)
        try:
            us = predicted(phase, point, machine)
        except UserError as error:  # a checkpoint that is not here, a curve that is not in the file
            left_out[f"({error})"] += 1
            continue
        found.append(Score(phase, point, ms, us, seen))
    return found


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
