"""The options of `ladder predict validate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.perf.planner.options import add_calibration


def add_validate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records",
        nargs="+",
        type=Path,
        metavar="RECORDS",
        help="results of `bench inference`, `bench train` and `bench ops`",
    )
    parser.add_argument(
        "--machine",
        default="h200x4",
        help="a shipped or declared machine, or a file of `ladder bench machine`",
    )
    add_calibration(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run_validate(options: argparse.Namespace) -> int:
    from ladder.perf.prediction.command import validate

    return validate(options)
