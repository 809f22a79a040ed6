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
    parser.add_argument(
        "--machine",
        help="of --sweep, in place of the paper's GPU: a shipped machine, or a file of `ladder "
        "bench machine`",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write an HTML page")


def run_t3(options: argparse.Namespace) -> int:
    from ladder.files import check_names_file
    from ladder.models import UserError
    from ladder.perf.machine_files import load
    from ladder.perf.report import Study, show
    from ladder.perf.t3.figures import FIGURES, figure, known
    from ladder.perf.t3.sweep import sweep_of
    from ladder.perf.t3.system import DECLARED, FITTED, SOURCE

    if options.sweep and options.figure:
        raise UserError("--sweep is of no figure; leave out --figure")
    if options.machine is not None and not options.sweep:
        raise UserError(
            f"--machine={options.machine} is of --sweep; figures are of the paper's GPU"
        )
    numbers = [known(number) for number in options.figure or FIGURES]
    if options.page is not None:
        check_names_file(options.page, "--page")
    if options.sweep:
        study = sweep_of(None if options.machine is None else load(options.machine))
    else:
        results = [figure(each) for each in dict.fromkeys(numbers)]
        study = Study(SOURCE, results, FITTED, DECLARED)
    show(study, options.json, options.page)
    if options.page is None and not options.json:
        some = ("--figure", *options.figure) if options.figure else ()
        some = ("--sweep",) if options.sweep else some
        some += ("--machine", options.machine) if options.machine else ()
        say_next("predict", "t3", *some, "--page", free(Path("t3.html")))
    return 0
