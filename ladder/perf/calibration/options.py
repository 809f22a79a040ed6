"""The options of `ladder bench machine`."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ladder.files import check_names_file
from ladder.models.errors import UserError, unknown
from ladder.next_step import say_next
from ladder.perf.machine import ATTENTION, IN_8_BITS, TURNS

# What --only can name.
FAMILIES = ("values", "product", "attention", "landing", "all-reduce", "peer-copy", "all-gather",
            "reduce-scatter", "exchange", "beside", "turns", "copy", "prompt-attention",
            "matrix")  # fmt: skip


def family(name: str) -> str:
    """The one of FAMILIES that has a part, or a curve, of this name."""
    if name == "barrier":
        return "exchange"
    if name in TURNS:
        return "turns"
    if name in ATTENTION.values():
        return "attention"
    if name == IN_8_BITS:
        return "product"
    if name == "copies to all":
        return "peer-copy"
    return "beside" if "beside" in name else name.replace(" ", "-")


def family_of_value(name: str) -> str:
    """The one of FAMILIES whose parts measure this value."""
    if name.startswith("prompt_attention"):
        return "prompt-attention"
    if name == "barrier_us":
        return "exchange"
    if name == "copies_to_all":
        return "peer-copy"
    return "beside" if "beside" in name else "values"


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
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        help=f"measure these alone, and keep the rest of an existing --out: {', '.join(FAMILIES)}",
    )
    parser.set_defaults(check=check)


def check(options: argparse.Namespace) -> None:
    """Raise UserError for wrong options, before ranks are started, and without torch: only a
    process that has not imported it can fork them."""
    if not 0 < options.budget < math.inf:
        raise UserError(f"--budget={options.budget} must be a number of minutes above 0")
    check_names_file(options.out, "--out")
    for name in options.only or ():
        if name not in FAMILIES:
            raise unknown("part of --only", name, FAMILIES)


def run(options: argparse.Namespace) -> int:
    from ladder.perf.calibration.command import main

    code = main(options)
    if not code and options.nproc > 1 and options.device != "cpu":
        say_next("bench", "inference", "--nproc", options.nproc)
    return code
