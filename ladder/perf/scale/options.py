"""The options of `ladder predict scale`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.next_step import free, say_next

STUDIES = {
    "dlrm": "a DLRM on 128 nodes, with fused embedding and all-to-all",
    "ladder": "Tables 1, 2 and 6 of Ladder Residual",
    "curves": "training and decoding on 8 to 1,024 GPUs, which nobody has measured",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    names = "; ".join(f"{name}: {text}" for name, text in STUDIES.items())
    parser.add_argument("studies", nargs="*", metavar="STUDY", help=f"{names}; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--page", type=Path, metavar="FILE", help="also write an HTML page")


def run(options: argparse.Namespace) -> int:
    from ladder.files import check_names_file
    from ladder.models.errors import unknown
    from ladder.perf.report import show
    from ladder.perf.scale.studies import study

    for name in options.studies:
        if name not in STUDIES:
            raise unknown("study", name, STUDIES)
    if options.page is not None:
        check_names_file(options.page, "--page")
    show(study(tuple(dict.fromkeys(options.studies or STUDIES))), options.json, options.page)
    if options.page is None and not options.json:
        say_next("predict", "scale", *options.studies, "--page", free(Path("scale.html")))
    return 0
