"""The options of the commands `ladder bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ladder.next_step import PROMPT, say_next

SIZES = tuple(2**n for n in range(13, 27))  # bytes of the all-reduces of `ladder bench comm`


def add_inference_options(parser: argparse.ArgumentParser) -> None:
    # Options that are not given come from the suite, or from ladder.bench.inference's Settings.
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--model", help="a name from configs/models, or a checkpoint's folder (llama-3-8b)"
    )
    parser.add_argument("--layers", type=int, help="use only this many layers; 0: all (0)")
    parser.add_argument(
        "--plans",
        nargs="+",
        help="presets (random weights), or `checkpoint`: the plan and weights of --model=FOLDER "
        "(standard ladder none; for a folder: checkpoint standard none)",
    )
    parser.add_argument(
        "--reducers", nargs="+", help="async (NCCL), push, fused, async-fp8 ... (push async)"
    )
    parser.add_argument("--tp", type=int, nargs="+", help="tensor-parallel degrees (all ranks)")
    parser.add_argument(
        "--tp-degree", type=int, help="T of plans that depend on it; 0: that of --tp (0)"
    )
    parser.add_argument("--batch", type=int, nargs="+", help="sequences per batch (1)")
    parser.add_argument("--prompt", type=int, help="tokens per prompt (1024)")
    parser.add_argument("--new-tokens", type=int, help="tokens to decode (512)")
    parser.add_argument(
        "--weights", help="how matrices are stored: bf16, fp8, fp8-block or int8 (bf16)"
    )
    parser.add_argument(
        "--activations",
        help="inputs of the products of prompts: bf16, or fp8 with --weights fp8 (bf16)",
    )
    parser.add_argument("--cache", help="how keys and values are stored: bf16 or fp8 (bf16)")
    parser.add_argument(
        "--p2p",
        nargs="+",
        choices=("on", "off"),
        help="off: no peer access between GPUs, as without NVLink (on)",
    )
    parser.argument_default = None
    parser.add_argument(
        "--suite",
        default=None,
        help="name of a suite in configs/bench; options override its values",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=None,
        metavar="MINUTES",
        help="start no measurement after this many minutes",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="measure only the time from process start to the first token",
    )
    parser.add_argument(
        "--profile", action="store_true", help="also write a trace of each point, for Perfetto"
    )
    parser.add_argument("--cold-child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--out", default="runs/bench", help="folder; results are added to it")
    # Not `nproc`: the command starts the ranks itself, anew for each setting of --p2p.
    parser.add_argument(
        "--nproc",
        dest="ranks",
        type=int,
        default=1,
        help="processes to start, one for each GPU",
    )


def run_inference(options: argparse.Namespace) -> int:
    from ladder.bench.inference.command import main
    from ladder.bench.inference.points import Settings

    code = main(options)
    if not code and not options.cold_child:
        model = getattr(options, "model", Settings.model)
        _say_next_step(model, getattr(options, "plans", ["standard", "ladder"]))
    return code


def add_comm_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        metavar="BYTES",
        default=list(SIZES),
        help="message sizes (8 KiB to 64 MiB, doubling)",
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument(
        "--programs", type=int, default=32, help="thread blocks of our two-shot kernel"
    )
    parser.add_argument(
        "--out", default="runs/bench", help="folder; results are added to its comm.jsonl"
    )
    parser.add_argument(
        "--write-table",
        type=Path,
        metavar="FILE",
        help="replace what this dispatch table says of this GPU and number of ranks by the fastest "
        "all-reduce of each size; bfloat16 and all default sizes",
    )
    parser.add_argument("--nproc", type=int, default=1, help="processes to start, one for each GPU")


def run_comm(options: argparse.Namespace) -> int:
    from ladder.bench.communication import main

    code = main(options)
    if not code:
        say_next("bench", "inference", "--nproc", options.nproc)
    return code


def add_ops_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", nargs="+", help="operators (all that the shapes have)")
    parser.add_argument(
        "--shapes",
        nargs="+",
        help="flux-gpt3, flux-llama2-70b, a name from configs/models (its four products), dlrm "
        "(embedding bags), tutel, mixtral-8x7b, qwen3-30b-a3b, deepseek-v3 (experts), gemv "
        "(flux-gpt3; on CPUs tiny)",
    )
    parser.add_argument(
        "--m",
        type=int,
        nargs="+",
        help="rows of the whole product; tokens a rank, of experts; samples of embedding bags (64 "
        "to 8192; of linear_all_reduce 1 to 64)",
    )
    parser.add_argument("--tables", type=int, nargs="+", help="tables a rank, of dlrm (256)")
    parser.add_argument("--pooling", type=int, nargs="+", help="rows a bag, of dlrm (10 30 70)")
    parser.add_argument("--dtype", help="of all (bfloat16; float32 for dlrm and on CPUs)")
    parser.add_argument(
        "--implementations",
        nargs="+",
        metavar="NAME[:KEY=VALUE,...]",
        help="those to time, with their options; staged is always there (all)",
    )
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time all implementations, also with options that may be faster",
    )
    parser.add_argument(
        "--budget", type=float, metavar="MINUTES", help="start no point after this many minutes"
    )
    parser.add_argument(
        "--write-table",
        type=Path,
        metavar="FILE",
        help="add the fastest implementation of each call to this table",
    )
    parser.add_argument(
        "--records",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: derive --write-table from these records, the newest last",
    )
    parser.add_argument(
        "--out", default="runs/bench", help="folder; results are added to its ops.jsonl"
    )
    parser.set_defaults(check=_check_ops)


def _check_ops(options: argparse.Namespace) -> None:
    from ladder.bench.ops.command import check

    check(options)


def run_ops(options: argparse.Namespace) -> int:
    from ladder.bench.ops.command import main, on_cpu

    code = main(options)
    if options.records is not None:
        return code
    if not code and on_cpu(options):  # no other benchmark of inference runs there
        say_next("doctor")
    elif not code:
        say_next("bench", "inference", "--nproc", options.nproc)
    return code


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="paper-1b", help="a name from configs/models")
    parser.add_argument("--layers", type=int, default=0, help="use only this many layers; 0: all")
    parser.add_argument(
        "--plans",
        nargs="+",
        default=["standard", "ladder"],
        help="presets; `none` does not communicate (standard ladder)",
    )
    parser.add_argument(
        "--layouts",
        nargs="+",
        default=["ddp"],
        help="how ranks share the work, for example ddp, fsdp, hsdp2, tp4, tp4+sp, tp2+sp+fsdp, "
        "tp4+sp+fused (sp: sequence parallelism; fused: reducer=fused) (ddp)",
    )
    parser.add_argument("--tp-degree", type=int, default=4, help="T of plans that depend on it")
    parser.add_argument("--seq-len", type=int, default=2048, help="tokens per sequence")
    parser.add_argument(
        "--batch", type=int, default=8, help="sequences per step and data-parallel rank"
    )
    parser.add_argument(
        "--micro-batch", type=int, default=0, help="sequences per forward pass; 0: all at once"
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument(
        "--activation-checkpointing", default="none", help="none, selective or full"
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile sublayers, landings and norms (torch.compile)",
    )
    parser.add_argument("--steps", type=int, default=10, help="steps to time")
    parser.add_argument(
        "--profile", action="store_true", help="also write a trace of each point, for Perfetto"
    )
    parser.add_argument(
        "--out", default="runs/bench", help="folder; results are added to its train.jsonl"
    )


def run_train(options: argparse.Namespace) -> int:
    from ladder.bench.training.command import main

    code = main(options)
    if not code:
        _say_next_step(options.model, options.plans)
    return code


def _say_next_step(model: str, plans: Sequence[str]) -> None:
    if Path(model).is_dir():
        say_next("generate", model, "--prompt", PROMPT)
    else:
        say_next("plans", *plans, "--model", model)
