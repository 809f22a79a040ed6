"""Quality at equal tokens: one small model under each plan, and its latency.

    python benchmarks/quality.py run [key=value ...] [--data FOLDER] [--out FOLDER] [--runs FOLDER]
        [--gpus N] [--budget MINUTES] [--only PLAN[:SEED] ...]
    python benchmarks/quality.py page --quality FILE --latency FILE [--out FILE]

`run` trains the recipe quality-100m by `ladder train`, one run on each GPU at a time (without GPUs
one run at a time on the CPU), the longest first. Finished runs are lines in `--out`/quality.jsonl
and are skipped when the command is started again; interrupted runs start again. PLAN is the name of
a plan, or a YAML file with one, then named after the file. key=value overrides the recipe for all
runs. The data is prepared by benchmarks/quality_data.py. `page` joins the results with the decode
latency of the same shape: `ladder bench inference --model quality-100m --plans ... --nproc 4`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jobs import Started, deadline, finish, run_all, visible_gpus
from quality_report import COLUMNS, PLANS, T, caption, latency_rows, read, rows, write_page

from ladder.cli import parse_words
from ladder.config import FILES, load_plan
from ladder.data.mix import open_sources
from ladder.data.prepared import TokenData
from ladder.files import make_folder, write_text
from ladder.models import ModelConfig, resolve_plan
from ladder.models.errors import UserError
from ladder.models.transformer import tensor_shapes
from ladder.plans import aligned
from ladder.records import append, facts
from ladder.train import metrics
from ladder.train.config import TrainConfig, load_train_config

RECIPE = "quality-100m"
SEEDS = {"standard": (0, 1), "ladder": (0, 1)}  # the others: 0
OWN = ("data", "out", "plan", "seed", "tp", "tp_degree")  # keys of the recipe that are set here
PER_RUN = ("data", "out", "plan", "seed", "tp_degree")  # keys in which runs side by side differ
RESULTS, TABLE = "quality.jsonl", "quality.txt"


@dataclass(frozen=True)
class Run:
    """One training run: plan, seed, and the resolved recipe."""

    plan: str
    seed: int
    config: TrainConfig
    model: ModelConfig
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.plan}-seed{self.seed}"

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def command(self) -> list[str]:
        return ["-m", "ladder", "train", RECIPE, *self.overrides]

    def clear(self) -> None:
        """Remove an interrupted run: its only checkpoint is written at the end."""
        if (self.folder / "recipe.json").exists():
            shutil.rmtree(self.folder)


# ---- run ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Train the runs that are not finished; 1 if one failed."""
    until = deadline(options.budget)
    gpus = visible_gpus(options.gpus)
    data = open_sources(str(options.data))
    runs = [resolve(plan, seed, options, data) for plan, seed in chosen(options.only)]
    file = options.out / RESULTS
    records = read(file) if file.is_file() else []
    common = {"recipe": recipe_of(runs[0]), "data": summary(data)}
    check_common(records, common, file)
    for folder in (options.out, options.runs):
        make_folder(folder)
    done = {(record["plan"], record["seed"]) for record in records}
    waiting = [each for each in runs if (each.plan, each.seed) not in done]
    # Virtual ranks make a run long; sorting keeps the order of the rest: a second seed is last.
    waiting.sort(key=lambda each: (each.seed, not each.model.plan.depends_on_tp))
    failed = train_all(waiting, gpus, until, records, file, common)
    if records:
        text = f"{caption(records)}\n{aligned([list(COLUMNS), *rows(records)])}"
        write_text(options.out / TABLE, text + "\n")
        print(f"\n{text}\n\n{file}")
    return 1 if failed else 0


def chosen(only: Sequence[str] | None) -> list[tuple[str, int]]:
    """(plan, seed) of all runs, or of those named: PLAN with all its seeds, or PLAN:SEED."""
    found: dict[tuple[str, int], None] = {}
    for name in only or PLANS:
        plan, colon, seed = name.partition(":")
        if colon and not seed.isdecimal():
            raise UserError(f"--only={name}: the seed must be a whole number, as in {plan}:1")
        for each in (int(seed),) if colon else SEEDS.get(plan, (0,)):
            found[plan, each] = None
    return list(found)


def resolve(plan: str, seed: int, options: argparse.Namespace, data: TokenData) -> Run:
    """The run of a plan and seed. Raises UserError where the plan or an override is wrong."""
    check_overrides(options.overrides, OWN)
    name = Path(plan).stem if plan.endswith(FILES) else plan
    folder = options.runs / f"{name}-seed{seed}"
    shared = [*options.overrides, f"data={options.data}", f"out={folder}"]
    shape = load_train_config(RECIPE, shared).model_config(data.vocab_size)
    own = [f"plan={plan}", f"seed={seed}"]
    if resolve_plan(load_plan(plan), shape.num_layers, T).depends_on_tp:
        own.append(f"tp_degree={T}")
    overrides = (*shared, *own)
    config = load_train_config(RECIPE, overrides)
    return Run(name, seed, config, config.model_config(data.vocab_size), overrides)


def recipe_of(each: Run) -> dict[str, Any]:
    """The recipe as plain JSON data, without the keys that differ between the runs of a table."""
    recipe = each.config.resolved(each.model)
    kept = {key: value for key, value in recipe.items() if key not in PER_RUN}
    found: dict[str, Any] = json.loads(json.dumps(kept))
    return found


def check_overrides(overrides: Sequence[str], own: Sequence[str]) -> None:
    """Raise UserError for an override of a key that the benchmark sets."""
    for override in overrides:
        if (key := override.partition("=")[0]) in own:
            raise UserError(f"override {override!r}: {key} is set by the benchmark; leave it out")


def check_common(records: Sequence[dict[str, Any]], common: dict[str, Any], file: Path) -> None:
    """Raise UserError where a file's records have another recipe or data than the new ones."""
    for record in records:
        if any(record[key] != value for key, value in common.items()):
            raise UserError(
                f"{file} holds runs of another recipe or of other data; choose another --out"
            )


def summary(data: TokenData) -> dict[str, Any]:
    found: dict[str, Any] = {"tokenizer_sha256": data.index["tokenizer_sha256"][:16]}
    for name, split in data.splits.items():
        found[name] = {"tokens": len(split), "bytes": split.bytes, "documents": split.documents}
    return found


def train_all(
    waiting: list[Run], gpus: Sequence[str | None], deadline: float,
    records: list[dict[str, Any]], file: Path, common: dict[str, Any],
) -> list[Run]:  # fmt: skip
    """Train all runs; returns those that failed.

    A run that would end after the deadline, by the longest of its kind, is not started."""

    def finished(started: Started[Run]) -> str:
        records.append({**record(started), **common})
        append(file, records[-1:])
        each = records[-1]
        return f"{each['heldout_bits_per_byte']:.4f} bits per byte, {each['wall_s']:.0f} s"

    return run_all(waiting, gpus, deadline, lambda each: expected_s(each, records), finished)


def expected_s(each: Run, records: Sequence[dict[str, Any]]) -> float:
    """The longest time of a run with as many virtual ranks; 0 before one has ended."""
    alike = [r["wall_s"] for r in records if r["tp_degree"] == each.model.tp_degree]
    return max(alike, default=0.0)


def record(started: Started[Run]) -> dict[str, Any]:
    """The record of a finished run, from its metrics."""
    each, found = started.job, metrics.read_metrics(started.job.folder)
    steps = [entry for entry in found if "loss" in entry]
    heldout = next(entry for entry in reversed(found) if "heldout_loss" in entry)
    parameters = sum(shape.numel() for shape in tensor_shapes(each.model).values())
    on_gpu = torch.cuda.is_available()
    return {
        "plan": each.plan,
        "seed": each.seed,
        "tp_degree": each.model.tp_degree,
        "parameters": parameters,
        "tokens": steps[-1]["tokens"],
        "heldout_bits_per_byte": heldout["heldout_bits_per_byte"],
        "heldout_loss": heldout["heldout_loss"],
        "wall_s": started.wall_s,
        "tokens_per_second": statistics.median(entry["tokens_per_second"] for entry in steps),
        "mfu": statistics.median(e["mfu"] for e in steps) if "mfu" in steps[-1] else None,
        "memory_gib": steps[-1].get("memory_gib"),
        "losses": [[entry["step"], round(entry["loss"], 4)] for entry in steps],
        "machine": {
            **facts(torch.cuda.get_device_name(0) if on_gpu else "none"),
            "command": " ".join(["python", *each.command]),
        },
    }


# ---- page and command line ------------------------------------------------------------------


def page(options: argparse.Namespace) -> int:
    records = read(options.quality)
    if any(record["recipe"] != records[0]["recipe"] for record in records):
        raise UserError(f"{options.quality} holds runs of several recipes; give one of one")
    shape = records[0]["recipe"]["model"]
    latency, machines = latency_rows(options.latency, shape["name"], shape["num_layers"])
    make_folder(options.out.parent)
    write_text(options.out, write_page(records, latency, machines))
    print(options.out)
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Quality at equal tokens, plan by plan.")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    add = verbs.add_parser("run", help="train what is not finished, and print the table")
    add.set_defaults(verb=run)
    add.add_argument("overrides", nargs="*", metavar="key=value", help="for the recipe of all runs")
    add.add_argument("--data", type=Path, default=Path("runs/quality-data/data"))
    add.add_argument("--out", type=Path, default=Path("runs/quality"), help="for the results")
    add.add_argument("--runs", type=Path, help="for the trainings' folders (--out)")
    add.add_argument("--gpus", type=int, help="runs at a time, one a GPU (all)")
    add.add_argument("--budget", type=float, metavar="MINUTES", help="begin none that ends later")
    add.add_argument("--only", nargs="+", metavar="PLAN[:SEED]", help="these runs, or others")
    add = verbs.add_parser("page", help="join the results with latency, in one HTML file")
    add.set_defaults(verb=page)
    add.add_argument("--quality", type=Path, required=True, help="what `run` wrote")
    add.add_argument("--latency", type=Path, required=True, help="inference.jsonl")
    add.add_argument("--out", type=Path, default=Path("runs/quality/quality.html"))
    options = parse_words(parser, sys.argv[1:] if arguments is None else arguments)
    if options.verb is run:
        options.runs = options.runs or options.out
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 where a training failed, 2 for a user's mistake."""
    return finish(parse(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    sys.exit(main())
