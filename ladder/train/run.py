"""A training run, checked on every rank before any of it is made or written."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ladder.checkpoint import checkpoints, model_hash, newest, read_config, read_json
from ladder.config import naming
from ladder.data.batches import Batches
from ladder.data.prepared import TokenData
from ladder.files import write_text
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import meta_model
from ladder.parallel import launch
from ladder.parallel.data import data_parallel, size_of
from ladder.train import state
from ladder.train.config import TrainConfig
from ladder.train.evaluate import check_heldout
from ladder.train.metrics import check_packages, connect, read_metrics
from ladder.train.resuming import as_started, differs, refuse_changes, refuse_length
from ladder.train.start import Start, starting_point


@dataclass(frozen=True)
class Run:
    """A run that was checked and may start or resume.

    config: the recipe, with its length in steps. fingerprint: the data's hash. source: the model
    and its initial weights. checkpoint: the folder from which the run resumes; record: its
    train.json; both None: the run starts at step 0. unevaluated: the evaluation after the
    checkpoint is due, but was not recorded. again: --resume was given, but there is no checkpoint
    yet. micro: sequences per forward pass. teacher: see `teacher_record`.
    """

    config: TrainConfig
    device: torch.device
    mesh: DeviceMesh | None
    data: TokenData
    fingerprint: str
    windows: Batches
    source: Start
    checkpoint: Path | None
    record: Mapping[str, Any] | None
    unevaluated: bool
    again: bool
    micro: int
    teacher: Mapping[str, str] | None

    @property
    def folder(self) -> Path:
        return Path(self.config.out)

    @property
    def model(self) -> ModelConfig:
        """The model's config at the end of the run; progressive conversion starts with others."""
        return self.source.config

    def model_after(self, done: int) -> ModelConfig:
        """The model after `done` steps, with the plan of the last of these steps."""
        return self.source.at(max(done - 1, 0))

    @property
    def recipe(self) -> dict[str, Any]:
        """The content of recipe.json."""
        return self.config.resolved(self.model)

    @property
    def start(self) -> int:
        """The number of steps that are done."""
        return _steps_of(self.record)

    @functools.cached_property
    def dp(self) -> int:
        """The number of data-parallel ranks."""
        return data_parallel(self.mesh)[0]

    @functools.cached_property
    def layout(self) -> dict[str, int]:
        """The layout of the ranks, as a checkpoint records it."""
        shard = 1 if self.mesh is None else size_of(self.mesh, "shard")
        return {"tp": self.config.tp, "dp": self.dp, "dp_shard": shard}

    def checkpoint_record(self, done: int) -> dict[str, Any]:
        """The train.json of the checkpoint after `done` steps."""
        more = {"first_plan": self.source.first.to_dict()} if self.config.convert_layers else {}
        if self.teacher is not None:
            more["teacher"] = dict(self.teacher)
        return {
            "step": done,
            "data": self.fingerprint,
            "layout": self.layout,
            "config": self.config.to_dict(),
            **more,
        }

    def notes(self) -> list[str]:
        """Lines to print before training, after the run's header."""
        drawn = self.config.steps * self.config.batch_size
        return [*self.windows.notes(drawn), *self.source.schedule.notes()]

    def going_on(self) -> list[str]:
        """Lines about a resumed run, to print before training."""
        if self.record is None:
            ended = "the run ended before its first checkpoint: it starts again"
            return [ended] if self.again else []
        begun = f"resuming from step {_steps_of(self.record):,} of {self.config.steps:,}"
        if self.unevaluated:
            begun += ", which is evaluated first"
        old = self.record["config"].get("micro_batch_size")
        before = _layout(self.config, old, self.record.get("layout"))
        now = _layout(self.config, self.config.micro_batch_size, self.layout)
        if before == now:
            return [begun]
        return [
            begun,
            f"resuming with the layout {now} a run of {before}: results agree up to rounding, not "
            f"bit for bit",
        ]

    def begin(self) -> Any:
        """Make the first writes to the run's folder. Called only on rank 0.

        Returns the Weights & Biases run, or None if none was requested.
        """
        state.remove_partial(self.folder)
        keep = self.config.keep_checkpoints
        # Another number than before: at once, as it may be meant to free a full disk. With the same
        # number older ones were kept on purpose, by a step that was not finite.
        if self.record is not None and keep != self.record["config"].get("keep_checkpoints", 0):
            state.remove_old(self.folder, keep)
        resumed = self.again or self.record is not None
        remote = connect(self.folder, self.config.wandb, self.recipe, resumed)
        write_text(self.folder / "recipe.json", json.dumps(self.recipe, indent=1) + "\n")
        return remote


def fingerprint(data: TokenData) -> str:
    """A hash of the data's content, independent of its folder."""
    content = [data.index["tokenizer_sha256"], data.index["splits"]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def check_run(
    config: TrainConfig,
    data: TokenData,
    mesh: DeviceMesh | None,
    device: torch.device,
    resume: bool,
    left: bool = False,
) -> Run:
    """The run of a recipe on this mesh. All ranks must call this while rank 0 holds the lock.

    left: the lock file was there already, left by a process that has died.

    Raises UserError, on every rank, for a folder, data, weights, number of ranks or a missing
    package that would make the run fail.
    """
    folder = Path(config.out)
    with _naming_data(config):
        windows = data.windows("train", config.seq_len)
    found, content, epochs, source = checkpoints(folder), fingerprint(data), config.epochs, None
    if not resume:
        config = config.with_steps(len(windows))
        source = starting_point(config, data)
    # A resumed run has its model in its own folder, so the folder is checked before the starting
    # point. Its length is compared last: `refuse_changes` first compares the options from which
    # epochs are turned into steps.
    record = _check_folder(folder, config, content, resume, found, left)
    if record is not None:
        config = as_started(record["config"], config, read_config(found[-1][1]))
        # Weights come from the checkpoint, and the teacher is known by its files.
        moved = ("init", "teacher") if "teacher" in record else ("init",)
        refuse_changes(record["config"], config, folder, moved)
    config = config.with_steps(len(windows))
    unevaluated = record is not None and _check_length(folder, config, epochs, record)
    teacher = teacher_record(config) if config.teacher else None
    _check_teacher((record or {}).get("teacher"), teacher, config)
    checkpoint = found[-1][1] if record else None
    if source is None:
        source = starting_point(config, data, checkpoint, (record or {}).get("first_plan"))
    if resume and not record:
        _check_restart(folder, config, epochs, config.resolved(source.config))
    launch.agree({"model": source.config.to_dict()})
    launch.agree({"teacher": teacher and teacher["model"]})
    # Before any rank writes to the folder.
    launch.agree({"start": _steps_of(record), "unevaluated": unevaluated})
    micro = _micro_batch(config, data_parallel(mesh)[0])
    with _naming_data(config):
        check_heldout(data, config.seq_len, config.eval_windows)
    heldout = len(data.windows("heldout", config.seq_len).spread(config.eval_windows or None))
    config.check_rows(micro)
    if heldout % micro:
        config.check_rows(heldout % micro, "eval_windows")
    launch.on_first(lambda: check_packages(config.tensorboard, config.wandb))
    again = resume and not record
    return Run(
        config, device, mesh, data, content, windows, source, checkpoint, record, unevaluated,
        again, micro, teacher,
    )  # fmt: skip


def _naming_data(config: TrainConfig) -> AbstractContextManager[None]:
    """Inside a `with`, errors begin with `data=...`; those of several sources name the source."""
    return naming(f"data={config.data}") if isinstance(config.data, str) else nullcontext()


def teacher_record(config: TrainConfig) -> dict[str, str]:
    """The folder of a recipe's teacher, and a hash that tells it from others.

    Raises UserError if the teacher cannot run on the recipe's TP ranks.
    """
    folder = newest(Path(config.teacher), "teacher=")
    with naming(f"teacher={config.teacher}"):
        model = meta_model(read_config(folder))
        degree = model.config.tp_degree or config.tp
        model.check_degree(config.tp if degree % config.tp else degree)
        return {"folder": str(folder), "model": model_hash(folder)}


def _steps_of(record: Mapping[str, Any] | None) -> int:
    return record["step"] if record else 0


def _micro_batch(config: TrainConfig, dp: int) -> int:
    """The sequences per forward pass; they must divide each rank's share of a batch."""
    if config.batch_size % dp:
        raise UserError(
            f"batch_size={config.batch_size} is not divisible by the {dp} data-parallel "
            f"ranks; change one of them"
        )
    share = config.batch_size // dp
    micro = config.micro_batch_size or share
    if share % micro:
        raise UserError(
            f"micro_batch_size={micro} does not divide the {share} sequences of each "
            f"rank's batch; choose a divisor"
        )
    return micro


def _check_folder(
    run: Path,
    config: TrainConfig,
    fingerprint: str,
    resume: bool,
    found: list[tuple[int, Path]],
    left: bool,
) -> dict[str, Any] | None:
    """The record of the checkpoint from which to resume; None to start at step 0.

    Raises UserError if the run's folder does not fit the request.
    """
    begun = found or (run / "recipe.json").exists() or (run / "metrics.jsonl").exists()
    if begun and not resume:
        raise UserError(
            f"out={config.out} holds a run already; add --resume to continue it, "
            f"or choose another out"
        )
    if resume and not (begun or left):
        raise UserError(
            f"--resume: out={config.out} has no checkpoint to resume from; leave "
            f"--resume out to start"
        )
    for name in () if begun else ("index.json", "config.json", "tokenizer.json"):
        if (run / name).exists():  # data, a model, a tokenizer
            raise UserError(f"out={config.out} holds something else, {name}; choose another out")
    if not found:
        return None  # a new run, or one that ended before its first checkpoint
    record = state.verified(found)
    if record.get("data") != fingerprint:
        raise UserError(
            f"data={config.data} has changed since the run in {run} was started; "
            f"resume with the data it was started with, several sources in their old order and "
            f"weights"
        )
    return record


def _check_length(run: Path, config: TrainConfig, epochs: float, record: Mapping[str, Any]) -> bool:
    """Whether the evaluation after this checkpoint is due but was not recorded.

    A run saves before it evaluates, so it may have ended in between. Raises UserError if the run
    had another length, or if nothing is left to do. epochs: see `refuse_length`.
    """
    refuse_length(record["config"], config, epochs, run)
    step = record["step"]
    unevaluated = config.evaluates(step) and not any(
        each["step"] == step and "heldout_loss" in each for each in read_metrics(run)
    )
    if step >= config.steps and not unevaluated:
        raise UserError(
            f"out={config.out} has finished its steps={config.steps} already; to train its weights "
            f"further, start another run from them: init={config.out} and another out"
        )
    return unevaluated


def _check_teacher(
    before: Mapping[str, str] | None, now: Mapping[str, str] | None, config: TrainConfig
) -> None:
    """Raise UserError if the teacher recorded in the checkpoint (`before`) is another model."""
    if before and now and now["model"] != before["model"]:
        raise UserError(
            f"teacher={config.teacher} is {now['folder']}, another model than that of the run in "
            f"{config.out}, which was started with {before['folder']}; resume with that one, or "
            f"start a new run with another out"
        )


def _layout(config: TrainConfig, micro: int | None, layout: Mapping[str, int] | None) -> dict:
    """The layout of a checkpoint's record, with the micro-batch size added."""
    layout = layout or {}
    return {**layout, "micro_batch_size": micro or config.batch_size // layout.get("dp", 1)}


def _check_restart(run: Path, config: TrainConfig, epochs: float, recipe: dict[str, Any]) -> None:
    """Raise UserError unless `recipe` may start the run in this folder again from step 0.

    It must be the run's own recipe, and the run must never have had a checkpoint. epochs: see
    `refuse_length`.
    """
    path = run / "recipe.json"
    records = read_metrics(run)
    if path.is_file():
        old = read_json(path)
        refuse_changes(old, config, run)
        model = old.get("model") or {}
        if not isinstance(model, dict):
            raise UserError(
                f"{path} has model={model!r}, no object of fields: put it right, or remove {run} "
                f"to start again"
            )
        for key, before in model.items():
            if key == "rope_scaling" and isinstance(before, dict):
                before = {"rope_type": "llama3", **before}  # early versions had no other type
            if key != "name" and before != recipe["model"].get(key):
                raise differs(f"model.{key}", recipe["model"].get(key), before, run)
        refuse_length(old, config, epochs, run)
    elif records:
        raise UserError(
            f"--resume: out={config.out} has neither a checkpoint nor recipe.json, and its "
            f"metrics.jsonl would be lost; put them back, or choose another out"
        )
    if (run / state.SAVED).exists():
        raise UserError(
            f"--resume: out={config.out} has no checkpoint, but had one, according to its "
            f"{state.SAVED}; put it back, or remove {run} to start again"
        )
