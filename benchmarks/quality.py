"""Quality at equal tokens: one small model under each plan, and its latency.

    python benchmarks/quality.py run [key=value ...] [--recipe NAME] [--data FOLDER] [--out FOLDER]
        [--runs FOLDER] [--gpus N] [--budget MINUTES] [--only SET|PLAN[:SEEDS[:T]] ...]
    python benchmarks/quality.py plans [PLAN ...] [--layers N] [--tp-degree T] [--out FOLDER]
    python benchmarks/quality.py page --quality FILE ... --latency FILE ... [--model NAME]
        [--tp N] [--out FILE]

`run` trains the recipe quality-100m, or that of --recipe, by `ladder train`, one run on each GPU at
a time (without GPUs one run at a time on the CPU), the longest first. Finished runs are lines in
`--out`/quality.jsonl (runs/quality; of another recipe runs/NAME) and are skipped when the command
is started again; interrupted runs start again, or with checkpoint_interval=N go on from their
newest checkpoint. PLAN is the name of a plan; desync-Nx-sqrt (-root4, -full): desync whose
unreduced partials are scaled by the square root of T (the fourth root, T); desync-Nx-init-sqrt
(-root4, -full): desync whose output matrices of unreduced sublayers begin that much larger, and
nothing else; or a YAML file with a plan, then named after the file. SEEDS is a number or a range,
as 0-2. The sets are in benchmarks/quality_plans.py. key=value overrides the recipe for all runs;
eval_interval=50 records the curves that the comparison at equal training time needs. The data is
prepared by benchmarks/quality_data.py.

`plans` writes the files of scaled plans, for `ladder bench inference --plans FILE`. `page` joins
the results with decode latencies, of the same shape or of `--model`, at TP 4 or `--tp`:
`ladder bench inference --model quality-100m --plans ... --batch 1 64 --p2p on off --nproc 4`.
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
from quality_frontier import latencies, write_page
from quality_initial import write_initial
from quality_plans import NAMED, T, called, chosen, depends_on_tp, initially, written
from quality_report import COLUMNS, KEYS, LOGGED, caption, different, read, read_all, rows

from ladder.checkpoint import checkpoints
from ladder.data.mix import open_sources
from ladder.data.prepared import TokenData
from ladder.files import make_folder, write_text
from ladder.models import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import tensor_shapes
from ladder.parser import Parser, parse_words
from ladder.plans import aligned
from ladder.records import append, facts
from ladder.train import metrics
from ladder.train.config import TrainConfig, load_train_config

RECIPE = "quality-100m"
OUT = Path("runs/quality")  # of RECIPE
# Keys of the recipe that this script sets, or keeps at their defaults.
OWN = ("data", "out", "plan", "seed", "init", "tp", "tp_degree")
PER_RUN = ("data", "out", "plan", "seed", "tp_degree")  # keys in which runs side by side differ
RESULTS, TABLE = "quality.jsonl", "quality.txt"


@dataclass(frozen=True)
class Run:
    """One training run: plan, seed, and the resolved recipe."""

    plan: str
    seed: int
    recipe: str
    config: TrainConfig
    model: ModelConfig
    overrides: tuple[str, ...]
    initial_scale: float = 1.0  # of the output matrices of unreduced sublayers

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def key(self) -> tuple[str, int, int | None]:
        """The values of KEYS in its record."""
        return self.plan, self.seed, self.model.tp_degree

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def command(self) -> list[str]:
        own = self.overrides
        if self.initial_scale != 1:  # the shape is that of the weights
            own = tuple(each for each in own if not each.startswith(("model=", "model.")))
            own = (*own, f"init={self.initial}")
        again = ["--resume"] if self.continues else []
        return ["-m", "ladder", "train", self.recipe, *own, *again]

    @property
    def continues(self) -> bool:
        """Whether it was interrupted and left a checkpoint (with checkpoint_interval=N)."""
        found = checkpoints(self.folder)
        return bool(found) and found[-1][0] < self.config.steps

    @property
    def initial(self) -> Path:
        """The folder of its initial weights, if `ladder train` does not draw them."""
        return self.folder.parent / "initial" / self.name

    def prepare(self) -> None:
        """Remove an interrupted run that has no checkpoint, and write the initial weights."""
        if self.continues:
            return
        if (self.folder / "recipe.json").exists():
            shutil.rmtree(self.folder)
        if self.initial_scale != 1:
            write_initial(self.model, self.seed, self.initial_scale, self.initial)


# ---- run ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Train the runs that are not finished; 1 if one failed."""
    until = deadline(options.budget)
    gpus = visible_gpus(options.gpus)
    data = open_sources(str(options.data))
    wanted = [resolve(*names, options, data) for names in chosen(options.only)]
    runs = list({each.key: each for each in wanted}.values())  # plans without T are alike for all T
    file = options.out / RESULTS
    records = read(file, KEYS) if file.is_file() else []
    common = {"recipe": recipe_of(runs[0]), "data": summary(data)}
    check_common(records, common, file)
    for folder in (options.out, options.runs):
        make_folder(folder)
    done = {tuple(record[key] for key in KEYS) for record in records}
    waiting = [each for each in runs if each.key not in done]
    # By seed, and then runs with virtual ranks, which are long, first; otherwise in order.
    waiting.sort(key=lambda each: (each.seed, not each.model.plan.depends_on_tp))
    failed = train_all(waiting, gpus, until, records, file, common)
    if records:
        text = f"{caption(records)}\n{aligned([list(COLUMNS), *rows(records)])}"
        write_text(options.out / TABLE, text + "\n")
        print(f"\n{text}\n\n{file}")
    return 1 if failed else 0


def resolve(plan: str, seed: int, degree: int, options: argparse.Namespace, data: TokenData) -> Run:
    """The run of a plan, seed and T. Raises UserError if the plan or an override is wrong."""
    check_overrides(options.overrides, OWN)
    name = called(plan)
    at = "" if degree == T else f"-T{degree}"
    shared = [*options.overrides, f"data={options.data}"]
    shape = load_train_config(options.recipe, shared).model_config(data.vocab_size)
    plan, initial_scale = initially(plan, degree)
    own = [f"plan={written(plan, shape.num_layers, degree, options.runs / 'plans')}"]
    if depends_on_tp(own[0].removeprefix("plan="), shape.num_layers):
        own.append(f"tp_degree={degree}")
    else:
        at = ""
    own += [f"seed={seed}", f"out={options.runs / f'{name}{at}-seed{seed}'}"]
    overrides = (*shared, *own)
    config = load_train_config(options.recipe, overrides)
    model = config.model_config(data.vocab_size)
    return Run(name, seed, options.recipe, config, model, overrides, initial_scale)


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
    """Raise UserError if a file's records have another recipe or data than the new ones."""
    for record in records:
        for key, value in common.items():
            if trained(record[key]) != trained(value):
                name = f"{key}.{different(record[key], value)}".rstrip(".")
                raise UserError(
                    f"{file} holds runs of another recipe or of other data ({name} differs); "
                    f"choose another --out"
                )


def trained(recipe: dict[str, Any]) -> dict[str, Any]:
    """The keys of a recipe that change what is trained."""
    return {key: value for key, value in recipe.items() if key not in LOGGED}


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

    A run that would end after the deadline, if it took as long as the longest finished run of its
    kind, is not started."""

    def finished(started: Started[Run]) -> str:
        records.append({**record(started), **common})
        append(file, records[-1:])
        each = records[-1]
        return f"{each['heldout_bits_per_byte']:.4f} bits per byte, {each['wall_s']:.0f} s"

    return run_all(waiting, gpus, deadline, lambda each: expected_s(each, records), finished)


def expected_s(each: Run, records: Sequence[dict[str, Any]]) -> float:
    """The longest time of finished runs with as many virtual ranks; 0 if there is none.

    0, too, for a run that can be interrupted."""
    if each.config.checkpoint_interval:
        return 0.0
    alike = [r["wall_s"] for r in records if r["tp_degree"] == each.model.tp_degree]
    return max(alike, default=0.0)


def record(started: Started[Run]) -> dict[str, Any]:
    """The record of a finished run, from its metrics."""
    each, found = started.job, metrics.read_metrics(started.job.folder)
    steps = [entry for entry in found if "loss" in entry]
    curve = [entry for entry in found if "heldout_loss" in entry]
    heldout = curve[-1]
    parameters = sum(shape.numel() for shape in tensor_shapes(each.model).values())
    on_gpu = torch.cuda.is_available()
    return {
        "plan": each.plan,
        "seed": each.seed,
        "tp_degree": each.model.tp_degree,
        "initial_scale": each.initial_scale,
        "parameters": parameters,
        "tokens": steps[-1]["tokens"],
        "heldout_bits_per_byte": heldout["heldout_bits_per_byte"],
        "heldout_loss": heldout["heldout_loss"],
        "wall_s": started.wall_s,  # of its last part, if the run was continued
        "tokens_per_second": statistics.median(entry["tokens_per_second"] for entry in steps),
        "mfu": statistics.median(e["mfu"] for e in steps) if "mfu" in steps[-1] else None,
        "memory_gib": steps[-1].get("memory_gib"),
        "losses": [[entry["step"], round(entry["loss"], 4)] for entry in steps],
        "heldout": [[entry["step"], entry["heldout_bits_per_byte"]] for entry in curve],
        "machine": {
            **facts(torch.cuda.get_device_name(0) if on_gpu else "none"),
            "command": " ".join(["python", *started.arguments]),
        },
    }


# ---- page and command line ------------------------------------------------------------------


def page(options: argparse.Namespace) -> int:
    records = read_all(options.quality)
    latency = latencies(options.latency, records, options.model, options.tp)
    make_folder(options.out.parent)
    write_text(options.out, write_page(records, latency))
    print(options.out)
    return 0


def plans(options: argparse.Namespace) -> int:
    """Write the files of scaled plans."""
    for name in options.plans:
        if not NAMED.fullmatch(name):
            raise UserError(f"{name!r} is no scaled plan; name one as desync-4x-sqrt")
    for name in options.plans:
        print(written(name, options.layers, options.tp_degree, options.out))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Quality at equal tokens, plan by plan.")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    add = verbs.add_parser("run", help="train what is not finished, and print the table")
    add.set_defaults(verb=run)
    add.add_argument("overrides", nargs="*", metavar="key=value", help="for the recipe of all runs")
    add.add_argument("--recipe", default=RECIPE, help=f"a name from configs/train ({RECIPE})")
    add.add_argument("--data", type=Path, default=Path("runs/quality-data/data"))
    add.add_argument("--out", type=Path, help=f"for the results ({OUT}; runs/RECIPE of another)")
    add.add_argument("--runs", type=Path, help="for the trainings' folders (--out)")
    add.add_argument("--gpus", type=int, help="runs at a time, one a GPU (all)")
    add.add_argument("--budget", type=float, metavar="MINUTES", help="begin none that ends later")
    add.add_argument("--only", nargs="+", metavar="SET|PLAN[:SEEDS[:T]]", help="these runs (plans)")
    add = verbs.add_parser("plans", help="write the files of scaled plans")
    add.set_defaults(verb=plans)
    add.add_argument("plans", nargs="+", metavar="PLAN", help="as desync-4x-sqrt")
    add.add_argument("--layers", type=int, default=12, help="of the model (12)")
    add.add_argument("--tp-degree", type=int, default=T, help=f"T ({T})")
    add.add_argument("--out", type=Path, default=OUT / "plans")
    add = verbs.add_parser("page", help="join the results with latency, in one HTML file")
    add.set_defaults(verb=page)
    add.add_argument("--quality", type=Path, nargs="+", required=True, help="what `run` wrote")
    add.add_argument("--latency", type=Path, nargs="+", required=True, help="inference.jsonl")
    add.add_argument("--model", help="whose latency is drawn (the trained shape)")
    add.add_argument("--tp", type=int, default=T, help=f"TP degree of that latency ({T})")
    add.add_argument("--out", type=Path, default=OUT / "quality.html")
    options = parse_words(parser, arguments)
    if options.verb is run:
        default = OUT if options.recipe == RECIPE else OUT.with_name(Path(options.recipe).stem)
        options.out = options.out or default
        options.runs = options.runs or options.out
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 where a training failed, 2 for a user's mistake."""
    return finish(parse(arguments))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that running jobs are ended, too
    sys.exit(main())
