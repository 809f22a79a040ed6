"""The options of `ladder tokenizer train` and `ladder data prepare`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from ladder.next_step import free, say_next

SHORTEST = 16  # tokens of a window worth proposing


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="text, JSONL or Parquet files, or folders; default: Python's standard library",
    )
    parser.add_argument("--text-field", default="text", help="field or column that holds the text")
    parser.add_argument(
        "--heldout-fraction",
        type=float,
        default=0.05,
        help="share of documents held out of training",
    )
    parser.add_argument(
        "--vocab-size", type=int, default=16384, help="number of tokens, 257 or more"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write tokenizer.json to")
    parser.add_argument("--overwrite", action="store_true", help="replace the tokenizer in --out")


def run_tokenizer(options: argparse.Namespace) -> int:
    from ladder.data.index import INDEX
    from ladder.data.sources import open_corpus
    from ladder.data.tokenizer import check_vocab_size, tokenizer_file, train_tokenizer
    from ladder.files import check_writable, refuse_inside
    from ladder.models.errors import UserError

    # Mistakes are reported before the corpus is read.
    check_vocab_size(options.vocab_size)
    refuse_inside(options.out, options.paths)
    check_writable(tokenizer_file(options.out))
    for name in (INDEX, "config.json", "checksums.json"):
        if (tokenizer_file(options.out).parent / name).exists():
            raise UserError(
                f"--out={options.out} holds prepared data or a model ({name}), whose tokens "
                f"another tokenizer would misread; choose another folder"
            )

    if tokenizer_file(options.out).exists() and not options.overwrite:
        raise UserError(
            f"--out={options.out} holds a tokenizer already; add --overwrite to replace it, or "
            f"choose another folder"
        )
    corpus = open_corpus(
        options.paths or None,
        heldout_fraction=options.heldout_fraction,
        text_field=options.text_field,
    )
    texts = (document.text for document in corpus.read("train"))
    size = train_tokenizer(texts, options.vocab_size, options.out)
    print(f"{options.out}: a byte-level BPE of {size:,} tokens")
    if size < options.vocab_size:
        print(f"fewer than --vocab-size={options.vocab_size}: the text has no more pairs to merge")
    same = []  # options that select the same documents
    if options.text_field != "text":
        same += ["--text-field", options.text_field]
    if options.heldout_fraction != 0.05:
        same += ["--heldout-fraction", options.heldout_fraction]
    out = free(tokenizer_file(options.out).parent.parent / "data")
    say_next("data", "prepare", *options.paths, *same, "--tokenizer", options.out, "--out", out)
    return 0


def add_prepare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", help="a YAML file, or a name from configs/data; options override it"
    )
    # Options that are not given come from --config, or from ladder.data.config.PrepareConfig.
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="text, JSONL or Parquet files, folders, hf:OWNER/NAME?name=CONFIG&split=train (a "
        "Hugging Face dataset, streamed); default: Python's standard library",
    )
    parser.add_argument("--text-field", help="field or column that holds the text (text)")
    parser.add_argument(
        "--chat-field",
        help="prepare conversations, not text: the field or column that holds them, such as "
        "messages",
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
        help="stop after the document that reaches this many tokens (no limit)",
    )
    parser.add_argument(
        "--workers", type=int, help="processes that tokenise; the output does not depend on it (1)"
    )
    parser.add_argument(
        "--tokenizer", help="tokenizer.json, or the folder that holds it (required, or in --config)"
    )
    parser.argument_default = None
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the data in --out, finished or not"
    )


def run_prepare(options: argparse.Namespace) -> int:
    from dataclasses import asdict, fields

    from ladder.data.config import PrepareConfig, load_prepare_config
    from ladder.data.index import IF_EMPTY
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
    if not index["splits"]["heldout"]["tokens"]:
        print(f"no text is held out, and `ladder train` needs some: {IF_EMPTY}")
        return 0
    if config.chat_field:
        _after_chats(options.out, config.tokenizer)
    else:
        _after_text(options.out, min(split["tokens"] for split in index["splits"].values()))
    return 0


def _after_chats(data: Path, tokenizer: str) -> None:
    """Propose to fine-tune the model in the tokenizer's folder; without one, say how it is done."""
    words = ["finetune", "tiny-sft"]
    given = [f"data={data}", f"out={free(data.parent / words[1])}"]
    if (Path(tokenizer) / "config.json").is_file():
        say_next(*words, f"init={tokenizer}", *given)
        return
    line = shlex.join(["ladder", *words, "init=MODEL", *given])
    print(f"to fine-tune a MODEL of this tokenizer, a run's folder for example: {line}")


def _after_text(data: Path, tokens: int) -> None:
    """Propose to train the tiny model, on windows that fit a split of so many tokens."""
    from ladder.config import find, load_mapping

    recipe = "tiny"
    wanted, fits = load_mapping(find("train", recipe))["seq_len"], tokens - 1
    if fits < SHORTEST:
        print(f"too little text to train on: a split has {tokens:,} tokens; prepare more documents")
        return
    shorter = [] if wanted <= fits else [f"seq_len={1 << fits.bit_length() - 1}"]
    say_next("train", recipe, f"data={data}", *shorter, f"out={free(data.parent / recipe)}")
