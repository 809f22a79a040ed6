"""The options of `ladder bench machine`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.next_step import say_next


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("machine.json"),
        help="the file to write; its stem is the name",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=8.0,
        metavar="MINUTES",
        help="start no measurement after this many minutes; the file lacks what is left out",
    )
    parser.set_defaults(check=_check)


def _check(options: argparse.Namespace) -> None:
    from ladder.perf.calibration.command import check

    check(options)


def run(options: argparse.Namespace) -> int:
    from ladder.perf.calibration.command import main

    code = main(options)
    if not code and options.nproc > 1 and options.device != "cpu":
        say_next("bench", "inference", "--nproc", options.nproc)
    return code
