"""The points of benchmarks/adapt.py: the models that it makes and measures, and their commands."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality import check_overrides

from ladder.convert.sensitivity import named
from ladder.files import make_folder
from ladder.models.errors import UserError
from ladder.train.config import TrainConfig, load_train_config

SIZES = (0.5, 0.625)  # of the layers: 16 and 20 of 32 in the paper's Table 4
WAYS = ("zero-shot", "plain", "distil", "progressive", "progressive-distil")
OWN = ("init", "data", "out", "plan", "model", "teacher", "convert_layers", "steps", "epochs", "lr",
       "tp", "tp_degree")  # fmt: skip
SCRIPT = Path(__file__).with_name("adapt.py")
SENSITIVITY, OFFLINE = "sensitivity", "offline"
RATE, RATES, WEIGHT, STEPS = 0.1, (0.25, 0.5, 2.0), 0.8, 250  # see benchmarks/README.md


@dataclass(frozen=True)
class Point:
    """A model to make with a `ladder` command, and to measure."""

    name: str
    folder: Path
    words: tuple[str, ...]
    measured: tuple[str, ...]  # the words of `measure`; none: the command measures itself
    about: dict[str, Any]

    @property
    def command(self) -> list[str]:
        if not self.measured:
            return ["-m", "ladder", *self.words]
        return [str(SCRIPT), "measure", *self.measured, "--first", *self.words]

    @property
    def result(self) -> Path:
        return self.folder / "result.json"

    def clear(self) -> None:
        if any((self.folder / name).exists() for name in ("model", "result.json")):
            shutil.rmtree(self.folder)
        make_folder(self.folder)


@dataclass(frozen=True)
class Recovery:
    """How choices are recovered. words: options of `ladder finetune`; lr: the peak rate."""

    words: tuple[str, ...]
    before: TrainConfig
    steps: int
    tokens: int
    lr: float


def recovery(options: argparse.Namespace) -> Recovery:
    """The recipe of the recovery: the standard model's, but for batch, learning rate and order.

    The batch is halved until there are STEPS steps. The rate rises to `--rate` of the peak in a
    tenth of the steps and falls to 0. The data has another order."""
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
    after = load_train_config(str(file), [*words, "warmup_steps=0", *options.overrides])
    steps = round(options.share * total / (after.batch_size * after.seq_len))
    if steps < 8:
        raise UserError(f"--share={options.share} is {steps} steps; raise it, or lower batch_size")
    words += [f"steps={steps}", f"warmup_steps={steps // 10}", *options.overrides]
    lr = options.rate * before.lr
    load_train_config(str(file), [*words, f"lr={lr:g}"])  # UserError before anything runs
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


def choices(found: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """(how chosen, layers): the last layers, and the cheapest where these differ."""
    ranked = [cost["layers"][0] for cost in found["singles"]]
    chosen = []
    for size in sizes(len(ranked)):
        last = tuple(sorted(ranked)[-size:])
        cheapest = tuple(sorted(ranked[:size]))
        chosen.append(("both" if cheapest == last else "last", last))
        if cheapest != last:
            chosen.append(("cheapest", cheapest))
    return chosen


def points(
    options: argparse.Namespace, recipe: Recovery, chosen: Sequence[tuple[str, tuple[int, ...]]]
) -> list[Point]:
    """All points, the most informative first."""
    measured = ["--original", options.standard, "--data", options.data, "--windows",
                options.windows, "--seq-len", recipe.before.seq_len]  # fmt: skip
    if not options.no_tasks:
        measured += ["--offline", options.out / OFFLINE]
        measured += [] if options.limit is None else ["--limit", options.limit]
    found = []

    def add(how: str, layers: tuple[int, ...], way: str, factor: float = 1) -> None:
        name = f"{how}-{len(layers)}-{way}" if layers else way
        name += f"-x{factor:g}" if factor != 1 else ""
        folder = options.runs / name
        model = folder / "model" if way != "original" else options.standard
        about = {"name": name, "chosen": how, "layers": list(layers), "way": way, "lr": None,
                 "tokens": 0}  # fmt: skip
        words: list[str] = []
        if way == "zero-shot":
            words = ["convert", str(options.standard), "--plan", named(layers), "--out", str(model)]
        elif way != "original":
            lr = f"{factor * recipe.lr:g}"
            about |= {"lr": float(lr), "tokens": recipe.tokens}
            words = [*recipe.words, f"lr={lr}", f"out={model}"]
            words += [f"plan={named(layers)}"] if layers else []
            words += [f"teacher={options.standard}"] if way.endswith("distil") else []
            if way.startswith("progressive"):
                every = max(1, recipe.steps // 2 // len(layers))
                words.append(f"convert_layers={{start_step: 0, every: {every}}}")
        own = tuple(map(str, [model, *measured, "--out", folder / "result.json"]))
        found.append(Point(name, folder, tuple(words), own, about))

    add("-", (), "original")
    for how, layers in chosen:
        add(how, layers, "zero-shot")
    add("-", (), "trained-on")
    for way in WAYS[1:]:
        for how, layers in chosen:
            add(how, layers, way)
    for factor in options.rates:
        for way in ("plain", "distil"):
            add(*chosen[0], way, factor)
        add("-", (), "trained-on", factor)
    return found
