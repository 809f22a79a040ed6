"""`ladder predict validate`: predictions beside recorded passes, and what the errors come to."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ladder.models.errors import UserError
from ladder.perf.machine import Machine
from ladder.perf.nodes import load
from ladder.perf.prediction.fitting import calibrated
from ladder.perf.prediction.ranking import NOTE, rankings, table
from ladder.perf.prediction.records import MEASURED, Run, Score, scores, summary
from ladder.perf.prediction.repeats import repeats
from ladder.plans import aligned

WAYS = {"decode": "reducer", "prefill": "reducer", "train": "layout"}


def machine_of(options: Any) -> Machine:
    machine = load(options.machine)
    return machine if options.calibrate is None else calibrated(machine, *options.calibrate)


def validate(options: Any) -> int:
    from ladder.perf.operators import scores as operators  # slow to import

    machine = machine_of(options)
    left_out: dict[str, Counter[str]] = {phase: Counter() for phase in MEASURED}
    found = [
        each for phase in MEASURED
        for each in scores(options.records, machine, phase, left_out[phase])
    ]  # fmt: skip
    calls = operators.scores(options.records, machine)
    if not found and not calls:
        for file in options.records:
            if not file.stat().st_size:
                raise UserError(f"{file} is empty; give results of `ladder bench`")
        raise UserError(
            f"{', '.join(map(str, options.records))}: nothing that is predicted was measured on "
            f"the GPUs of machine {options.machine!r}{_besides(left_out)}; give its records, or "
            f"another --machine"
        )
    if options.json:
        data = [
            {"phase": each.phase, **asdict(each.point), "measured_ms": each.measured,
             "predicted_ms": each.predicted, "calibrated": each.calibrated,
             "kernels": each.era if each.phase == "decode" else None}
            for each in found
        ]  # fmt: skip
        data += [each.to_dict() for each in calls]
        print(json.dumps(data, indent=1))
        for phase, reasons in left_out.items():
            for line in not_scored(phase, reasons):
                print(line, file=sys.stderr)
        return 0
    for phase in dict.fromkeys(each.phase for each in found):
        print("\n".join(report(phase, [each for each in found if each.phase == phase])))
        said = [] if phase == "train" else repeats(options.records, machine, phase)
        print("".join(f"{line}\n" for line in [*said, ""] if said), end="")
    for phase, reasons in left_out.items():
        print("".join(f"{line}\n" for line in not_scored(phase, reasons)), end="")
    if calls:
        print("\n".join(operators.report(calls)))
    return 0


def not_scored(phase: str, reasons: Counter[str]) -> list[str]:
    return [f"{phase}: not scored: {count} {why}" for why, count in sorted(reasons.items())]


def _besides(left_out: dict[str, Counter[str]]) -> str:
    """In words, the records that were left out, by reason."""
    most = Counter[str]()
    for reasons in left_out.values():
        most |= reasons
    said = "; ".join(f"{count} {why}" for why, count in sorted(most.items()))
    return said and f" ({said})"


def report(phase: str, found: Sequence[Score]) -> list[str]:
    """Every point of a phase, then the errors by model and reducer, by plan, and the comparisons of
    plans."""
    rows = [["model", "GPUs", "batch", "plan", WAYS[phase], "measured ms", "predicted", "error"]]
    for each in sorted(found, key=lambda one: str(one.point)):
        point = each.point
        gpus, way = where(each)
        error = "calibrated" if each.calibrated else f"{100 * each.error:+.1f} %"
        rows.append([named(point), str(gpus), str(point.batch), plan_of(each), way,
                     f"{each.measured:.3f}", f"{each.predicted:.3f}", error])  # fmt: skip
    lines = [f"{phase}\n", aligned(rows), ""]
    if all(each.calibrated for each in found):
        return [*lines, "nothing is held out: values are fitted to these; record other plans", ""]
    for title, key in (("model", model_of), ("plan", lambda each: (plan_of(each),))):
        rows = [[f"held out, by {title}", "points", "mean error", "90th percentile", "largest"]]
        for name, (count, mean, high, most) in summary(found, key).items():
            rows.append(
                [" ".join(name), str(count), *(f"{each:.1f} %" for each in (mean, high, most))]
            )
        lines += [aligned(rows), ""]
    for (about,), (count, mean, high, most) in summary(found, kind_of).items():
        lines.append(
            f"{count} {about}: mean error {mean:.1f} %, 90th percentile {high:.1f} %, largest "
            f"{most:.1f} %"
        )
    ranked = rankings(found)
    if ranked:
        lines += ["", aligned(table(ranked)), "", *textwrap.wrap(NOTE, 100)]
    return [*lines, ""]


def named(point: Any) -> str:
    """The model, and how its weights and its cache are stored if not in bf16."""
    stored = getattr(point, "weights", "bf16")
    name = point.model if stored == "bf16" else f"{point.model} {stored}"
    return name if getattr(point, "cache", "bf16") == "bf16" else f"{name}, {point.cache} cache"


def plan_of(each: Score) -> str:
    return f"{each.point.plan} no_comm" if each.point.no_comm else each.point.plan


def where(each: Score) -> tuple[int, str]:
    """The number of GPUs, and the reducer or the layout."""
    point = each.point
    return (point.gpus, point.layout) if isinstance(point, Run) else (point.tp, point.reducer)


def model_of(each: Score) -> tuple[str, ...]:
    return named(each.point), where(each)[1]


def kind_of(each: Score) -> tuple[str]:
    virtual = isinstance(each.point, Run) and each.point.virtual
    return ("held out with virtual ranks" if virtual else "held out",)
