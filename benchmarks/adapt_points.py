"""The points of benchmarks/adapt.py: the models that it makes and measures, and their commands."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quality import check_overrides
from quality_plans import T, scaled

from ladder.convert.sensitivity import named, ranges
from ladder.files import make_folder, write_text
from ladder.models import ModelConfig, resolve_plan
from ladder.models.errors import UserError
from ladder.models.plan import Plan
from ladder.train.config import DISTILLING, TrainConfig, load_train_config

SIZES = (0.5, 0.625)  # shares of the layers: 16 and 20 of 32 in the paper's Table 4
WAYS = ("plain", "distil", "progressive", "progressive-distil")
FEW_WAYS = ("distil", "plain")  # for --choices half, the better way first
LADDER, UNSCALED = "ladder", "-one"
OWN = ("init", "data", "out", "plan", "model", "teacher", "convert_layers", "steps", "epochs", "lr",
       "tp", "tp_degree")  # fmt: skip
SCRIPT = Path(__file__).with_name("adapt.py")
SENSITIVITY, OFFLINE = "sensitivity", "offline"
RATE, RATES, WEIGHT, STEPS = 0.1, (0.25, 0.5, 2.0), 0.8, 250  # see benchmarks/README.md


Choice = tuple[str, tuple[int, ...]]  # how the layers were chosen, and which


@dataclass(frozen=True)
class Point:
    """A model to make with a `ladder` command, and to measure.

    measured: the arguments of `adapt.py measure`; (): the command itself measures. plan: the plan
    to write to the file that the command names.
    """

    name: str
    folder: Path
    words: tuple[str, ...]
    measured: tuple[str, ...]
    about: dict[str, Any]
    plan: Plan | None = None

    @property
    def command(self) -> list[str]:
        if not self.measured:
            return ["-m", "ladder", *self.words]
        return [str(SCRIPT), "measure", *self.measured, "--first", *self.words]

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def prepare(self) -> None:
        if any((self.folder / name).exists() for name in ("model", "result.json")):
            shutil.rmtree(self.folder)
        make_folder(self.folder)
        if self.plan is not None:
            write_text(plan_file(self.folder, self.plan), json.dumps(self.plan.to_dict()) + "\n")


def plan_file(folder: Path, plan: Plan) -> Path:
    return folder / f"{plan.name}.json"


@dataclass(frozen=True)
class Recovery:
    """How choices are recovered. words: options of `ladder finetune`; lr: the peak rate."""

    words: tuple[str, ...]
    before: TrainConfig
    steps: int
    tokens: int
    lr: float


def recovery(options: argparse.Namespace) -> Recovery:
    """The recipe of the recovery: the standard model's with another batch, rate and order.

    The batch is halved until there are STEPS steps. The learning rate rises to `--rate` of the
    peak in a tenth of the steps and falls to 0. Another seed gives the data another order."""
    file = options.standard / "recipe.json"
    if not file.is_file():
        raise UserError(f"--standard={options.standard} is no run: {file} does not exist")
    before = load_train_config(str(file), [])
    options.data = options.data or before.data
    check_overrides(options.overrides, OWN)
    total = before.steps * before.batch_size * before.seq_len
    batch = before.batch_size
    while batch > 1 and options.share * total < STEPS * batch * before.seq_len:
        batch //= 2
    words = [f"init={options.standard}", f"data={options.data}", f"batch_size={batch}",
             f"micro_batch_size={math.gcd(before.micro_batch_size, batch)}", "min_lr=0",
             f"seed={before.seed + 1}", f"distill_weight={WEIGHT}", "eval_windows=1",
             "tensorboard=false"]  # fmt: skip
    teacher = f"teacher={options.standard}"  # for points that distil; others get no distill_weight
    after = load_train_config(str(file), [*words, teacher, "warmup_steps=0", *options.overrides])
    steps = round(options.share * total / (after.batch_size * after.seq_len))
    if steps < 8:
        raise UserError(f"--share={options.share} is {steps} steps; raise it, or lower batch_size")
    words += [f"steps={steps}", f"warmup_steps={steps // 10}", *options.overrides]
    lr = options.rate * before.lr
    load_train_config(str(file), [*words, teacher, f"lr={lr:g}"])  # UserError before anything runs
    tokens = steps * after.batch_size * after.seq_len
    return Recovery(("finetune", str(file), *words), before, steps, tokens, lr)


def sensitivity(options: argparse.Namespace, seq_len: int) -> Point:
    folder = options.runs / SENSITIVITY
    words = ["convert", SENSITIVITY, options.standard, "--data", options.data, "--layers", 1,
             "--seq-len", seq_len, "--dtype", "float32", "--out",
             folder / "result.json"]  # fmt: skip
    return Point(SENSITIVITY, folder, tuple(map(str, words)), (), {})


def sizes(layers: int) -> list[int]:
    """The numbers of layers to convert."""
    return list({math.floor(share * layers + 0.5): None for share in SIZES})


def last_half(layers: Sequence[int]) -> list[Choice]:
    """Only the paper's choice, the last half of the layers, which needs no sensitivity."""
    return [("last", tuple(layers[-sizes(len(layers))[0] :]))]


def choices(found: dict[str, Any]) -> list[Choice]:
    """For each size the last layers, and the cheapest if these differ."""
    ranked = [cost["layers"][0] for cost in found["singles"]]
    chosen: list[Choice] = []
    for size in sizes(len(ranked)):
        last = tuple(sorted(ranked)[-size:])
        cheapest = tuple(sorted(ranked[:size]))
        chosen.append(("both" if cheapest == last else "last", last))
        if cheapest != last:
            chosen.append(("cheapest", cheapest))
    return chosen


def wired(wiring: str, layers: Sequence[int], original: ModelConfig, degree: int) -> ModelConfig:
    """The original model with some layers wired as `wiring`, the others as `standard`.

    wiring: a preset or a plan of benchmarks/quality_plans.py; with `-one` at its end, own partials
    are not scaled. degree: T, for plans that depend on it.
    """
    base = wiring.removesuffix(UNSCALED)
    try:
        records = list(resolve_plan("standard", original.num_layers).sublayers)
        for first, last in ranges(layers):
            plan = scaled(base, last + 1 - first, degree)
            found = () if plan is None else plan.sublayers
            if plan is None:
                plan = resolve_plan(f"{base}@{first}-{last}", original.num_layers, degree)
                found = tuple(
                    record
                    for layer, record in zip(plan.layers, plan.sublayers, strict=True)
                    if first <= layer <= last
                )
            if len(found) != 2 * (last + 1 - first):
                raise UserError("it merges the norms of a layer, and so is no plan to recover")
            if base != wiring:
                found, before = tuple(replace(each, own_scale=1.0) for each in found), found
                if found == before:
                    raise UserError(f"{base} has no scale that {UNSCALED} would leave out")
            records[2 * first : 2 * last + 2] = found
        plan = Plan(tuple(records), named(layers, wiring))
        if plan.sublayers == original.plan.sublayers:
            raise UserError("it is the plan that the model has already")
        return replace(original, plan=plan, tp_degree=degree if plan.depends_on_tp else None)
    except UserError as error:
        raise UserError(f"--wiring={wiring}: {error}") from error


def points(
    options: argparse.Namespace, recipe: Recovery, chosen: Sequence[Choice], original: ModelConfig
) -> list[Point]:
    """All points, the most informative first. original: the standard model."""
    measured = ["--original", options.standard, "--data", options.data, "--windows",
                options.windows, "--seq-len", recipe.before.seq_len]  # fmt: skip
    if not options.no_tasks:
        measured += ["--offline", options.out / OFFLINE]
        measured += [] if options.limit is None else ["--limit", options.limit]
    found = []

    def add(way: str, choice: Choice = ("-", ()), wiring: str = "", factor: float = 1) -> None:
        how, layers = choice
        parts = [how, str(len(layers))] if layers else []
        config = wired(wiring, layers, original, options.tp_degree) if layers else original
        if wiring not in ("", LADDER):
            degree = config.tp_degree
            parts += [wiring, *([f"T{degree}"] if degree not in (None, T) else [])]
        name = "-".join([*parts, way, *([f"x{factor:g}"] if factor != 1 else [])])
        folder = options.runs / name
        model = folder / "model" if way != "original" else options.standard
        about = {"name": name, "chosen": how, "layers": list(layers), "way": way, "lr": None,
                 "tokens": 0, "tp_degree": config.tp_degree}  # fmt: skip
        written = config.plan if config.tp_degree else None
        plan = str(plan_file(folder, config.plan)) if written else config.plan.name
        words: list[str] = []
        if way == "zero-shot":
            words = ["convert", str(options.standard), "--plan", plan, "--out", str(model)]
            words += ["--tp-degree", str(config.tp_degree)] if written else []
        elif way != "original":
            lr = f"{factor * recipe.lr:g}"
            about |= {"lr": float(lr), "tokens": recipe.tokens}
            distils = way.endswith("distil")
            given = [
                each for each in recipe.words if distils or each.split("=")[0] not in DISTILLING
            ]
            words = [*given, f"lr={lr}", f"out={model}"]
            words += [f"plan={plan}"] if layers else []
            words += [f"tp_degree={config.tp_degree}"] if written else []
            words += [f"teacher={options.standard}"] if distils else []
            if way.startswith("progressive"):
                if written:  # refused: see ladder.train.conversion
                    return
                every = max(1, recipe.steps // 2 // len(layers))
                words.append(f"convert_layers={{start_step: 0, every: {every}}}")
        own = tuple(map(str, [model, *measured, "--out", folder / "result.json"]))
        found.append(Point(name, folder, tuple(words), own, about, written))

    kinds = [(choice, wiring) for choice in chosen for wiring in options.wiring]
    add("original")
    for choice, wiring in kinds:
        add("zero-shot", choice, wiring)
    add("trained-on")
    for way in FEW_WAYS if options.choices == "half" else WAYS:
        for choice, wiring in kinds:
            add(way, choice, wiring)
    for factor in options.rates:
        for wiring in options.wiring:
            for way in ("plain", "distil"):
                add(way, chosen[0], wiring, factor)
        add("trained-on", factor=factor)
    return found
