"""`ladder eval`: models compared on tasks of lm-evaluation-harness."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import platform
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ladder.checkpoint import check_model, newest, read_config, trained_length
from ladder.eval import offline, results, suites
from ladder.eval.options import RESULTS, check
from ladder.files import check_writable, make_folder, new_folder, write_text
from ladder.infer.cache import check_cache_kind
from ladder.infer.engine import refuse_not_finite
from ladder.infer.load import (
    as_dtype,
    check_activations,
    check_tokenizer,
    check_tp,
    dtype_of,
    kinds_of,
    load_for_inference,
    load_model_tokenizer,
)
from ladder.lock import remove_empty
from ladder.models.errors import UserError
from ladder.models.quantised import held_as
from ladder.parallel import launch
from ladder.plans import aligned
from ladder.records import commit

DATA = "offline"  # the folder in --out for data built from text
MARKDOWN = "results.md"
HELDOUT = "local_heldout"
BOOTSTRAPS = 1000  # draws for the standard error of a metric that has no formula


def eval_command(options: argparse.Namespace) -> int:
    """Run `ladder eval` on this rank; rank 0 prints and writes."""
    device = launch.join(options.device)  # ranks that have joined report an error once
    out = Path(options.out)
    check(options)
    if launch.rank() == 0:
        check_writable(out)
    as_dtype(dtype_of(options.weights, options.dtype))
    check_activations(options.activations)
    check_cache_kind(options.cache)
    suites.check_include(options.include_path)
    suites.require_lm_eval()
    from ladder.data.template import open_template

    chosen = suites.entries(options.tasks, options.num_fewshot)
    folders = {str(given): newest(given) for given in options.models}
    if len(folders) < len(options.models):
        twice = next(name for name in folders if options.models.count(Path(name)) > 1)
        raise UserError(f"MODEL={twice} is given twice; give each model once")
    for folder in folders.values():  # every model is checked before the first takes hours
        check_model(folder)
        kinds_of(options.weights, folder, device, options.activations)
        tokenizer = load_model_tokenizer(folder)
        check_tokenizer(folder, tokenizer)
        open_template(folder, tokenizer, options.chat_template)
    launch.agree(vars(options))
    own = suites.own(chosen, options.include_path)
    if options.text and not own:
        raise UserError(
            "--text is for the offline suite, and --tasks names none of its tasks; leave --text "
            "out, or add --tasks offline"
        )
    check_tp(options.tp)
    _compare(options, device, chosen, folders, out, own)
    return 0


@contextlib.contextmanager
def _written(out: Path, own: Collection[str]) -> Iterator[Path | None]:
    """Create `out` on rank 0 and, if `own` tasks are chosen, a folder in it for their data.

    The data's folder replaces an older one at the end of the `with` block. An error in the block
    leaves `out` as it was, and removes it if it is new.
    """
    data: Path | None = None
    with contextlib.ExitStack() as stack:
        if launch.rank() == 0:
            made = [folder for folder in (out, *out.parents) if not folder.exists()]
            stack.callback(remove_empty, made)  # without an error, they hold the results
            make_folder(out)
            data = stack.enter_context(new_folder(out / DATA, overwrite=True)) if own else None
        yield data


def _load_tasks(
    options: argparse.Namespace,
    chosen: Sequence[suites.SuiteTask],
    own: Collection[str],
    data: Path | None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The tasks, and on rank 0 the index of the data of our `own` tasks, which it builds in `data`.

    Rank 0 loads the tasks first: one that cannot be loaded ends the run while the others wait.
    """
    index = tasks = None
    if launch.rank() == 0:
        if data is not None:
            index = offline.build_tasks(options.text, data, own)
        if index and index.get("definitions") == "the standard library":
            print("local_definitions: of the standard library; --text defines too few words")
        tasks = suites.load(chosen, data, options.include_path)
        shots = options.num_fewshot
        if shots and all(each.get_config("num_fewshot") == 0 for each in tasks["tasks"].values()):
            print(f"--num-fewshot={shots} has no effect: these tasks have no examples")
    data = launch.from_first(data)
    return tasks or suites.load(chosen, data, options.include_path), index


def _compare(
    options: argparse.Namespace,
    device: torch.device,
    chosen: Sequence[suites.SuiteTask],
    folders: dict[str, Path],
    out: Path,
    own: Collection[str],
) -> None:
    """Run every model on the tasks; rank 0 prints and writes the results.

    They are written after each model, so that whatever ends a later one does not lose them.
    """
    columns: dict[str, list[results.Metric]] = {}
    models: dict[str, dict[str, Any]] = {}
    rows: list[list[str]] = []
    samples: dict[str, dict[str, Any]] = {}  # by model, with --log-samples
    # With a run, one length for all models: windows of another length give other bits per byte.
    lengths = {length for folder in folders.values() if (length := trained_length(folder))}
    contexts = {
        name: read_config(folder, quantised=True).max_seq_len for name, folder in folders.items()
    }
    window = min({*lengths, *contexts.values()}) if lengths else None
    notes: dict[str, str] = {}

    def run(name: str, folder: Path) -> None:
        found: dict[str, Any] = {}
        columns[name], models[name] = _run(options, device, name, folder, tasks, window, found)
        if launch.rank() == 0:
            if options.overwrite and len(models) == 1:  # those of older results
                results.remove_samples(out)
            if options.log_samples:
                samples[name] = found
                results.write_samples(out, samples)
            facts = _facts(options, device, models, [*folders][len(models) :]) | notes
            rows[:] = write_results(columns, tasks["group_map"], facts, models, index, out)

    from ladder.eval.model import check_generation

    first, *others = folders.items()
    with _written(out, own) as data:
        tasks, index = _load_tasks(options, chosen, own, data)
        check_generation(tasks["tasks"], folders.values())
        notes = _notes(tasks["tasks"], window, lengths, contexts)
        run(*first)
    try:
        for each in others:
            run(*each)
    except BaseException as error:
        error.add_note(f"{out / RESULTS} has the results of the models that were finished")
        raise
    finally:
        if rows:
            said = (f"{key}: {note}" for key, note in notes.items())
            print(aligned(rows), *said, sep="\n", flush=True)
    if rows:
        files = [RESULTS, MARKDOWN, *([results.SAMPLES] if options.log_samples else ())]
        print(", ".join(str(out / file) for file in files))


def _notes(
    tasks: Mapping[str, Any], window: int | None, lengths: Collection[int],
    contexts: Mapping[str, int],
) -> dict[str, str]:  # fmt: skip
    """Notes below the table on some tasks: which text they score, and in which windows.

    window: the tokens of all models' windows; None: each model's context. lengths: the `seq_len` at
    which runs among the models were trained. contexts: each model's max_seq_len.
    """
    notes = {}
    if HELDOUT in tasks:
        notes[HELDOUT] = f"the first {offline.CHARACTERS:,} characters of each document"
    rolling = any(
        task.get_config("output_type") == "loglikelihood_rolling" for task in tasks.values()
    )
    if rolling and window is not None:
        which = "as trained" if len(lengths) == 1 else "the fewest that a run was trained with"
        if window < min(lengths):
            which = "the shortest context of the models"
        notes["windows"] = f"{window:,} tokens, {which}"
    elif rolling and len({*contexts.values()}) > 1:
        each = ", ".join(f"{name} {context:,}" for name, context in contexts.items())
        notes["windows"] = f"{each} tokens, each model's context"
    return notes


def _run(
    options: argparse.Namespace,
    device: torch.device,
    name: str,
    folder: Path,
    tasks: dict[str, Any],
    window: int | None,
    samples: dict[str, Any],
) -> tuple[list[results.Metric], dict[str, Any]]:
    """The metrics of one model, and facts about the model. window, samples: see `evaluate`."""
    model = load_for_inference(
        folder,
        tp=options.tp,
        dtype=options.dtype,
        device=options.device,
        weights=options.weights,
        activations=options.activations,
    )
    dtype = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    weights = held_as(model)
    if launch.rank() == 0:
        held = "" if weights is None else f", {weights} weights"
        for what in ("activations", "cache"):
            if (kind := getattr(options, what)) != "auto":
                held += f", {kind} {what}"
        print(f"{name}: {folder} ({dtype}{held})", flush=True)
    with refuse_not_finite(folder):
        found = evaluate(
            model, folder, tasks, options.batch, options.limit, options.chat_template,
            options.cache, window, samples,
        )  # fmt: skip
    facts = {
        "folder": str(folder),
        "plan": model.config.plan.name,
        "tp_degree": model.config.tp_degree,
        "context": model.config.max_seq_len,
        "window": min(model.config.max_seq_len, window or model.config.max_seq_len),
        "dtype": dtype,
        "weights": weights or dtype,
        "activations": options.activations,
        "cache": options.cache,
    }
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found, facts


def evaluate(
    model: Any,
    folder: Path,
    tasks: dict[str, Any],
    batch: int = 8,
    limit: int | None = None,
    chat_template: str | None = None,
    cache: str = "auto",
    window: int | None = None,
    samples: dict[str, Any] | None = None,
) -> list[results.Metric]:
    """The metrics of a sharded model (or of a model of the harness) on loaded tasks.

    Every rank calls this and gets the same. limit: examples of each task; None: all. chat_template:
    the template that examples are put into: a Jinja file's path, or "" for the tokenizer's own;
    None: they stay plain text. cache: the type of keys and values (Engine). window: the most tokens
    per window when a whole text is scored (local_heldout); None: the model's context. samples:
    filled with the harness's records of the examples, by task.
    """
    from lm_eval import evaluator
    from lm_eval.api.model import LM

    from ladder.eval.model import LadderLM

    suites.seed(tasks)
    if not isinstance(model, LM):
        model = LadderLM(model, folder, batch, chat_template, cache, window)
    with contextlib.redirect_stdout(sys.stderr):  # the harness prints while it bootstraps
        found = evaluator.evaluate(
            lm=model,
            task_dict=tasks,
            limit=limit,
            bootstrap_iters=BOOTSTRAPS,
            log_samples=True,  # the errors of ratios need them, too
            apply_chat_template=chat_template is not None,
            fewshot_as_multiturn=chat_template is not None,
        )
    assert found is not None
    if samples is not None:
        samples |= found["samples"]
    return results.metrics(found)


def write_results(
    columns: dict[str, list[results.Metric]],
    groups: dict[str, list[str]],
    facts: dict[str, Any],
    models: dict[str, dict[str, Any]],
    index: dict[str, Any] | None,
    out: Path,
) -> list[list[str]]:
    """Write results.json (all figures and their settings) and results.md; return the table."""
    rows = results.table({name: results.shown(found, groups) for name, found in columns.items()})
    record = {**facts, "models": models, "offline": index, "results": results.plain(columns)}
    write_text(out / RESULTS, json.dumps(record, indent=1) + "\n")
    write_text(out / MARKDOWN, results.markdown(rows, facts))
    return rows


def _facts(
    options: argparse.Namespace,
    device: torch.device,
    models: dict[str, dict[str, Any]],
    missing: Sequence[str],
) -> dict[str, Any]:
    """The settings and versions of an evaluation, for results.json and results.md.

    missing: the models that are still to be run.
    """
    import lm_eval

    dtypes, weights = (
        sorted({model[key] for model in models.values()}) for key in ("dtype", "weights")
    )
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "incomplete": f"without {', '.join(missing)}" if missing else None,
        "tasks": " ".join(options.tasks),
        "limit": options.limit,
        "batch": options.batch,
        "dtype": ", ".join(dtypes),
        "weights": ", ".join(weights),
        "activations": options.activations,
        "cache": options.cache,
        "chat template": "the tokenizer's"
        if options.chat_template == ""
        else options.chat_template,
        "ranks": launch.world_size(),
        "device": device.type if gpu is None else f"{launch.world_size()}x {gpu}",
        "lm_eval": lm_eval.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
    }
