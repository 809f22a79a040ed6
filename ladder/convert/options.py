"""The options of `ladder convert` and of `ladder convert sensitivity`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.config import DTYPES
from ladder.files import check_new_folder, refuse_inside
from ladder.folders import newest
from ladder.next_step import PROMPT, say_next

CAST_DTYPES = (*DTYPES, "float16")  # that `ladder convert` writes on request


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="folder of a Hugging Face model (Llama, Mistral, Qwen2 or 3), a run, or a checkpoint",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--plan",
        help="a preset, presets on layers (ladder@16-31), or a YAML file; default: MODEL's own",
    )
    parser.add_argument(
        "--ladder-layers",
        metavar="FIRST-LAST",
        help="with --plan hybrid: the layers that become a ladder",
    )
    parser.add_argument(
        "--tp-degree", type=int, help="number of ranks T, for plans that depend on it"
    )
    parser.add_argument(
        "--to",
        choices=("ladder", "hf"),
        default="ladder",
        help="format to write; hf: Hugging Face's, which holds plan standard only",
    )
    parser.add_argument(
        "--dtype", choices=CAST_DTYPES, help="type of the weights to write; default: as in MODEL"
    )
    parser.add_argument(
        "--weights",
        metavar="TYPE",
        help="store the matrices in 8 bits, for inference only: fp8 (e4m3) or int8, with a scale "
        "for each row, or fp8-block, for each 128 columns of a row; default: as in MODEL",
    )
    parser.set_defaults(check=check)


def check(options: argparse.Namespace) -> None:
    """Raise UserError for mistakes that cost no work."""
    newest(options.model)
    check_out(options.out, options.model)


def check_out(out: Path, source: Path) -> None:
    """Raise UserError unless `out` can be a new folder, outside the one that is read."""
    refuse_inside(out, [source])
    check_new_folder(out)


def run(options: argparse.Namespace) -> int:
    from ladder.convert.command import convert_command

    code = convert_command(options)
    if not code and (options.out / "tokenizer.json").is_file():
        say_next("generate", options.out, "--prompt", PROMPT)
    return code


def add_sensitivity_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a model or a run")
    parser.add_argument(
        "--data", required=True, help="folder of `ladder data prepare`; its held-out text is used"
    )
    parser.add_argument("--layers", type=int, required=True, help="how many layers to convert")
    parser.add_argument("--windows", type=int, default=32, help="how many held-out windows")
    parser.add_argument(
        "--seq-len",
        type=int,
        default=0,
        help="tokens per window; 0: as many as the run was trained with, or the model's context, "
        "but at most 1024",
    )
    parser.add_argument("--batch", type=int, default=8, help="windows per forward pass")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")


def run_sensitivity(options: argparse.Namespace) -> int:
    from ladder.convert.sensitivity import sensitivity_command

    return sensitivity_command(options)
