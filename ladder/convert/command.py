"""`ladder convert`: a model folder under another plan, or in Hugging Face's format.

Tensors are converted one by one; those of at most one file are in memory. The new folder gets its
name once it has been verified; after an error there is none.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ladder.checkpoint import (
    GENERATION,
    WEIGHTS,
    Entry,
    TensorReader,
    generation_settings,
    huggingface_config,
    newest,
    read_config,
    read_json,
    read_stop_tokens,
    read_stored,
    refuse_damage,
    stored_dtype,
    write_config,
    write_tensors,
)
from ladder.config import load_plan
from ladder.convert.options import CAST_DTYPES, check, check_out
from ladder.convert.quantise import in_eight_bits, refuse_weights, untied
from ladder.convert.verify import cannot_compare, compare_logits, tensor_checksum, verify_checksums
from ladder.convert.weights import Made, plainly, recipes
from ladder.data.tokenizer import SPECIAL_TOKENS, TOKENIZER_CONFIG, load_tokenizer, tokenizer_file
from ladder.files import new_folder, write_text
from ladder.hf_config import config_to_huggingface, refuse_other_plans, stop_tokens
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError, unknown
from ladder.models.transformer import meta_model
from ladder.progress import Progress, amount

FORMATS = ("ladder", "hf")
COMPANIONS = (  # files that are copied: tokenizer, chat template, generation settings
    "tokenizer*", SPECIAL_TOKENS, "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "chat_template.*", "additional_chat_templates", GENERATION,
)  # fmt: skip


@dataclass(frozen=True)
class ConversionReport:
    """The result of a conversion.

    logits: the largest difference from transformers' logits, as a share of the largest one, or why
    they were not compared. compared: the logits that were compared, in words.
    """

    tensors: int
    nbytes: int
    seconds: float
    logits: float | str
    compared: str


def convert(
    source: Path,
    out: Path,
    plan: Any = None,
    tp_degree: int | None = None,
    to: str = "ladder",
    finish: Callable[[Path], None] | None = None,
    weights: str | None = None,
    dtype: str | torch.dtype | None = None,
) -> ConversionReport:
    """Convert a model folder (ours, a run's, or Hugging Face's) to a new folder `out`.

    plan: a specification for `resolve_plan`; None keeps the source's. to: a name in FORMATS.
    finish: called with the new folder before it gets its name. weights: a name in QUANTISED, to
    store the matrices in 8 bits (for inference only); None: as in the source. dtype: one of
    CAST_DTYPES, the type of all tensors; None: each keeps its own. Raises UserError if the model
    cannot be converted, and if the written files fail verification.
    """
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    asked = None if dtype is None else _dtype(dtype, weights)
    start = time.monotonic()
    check_out(out, source)
    old = read_config(source)
    config = old
    if plan is not None:
        config = replace(old, plan=plan, tp_degree=tp_degree)
        config.refuse_no_comm()
    elif tp_degree is not None:
        raise UserError(f"tp_degree={tp_degree} needs a plan: add --plan, or leave --tp-degree out")
    if to == "hf":
        refuse_other_plans(config)
    if weights is not None:
        refuse_weights(config, weights, to)
    reader = TensorReader(source, WEIGHTS)
    model = meta_model(old)
    reader.check(model)
    stored = asked or stored_dtype(model, reader)
    reader.close()
    refuse_damage(reader, "convert another checkpoint of the run")
    _refuse_end(source, old.vocab_size)
    read_stop_tokens(source)  # refuses damaged ones now: they are copied
    todo = recipes(old, config)
    if weights is None:
        wanted = plainly(todo, reader, asked)
    else:
        wanted, config = in_eight_bits(todo, reader, config, weights), untied(config)
    nbytes = {each.name: each.nbytes for each in wanted}
    total = sum(nbytes.values())
    sums: dict[str, str] = {}
    size, unit = (10**6, "MB") if total >= 10**7 else (10**3, "kB")
    with new_folder(out) as folder:
        with Progress("convert", total // size, unit) as progress:
            done = 0  # bytes, each twice: when it is made, and when it is read back

            def advance(name: str) -> None:
                nonlocal done
                done += nbytes[name]
                progress.update(done // (2 * size))

            def fetcher(made: Made) -> Callable[[], Tensor]:
                def fetch() -> Tensor:
                    value = made.make()
                    sums[made.name] = tensor_checksum(value)
                    advance(made.name)
                    return value

                return fetch

            entries = [Entry(each.name, each.nbytes, fetcher(each)) for each in wanted]
            write_tensors(folder, WEIGHTS, entries, writer=True)
            verify_checksums(folder, sums, advance)
        _write_config(source, folder, config, to, stored, weights)
        _copy_companions(source, folder)
        if to == "hf":
            name_end(folder)
        seconds = time.monotonic() - start
        logits: float | str = f"the matrices are stored in {weights}"
        compared = "logits"
        if weights is None:
            logits, compared = _logits(source, folder, old, config, to, asked)
        if finish is not None:
            finish(folder)
    return ConversionReport(len(wanted), total, seconds, logits, compared)


def _dtype(dtype: str | torch.dtype, weights: str | None) -> torch.dtype:
    """The type of this name. Raises UserError for an unknown one, and with `weights`."""
    name = str(dtype).removeprefix("torch.")
    if name not in CAST_DTYPES:
        raise unknown("dtype", name, CAST_DTYPES)
    if weights is not None:
        raise UserError(f"--dtype={name} with --weights={weights}: leave one of the two out")
    found: torch.dtype = getattr(torch, name)
    return found


def _refuse_end(source: Path, vocab_size: int) -> None:
    """Raise UserError if no end-of-text token of config.json is in the vocabulary.

    The other ids are not checked: older Llamas have pad_token_id=-1.
    """
    path = source / "config.json"
    ends = stop_tokens(read_json(path), str(path))
    if ends and not any(0 <= each < vocab_size for each in ends):
        raise UserError(
            f"{path} has eos_token_id={ends[0] if len(ends) == 1 else ends}, outside vocab_size="
            f"{vocab_size}, so that no text would end; correct it, or set it to null"
        )


def _write_config(
    source: Path, folder: Path, config: ModelConfig, to: str, dtype: torch.dtype,
    weights: str | None,
) -> None:  # fmt: skip
    data = read_json(source / "config.json")
    kept = huggingface_config(data)
    if to == "ladder":
        ids = data if kept is None else None  # the original's others are kept with it
        write_config(folder, config, data.get("eos_token_id"), kept, weights, ids)
    else:
        found = config_to_huggingface(config, dtype, kept, data)
        write_text(folder / "config.json", json.dumps(found, indent=2) + "\n")


def _copy_companions(source: Path, folder: Path) -> None:
    for path in sorted({path for name in COMPANIONS for path in source.glob(name)}):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        else:
            shutil.copyfile(path, folder / path.name)
    if (settings := source / GENERATION).is_file():
        content = generation_settings(settings, read_stop_tokens(source))
        (folder / GENERATION).write_bytes(content)


def name_end(folder: Path) -> None:
    """Write the end-of-text token into transformers' tokenizer config; runs store its id only."""
    stop, config = read_stop_tokens(folder), folder / TOKENIZER_CONFIG
    if len(stop) == 1 and tokenizer_file(folder).is_file() and not config.exists():
        token = load_tokenizer(folder).id_to_token(stop[0])
        data = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
        write_text(config, json.dumps(data, indent=1) + "\n")


def _logits(
    source: Path, folder: Path, old: ModelConfig, config: ModelConfig, to: str,
    dtype: torch.dtype | None,
) -> tuple[float | str, str]:  # fmt: skip
    """The fields `logits` and `compared` of the ConversionReport."""
    from_hf = read_json(source / "config.json").get("model_type") != "ladder"
    reason = cannot_compare(old, config)
    if from_hf == (to == "hf"):
        reason = "both folders have the same format"
    if reason is not None:
        return reason, "logits"
    ours, theirs = (folder, source) if from_hf else (source, folder)
    return compare_logits(ours, theirs, dtype)


def _refuse_plans(options: argparse.Namespace) -> None:
    """Raise UserError for options of a plan that Hugging Face's format cannot hold."""
    if options.plan not in (None, "standard"):
        raise UserError(
            f"--plan={options.plan} with --to hf, which writes plan `standard` only: leave one of "
            f"the two out, or give --plan standard: the same weights then compute another function"
        )
    for name in ("ladder_layers", "tp_degree"):
        if (value := getattr(options, name)) is not None:
            option = name.replace("_", "-")
            raise UserError(
                f"--{option}={value} with --to hf, which writes plan `standard` only: leave it out"
            )


def convert_command(options: argparse.Namespace) -> int:
    """Run `ladder convert`."""
    plan = options.plan
    if options.to == "hf":
        _refuse_plans(options)
    if options.ladder_layers is not None:
        if plan != "hybrid":
            instead = "" if plan is None else f" instead of --plan {plan}"
            raise UserError(
                f"--ladder-layers={options.ladder_layers} is for a hybrid: add --plan hybrid"
                f"{instead}"
            )
        plan = ",".join(f"ladder@{part.strip()}" for part in options.ladder_layers.split(","))
    check(options)
    source = newest(options.model)
    report = convert(
        source,
        options.out,
        None if plan is None else load_plan(plan),
        options.tp_degree,
        options.to,
        weights=options.weights,
        dtype=options.dtype,
    )
    rate = amount(round(report.nbytes / report.seconds))
    print(
        f"{options.out}: {report.tensors} tensors, {amount(report.nbytes)} in "
        f"{report.seconds:.1f} s, {rate}/s; every checksum agrees"
    )
    if isinstance(report.logits, str):
        print(f"logits were not compared with those of transformers: {report.logits}")
    elif not report.logits:
        print(f"{report.compared} equal transformers', bit for bit")
    else:
        print(f"{report.compared} differ from transformers' by {report.logits:.1e} of the largest")
    old, new = (read_stored(folder)[0].plan for folder in (source, options.out))
    if old.sublayers != new.sublayers:
        remedy = f"as by `ladder finetune RECIPE init={options.out} teacher={options.model}`"
        if options.weights is not None:
            remedy = "converted without --weights"
        print(
            f"plan {new.name} computes another function than {old.name}: fine-tune it before use, "
            f"{remedy}"
        )
    return 0
