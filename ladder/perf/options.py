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
    import json

    from ladder.files import write_text
    from ladder.models import UserError
    from ladder.perf.report import Study
    from ladder.perf.t3.figures import FIGURES, figure, known
    from ladder.perf.t3.sweep import sweep
    from ladder.perf.t3.system import DECLARED, FITTED, SOURCE

    if options.sweep and options.figure:
        raise UserError("--sweep is of no figure; leave out --figure")
    numbers = [known(number) for number in options.figure or FIGURES]
    page = options.page
    if page is not None and (page.is_dir() or not page.parent.is_dir()):
        raise UserError(f"--page {page}: name a file in a folder that exists")
    results = [sweep()] if options.sweep else [figure(each) for each in dict.fromkeys(numbers)]
    study = Study(SOURCE, results, FITTED, DECLARED)
    if page is not None:
        write_text(page, study.as_page())
    if options.json:
        print(json.dumps(study.as_data(), indent=1))
        return 0
    print(study.text())
    if page is None:
        some = ("--figure", *options.figure) if options.figure else ()
        some = ("--sweep",) if options.sweep else some
        say_next("predict", "t3", *some, "--page", free(Path("t3.html")))
    return 0
