"""The options of `ladder doctor`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.next_step import free, say_next


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    from ladder.doctor.command import main

    code = main(options.json)
    if not code and not options.json:
        out = free(Path("runs/tokenizer"))
        say_next("tokenizer", "train", "--vocab-size", 1024, "--out", out)
    return code
