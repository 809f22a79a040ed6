"""`ladder predict validate`: predictions beside recorded passes, and what the errors come to."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import combinations
from typing import Any

from ladder.models.errors import UserError
from ladder.perf.machine import Machine, load
from ladder.perf.prediction.ranking import NOTE, rankings, table
from ladder.perf.prediction.records import MEASURED, Score, calibrated, scores, summary
from ladder.plans import aligned

APART = 1.03  # plans whose times differ by less are not ordered


def machine_of(options: Any) -> Machine:
    machine = load(options.machine)
    return machine if options.calibrate is None else calibrated(machine, options.calibrate)


def validate(options: Any) -> int:
    machine = machine_of(options)
    found = [each for phase in MEASURED for each in scores(options.records, machine, phase)]
    if not found:
        raise UserError(
            f"{', '.join(map(str, options.records))}: nothing that is predicted was measured on "
            f"the GPUs of machine {options.machine!r}; give its records, or another --machine"
        )
    if options.json:
        data = [
            {"phase": each.phase, **asdict(each.point), "measured_ms": each.measured,
             "predicted_ms": each.predicted, "calibrated": each.calibrated}
            for each in found
        ]  # fmt: skip
        print(json.dumps(data, indent=1))
        return 0
    for phase in dict.fromkeys(each.phase for each in found):
        print("\n".join(report(phase, [each for each in found if each.phase == phase])))
    return 0


def report(phase: str, found: Sequence[Score]) -> list[str]:
    """Every point of a phase, then the errors by model and reducer, by plan, and the comparisons of
    plans."""
    rows = [["model", "tp", "batch", "plan", "reducer", "measured ms", "predicted", "error"]]
    for each in sorted(found, key=lambda one: str(one.point)):
        point = each.point
        error = "calibrated" if each.calibrated else f"{100 * each.error:+.1f} %"
        rows.append([point.model, str(point.tp), str(point.batch), plan_of(each), point.reducer,
                     f"{each.measured:.3f}", f"{each.predicted:.3f}", error])  # fmt: skip
    lines = [f"{phase}\n", aligned(rows), ""]
    for title, key in (("model", model_of), ("plan", lambda each: (plan_of(each),))):
        rows = [[f"held out, by {title}", "points", "mean error", "90th percentile", "largest"]]
        for name, (count, mean, high, most) in summary(found, key).items():
            rows.append(
                [" ".join(name), str(count), *(f"{each:.1f} %" for each in (mean, high, most))]
            )
        lines += [aligned(rows), ""]
    every = summary(found, lambda each: (each.phase,))
    for count, mean, high, most in every.values():
        lines.append(
            f"{count} held out: mean error {mean:.1f} %, 90th percentile {high:.1f} %, largest "
            f"{most:.1f} %"
        )
    lines += [speedup_line(found), order_line(found), ""]
    if ranked := rankings(found):
        lines += [aligned(table(ranked)), "", *textwrap.wrap(NOTE, 100), ""]
    return lines


def plan_of(each: Score) -> str:
    return f"{each.point.plan} no_comm" if each.point.no_comm else each.point.plan


def model_of(each: Score) -> tuple[str, ...]:
    return each.point.model, each.point.reducer


def cases(found: Iterable[Score]) -> list[list[Score]]:
    """The scores of plans that were measured for one choice: all but the plan is alike."""
    groups: dict[Any, list[Score]] = {}
    for each in found:
        if not each.point.no_comm and each.point.plan != "none":
            groups.setdefault(replace(each.point, plan="", degree=0), []).append(each)
    return list(groups.values())


def speedups(found: Iterable[Score], plan: str = "ladder") -> list[float]:
    """By how many points the predicted speedup of a plan over standard is above the measured."""
    errors = []
    for case in cases(found):
        named = {each.point.plan: each for each in case}
        if plan in named and "standard" in named:
            one, other = named["standard"], named[plan]
            faster = one.predicted / other.predicted - one.measured / other.measured
            errors.append(100 * faster)
    return errors


def tau(found: Iterable[Score]) -> tuple[float, int]:
    """Kendall's tau over the pairs of plans of one case that are apart, and how many they are."""
    agree = pairs = 0
    for case in cases(found):
        for one, other in combinations(case, 2):
            measured = one.measured / other.measured
            if max(measured, 1 / measured) > APART:
                pairs += 1
                agree += (measured > 1) == (one.predicted > other.predicted)
    return (2 * agree - pairs) / pairs if pairs else 1.0, pairs


def speedup_line(found: Sequence[Score]) -> str:
    errors = speedups(found)
    if not errors:
        return "no case has both standard and ladder"
    mean = sum(map(abs, errors)) / len(errors)
    return (
        f"ladder's speedup over standard, {len(errors)} cases: off by {mean:.1f} points on "
        f"average, {max(errors, key=abs):+.1f} at most"
    )


def order_line(found: Sequence[Score]) -> str:
    agreement, pairs = tau(found)
    return f"plans more than 3 % apart, {pairs} pairs: Kendall's tau {agreement:.2f}"
