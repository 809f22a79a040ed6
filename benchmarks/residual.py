"""What later layers read of each sublayer's output: sizes, shares and gradients, by plan.

    python benchmarks/residual.py run [key=value ...] [--plans PLAN ...] [--scales S ...]
        [--tp-degree T] [--data FOLDER] [--out FOLDER] [--windows N]
    python benchmarks/residual.py run --run FOLDER ... [--tp-degree T] [--data FOLDER]
        [--out FOLDER] [--windows N]
    python benchmarks/residual.py report FILE

`run` trains a small model (recipe tiny, with key=value overrides) under each plan, or takes the
folders of trained runs, and measures each model at its initialisation and as trained, on held-out
windows, with all T ranks as virtual ranks of one process. A plan whose partials wait for a later
sublayer's reduce (desync, accumulate) is trained with each of --scales as their `own_scale`; by
default 1, sqrt(T) and T. Measured are, by sublayer:

- the coefficients with which each rank's partial is in the residual of each later read, by passing
  unit vectors through the plan, and how far the sums of partials with these coefficients are from
  the residuals that the model computes (`error`);
- the root mean square (RMS) of the residual, of the partials and of whole outputs; how far the
  ranks' residuals are from their mean;
- the share of the final residual x that an output wrote: <written, x> / <x, x>, the mean over
  tokens; the shares of the embedding and all outputs add up to 1;
- norms of the gradients of the residual, of the partials, and of the parameters.

Lines go to `--out`/residual.jsonl, a table to residual.txt. A plan that is in that file is skipped.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jobs import add_report, finish
from quality import check_overrides
from residual_measure import measure
from residual_report import describe, read
from torch import Tensor

from ladder.config import FILES, load_plan
from ladder.data.mix import open_sources
from ladder.files import make_folder, write_text
from ladder.infer.load import load_for_inference
from ladder.models import ModelConfig, Plan, Transformer, resolve_plan
from ladder.models.errors import UserError
from ladder.parallel.sharding import initialise
from ladder.parser import Parser, parse_words
from ladder.records import append, facts
from ladder.train import metrics
from ladder.train.config import TrainConfig, load_train_config
from ladder.train.loop import train

RECIPE = "tiny"
PLANS = ("standard", "ladder", "desync-4x", "accumulate-4x")
# Keys of the recipe that this script sets.
OWN = ("data", "out", "plan", "init", "tp", "tp_degree", "tensorboard")
RESULTS, TABLE = "residual.jsonl", "residual.txt"
INITIAL, TRAINED = "initial", "trained"


@dataclass(frozen=True)
class Subject:
    """A model to measure. config: trains it into `folder` first; None: `folder` has it."""

    name: str
    folder: Path
    config: TrainConfig | None = None


def waiting(plan: Plan) -> list[bool]:
    """Whether each sublayer's partial is read on its own rank before a later sum replaces it.

    If sums lag, so is the partial of the sublayer that reduces.
    """
    return [
        read_apart and record.reduce in ("none", "accumulated")
        for record, read_apart in zip(plan.sublayers, plan.own_needed, strict=True)
    ]


def scaled(plan: Plan, scale: float, degree: int) -> Plan:
    """The plan with `own_scale` on all partials that wait for their sum. Its name is as in
    quality.py, with -sqrt for sqrt(T) and -full for T."""
    records = tuple(
        replace(each, own_scale=scale) if waits else each
        for each, waits in zip(plan.sublayers, waiting(plan), strict=True)
    )
    if records == plan.sublayers:
        return plan
    known = {float(degree): "full", math.sqrt(degree): "sqrt"}
    return Plan(records, f"{plan.name}-{known.get(scale, f'scale-{scale:g}')}")


def variants(plan: Plan, scales: Sequence[float], degree: int) -> list[Plan]:
    """The plan at each scale; alone, if all partials are reduced at once or some never are."""
    if plan.final_mean or not any(waiting(plan)):
        return [plan]
    return [scaled(plan, scale, degree) for scale in scales]


def to_train(options: argparse.Namespace) -> list[Subject]:
    check_overrides(options.overrides, OWN)
    degree, data = options.tp_degree, options.data or Path("runs/data")
    common = [*options.overrides, f"data={data}", f"out={options.out}", "tensorboard=false"]
    recipe = load_train_config(RECIPE, common)
    shape = recipe.model_config(open_sources(str(data)).vocab_size)
    shape.check_divides(degree, "--tp-degree")
    scales = options.scales or (1.0, math.sqrt(degree), float(degree))
    found = []
    for spec in options.plans or PLANS:
        plan = resolve_plan(load_plan(spec), shape.num_layers, degree)
        name = Path(spec).stem if spec.endswith(FILES) else plan.name
        for each in variants(Plan(plan.sublayers, name), scales, degree):
            folder = options.out / each.name
            own = {"plan": each.to_dict(), "out": str(folder)}
            if each.depends_on_tp:
                own["tp_degree"] = degree
            found.append(Subject(each.name, folder, replace(recipe, **own)))
    return found


def windows(recipe: TrainConfig, data: str, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [count, seq_len] of the first held-out windows."""
    heldout = open_sources(data).windows("heldout", recipe.seq_len)
    return heldout.read(range(min(count, len(heldout))))


def initial_model(config: ModelConfig, seed: int, device: torch.device) -> Transformer:
    with device:
        model = Transformer(config)
    initialise(model, seed)
    return model


def measured(subject: Subject, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of a model: at its initialisation, and as trained."""
    if subject.config is not None:
        if (subject.folder / "recipe.json").exists():  # an interrupted training
            shutil.rmtree(subject.folder)
        train(subject.config)
    file = subject.folder / "recipe.json"
    if not file.is_file():
        raise UserError(f"--run={subject.folder} is no run: {file} does not exist")
    recipe = load_train_config(str(file), [])
    model = load_for_inference(subject.folder, dtype="float32")
    degree = model.config.tp_degree or options.tp_degree
    model.config.check_divides(degree, "--tp-degree")
    device = model.model.embed_tokens.weight.device
    tokens, targets = windows(recipe, str(options.data or recipe.data), options.windows)
    tokens, targets = tokens.to(device), targets.to(device)
    heldout = [e for e in metrics.read_metrics(subject.folder) if "heldout_loss" in e]
    gpu = torch.cuda.get_device_name(0) if device.type == "cuda" else "none"
    about = {
        "plan": subject.name,
        "tp_degree": degree,
        "parameters_count": sum(shape.numel() for shape in model.shapes.values()),
        "tokens_measured": tokens.numel(),
        "recipe": recipe.resolved(model.config),
        "machine": {**facts(gpu), "command": " ".join(["python", *sys.argv])},
    }
    del about["recipe"]["plan"], about["recipe"]["out"]
    models = {TRAINED: model}
    if not recipe.init:  # init: the first weights are not the seed's
        models = {INITIAL: initial_model(model.config, recipe.seed, device), **models}
    return [
        {
            **about,
            "when": when,
            "heldout_bits_per_byte": heldout[-1]["heldout_bits_per_byte"]
            if heldout and when == TRAINED
            else None,
            **measure(each, tokens, targets, degree),
        }
        for when, each in models.items()
    ]


def run(options: argparse.Namespace) -> int:
    """Train and measure the models that are not measured yet."""
    if options.run and options.overrides:
        raise UserError(f"override {options.overrides[0]!r} with --run: leave one of them out")
    for name in ("plans", "scales"):
        if options.run and getattr(options, name) is not None:
            raise UserError(f"--{name} with --run, whose plans are trained: leave one of them out")
    for scale in options.scales or ():
        if not 0 < scale < 1e6:
            raise UserError(f"--scales={scale:g} must be above 0 and below 1e6")
    if options.tp_degree < 2:
        raise UserError(f"--tp-degree={options.tp_degree} must be 2 or more")
    if options.windows < 1:
        raise UserError(f"--windows={options.windows} must be 1 or more")
    subjects = [Subject(folder.name, folder) for folder in options.run] or to_train(options)
    make_folder(options.out)
    file = options.out / RESULTS
    done = {record["plan"] for record in read(file)} if file.is_file() else set()
    for subject in subjects:
        if subject.name not in done:
            append(file, measured(subject, options))
    text = describe(read(file))
    write_text(options.out / TABLE, text)
    print(f"{text}\n{file}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="What later layers read of each output.")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    add = verbs.add_parser("run", help="train and measure, or measure trained runs")
    add.set_defaults(verb=run)
    add.add_argument("overrides", nargs="*", metavar="key=value", help="for the recipe tiny")
    add.add_argument("--run", nargs="+", type=Path, default=[], help="folders of trained runs")
    add.add_argument("--plans", nargs="+", help=f"names, or YAML files ({' '.join(PLANS)})")
    add.add_argument(
        "--scales", nargs="+", type=float, help="own_scale of waiting partials (1, sqrt(T) and T)"
    )
    add.add_argument("--tp-degree", type=int, default=4, help="T")
    add.add_argument("--data", type=Path, help="(runs/data, or that of the run)")
    add.add_argument("--out", type=Path, default=Path("runs/residual"))
    add.add_argument("--windows", type=int, default=8, help="held-out windows to measure on")
    add_report(verbs, lambda file: describe(read(file)))
    return parse_words(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a user's mistake."""
    return finish(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
