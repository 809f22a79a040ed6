"""Recorded inference and training: what predictions are scored against."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ladder.bench.inference.points import InferencePoint, resolve
from ladder.bench.results import read_results
from ladder.bench.training.points import TrainingPoint, is_virtual, parse_layout, shape_of
from ladder.config import CHECKPOINTING
from ladder.kernels.limits import MAX_ROWS
from ladder.models.eight_bits import EIGHT_BITS
from ladder.models.errors import UserError
from ladder.parallel.choose import ROUNDING
from ladder.perf import phases, training_phase
from ladder.perf.cost import WAY
from ladder.perf.graph import FUSED
from ladder.perf.machine import ATTENTION, Machine
from ladder.perf.nodes import older_passes, relatives, without_peers
from ladder.perf.prediction.eras import (
    ERAS,
    Chosen,
    Era,
    as_then,
    converts,
    earlier,
    every,
    of_era,
    reads_bytewise,
    sums_otherwise,
)
from ladder.perf.riders import TODAY, Kernels

CALIBRATED = ("llama-3-8b", "none")  # model and plan on all GPUs, from which values may be fitted
RANK = ("quarter-8b", 1)  # a model and GPUs: it computes what a rank of that model does at TP 4
MEASURED = {"decode": "decode_ms", "prefill": "prefill_ms", "train": "step_ms"}
Point = TypeVar("Point")
TP_DEGREE = 4  # T of recorded training steps of plans that depend on it, the default of bench train


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

    @property
    def tokens(self) -> int:
        """The tokens of one step over all copies of the model."""
        return self.gpus // parse_layout(self.layout).tp * self.batch * self.seq_len


@dataclass(frozen=True)
class Score:
    """A recorded pass and its prediction, in milliseconds. measured: the median of a point's
    records, for training steps the least: some hosts were slow, and no GPU was too fast. era: of a
    decode step. inside: whether a prompt ran by fused operators without being asked to.
    """

    phase: str
    point: Any
    measured: float
    predicted: float
    calibrated: bool
    era: Era = "today"
    inside: bool | None = None

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def inference_times(
    files: Iterable[Path], machine: Machine, phase: str, of: Chosen = every
) -> dict[InferencePoint, float]:
    """Milliseconds of each point that was recorded on this machine's GPUs and can be predicted:
    medians over its records. of: see `inference_runs`."""
    runs = inference_runs(files, machine, phase, of=of)
    found = by_point((point, ms) for point, _, ms in runs)
    return {point: statistics.median(times) for point, times in found.items()}


def by_point(runs: Iterable[tuple[Point, float]]) -> dict[Point, list[float]]:
    """All recorded times of each point."""
    found: dict[Point, list[float]] = {}
    for point, ms in runs:
        found.setdefault(point, []).append(ms)
    return found


def inference_runs(
    files: Iterable[Path], machine: Machine, phase: str, left_out: Counter[str] | None = None,
    of: Chosen = every, inside: bool | None = None,
) -> Iterator[tuple[InferencePoint, str, float]]:  # fmt: skip
    """The records that can be predicted: the point, what tells a run of the benchmark from others
    (commit and command), and milliseconds. left_out: counts the other records by reason. of: a
    filter on what records say of their machine. inside: whether to take prompts that ran by fused
    operators without being asked to, or the others; None: all."""
    left_out = Counter() if left_out is None else left_out
    names = {each.name for each in fields(InferencePoint)}
    degrees = known_degrees(machine)
    for record in records(files):
        data, about = record["point"], record["machine"]
        if "new_tokens" not in data or not of(about):
            continue
        if inside is not None and inside != _ran_inside(record):
            continue
        if _elsewhere(record, machine, left_out):
            continue
        try:
            point = InferencePoint(**{key: data[key] for key in data if key in names})
            ms = record["result"][MEASURED[phase]]
            check_kinds(point)
            check_number(MEASURED[phase], ms, above=0)
        except (KeyError, TypeError) as error:
            raise cut(files, error) from error
        reason = _inference_refusal(point, phase, degrees, not without_peers(machine))
        if point.cache == "fp8" and not reason:
            reason = _cache_refusal(about, machine)
        several = phase == "decode" and point.batch > 1
        if several and converts(about, point.weights) and not reason:
            reason = f"of several sequences in {point.weights}, by kernels that are not kept"
        if point.reducer in ROUNDING and not reason and sums_otherwise(about):
            reason = "with older reduces in 8 bits"
        if reason:
            left_out[reason] += 1
        else:
            yield point, f"{about.get('commit')} {about.get('command')}", ms


def _ran_inside(record: Mapping[str, Any]) -> bool:
    """Whether its prompt ran by fused operators without being asked to."""
    chosen = (record.get("result") or {}).get("chosen")  # older records lack it
    way = str(chosen.get("prefill")) if isinstance(chosen, dict) else ""
    return way.startswith(FUSED) and record["point"].get("reducer") != FUSED


def _elsewhere(record: Mapping[str, Any], machine: Machine, left_out: Counter[str]) -> bool:
    """Whether a record is of other GPUs, or of a point that failed."""
    gpu = record["machine"].get("gpu") or "GPUs that they do not name"
    if "cold" in record:
        left_out["of cold starts, which are not predicted"] += 1
    elif not record.get("result"):
        left_out["failed when they were measured"] += 1
    elif gpu != machine.gpu:
        left_out[f"on {'CPUs' if gpu == 'none' else gpu}"] += 1
    else:
        return False
    return True


def _inference_refusal(point: InferencePoint, phase: str, degrees: set[int], peers: bool) -> str:
    """Why an inference point cannot be predicted, or "". peers: whether the machine's GPUs can
    access each other's memory."""
    able = (*WAY, FUSED, *ROUNDING) if phase == "prefill" else tuple(WAY)
    if point.tp > 1 and point.p2p != peers:
        return f"with{'' if point.p2p else 'out'} access to peers' memory"
    if point.tp not in degrees:
        return f"on {point.tp} GPUs, of which no machine's file has collectives"
    if point.reducer == FUSED and phase != "prefill":
        return "with reducer=fused, which decodes as push does"
    if point.weights not in ("bf16", *EIGHT_BITS):
        return f"with weights={point.weights}, which are unknown"
    if point.cache not in ATTENTION:
        return f"with cache={point.cache}, which is unknown"
    if point.activations != "bf16" or point.reducer not in able:
        return "with activations or reduces in 8 bits"
    if point.degree not in (0, point.tp):
        return "of virtual ranks"
    return (
        f"of more than {MAX_ROWS} sequences"
        if phase != "prefill" and point.batch > MAX_ROWS
        else ""
    )


def _cache_refusal(about: Mapping[str, Any], machine: Machine) -> str:
    """Why a record with a cache in fp8 cannot be predicted, or ""."""
    if reads_bytewise(about):
        return "with a cache in fp8, read by older kernels"
    if not machine.family(ATTENTION["fp8"]):
        return "with a cache in fp8, of which the machine's file has no attention"
    return ""


def training_times(files: Iterable[Path], machine: Machine) -> dict[Run, float]:
    """Milliseconds of each training step that was recorded on this machine's GPUs: the least."""
    found = by_point(training_runs(files, machine))
    return {run: min(times) for run, times in found.items()}


def training_runs(
    files: Iterable[Path], machine: Machine, left_out: Counter[str] | None = None,
    of: Chosen = every,
) -> Iterator[tuple[Run, float]]:  # fmt: skip
    """The records of training steps that can be predicted, with milliseconds. left_out, of: see
    `inference_runs`."""
    left_out = Counter() if left_out is None else left_out
    names = {each.name for each in fields(TrainingPoint)}
    degrees = known_degrees(machine)
    for record in records(files):
        data, about = record["point"], record["machine"]
        if "layout" not in data or not of(about) or _elsewhere(record, machine, left_out):
            continue
        try:
            kept = {key: data[key] for key in data if key in names}
            run, ms = Run(**kept, gpus=about["ranks"]), record["result"]["step_ms"]
            check_kinds(run)
            check_number("step_ms", ms, above=0)
        except (KeyError, TypeError) as error:
            raise cut(files, error) from error
        if run.gpus not in degrees:
            left_out[f"on {run.gpus} GPUs, of which no machine's file has collectives"] += 1
        elif run.dtype != "bfloat16" or not run.compile:
            left_out["of steps that are not compiled, or not in bfloat16"] += 1
        elif run.checkpointing not in CHECKPOINTING:
            left_out[f"with checkpointing={run.checkpointing}, which is unknown"] += 1
        else:
            yield run, ms


_kinds = functools.cache(get_type_hints)  # of a point's fields


def check_kinds(point: object) -> None:
    """Raise TypeError for a field of a wrong kind; counts are whole numbers from 0 on."""
    for key, kind in _kinds(type(point)).items():  # type: ignore[arg-type]
        value = getattr(point, key)
        alike = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        if not alike or (isinstance(value, int) and value < 0):
            raise TypeError(f"{key}={value!r}")


def check_number(name: str, value: object, above: float = -math.inf) -> None:
    """Raise TypeError unless it is a finite number above `above`."""
    alike = isinstance(value, int | float) and not isinstance(value, bool)
    if not alike or not above < value < math.inf:  # type: ignore[operator]
        raise TypeError(f"{name}={value!r}")


def cut(files: Iterable[Path], error: Exception) -> UserError:
    """The error of records whose fields are not what a benchmark writes."""
    said = ", ".join(map(str, files))
    return UserError(
        f"{said}: a record lacks a field, or has one that is unknown or wrong ({error}); name "
        f"files that this version of `ladder bench` has written"
    )


def records(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        if not file.is_file():
            raise UserError(
                f"{file} does not exist, or is a folder; name the inference.jsonl of a benchmark"
            )
        for record in read_results(file):
            parts = {part: record.get(part) or {} for part in ("point", "machine")}
            yield {**record, **parts}


def known_degrees(machine: Machine) -> set[int]:
    """The TP degrees whose collectives are known for these GPUs."""
    return {1, machine.gpus, *(each.gpus for each in relatives(machine))}


def context_of(point: InferencePoint) -> int:
    """The context of a recorded decode step: that halfway through the new tokens."""
    return point.prompt + point.new_tokens // 2


def is_calibration(point: InferencePoint, machine: Machine) -> bool:
    """Whether a fitted value comes from a point, or could come from it."""
    where = (CALIBRATED[0], machine.gpus), RANK
    this = point.plan == CALIBRATED[1] and (point.model, point.tp) in where
    return this and not point.no_comm and point.weights in ("bf16", *EIGHT_BITS)


def is_training_calibration(run: Run, machine: Machine) -> bool:
    """The same for a training step. Plan `none` is recorded as `standard` without its reduces."""
    this = (run.model, run.plan, run.no_comm) == (CALIBRATED[0], "standard", True)
    return this and parse_layout(run.layout).tp == run.gpus == machine.gpus


def predicted(
    phase: str, point: Any, machine: Machine, kernels: Kernels = TODAY, inside: bool = True
) -> float:
    """The predicted milliseconds. kernels: of a decode step. inside: see `phases.prefill`."""
    if isinstance(point, Run):
        found = training_phase.train(
            shape_of(point, TP_DEGREE), machine, point.layout, point.seq_len, point.batch,
            point.micro_batch, point.checkpointing, point.no_comm, point.gpus,
        )  # fmt: skip
        return found.us / 1e3
    asked = resolve(point), machine, point.tp, point.reducer, point.batch
    if phase == "decode":
        context = context_of(point)
        stored = {"weights": point.weights, "cache": point.cache}
        found = phases.decode(*asked, context, **stored, kernels=kernels)
    else:
        found = phases.prefill(*asked, point.prompt, weights=point.weights, inside=inside)
    return found.us / 1e3


def scores(
    files: Iterable[Path], machine: Machine, phase: str, left_out: Counter[str] | None = None
) -> list[Score]:
    """All recorded passes of a phase with their predictions. For a shipped machine, decode steps by
    older kernels are predicted with these, and older prompts and training with the file of then.
    Prompts are predicted by operators if they ran so, or else by copies between products. left_out:
    counts the records without a prediction, by reason."""
    left_out = Counter() if left_out is None else left_out
    found = []
    ways = (True, False) if phase == "prefill" else (None,)
    for (era, (tried, kernels), of), inside in itertools.product(_eras(machine, phase), ways):
        runs: Iterable[tuple[Any, float]] = training_runs(files, tried, left_out, of)
        if phase != "train":
            some = inference_runs(files, tried, phase, left_out, of, inside)
            runs = ((point, ms) for point, _, ms in some)
        for point, times in by_point(runs).items():
            try:
                us = predicted(phase, point, tried, kernels, inside is not False)
            except UserError as error:  # a checkpoint that is not here, a curve not in the file
                left_out[f"({error})"] += len(times)
                continue
            if isinstance(point, Run):
                ms, seen = min(times), is_training_calibration(point, tried)
            else:
                ms, seen = statistics.median(times), is_calibration(point, tried)
            found.append(Score(phase, point, ms, us, seen, era, inside))
    return found


def _eras(machine: Machine, phase: str) -> Iterator[tuple[Era, tuple[Machine, Kernels], Chosen]]:
    """The machine and kernels of each era, and the filter for the records to predict with them."""
    if phase == "decode":
        yield from ((era, as_then(machine, era), of_era(era)) for era in ERAS)
        return
    then = older_passes(machine)
    if then is not None:
        yield "today", (then, TODAY), earlier
    yield "today", (machine, TODAY), lambda about: then is None or not earlier(about)


def summary(
    found: Iterable[Score], key: Callable[[Score], tuple[str, ...]]
) -> dict[tuple[str, ...], tuple[int, float, float, float]]:
    """By group, the number of held-out points and their mean, 90th percentile and largest error
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
