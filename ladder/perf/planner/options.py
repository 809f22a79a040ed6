"""The options of `ladder predict MODEL`."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path

OBJECTIVES = ("latency", "throughput", "memory")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name from configs/models, a YAML file, or a folder with a config.json, ours or "
        "Hugging Face's",
    )
    parser.add_argument(
        "--machine",
        nargs="+",
        default=["h200x4"],
        metavar="M",
        help="a shipped machine, a file of `ladder bench machine`, or a declared one (h200x8, "
        "h100x4, h100x8); further ones of the same GPU add their TP degrees, as shipped ones "
        "do by themselves (h200x4)",
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="number of machines; training spans all of them, each inference copy stays on one",
    )
    phase = parser.add_mutually_exclusive_group()
    for name, text in (
        ("decode", "a decode step (default)"),
        ("prefill", "a prompt"),
        ("train", "a training step"),
    ):
        phase.add_argument(
            f"--{name}", dest="phase", action="store_const", const=name, help=f"predict {text}"
        )
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        help="sequences of a copy of the model (1; for throughput 1 4 16 64, in training 1 2 4 8)",
    )
    parser.add_argument(
        "--context", type=int, help="tokens of each sequence (1024, or as many as the model takes)"
    )
    parser.add_argument(
        "--plans",
        nargs="+",
        help="presets or YAML files; checkpoint: that of MODEL's folder (all presets)",
    )
    parser.add_argument("--tp", type=int, nargs="+", help="tensor-parallel degrees (all)")
    parser.add_argument("--tp-degree", type=int, help="T of plans that depend on it (that of --tp)")
    parser.add_argument(
        "--reducers",
        nargs="+",
        help="push, async: NCCL; of prompts also fused, async-fp8, async-int8 (push async)",
    )
    parser.add_argument(
        "--weights",
        help="of inference, how matrices are stored: bf16, fp8, fp8-block or int8 (as in a folder, "
        "or else bf16)",
    )
    parser.add_argument(
        "--cache", choices=("bf16", "fp8"), default="bf16",
        help="of inference, how keys and values are stored",
    )  # fmt: skip
    parser.add_argument(
        "--layouts",
        nargs="+",
        help="of --train: how ranks share the work, as in `ladder bench train` (ddp fsdp tpN+sp "
        "tpN+sp+fsdp)",
    )
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="of --train: sequences of a pass; 0: the batch"
    )
    parser.add_argument(
        "--activation-checkpointing", default="none", help="of --train: none, selective or full"
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        help="what to recommend: the least time (not of --train), the most tokens a second on all "
        "GPUs, or the least memory (latency; of --train throughput)",
    )
    add_calibration(parser)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="also write an HTML page with figures"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="also write the recommended step's kernels as a trace, for Perfetto",
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.0,
        metavar="PERCENT",
        help="standard deviation, in %%, of an operation's time between ranks; adds the wait for "
        "the slowest rank",
    )


def add_calibration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--calibrate",
        type=Path,
        nargs="+",
        metavar="RECORDS",
        help="your own benchmark records; used to fit what the machine file does not contain: an "
        "inference.jsonl with llama-3-8b, none, batch 1; for training a train.jsonl, too",
    )


def run(options: argparse.Namespace) -> int:
    gc.disable()  # a quarter of the time goes into scanning torch's modules; there are no cycles
    try:
        from ladder.perf.planner.command import main

        return main(options)
    finally:
        gc.enable()
