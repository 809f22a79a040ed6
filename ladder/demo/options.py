"""The options of `ladder demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.next_step import say_next


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the folder to write")


def run(options: argparse.Namespace) -> int:
    from ladder.demo.command import PROMPT, main

    code = main(options.out)
    if not code:
        say_next("generate", options.out / "ladder", "--prompt", PROMPT)
    return code
