"""The options of `ladder predict`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.next_step import free, say_next


def add_t3_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--figure",
        nargs="+",
        metavar="N",
        help="figures of the paper: 4, 6, 14, 15, 16, 17, 18, 19, 20; default: all of them",
    )
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="instead: other collectives and TP degrees, which the paper does not evaluate",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write an HTML page")


def run_t3(options: argparse.Namespace) -> int:
    from ladder.files import check_names_file
    from ladder.models import UserError
    from ladder.perf.report import Study, show
    from ladder.perf.t3.figures import FIGURES, figure, known
    from ladder.perf.t3.sweep import sweep
    from ladder.perf.t3.system import DECLARED, FITTED, SOURCE

    if options.sweep and options.figure:
        raise UserError("--sweep is of no figure; leave out --figure")
    numbers = [known(number) for number in options.figure or FIGURES]
    if options.page is not None:
        check_names_file(options.page, "--page")
    results = [sweep()] if options.sweep else [figure(each) for each in dict.fromkeys(numbers)]
    show(Study(SOURCE, results, FITTED, DECLARED), options.json, options.page)
    if options.page is None and not options.json:
        some = ("--figure", *options.figure) if options.figure else ()
        some = ("--sweep",) if options.sweep else some
        say_next("predict", "t3", *some, "--page", free(Path("t3.html")))
    return 0
