"""The `ladder` command: the table of its commands, the options that they share, and the dispatch.

A command's own options lie beside the code that it runs, in a module that is light to import; the
function that runs it imports the rest.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from ladder import __version__, plans
from ladder.bench import options as bench
from ladder.convert import options as convert
from ladder.data import options as data
from ladder.demo import options as demo
from ladder.doctor import options as doctor
from ladder.eval import options as evaluation
from ladder.infer import options as infer
from ladder.models.errors import UserError
from ladder.parallel import launch
from ladder.parser import Help, Parser, parse_words
from ladder.perf import options as perf
from ladder.perf.calibration import options as calibration
from ladder.perf.operators import options as operators
from ladder.perf.planner import options as planner
from ladder.perf.prediction import options as prediction
from ladder.perf.scale import options as scale
from ladder.train import options as train


class Verb(NamedTuple):
    """A command of the table.

    name: the words of the command; the first of two may be in GROUPS. help: its line in `ladder
    --help`. modules: the modules that its ranks import, for `launch.run`; a command with modules
    has the options --nproc and --device.
    """

    name: str
    help: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    modules: tuple[str, ...] = ()


GROUPS = {
    "tokenizer": "train a tokenizer",
    "data": "prepare training data",
    "bench": "measure inference, training, all-reduces, operators and the machine",
}
VERBS = (
    Verb(
        "plans",
        "show residual plans as pictures, tables and costs",
        plans.add_options,
        plans.run,
    ),
    Verb(
        "tokenizer train",
        "train a byte-level BPE on the training text",
        data.add_tokenizer_options,
        data.run_tokenizer,
    ),
    Verb(
        "data prepare",
        "turn text into token shards with an index",
        data.add_prepare_options,
        data.run_prepare,
    ),
    Verb(
        "train",
        "pretrain a model, on one process or several",
        train.add_train_options,
        train.run,
        modules=("ladder.train.loop", "torch._dynamo"),  # which optimisers import
    ),
    Verb(
        "finetune",
        "fine-tune a model: train from the weights of init=FOLDER",
        train.add_finetune_options,
        train.run,
        modules=("ladder.train.loop", "torch._dynamo"),
    ),
    Verb(
        "convert",
        "convert a model to another plan, or to Hugging Face's format",
        convert.add_options,
        convert.run,
    ),
    Verb(
        "convert sensitivity",
        "measure what each layer costs as a ladder, before training",
        convert.add_sensitivity_options,
        convert.run_sensitivity,
        modules=("ladder.convert.sensitivity",),
    ),
    Verb(
        "generate",
        "continue prompts with a trained model",
        infer.add_options,
        infer.run,
        modules=("ladder.infer.command",),
    ),
    Verb(
        "eval",
        "compare models on an offline suite (default) or tasks of lm-evaluation-harness",
        evaluation.add_options,
        evaluation.run,
        modules=("ladder.eval.command",),
    ),
    Verb(
        "bench inference",
        "time prefill and decode, plan by plan",
        bench.add_inference_options,
        bench.run_inference,
    ),
    Verb(
        "bench comm",
        "time all-reduces by message size, and write the dispatch table",
        bench.add_comm_options,
        bench.run_comm,
    ),
    Verb(
        "bench ops",
        "time operators that compute and communicate, against their parts",
        bench.add_ops_options,
        bench.run_ops,
        modules=("ladder.bench.ops.command",),
    ),
    Verb(
        "bench train",
        "time training steps, plan by plan",
        bench.add_train_options,
        bench.run_train,
        modules=("ladder.bench.training.command", "torch._dynamo"),
    ),
    Verb(
        "bench machine",
        "measure the curves of this machine, from which times are predicted",
        calibration.add_options,
        calibration.run,
        modules=("ladder.perf.calibration.command",),
    ),
    Verb(
        "predict",
        "predict which plans, TP degrees and reducers fit a machine and how fast they are, "
        "without a GPU",
        planner.add_options,
        planner.run,
    ),
    Verb(
        "predict validate",
        "score predictions against recorded times",
        prediction.add_validate_options,
        prediction.run_validate,
    ),
    Verb(
        "predict ops",
        "predict time and overlap efficiency of operators by implementation",
        operators.add_options,
        operators.run,
    ),
    Verb(
        "predict t3",
        "simulate the figures of the T3 paper, and score them against it",
        perf.add_t3_options,
        perf.run_t3,
    ),
    Verb(
        "predict scale",
        "simulate several nodes: a DLRM, Ladder Residual's tables, up to 1,024 GPUs",
        scale.add_options,
        scale.run,
    ),
    Verb(
        "doctor",
        "show what this machine and installation can run",
        doctor.add_options,
        doctor.run,
    ),
    Verb(
        "demo",
        "train, evaluate and run one tiny model under five plans",
        demo.add_options,
        demo.run,
    ),
)
# Two words beside a command whose first argument is a model: they come before it.
JOINED = tuple(
    each.name for each in VERBS if " " in each.name and each.name.split()[0] not in GROUPS
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: success, 2: a user's mistake, 130: interrupted, 1: any other error.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    joined = " ".join(words[:2])
    if joined in JOINED:
        words[:2] = [joined]
    elif (hint := _near_command(words)) and not os.path.exists(words[1]):
        print(f"error: unknown command {joined!r}{hint}; see `ladder --help`", file=sys.stderr)
        return 2
    options = parse_words(make_parser(), words)
    verb: Verb = vars(options).pop("verb")
    flags: dict[str, str] = vars(options).pop("flags")  # the rest are the user's words
    # Set before torch is imported. GNU's OpenMP spins for milliseconds at a barrier, which makes
    # CPU training several times slower beside another process. A short spin costs nothing.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # A panic in a Rust library (tokenizers) is one line then, without pages of backtrace.
    os.environ["RUST_BACKTRACE"] = "0"
    try:
        nproc = getattr(options, "nproc", 1)
        launch.check_nproc(nproc)
        # Mistakes are reported before torch is imported and ranks are started. Ranks started by
        # torchrun join their group first, so that they report a mistake once.
        code = 0
        if hasattr(options, "check") and launch.world_size() == 1:
            code = launch.run(_run, (_checked, options, flags))
        modules = verb.modules or ("torch",)
        return code or launch.run(_run, (verb.run, options, flags), nproc, modules)
    except ValueError as error:  # of the launch itself
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        lines = [f"interrupted{launch.remedy(options)}", *getattr(stop, "__notes__", ())]
        print(*lines, sep="\n", file=sys.stderr)
        return 130


def _run(
    command: Callable[[argparse.Namespace], int],
    options: argparse.Namespace,
    flags: Mapping[str, str],
) -> int:
    """Run a command, whose errors about an option then name it as it is typed.

    Functions that are also called from Python name their argument: vocab_size=10. flags: the
    option of each name.
    """
    given = dict(vars(options))  # some commands fill in values that are not given
    try:
        return command(options)
    except UserError as error:
        error.args = (_as_typed(str(error), given, flags),)
        raise


def _as_typed(message: str, given: Mapping[str, Any], flags: Mapping[str, str]) -> str:
    """The message with --NAME=VALUE in place of NAME=VALUE at its beginning, if that was given."""
    name, _, rest = message.partition("=")
    if name in flags and name in given:
        for said in (str(given[name]), repr(given[name])):
            if re.match(rf"{re.escape(said)}(?!\w|\.\d)", rest):
                return f"{flags[name]}={given[name]}{rest.removeprefix(said)}"
    return message


def _checked(options: argparse.Namespace) -> int:
    options.check(options)
    return 0


def _near_command(words: Sequence[str]) -> str:
    """A hint where the second word is nearly that of a command of two words."""
    seconds = [each.split()[1] for each in JOINED if each.split()[0] == words[0]] if words else []
    near = get_close_matches(words[1], seconds, n=1, cutoff=0.8) if words[1:] else []
    return f" (did you mean '{words[0]} {near[0]}'?)" if near else ""


def make_parser() -> Parser:
    """The parser of every command in VERBS."""
    parser = Parser(
        prog="ladder",
        description="Transformers whose architecture makes tensor parallelism cheap.",
        epilog="`ladder COMMAND --help` lists the options. To begin: `ladder doctor` checks "
        "this machine, `ladder demo` shows every step on a tiny model in 5 minutes.",
    )
    parser.add_argument("--version", action="version", version=f"ladder {__version__}")
    top: Any = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups: dict[str, Any] = {}
    for verb in VERBS:
        first, _, second = verb.name.partition(" ")
        if first not in GROUPS:
            _add_verb(top, verb.name, verb)
            continue
        if first not in groups:
            group = top.add_parser(first, help=GROUPS[first])
            groups[first] = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
        _add_verb(groups[first], second, verb)
    return parser


def _add_verb(commands: Any, name: str, verb: Verb) -> None:
    parser = commands.add_parser(
        name,
        help=verb.help,
        description=verb.help[0].upper() + verb.help[1:] + ".",
        formatter_class=Help,
    )
    verb.add_options(parser)
    if verb.modules:
        parser.add_argument(
            "--nproc", type=int, default=1, help="processes to start; with GPUs, one for each"
        )
        parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    valued = (each for each in parser._actions if each.option_strings and each.nargs != 0)
    flags = {each.dest: each.option_strings[-1] for each in valued}
    parser.set_defaults(verb=verb, flags=flags)
