"""The options of `ladder predict ops`."""

from __future__ import annotations

import argparse

from ladder.next_step import say_next
from ladder.perf.planner.options import add_calibration


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine",
        default="h200x4",
        help="a shipped or declared machine, or a file of `ladder bench machine`",
    )
    add_calibration(parser)
    parser.add_argument("--tp", type=int, help="ranks that share a product (all GPUs)")
    parser.add_argument("--ops", nargs="+", help="operators (all that are predicted)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        help="as of `ladder bench ops`: flux-gpt3, flux-llama2-70b, or a name from configs/models "
        "(flux-gpt3)",
    )
    parser.add_argument(
        "--m", type=int, nargs="+", help="rows of the whole product (as of `ladder bench ops`)"
    )
    parser.add_argument(
        "--implementations",
        nargs="+",
        metavar="NAME[:KEY=VALUE,...]",
        help="those to predict, with their options (all)",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="predict all implementations, also with the options that `ladder bench ops --tune` "
        "tries",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    # what `ladder bench ops` has besides, and operators that are predicted do not depend on
    parser.set_defaults(dtype="bfloat16", tables=None, pooling=None, budget=None)


def run(options: argparse.Namespace) -> int:
    from ladder.perf.operators.command import main, measuring
    from ladder.perf.planner.running import as_its_links
    from ladder.perf.prediction.command import machine_of

    code = main(options)
    if not options.json:
        say_next(*measuring(options), before=as_its_links(machine_of(options)))
    return code
