"""The options of `ladder eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.files import refuse_inside
from ladder.folders import newest
from ladder.infer.options import add_load_options
from ladder.models.errors import UserError
from ladder.next_step import PROMPT, say_next

RESULTS = "results.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "models",
        nargs="+",
        type=Path,
        metavar="MODEL",
        help="folders of runs, checkpoints, or Hugging Face models",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["offline"],
        help="suites (offline, paper-pretrain, paper-adapt, or a YAML file) and tasks of "
        "lm-evaluation-harness (offline)",
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="folder of your own tasks, in the harness's YAML, to name in --tasks",
    )
    parser.add_argument(
        "--num-fewshot",
        type=int,
        help="examples in the prompt, for tasks that have some (the task's own number)",
    )
    parser.add_argument(
        "--limit", type=int, help="use only the first LIMIT examples of each task (all)"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="PATH",
        help="text for the offline suite: text, JSONL or Parquet files, folders, or one folder of "
        "`ladder data prepare`, for its held-out text; default: Python's standard library",
    )
    parser.add_argument(
        "--chat-template",
        nargs="?",
        const="",
        metavar="FILE",
        help="put the examples into a chat template: the tokenizer's, or that of a Jinja file",
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences per forward pass")
    add_load_options(parser)
    parser.add_argument(
        "--out", default="runs/eval", help="folder for results and the suite's data"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the results in --out")
    parser.add_argument(
        "--log-samples",
        action="store_true",
        help="also write each example and its answers, to samples_TASK.jsonl in --out",
    )
    parser.set_defaults(check=check)


def check(options: argparse.Namespace) -> None:
    """Raise UserError for mistakes that cost no work."""
    for name, least in (("batch", 1), ("limit", 1), ("num_fewshot", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')}={value} must be {least} or more")
    for folder in options.models:
        newest(folder)
    if (Path(options.out) / RESULTS).exists() and not options.overwrite:
        raise UserError(
            f"--out={options.out} holds results already; choose another folder, or add --overwrite"
        )
    refuse_inside(options.out, [*options.models, *(options.text or ())])


def run(options: argparse.Namespace) -> int:
    from ladder.eval.command import eval_command

    code = eval_command(options)
    if not code:
        say_next("generate", options.models[0], "--prompt", PROMPT)
    return code
