"""Post-training adaptation: a small standard model converted to hybrids, and recovered.

    python benchmarks/adapt.py run --standard RUN [key=value ...] [--data FOLDER] [--out FOLDER]
        [--wiring PLAN ...] [--tp-degree T] [--choices half|all] [--runs FOLDER] [--share 0.05]
        [--rates FACTOR ...] [--windows N] [--limit N | --no-tasks] [--gpus N] [--budget MINUTES]
        [--only NAME ...]
    python benchmarks/adapt.py report FILE

`run` takes a standard model from `ladder train` (benchmarks/quality.py trains one) and wires half
and 62.5 % of its layers as a ladder: the last layers, and the layers that `ladder convert
sensitivity` finds cheapest one by one. It recovers each choice by `ladder finetune` on the same
text, with `--share` of the model's training tokens: by plain training, by distillation from the
original model, and by either while layers are converted one after another in the first half of the
steps. Controls: each choice before any training, the original model, and the original model trained
for as many more tokens. `--rates` also trains the first choice at multiples of the learning rate.

`--wiring` puts other plans on the last half of the layers, as `--wiring ladder desync-4x-sqrt
accumulate-4x`: each is measured zero-shot, distilled and trained plainly, with the same controls.

Every point is measured in float32 on held-out text: bits per byte, divergence from the original
model, and the tasks of `ladder eval --tasks offline`. key=value overrides the recipe of the
recovery (see `recovery`) for all points. Finished points are lines in `--out`/adapt.jsonl and are
skipped when the command is started again. Each GPU runs one point at a time. `report` writes the
table as Markdown.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import hashlib
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from adapt_points import (
    LADDER,
    OFFLINE,
    RATE,
    RATES,
    SENSITIVITY,
    Point,
    choices,
    last_half,
    points,
    recovery,
    sensitivity,
    sizes,
)
from adapt_report import caption, markdown, read, tables
from jobs import Started, add_report, deadline, finish, run_all, visible_gpus
from quality import check_common, summary
from quality_plans import T

from ladder.checkpoint import newest, read_config
from ladder.cli import main as ladder
from ladder.convert.sensitivity import costs, free_layers
from ladder.data.mix import open_sources
from ladder.eval import offline, suites
from ladder.eval.command import evaluate
from ladder.files import checksum, make_folder, write_text
from ladder.infer.load import load_for_inference
from ladder.models.errors import UserError
from ladder.parser import Parser, parse_words
from ladder.plans import aligned
from ladder.records import append, facts
from ladder.train import metrics

RESULTS, TABLE = "adapt.jsonl", "adapt.txt"


# ---- run ------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> None:
    """Raise UserError for numbers out of range."""
    for name, values in (("share", [options.share]), ("rate", [options.rate]),
                         ("rates", options.rates)):  # fmt: skip
        for value in values:
            if not 0 < value < math.inf:
                raise UserError(f"--{name}={value:g} must be above 0")
    if options.windows < 0:
        raise UserError(f"--windows={options.windows} must be 0 (all) or more")
    if options.limit is not None and options.limit < 1:
        raise UserError(f"--limit={options.limit} must be 1 or more")


def run(options: argparse.Namespace) -> int:
    """Make and measure the points that are not finished; 1 if one failed."""
    check(options)
    until, gpus, recipe = deadline(options.budget), visible_gpus(options.gpus), recovery(options)
    original = read_config(newest(options.standard))
    layers = free_layers(original.plan)
    half = options.choices == "half"
    hows = ("last", "cheapest", "both")  # the sensitivity says which of them there are
    possible = [[(how, (*range(size),)) for size in sizes(len(layers))] for how in hows]
    possible = [last_half(layers)] if half else possible
    named_points(options, [p for each in possible for p in points(options, recipe, each, original)])
    if not options.no_tasks:
        suites.require_lm_eval()
    data = open_sources(options.data)
    data.windows("heldout", recipe.before.seq_len)
    for folder in (options.out, options.runs):
        make_folder(folder)
    weights = sorted(newest(options.standard).glob("*.safetensors"))
    digest = hashlib.sha256("".join(map(checksum, weights)).encode()).hexdigest()[:16]
    words = [word for word in recipe.words if not word.startswith(("init=", "data="))][2:]
    common = {
        "data": summary(data),
        "standard": {"weights_sha256": digest, "recipe": recipe.before.to_dict()},
        "settings": {
            "recovery": [*words, f"lr={recipe.lr:g}"],
            "windows": options.windows,
            "tasks": not options.no_tasks,
            "limit": options.limit,
        },
    }
    common = json.loads(json.dumps(common))
    file = options.out / RESULTS
    records = read(file) if file.is_file() else []
    check_common(records, common, file)

    def finished(started: Started[Point]) -> str:
        point = started.job
        result = json.loads(point.result.read_text(encoding="utf-8"))
        gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
        machine = {**facts(gpu), "command": " ".join(["ladder", *point.words])}
        about = {"name": point.name, **point.about, "wall_s": started.wall_s}
        records.append({**about, **result, "machine": machine, **common})
        append(file, records[-1:])
        said = f"{records[-1]['bits_per_byte']:.4f} bits per byte, " if point.measured else ""
        return f"{said}{records[-1]['wall_s']:.0f} s"

    def expected_s(point: Point) -> float:
        """The longest time of finished points of the same kind; 0 if there is none."""
        ways = [r["wall_s"] for r in records if r.get("way") == point.about.get("way")]
        return max(ways, default=0.0)

    def todo(points: list[Point]) -> list[Point]:
        done = {record["name"] for record in records}
        return [point for point in points if point.name not in done]

    first = [] if half else todo([sensitivity(options, recipe.before.seq_len)])
    if run_all(first, gpus, until, expected_s, finished) or first:  # it failed, or was left out
        return 1
    if not options.no_tasks:
        offline.build_tasks([options.data], options.out / OFFLINE)
    found = next((record for record in records if record["name"] == SENSITIVITY), {})
    chosen = last_half(layers) if half else choices(found)
    waiting = todo(named_points(options, points(options, recipe, chosen, original)))
    failed = run_all(waiting, gpus, until, expected_s, finished)
    text = "\n\n".join([caption(records), *map(aligned, tables(records))])
    write_text(options.out / TABLE, text + "\n")
    print(f"\n{text}\n\n{file}")
    return 1 if failed else 0


def named_points(options: argparse.Namespace, every: list[Point]) -> list[Point]:
    """The points that `--only` names. Raises UserError if it names none."""
    chosen = [p for p in every if any(fnmatch.fnmatch(p.name, each) for each in options.only)]
    if not chosen:
        known = ", ".join(dict.fromkeys(point.name for point in every))
        raise UserError(f"--only={' '.join(options.only)} names none of the points: {known}")
    return chosen


def tasks(model: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """(value, standard error) of each metric of the offline suite."""
    suites.require_lm_eval()
    loaded = suites.load(suites.entries([OFFLINE], None), options.offline)
    found = evaluate(model, folder, loaded, options.batch, options.limit)
    return {f"{each.task} {each.metric}": [each.value, each.stderr] for each in found}


def measure(options: argparse.Namespace) -> int:
    """Make a model, if the point has a command, and measure it."""
    since = time.monotonic()
    if options.first and (code := ladder(options.first)):
        return int(code)
    made = time.monotonic()
    data, folder = open_sources(options.data), newest(options.model)

    def load(path: Path) -> Any:
        return load_for_inference(path, reducer="async", dtype="float32")

    model = load(folder)
    original = None if options.model == options.original else load(newest(options.original))
    tokens, (cost,) = costs(
        model, data, [], options.seq_len, options.windows or None, options.batch, "text", original
    )
    result = {
        "plan": model.config.plan.name,
        "reduces": model.config.plan.collectives,
        "bits_per_byte": cost.bits_per_byte,
        "divergence": cost.divergence,
        "heldout_tokens": tokens,
        "tasks": {},
    }
    del original
    gc.collect()
    if options.offline is not None:
        result["tasks"] = tasks(model, folder, options)
    curve = [e for e in metrics.read_metrics(options.model) if "loss" in e] if options.first else []
    kept = ("step", "loss", "cross_entropy", "divergence")
    result |= {
        "make_s": round(made - since, 1),
        "measure_s": round(time.monotonic() - made, 1),
        "curve": [[round(e[key], 4) for key in kept if key in e] for e in curve],
    }
    write_text(options.out, json.dumps(result) + "\n")
    return 0


# ---- command line ---------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Post-training adaptation in small.")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    add = verbs.add_parser("run", help="make and measure what is not finished; print the table")
    add.set_defaults(verb=run)
    add.add_argument("overrides", nargs="*", metavar="key=value", help="for all recoveries")
    add.add_argument("--standard", type=Path, required=True, help="the run of a standard model")
    add.add_argument("--data", help="prepared text (what the model was trained on)")
    add.add_argument("--out", type=Path, default=Path("runs/adapt"), help="for the results")
    add.add_argument("--runs", type=Path, help="for the models (--out)")
    add.add_argument("--share", type=float, default=0.05, help="of the pretraining tokens")
    add.add_argument("--rate", type=float, default=RATE, help="of the standard model's peak rate")
    add.add_argument("--rates", type=float, nargs="*", metavar="FACTOR",
                     help="of that rate, for the smallest choice as well")  # fmt: skip
    add.add_argument("--wiring", nargs="+", metavar="PLAN",
                     help="ladder (the default), desync-4x-sqrt, accumulate-4x, ...")  # fmt: skip
    add.add_argument("--tp-degree", type=int, default=T, help=f"T of plans that need it ({T})")
    add.add_argument("--choices", choices=("half", "all"),
                     help="of layers: the last half, or all four (half with --wiring)")  # fmt: skip
    add.add_argument("--windows", type=int, default=512, help="held-out windows; 0: all")
    add.add_argument("--limit", type=int, help="examples of each task (all)")
    add.add_argument("--no-tasks", action="store_true", help="without the offline tasks (lm_eval)")
    add.add_argument("--gpus", type=int, help="points at a time, one a GPU (all)")
    add.add_argument("--budget", type=float, metavar="MINUTES", help="begin none that ends later")
    add.add_argument(
        "--only",
        nargs="+",
        default=["*"],
        metavar="NAME",
        help="these points; * stands for any part",
    )
    add = verbs.add_parser("measure", help="one point; `run` calls it")
    add.set_defaults(verb=measure)
    add.add_argument("model", type=Path)
    for name in ("--original", "--offline", "--out"):
        add.add_argument(name, type=Path, required=name != "--offline")
    add.add_argument("--data", required=True)
    add.add_argument("--first", nargs=argparse.REMAINDER, help="a `ladder` command that makes it")
    for name, default in (("--windows", 0), ("--seq-len", 1024), ("--batch", 8), ("--limit", None)):
        add.add_argument(name, type=int, default=default)
    add_report(verbs, lambda file: markdown(read(file)))
    options = parse_words(parser, arguments)
    if options.verb is run:
        options.runs = options.runs or options.out
        options.choices = options.choices or ("half" if options.wiring else "all")
        options.wiring = list(dict.fromkeys(options.wiring or [LADDER]))
        if options.rates is None:
            options.rates = () if options.choices == "half" else RATES
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 where a point failed, 2 for a user's mistake."""
    return finish(parse(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running jobs are ended, too
    sys.exit(main())
