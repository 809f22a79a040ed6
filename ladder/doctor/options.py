"""The options of `ladder doctor`."""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(options: argparse.Namespace) -> int:
    from ladder.doctor.command import main

    return main(options.json)
