"""The options of `ladder eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.next_step import PROMPT, say_next


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
    parser.add_argument(
        "--tp", type=int, default=0, help="ranks that share the model; 0: all ranks"
    )
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    parser.add_argument(
        "--weights",
        default="auto",
        help="matrices in memory: auto (in --dtype, or as stored), bf16, fp8 (e4m3), fp8-block "
        "(e4m3, a scale for each 128 columns of a row) or int8",
    )
    parser.add_argument(
        "--activations",
        default="auto",
        help="inputs of the products of prompts: auto (in --dtype), or fp8: each token rounded to "
        "e4m3 and multiplied in e4m3, with --weights fp8",
    )
    parser.add_argument(
        "--cache",
        default="auto",
        help="keys and values: auto (in --dtype), or fp8 (e4m3, a scale for each head and token)",
    )
    parser.add_argument(
        "--out", default="runs/eval", help="folder for results and the suite's data"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the results in --out")


def run(options: argparse.Namespace) -> int:
    from ladder.eval.command import eval_command

    code = eval_command(options)
    if not code:
        say_next("generate", options.models[0], "--prompt", PROMPT)
    return code
