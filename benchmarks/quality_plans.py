"""The runs of benchmarks/quality.py: named sets of them, and plans of scaled desync."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ladder.config import FILES, load_plan
from ladder.files import make_folder, write_text
from ladder.models import resolve_plan
from ladder.models.errors import UserError
from ladder.models.plan import Plan

PLANS = ("standard", "parallel", "ladder", "desync-2x", "desync-4x", "dtp-1")
T = 4  # of plans that depend on it, unless a run names another
SEEDS = {"standard": (0, 1), "ladder": (0, 1)}  # the others: 0
POWERS = {"root4": 0.25, "sqrt": 0.5, "full": 1.0}  # own_scale is T to this power
NAMED = re.compile(r"(desync-\d+x)-(" + "|".join(POWERS) + ")")
INITIAL = re.compile(r"(desync-\d+x)-init-(" + "|".join(POWERS) + ")")
# All scaled forms: a scale changes no latency. -learned was trained once (docs/results/quality.md).
SCALED = re.compile(r"(desync-\d+x)-(init-)?(" + "|".join([*POWERS, "learned"]) + ")")
# For 12 layers, whose 24th sublayer is the last: desync-24x reduces once, at the end.
SETS = {
    "plans": PLANS,
    "scales": (
        "standard:0",
        "ladder:0",
        *(
            f"desync-{n}x{suffix}:0"
            for n in (2, 4, 8, 16, 24)
            for suffix in ("", *(f"-{power}" for power in POWERS))
        ),
    ),
    "frontier": (
        *(f"{plan}:0-2" for plan in ("standard", "parallel", "ladder", "desync-4x")),
        *(f"desync-{n}x-sqrt:0-2" for n in (4, 8, 24)),
        *(f"{plan}:0-2" for plan in ("accumulate-8x", "accumulate-8x-lag4")),
        "desync-4x-sqrt:0-2:2",  # T = 8 does not divide this model's 12 heads
    ),
    "initial": tuple(f"desync-{n}x-init-{power}:0" for n in (4, 8) for power in ("sqrt", "full")),
    "shapes": (  # for --recipe quality-30m and quality-300m
        *(f"{plan}:0" for plan in ("standard", "ladder", "desync-4x")),
        *(f"desync-{n}x-sqrt:0" for n in (4, 8)),
        *(f"{plan}:0" for plan in ("accumulate-4x", "accumulate-8x", "accumulate-8x-lag4")),
    ),
}


def chosen(only: Sequence[str] | None) -> list[tuple[str, int, int]]:
    """(plan, seed, T) of the runs named: a set, or PLAN[:SEEDS[:T]]. None: the set `plans`."""
    found: dict[tuple[str, int, int], None] = {}
    for name in (each for entry in only or ["plans"] for each in SETS.get(entry, (entry,))):
        plan, *more = name.split(":")
        seeds, degree = [*more, "", ""][:2]
        if len(more) > 2 or not re.fullmatch(r"(\d+(-\d+)?)?", seeds):
            raise UserError(
                f"--only={name}: the seed must be a whole number or a range, as in {plan}:1 or "
                f"{plan}:0-2"
            )
        if degree and not (degree.isdecimal() and int(degree) > 1):
            raise UserError(f"--only={name}: T must be a whole number above 1, as in {plan}:0:8")
        first, _, last = seeds.partition("-")
        own = range(int(first), int(last or first) + 1) if seeds else SEEDS.get(plan, (0,))
        if not own:
            raise UserError(f"--only={name}: the first seed is above the last")
        for seed in own:
            found[plan, seed, int(degree or T)] = None
    return list(found)


def scaled(name: str, layers: int, degree: int) -> Plan | None:
    """The plan desync-Nx-root4, -sqrt or -full: desync-Nx whose unreduced partials are scaled.

    They are multiplied by T to the power of 1/4, 1/2 or 1 as they join their rank's residual. None:
    `name` is no such plan.
    """
    match = NAMED.fullmatch(name)
    if match is None:
        return None
    scale = degree ** POWERS[match[2]]
    records = resolve_plan(match[1], layers, degree).sublayers
    return Plan(
        tuple(replace(r, own_scale=scale) if r.reduce == "none" else r for r in records), name
    )


def initially(plan: str, degree: int) -> tuple[str, float]:
    """The plan to train, and the scale of its unreduced output matrices at the beginning.

    desync-Nx-init-sqrt is desync-Nx with matrices sqrt(T) times larger; 1 for other plans.
    """
    match = INITIAL.fullmatch(plan)
    return (plan, 1.0) if match is None else (match[1], degree ** POWERS[match[2]])


def unscaled(plan: str) -> str:
    """The plan with the same latency: desync-Nx for its scaled forms, else the plan itself."""
    match = SCALED.fullmatch(plan)
    return match[1] if match else plan


def written(plan: str, layers: int, degree: int, folder: Path) -> str:
    """The name or file of a plan as `ladder` takes it; a scaled plan's file is written here."""
    made = scaled(plan, layers, degree)
    if made is None:
        return plan
    file = folder / f"T{degree}" / f"{plan}.yaml"  # the stem is the plan's name in records
    make_folder(file.parent)
    head = f"# For {layers} layers and T = {degree}."
    records = [f"  - {json.dumps(record)}" for record in made.to_dict()["sublayers"]]
    write_text(file, "\n".join([head, "sublayers:", *records]) + "\n")
    return str(file)


def called(plan: str) -> str:
    """The name of a plan; for a plan in a file, the file's name without suffix."""
    return Path(plan).stem if plan.endswith(FILES) else plan


def depends_on_tp(plan: str, layers: int) -> bool:
    """Whether the plan depends on T. Raises UserError if it is no plan."""
    return resolve_plan(load_plan(plan), layers, T).depends_on_tp
