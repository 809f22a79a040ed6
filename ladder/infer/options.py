"""The options of `ladder generate`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ladder.files import check_names_file, check_writable
from ladder.folders import newest
from ladder.infer.lines import read_prompts
from ladder.infer.settings import Sampling
from ladder.models.errors import UserError
from ladder.next_step import say_next
from ladder.parallel import launch


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="folder of a run, a checkpoint, or a Hugging Face model",
    )
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="text to continue; may be repeated")
    prompts.add_argument(
        "--prompts",
        metavar="FILE",
        help='JSON lines, each with a "prompt", to continue as one batch; -: standard input',
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the completions there, as JSON lines, in place of printing them",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="treat the prompt as a user's message, in the chat template",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file of the chat template, implies --chat (the tokenizer's own)",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, help="number of tokens to add at most"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0: from all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens of this total probability",
    )
    parser.add_argument("--seed", type=int, help="seed of the sampling (0)")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        help="text that ends a completion, which is printed without it; may be repeated",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="continue past the end-of-text token"
    )
    add_load_options(parser)
    parser.add_argument(
        "--reducer",
        default="auto",
        help="how ranks sum partial outputs: auto, async (NCCL or gloo), push (peer memory), fused "
        "(prompts exchange within matrix products), or async-fp8 or async-int8 (messages of more "
        "than 64 tokens in 8 bits)",
    )
    parser.set_defaults(check=check)


def check(options: argparse.Namespace) -> Sampling:
    """The sampling that the options ask for. Raises UserError for mistakes that cost no work.

    It also reads the prompts of --prompts into `options.prompt`, and the numbers of their lines
    into `options.lines`: ranks that a launcher starts have no standard input.
    """
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens={options.max_new_tokens} must be 1 or more")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed or 0)
    if sampling.temperature == 0 and options.seed is not None:
        raise UserError(
            f"--seed={options.seed} has no effect at temperature=0 (greedy); also give a "
            f"temperature, as 0.8, or leave --seed out"
        )
    if "" in options.stop:
        raise UserError("--stop='' has no text; give some text, or leave --stop out")
    newest(options.model)
    if options.out is not None and launch.rank() == 0:
        check_names_file(options.out, "--out")
        if options.prompts and os.path.realpath(options.prompts) == os.path.realpath(options.out):
            raise UserError(f"--out={options.out} is the file of --prompts; give another path")
        check_writable(options.out)
    if options.prompts is not None and options.prompt is None:
        found = read_prompts(options.prompts)
        options.prompt, options.lines = list(found.values()), list(found)
    return sampling


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for a model's weights, activations and cache; `ladder eval` has them, too."""
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


def run(options: argparse.Namespace) -> int:
    from ladder.infer.command import generate_command

    code = generate_command(options)
    if not code and sys.stdout.isatty():  # a program gets the text and nothing else
        say_next("eval", options.model, file=sys.stderr)
    return code
