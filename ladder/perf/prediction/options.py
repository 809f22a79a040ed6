"""The options of `ladder predict decode` and `ladder predict validate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ladder.next_step import say_next


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--machine", default="h200x4", help="a shipped machine, or a file of `ladder bench machine`"
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="RECORDS",
        help="an inference.jsonl with llama-3-8b, none, batch 1, from which the gap between "
        "launches is fitted",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def add_decode_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a name from configs/models")
    parser.add_argument(
        "--plans",
        nargs="+",
        default=["standard", "parallel", "ladder", "none"],
        help="presets or YAML files (standard parallel ladder none)",
    )
    parser.add_argument(
        "--reducers", nargs="+", default=["push", "async"], help="push, async: NCCL (push async)"
    )
    parser.add_argument("--tp", type=int, help="tensor-parallel degree (the machine's GPUs)")
    parser.add_argument("--tp-degree", type=int, help="T of plans that depend on it (--tp)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences (1)")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence so far")
    _add_machine(parser)


def run_decode(options: argparse.Namespace) -> int:
    from ladder.perf.prediction.command import decode

    code = decode(options)
    if not code and not options.json:
        words = ("--model", options.model, "--plans", *options.plans, "--batch", *options.batch)
        say_next("bench", "inference", *words, "--nproc", options.tp or 1)
    return code


def add_validate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "records",
        nargs="+",
        type=Path,
        metavar="RECORDS",
        help="results of `bench inference`",
    )
    _add_machine(parser)


def run_validate(options: argparse.Namespace) -> int:
    from ladder.perf.prediction.command import validate

    return validate(options)
