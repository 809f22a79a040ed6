"""The `ladder` command: one verb for each job. A verb imports what it needs when it runs.

It is long because every option of every verb stands here, and nothing else does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder import __version__
from ladder.next_step import PROMPT, free, say_next

if TYPE_CHECKING:
    from ladder.train.config import TrainConfig

Verb = Callable[[argparse.Namespace], int]


SENSITIVITY = "convert sensitivity"
OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")  # of a recipe


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 2 for a user's mistake, 1 for anything else."""
    parser = _parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == SENSITIVITY.split():  # beside a command whose first argument is a folder
        words[:2] = [SENSITIVITY]
    options = parse_words(parser, words)
    # Before torch is imported. GNU's OpenMP spins for milliseconds at a barrier: CPU training took
    # nine times as long beside another process. So few spins cost an idle machine nothing.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # A panic in a library is told as an error, in one line: where it came from would be pages.
    os.environ["RUST_BACKTRACE"] = "0"
    verb: Verb = options.verb
    try:
        from ladder.parallel import launch

        nproc, modules = getattr(options, "nproc", 1), getattr(options, "modules", ("torch",))
        if nproc > 1 and hasattr(options, "check"):
            options.check(options)  # here, before ranks and what they import are waited for
        return launch.run(verb, (options,), nproc, modules)
    except ValueError as error:  # of the launch itself
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        remedy = "; --resume goes on from the last checkpoint" if hasattr(options, "resume") else ""
        told = [f"interrupted{remedy}", *getattr(stop, "__notes__", ())]
        print(*told, sep="\n", file=sys.stderr)
        return 130


def parse_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line whose `overrides`, where a command has any, may follow an option.

    argparse itself takes positional arguments in one place only, and hands key=value to an option
    before it that takes several words.
    """
    options, rest = parser.parse_known_args(words)
    if rest and (not hasattr(options, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not hasattr(options, "overrides"):
        return options
    for name, value in list(vars(options).items()):
        if name == "overrides" or not isinstance(value, list):
            continue
        taken = [item for item in value if isinstance(item, str) and OVERRIDE.match(item)]
        if not taken:
            continue
        if len(taken) == len(value):
            parser.error(f"argument --{name}: expected at least one argument before {taken[0]}")
        setattr(options, name, [item for item in value if item not in taken])
        rest = [*taken, *rest]
    options.overrides = [*options.overrides, *rest]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ladder",
        description="Transformers whose architecture makes tensor parallelism cheap.",
        epilog="`ladder COMMAND --help` lists the options. To begin: `ladder doctor` checks "
        "this machine, `ladder demo` shows every step on a tiny model in 5 minutes.",
    )
    parser.add_argument("--version", action="version", version=f"ladder {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (
        _plans, _tokenizer, _data, _train, _finetune, _convert, _generate, _eval, _bench, _doctor,
        _demo,
    ):  # fmt: skip
        add(verbs)
    return parser


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of an option that has one; lists of words stand in their help texts."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if default is None or default is False or isinstance(default, list):
            return action.help
        return super()._get_help_string(action)


def _add(verbs: Any, name: str, verb: Verb, text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=_Help,
    )
    parser.set_defaults(verb=verb)
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def _add_processes(parser: argparse.ArgumentParser, *modules: str) -> None:
    """modules: what the verb imports, for `launch.run`."""
    parser.add_argument(
        "--nproc", type=int, default=1, help="processes to start here; on GPUs one each"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.set_defaults(modules=modules)


# ---- plans ----------------------------------------------------------------------------------


def _plans(verbs: Any) -> None:
    parser = _add(verbs, "plans", plans, "show residual plans as pictures, tables and costs")
    parser.add_argument(
        "plans",
        nargs="*",
        metavar="PLAN",
        help="a preset (standard, parallel, ladder, hybrid, desync-4x, dtp-2, none), presets on "
        "layers (ladder@16-31), or a YAML file; without one: an overview of the presets",
    )
    parser.add_argument("--model", help="a name from configs/models: take its number of layers")
    parser.add_argument("--layers", type=int, help="number of layers, without --model (32)")
    parser.add_argument(
        "--tp-degree", type=int, default=4, help="number of ranks T, for plans that depend on it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


OVERVIEW = ("standard", "parallel", "ladder", "hybrid", "desync-2x", "desync-4x", "dtp-1", "none")


def plans(options: argparse.Namespace) -> int:
    from ladder.config import load_plan, model_config
    from ladder.models import UserError, resolve_plan
    from ladder.models.presets import MOST_LAYERS
    from ladder.plans import describe, overview, summary

    layers = 32 if options.layers is None else options.layers
    if options.model is not None:
        layers = model_config(options.model).num_layers
        if options.layers not in (None, layers):
            raise UserError(
                f"--layers={options.layers}: {options.model} has {layers}; leave one of --layers "
                f"and --model out"
            )
    if not 1 <= layers <= MOST_LAYERS:
        raise UserError(f"--layers={layers} must be from 1 to {MOST_LAYERS}")
    chosen = options.plans or OVERVIEW
    found = [resolve_plan(load_plan(plan), layers, options.tp_degree) for plan in chosen]
    if options.json:
        print(json.dumps([summary(plan) for plan in found], indent=1))
    elif options.plans:
        print("\n\n".join(describe(plan) for plan in found))
        _after_plans(options, layers)
    else:
        print(f"{layers} layers\n\n{overview(found)}")
        shape = ("--model", options.model) if options.model else ("--layers", layers)
        say_next("plans", "ladder", *shape, "--tp-degree", options.tp_degree)
    return 0


def _after_plans(options: argparse.Namespace, layers: int) -> None:
    """Time the plans that were drawn, in a model that they fit; or see some trained."""
    from ladder.config import model_config

    name = options.model or "tiny"
    timed = [plan for plan in options.plans if plan != "none"]
    if timed and model_config(name).num_layers == layers:
        degree = ("--tp-degree", options.tp_degree)
        shape = ("--model", name, "--seq-len", 128, *degree)
        say_next("bench", "train", *shape, "--plans", *timed)
    else:
        say_next("demo")


# ---- data -----------------------------------------------------------------------------------


def _tokenizer(verbs: Any) -> None:
    outer = verbs.add_parser("tokenizer", help="train a tokenizer")
    inner = outer.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = _add(inner, "train", tokenizer_train, "train a byte-level BPE on the training text")
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="text, JSONL or Parquet files, or folders; without one: Python's standard library",
    )
    parser.add_argument("--text-field", default="text", help="field or column that holds the text")
    parser.add_argument(
        "--heldout-fraction",
        type=float,
        default=0.05,
        help="share of documents left out of training",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=16384, help="number of tokens, 257 or more"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write tokenizer.json to")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a tokenizer that is there"
    )


def tokenizer_train(options: argparse.Namespace) -> int:
    from ladder.data.sources import open_corpus
    from ladder.data.tokenizer import check_vocab_size, tokenizer_file, train_tokenizer
    from ladder.files import check_writable, refuse_inside
    from ladder.models.errors import UserError

    check_vocab_size(options.vocab_size)  # as what follows, before the corpus is read
    refuse_inside(options.out, options.paths)
    check_writable(tokenizer_file(options.out))

    if tokenizer_file(options.out).exists() and not options.overwrite:
        raise UserError(
            f"--out={options.out} holds a tokenizer already; add --overwrite to "
            f"replace it, or choose another folder"
        )
    corpus = open_corpus(
        options.paths or None,
        heldout_fraction=options.heldout_fraction,
        text_field=options.text_field,
    )
    texts = (document.text for document in corpus.read("train"))
    size = train_tokenizer(texts, options.vocab_size, options.out)
    print(f"{options.out}: a byte-level BPE of {size:,} tokens")
    same = []  # corpus
    if options.text_field != "text":
        same += ["--text-field", options.text_field]
    if options.heldout_fraction != 0.05:
        same += ["--heldout-fraction", options.heldout_fraction]
    out = free(tokenizer_file(options.out).parent.parent / "data")
    say_next("data", "prepare", *options.paths, *same, "--tokenizer", options.out, "--out", out)
    return 0


def _data(verbs: Any) -> None:
    outer = verbs.add_parser("data", help="prepare training data")
    inner = outer.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = _add(inner, "prepare", data_prepare, "turn text into token shards with an index")
    parser.add_argument(
        "--config", help="a YAML file, or a name from configs/data; options override it"
    )
    # What is not given comes from the config, or from ladder.data.config.PrepareConfig.
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="text, JSONL or Parquet files, folders, hf:OWNER/NAME?name=CONFIG&split=train (a "
        "Hugging Face dataset, streamed); without one: Python's standard library",
    )
    parser.add_argument("--text-field", help="field or column that holds the text (text)")
    parser.add_argument(
        "--chat-field",
        help="prepare conversations, not text: the field or column that holds them (messages, "
        "conversations)",
    )
    parser.add_argument(
        "--chat-template", help="Jinja file of the chat template (the tokenizer's own)"
    )
    parser.add_argument(
        "--heldout-fraction", type=float, help="share of documents held out of training (0.05)"
    )
    parser.add_argument(
        "--max-left-out",
        type=float,
        help="stop if more than this share of the conversations cannot be used (0.1)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help="stop after the document that reaches so many tokens (no limit)",
    )
    parser.add_argument(
        "--workers", type=int, help="processes that tokenise; any number writes the same bytes (1)"
    )
    parser.add_argument(
        "--tokenizer", help="tokenizer.json, or the folder that holds it (required, or in --config)"
    )
    parser.argument_default = None
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace finished or unfinished data that is there"
    )


def data_prepare(options: argparse.Namespace) -> int:
    from dataclasses import asdict, fields

    from ladder.data.config import PrepareConfig, load_prepare_config
    from ladder.data.prepare import prepare

    names = tuple(item.name for item in fields(PrepareConfig))
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    config = load_prepare_config(options.config, given)
    index = prepare(**asdict(config), out=options.out, overwrite=options.overwrite)
    for name, split in index["splits"].items():
        print(
            f"{name}: {split['tokens']:,} tokens, {split['bytes']:,} bytes, "
            f"{split['documents']:,} documents"
        )
    for reason, count in index.get("left_out", {}).items():
        print(f"left out: {count:,} conversations {reason}")
    print(options.out)
    recipe = ["train", "tiny"]
    if config.chat_field and (Path(config.tokenizer) / "config.json").is_file():
        recipe = ["finetune", "tiny-sft", f"init={config.tokenizer}"]  # the model's own tokenizer
    out = free(options.out.parent / recipe[1])
    say_next(*recipe, f"data={options.out}", f"out={out}")
    return 0


# ---- train ----------------------------------------------------------------------------------


def _train(verbs: Any) -> None:
    _add_recipe(_add(verbs, "train", train, "pretrain a model, on one process or several"))


def _finetune(verbs: Any) -> None:
    _add_recipe(
        _add(
            verbs, "finetune", finetune, "fine-tune a model: train from the weights of init=FOLDER"
        )
    )


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="recipe: a YAML file, or a name from configs/train")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without one, argparse calls it required
        metavar="KEY=VALUE",
        help="replace a value of the recipe: plan=ladder, steps=500, model.num_layers=2",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    _add_processes(parser, "ladder.train.loop", "torch._dynamo")  # which optimisers import
    parser.set_defaults(check=recipe)


def recipe(options: argparse.Namespace) -> TrainConfig:
    """What `train` and `finetune` are asked for; UserError where that is no recipe."""
    from ladder.models.errors import UserError
    from ladder.train.config import load_train_config

    config = load_train_config(options.config, options.overrides)
    if options.verb is finetune and not config.init:
        raise UserError(
            "init is missing: give the model to fine-tune, init=FOLDER (a run, a checkpoint, a "
            "Hugging Face Llama folder); `ladder train` starts from random weights"
        )
    return config


def train(options: argparse.Namespace) -> int:
    config = recipe(options)  # a mistake is told before torch is imported
    from ladder.train.loop import train as run

    if run(config, resume=options.resume, device=options.device) is not None:
        say_next("generate", config.out, "--prompt", PROMPT)
    return 0


def finetune(options: argparse.Namespace) -> int:
    """The same loop, and a recipe that says whose weights it starts from."""
    return train(options)


# ---- convert --------------------------------------------------------------------------------


def _convert(verbs: Any) -> None:
    parser = _add(
        verbs, "convert", convert, "convert a model to another plan, or to Hugging Face's format"
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="folder of a Hugging Face model (Llama, Mistral, Qwen2 or 3), a run, or a checkpoint",
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--plan",
        help="a preset, presets on layers (ladder@16-31), or a YAML file; without it: MODEL's own",
    )
    parser.add_argument(
        "--ladder-layers",
        metavar="FIRST-LAST",
        help="with --plan hybrid: which layers are a ladder",
    )
    parser.add_argument(
        "--tp-degree", type=int, help="number of ranks T, for plans that depend on it"
    )
    parser.add_argument(
        "--to",
        choices=("ladder", "hf"),
        default="ladder",
        help="format to write; hf: Hugging Face's, for plan standard",
    )
    parser = _add(
        verbs,
        SENSITIVITY,
        sensitivity,
        "measure what each layer costs as a ladder, before training",
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="folder of a model or a run")
    parser.add_argument(
        "--data", required=True, help="folder of `ladder data prepare`; its held-out part is used"
    )
    parser.add_argument("--layers", type=int, required=True, help="how many layers to convert")
    parser.add_argument("--windows", type=int, default=32, help="how many held-out windows")
    parser.add_argument("--seq-len", type=int, default=0, help="tokens per window; 0: up to 1024")
    parser.add_argument("--batch", type=int, default=8, help="windows per forward pass")
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    parser.add_argument("--out", type=Path, help="JSON file to write all figures to")
    _add_processes(parser, "ladder.convert.sensitivity")


def sensitivity(options: argparse.Namespace) -> int:
    from ladder.convert.sensitivity import sensitivity_command

    return sensitivity_command(options)


def convert(options: argparse.Namespace) -> int:
    from ladder.convert.command import convert_command

    code = convert_command(options)
    if not code and (options.out / "tokenizer.json").is_file():
        say_next("generate", options.out, "--prompt", PROMPT)
    return code


# ---- generate -------------------------------------------------------------------------------


def _generate(verbs: Any) -> None:
    parser = _add(verbs, "generate", generate, "continue prompts with a trained model")
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="folder of a run, a checkpoint, or a Hugging Face model",
    )
    parser.add_argument(
        "--prompt", action="append", required=True, help="text to continue; may be repeated"
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="treat the prompt as a user's message, by the chat template",
    )
    parser.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja file of the chat template, implies --chat (the tokenizer's own)",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="most tokens to add")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="sample from the k likeliest tokens; 0: from all"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens of this total probability",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling")
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        help="text of a token that ends a completion; may be repeated",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="continue past the end-of-text token"
    )
    parser.add_argument(
        "--tp", type=int, default=0, help="ranks that share the model; 0: all that run"
    )
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    parser.add_argument(
        "--reducer",
        default="auto",
        help="how ranks sum: auto, async (NCCL or gloo), or push (GPU peer memory)",
    )
    _add_processes(parser, "ladder.infer.command")


def generate(options: argparse.Namespace) -> int:
    from ladder.infer.command import generate_command

    code = generate_command(options)
    if not code and sys.stdout.isatty():  # elsewhere the text is for programs
        say_next("eval", options.model, file=sys.stderr)
    return code


# ---- evaluate -------------------------------------------------------------------------------


def _eval(verbs: Any) -> None:
    parser = _add(verbs, "eval", evaluate, "compare models on lm-evaluation-harness tasks")
    parser.add_argument(
        "models",
        nargs="+",
        type=Path,
        metavar="MODEL",
        help="folders of runs, checkpoints, or Hugging Face models",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["offline"],
        help="suites (offline, paper-pretrain, paper-adapt, or a YAML file) and tasks of "
        "lm-evaluation-harness (offline)",
    )
    parser.add_argument(
        "--include-path",
        type=Path,
        metavar="DIR",
        help="folder of your own tasks, in the harness's YAML, to name in --tasks",
    )
    parser.add_argument(
        "--num-fewshot",
        type=int,
        help="examples shown in the prompt, for tasks that show some (the task's number)",
    )
    parser.add_argument(
        "--limit", type=int, help="use the first so many examples of each task (all)"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        metavar="PATH",
        help="text for the offline suite: text, JSONL or Parquet files, folders, or one folder of "
        "`ladder data prepare`, for its held-out part; without it: Python's standard library",
    )
    parser.add_argument(
        "--chat-template",
        nargs="?",
        const="",
        metavar="FILE",
        help="ask as in a chat: by the tokenizer's chat template, or a Jinja file's",
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences per forward pass")
    parser.add_argument(
        "--tp", type=int, default=0, help="ranks that share the model; 0: all that run"
    )
    parser.add_argument("--dtype", default="auto", help="auto (as stored), float32 or bfloat16")
    parser.add_argument(
        "--out", default="runs/eval", help="folder for results and the suite's data"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace results that are there")
    _add_processes(parser, "ladder.eval.command")


def evaluate(options: argparse.Namespace) -> int:
    from ladder.eval.command import eval_command

    code = eval_command(options)
    if not code:
        say_next("generate", options.models[0], "--prompt", PROMPT)
    return code


# ---- bench ----------------------------------------------------------------------------------


def _bench(verbs: Any) -> None:
    outer = verbs.add_parser("bench", help="measure inference, communication and training")
    inner = outer.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = _add(inner, "inference", bench_inference, "time prefill and decode, plan by plan")
    # What is not given comes from ladder.bench.inference.points.Settings, or from the suite.
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--model", help="a name from configs/models, or a checkpoint's folder (llama-3-8b)"
    )
    parser.add_argument("--layers", type=int, help="use only so many layers; 0: all (0)")
    parser.add_argument(
        "--plans",
        nargs="+",
        help="presets (random weights), or `checkpoint`: the plan and weights of --model=FOLDER "
        "(standard ladder none; for a folder: checkpoint standard none)",
    )
    parser.add_argument("--reducers", nargs="+", help="async (NCCL), push, ... (push async)")
    parser.add_argument(
        "--tp", type=int, nargs="+", help="tensor-parallel degrees (all ranks that run)"
    )
    parser.add_argument(
        "--tp-degree", type=int, help="T of plans that depend on it; 0: that of --tp (0)"
    )
    parser.add_argument("--batch", type=int, nargs="+", help="sequences per batch (1)")
    parser.add_argument("--prompt", type=int, help="tokens per prompt (1024)")
    parser.add_argument("--new-tokens", type=int, help="tokens to decode (512)")
    parser.add_argument(
        "--p2p",
        nargs="+",
        choices=("on", "off"),
        help="off: no peer access between GPUs, as without NVLink (on)",
    )
    parser.argument_default = None
    parser.add_argument(
        "--suite", default=None, help="points from configs/bench: a name; options override its own"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=None,
        metavar="MINUTES",
        help="start no measurement after so many minutes",
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
    parser.add_argument("--out", default="runs/bench", help="folder; results are appended")
    # Not `nproc`: P2P on and off need ranks of their own, which the verb starts.
    parser.add_argument(
        "--nproc",
        dest="ranks",
        type=int,
        default=1,
        help="processes to start here; one for each GPU",
    )

    parser = _add(
        inner, "comm", bench_comm, "time all-reduces by message size, and write the dispatch table"
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        metavar="BYTES",
        default=[2**n for n in range(13, 27)],
        help="message sizes (8 KiB to 64 MiB, doubling)",
    )
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument(
        "--programs", type=int, default=32, help="thread blocks of our two-shot kernel"
    )
    parser.add_argument(
        "--out", default="runs/bench", help="folder; comm.jsonl in it is appended to"
    )
    parser.add_argument(
        "--write-table",
        type=Path,
        metavar="FILE",
        help="add what was fastest at each size to this dispatch table",
    )
    parser.add_argument(
        "--nproc", type=int, default=1, help="processes to start here; one for each GPU"
    )

    parser = _add(inner, "train", bench_train, "time training steps, plan by plan")
    parser.add_argument("--model", default="paper-1b", help="a name from configs/models")
    parser.add_argument("--layers", type=int, default=0, help="use only so many layers; 0: all")
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
        help="how ranks share the work, for example ddp, fsdp, hsdp2, tp4, tp4+sp, tp2+sp+fsdp "
        "(sp: sequence parallelism) (ddp)",
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
        "--compile", action="store_true", help="compile each sublayer (torch.compile)"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps to time")
    parser.add_argument(
        "--profile", action="store_true", help="also write a trace of each point, for Perfetto"
    )
    parser.add_argument(
        "--out", default="runs/bench", help="folder; train.jsonl in it is appended to"
    )
    _add_processes(parser, "ladder.bench.training.command", "torch._dynamo")


def bench_train(options: argparse.Namespace) -> int:
    from ladder.bench.training.command import main as run

    code = run(options)
    if not code:
        _after_bench(options.model, options.plans)
    return code


def bench_inference(options: argparse.Namespace) -> int:
    from ladder.bench.inference.command import main as run
    from ladder.bench.inference.points import Settings

    code = run(options)
    if not code and not options.cold_child:
        model = getattr(options, "model", Settings.model)
        _after_bench(model, getattr(options, "plans", ["standard", "ladder"]))
    return code


def bench_comm(options: argparse.Namespace) -> int:
    from ladder.bench.communication import main as run

    code = run(options)
    if not code:
        say_next("bench", "inference", "--nproc", options.nproc)
    return code


def _after_bench(model: str, plans: Sequence[str]) -> None:
    if Path(model).is_dir():
        say_next("generate", model, "--prompt", PROMPT)
    else:
        say_next("plans", *plans, "--model", model)


# ---- the rest -------------------------------------------------------------------------------


def _doctor(verbs: Any) -> None:
    parser = _add(verbs, "doctor", doctor, "show what this machine and installation can run")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def doctor(options: argparse.Namespace) -> int:
    from ladder.doctor import main as examine

    code = examine(options.json)
    if not code and not options.json:
        out = free(Path("runs/tokenizer"))
        say_next("tokenizer", "train", "--vocab-size", 1024, "--out", out)
    return code


def _demo(verbs: Any) -> None:
    parser = _add(verbs, "demo", demo, "train, evaluate and run one tiny model under five plans")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="the folder to write")


def demo(options: argparse.Namespace) -> int:
    from ladder.demo import PROMPT as CODE
    from ladder.demo import main as run

    code = run(options.out)
    if not code:
        say_next("generate", options.out / "ladder", "--prompt", CODE)
    return code
