"""The quality of weights, activations, cache and all-reduces in 8 bits, in one table.

    python benchmarks/formats.py run MODEL ... --data FOLDER [--formats NAME ...] [--dtype DTYPE]
        [--windows N] [--limit N] [--batch N] [--no-suite] [--out FOLDER] [--device DEVICE]
    python benchmarks/formats.py report FILE

`run` measures each model folder in each format, on the held-out text of a folder of `ladder data
prepare`: bits per byte; the divergence KL(model in float32 || model in the format), in nats per
token; the tasks of the offline suite (which needs the extra `eval`), built from the same text. The
activations are in --dtype, but for the format `float32`. Formats with `reduce` need several
ranks: with torchrun, all formats run on its ranks.

Lines go to `--out`/formats.jsonl, a table to formats.txt. Measurements in the former are skipped.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jobs import add_report, finish
from quality_report import read

from ladder.checkpoint import newest, quantised_as
from ladder.convert.sensitivity import costs
from ladder.data.prepared import TokenData, check_tokenizer, open_data
from ladder.eval import offline, suites
from ladder.eval.command import evaluate
from ladder.files import make_folder, write_text
from ladder.infer.load import as_dtype, load_for_inference
from ladder.models import Transformer
from ladder.models.errors import UserError, unknown
from ladder.models.quantised import matrices
from ladder.parallel import launch
from ladder.parallel.sharding import local_tensor
from ladder.parser import Parser, parse_words
from ladder.plans import aligned
from ladder.records import append, facts

SEQ_LEN = 1024  # tokens; less if the model's context is shorter
RESULTS, TABLE = "formats.jsonl", "formats.txt"
KEYS = ("model", "format", "dtype", "ranks")
MEASURED = (*KEYS, "tokens")  # of records that agree in these the newest counts
# The arguments of `load_for_inference`, and the type of the cache.
FORMATS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "as is": {},
    "int8": {"weights": "int8"},
    "fp8": {"weights": "fp8"},
    "fp8-block": {"weights": "fp8-block"},
    "fp8 + activations": {"weights": "fp8", "activations": "fp8"},
    "cache fp8": {"cache": "fp8"},
    "fp8 + cache": {"weights": "fp8", "cache": "fp8"},
    "fp8 + both": {"weights": "fp8", "activations": "fp8", "cache": "fp8"},
    "reduce int8": {"reducer": "async-int8"},
    "reduce fp8": {"reducer": "async-fp8"},
}
# The metric that is shown of each task of the suite.
SHOWN = {
    "local_heldout": "bits_per_byte",
    "local_cloze": "acc",
    "local_definitions": "acc",
    "local_copying": "bits_per_byte",
    "local_sums": "bits_per_byte",
}


def matrix_bytes(model: Transformer) -> int:
    """Bytes of this rank's matrices of sublayers and of the head, with their scales."""
    parts = [each for _, m in matrices(model) for each in (m.weight, m.scales) if each is not None]
    return sum(local_tensor(each).nbytes for each in parts)


def measured(
    folder: Path, name: str, data: TokenData, tasks: dict[str, Any] | None,
    original: Transformer, options: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """The figures of one model in one format; every rank calls it."""
    chosen = {"dtype": options.dtype, **FORMATS[name]}
    cache = chosen.pop("cache", "auto")
    model = load_for_inference(folder, device=options.device, **chosen)
    length = min(SEQ_LEN, model.config.max_seq_len)
    tokens, (cost,) = costs(
        model, data, (), length, options.windows, options.batch, name, original, cache
    )
    suite = {}
    if tasks is not None:
        found = evaluate(model, folder, tasks, options.batch, options.limit, cache=cache)
        suite = {
            each.task: {"metric": each.metric, "value": each.value, "stderr": each.stderr}
            for each in found
            if SHOWN.get(each.task) == each.metric
        }
    return {
        "plan": model.config.plan.name,
        "settings": {**chosen, "cache": cache},
        "matrix_bytes": matrix_bytes(model),
        "tokens": tokens,
        "seq_len": length,
        "divergence": cost.divergence,
        "bits_per_byte": cost.bits_per_byte,
        "suite": suite,
    }


def describe(records: Sequence[dict[str, Any]]) -> str:
    """A table for each model, type of activations and text: formats, one below the other."""
    parts, alike = [], ("model", "dtype", "tokens", "seq_len")
    for case in dict.fromkeys(tuple(record[key] for key in alike) for record in records):
        members = [record for record in records if tuple(record[key] for key in alike) == case]
        tasks = [task for task in SHOWN if any(task in each["suite"] for each in members)]
        rows = [["format", "ranks", "matrices MB", "bits per byte", "KL", *tasks]]
        for each in members:
            rows.append([
                each["format"], str(each["ranks"]), f"{each['matrix_bytes'] / 1e6:.2f}",
                f"{each['bits_per_byte']:.4f}", f"{each['divergence']:.2e}",
                *(_cell(each["suite"].get(task)) for task in tasks),
            ])  # fmt: skip
        first = members[0]
        parts.append(
            f"{first['model']}, plan {first['plan']}, activations in {first['dtype']}, "
            f"{first['tokens']:,} held-out tokens in windows of {first['seq_len']}\n"
            f"{aligned(rows, left=1)}"
        )
    return "\n\n".join(parts) + "\n"


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "-"
    error = "" if found["stderr"] is None else f" ± {found['stderr']:.3f}"
    return f"{found['value']:.4f}{error}"


def check(options: argparse.Namespace) -> None:
    """Raise UserError for options that cannot be met."""
    several = launch.world_size() > 1
    for name in options.formats or ():
        if name not in FORMATS:
            raise unknown("format of --formats", name, FORMATS)
        if "reducer" in FORMATS[name] and not several:
            raise UserError(f"--formats {name!r} needs several ranks: start it with torchrun")
    for key in ("windows", "batch", "limit"):
        value = getattr(options, key)
        if value is not None and value < 1:
            raise UserError(f"--{key}={value} must be 1 or more")
    as_dtype(options.dtype)
    if options.suite:
        suites.require_lm_eval()


def run(options: argparse.Namespace) -> int:
    """Measure what is not measured yet."""
    check(options)
    device = launch.join(options.device)
    main = launch.rank() == 0
    data = open_data(options.data)
    folders = {str(each): newest(each) for each in options.models}
    for model, folder in folders.items():
        if stored := quantised_as(folder):
            raise UserError(
                f"{model} holds {stored} weights: give the folder that it was converted from"
            )
        check_tokenizer(data, folder, f"--data={options.data}", str(folder))
    several = launch.world_size() > 1
    names = options.formats or [n for n in FORMATS if several or "reducer" not in FORMATS[n]]
    file = options.out / RESULTS
    tasks = None
    if main:
        make_folder(options.out)
    if options.suite:
        chosen = suites.entries(["offline"], None)
        if main:
            offline.build_tasks([str(options.data)], options.out / "offline")
        launch.from_first(None)  # wait for the data
        tasks = suites.load(chosen, options.out / "offline")
    done = launch.from_first(
        {measured_as(each) for each in read(file, MEASURED, "formats.py")}
        if main and file.is_file()
        else set()
    )
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    for model, folder in folders.items():
        original = None
        for name in names:
            about = {"model": model, "format": name, "dtype": options.dtype,
                     "ranks": launch.world_size(), "windows": options.windows}  # fmt: skip
            if measured_as(about) in done:
                continue
            if original is None:
                original = load_for_inference(folder, dtype="float32", device=options.device)
            found = measured(folder, name, data, tasks, original, options)
            machine = {**facts(gpu), "command": " ".join(["python", *sys.argv])}
            if main:
                append(file, [{**about, **found, "machine": machine}])
            gc.collect()
    if main:
        text = describe(read(file, MEASURED, "formats.py"))
        write_text(options.out / TABLE, text)
        print(f"{text}\n{file}")
    return 0


def measured_as(record: dict[str, Any]) -> tuple[Any, ...]:
    """The key of a measurement. Older records lack `windows`: they are of all windows."""
    return (*(record[key] for key in KEYS), record.get("windows"))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="The quality of formats of 8 bits.")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    add = verbs.add_parser("run", help="measure models in each format")
    add.set_defaults(verb=run)
    add.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="model folders")
    add.add_argument("--data", type=Path, default=Path("runs/data"), help="held-out text")
    add.add_argument(
        "--formats", nargs="+", metavar="NAME", help=f"{', '.join(FORMATS)} (all that can run)"
    )
    add.add_argument("--dtype", default="bfloat16", help="of activations (bfloat16)")
    add.add_argument("--windows", type=int, help="held-out windows (all)")
    add.add_argument("--limit", type=int, help="examples of each task (all)")
    add.add_argument("--batch", type=int, default=8, help="sequences per pass")
    add.add_argument("--no-suite", dest="suite", action="store_false", help="no offline suite")
    add.add_argument("--out", type=Path, default=Path("runs/formats"))
    add.add_argument("--device", default="auto")
    add_report(verbs, lambda file: describe(read(file, MEASURED, "formats.py")))
    return parse_words(parser, arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 for a user's mistake."""
    return finish(parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
