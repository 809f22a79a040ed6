"""The options of `ladder train` and `ladder finetune`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ladder.next_step import GREETING, PROMPT, say_next
from ladder.parallel import launch

if TYPE_CHECKING:
    from ladder.train.config import TrainConfig


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="recipe: a YAML file, or a name from configs/train")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],  # without a default, argparse calls it required
        metavar="KEY=VALUE",
        help="set a value of the recipe: plan=ladder, steps=500, model.num_layers=2",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.set_defaults(check=recipe)


def add_finetune_options(parser: argparse.ArgumentParser) -> None:
    add_train_options(parser)
    parser.set_defaults(check=finetuning_recipe)


def recipe(options: argparse.Namespace) -> TrainConfig:
    """The recipe of a command line. Raises UserError for a mistake in it."""
    from ladder.train.config import load_train_config

    config = load_train_config(options.config, options.overrides)
    if not config.init:
        config.model_config(vocab_size=1)  # checks the plan; the vocabulary comes with the data
    return config


def finetuning_recipe(options: argparse.Namespace) -> TrainConfig:
    """The recipe of `ladder finetune`, which must have `init`."""
    from ladder.models.errors import UserError

    config = recipe(options)
    if not config.init:
        raise UserError(
            "init is missing: give the model to fine-tune, init=FOLDER (a run, a checkpoint, a "
            "Hugging Face Llama folder); `ladder train` starts from random weights"
        )
    return config


def run(options: argparse.Namespace) -> int:
    from ladder.train.loop import train

    launch.join(options.device)  # ranks that have joined report a mistake once
    config: TrainConfig = options.check(options)

    if train(config, resume=options.resume, device=options.device) is not None:
        asked = ["--chat", "--prompt", GREETING] if _of_chats(config) else ["--prompt", PROMPT]
        say_next("generate", config.out, *asked)
    return 0


def _of_chats(config: TrainConfig) -> bool:
    """Whether a source of the recipe holds conversations, whose chat template the model has."""
    from ladder.data.index import holds_chats, read_index
    from ladder.data.weights import parse_sources

    return any(holds_chats(read_index(Path(path))) for path, _ in parse_sources(config.data))
