"""Checkpoints of a run: weights, optimiser state and step, for exact resumption.

A run's folder holds `checkpoints/step-000100/`: a model folder (see ladder.checkpoint) with the
optimiser's state (`exp_avg.NAME`, `exp_avg_sq.NAME`) in the same kind of files, train.json, and the
SHA-256 of every file in checksums.json. ladder.train.checkpointer writes it. The first checkpoint
also adds saved.json to the run's folder: a run without that file may start again, since it has no
checkpoint to lose.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ladder.checkpoint import (
    RECORD,
    WEIGHTS,
    TensorReader,
    checkpoints,
    fill,
    first_damage,
    read_config,
    read_json,
)
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel.sharding import local_parameters, local_tensor
from ladder.train.resuming import differs
from ladder.train.shards import MOMENTS, OPTIMIZER

SAVED = "saved.json"  # has the step of the run's first checkpoint
LOCK = ".lock"  # the lock of a run that trains, see ladder.lock


def verified(found: list[tuple[int, Path]]) -> dict[str, Any]:
    """The train.json of the newest of these checkpoints, with its `step` and `config`.

    Raises UserError, on every rank, if the checkpoint is damaged.
    """
    step, folder = found[-1]
    wrong = first_damage(folder)
    record: dict[str, Any] = {}
    if wrong is None:
        try:
            record = _read_record(folder / RECORD, step)
        except UserError as error:
            wrong = str(error)
    if wrong is not None:
        earlier = [path for _, path in found[:-1]]
        remedy = f"resume from {earlier[-1].name}" if earlier else "start again, without --resume"
        gone = folder if earlier else folder.parent.parent
        raise UserError(f"{wrong}; copy it again, or remove {gone} to {remedy}")
    return record


def _read_record(path: Path, step: int) -> dict[str, Any]:
    record = read_json(path)
    layout = record.get("layout") or {}
    if record.get("step") != step:
        raise UserError(f"{path} has step={record.get('step')!r} in the checkpoint of step {step}")
    if not isinstance(record.get("config"), dict):
        raise UserError(f"{path} has config={record.get('config')!r}, no object of options")
    if not isinstance(layout, dict) or not all(
        isinstance(size, int) and size > 0 for size in layout.values()
    ):
        raise UserError(f"{path} has layout={layout!r}, no object of numbers of ranks")
    if not isinstance(record.get("first_plan", {}), dict):
        raise UserError(f"{path} has first_plan={record['first_plan']!r}, no plan")
    return record


def remove_partial(run: Path) -> None:
    """Remove incomplete checkpoints, which a killed process was writing or removing.

    A folder that cannot be removed gives a warning; it hinders only a save of the same step.
    """
    for folder in (run / "checkpoints").glob(".step-*"):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            _warn(folder, error)


def remove_old(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints (0: keep all), and incomplete ones.

    Each folder is first renamed and then deleted. A folder that cannot be deleted (NFS keeps open
    files) gives a warning and does not fail the save.
    """
    for _, folder in checkpoints(run)[:-keep] if keep else ():
        try:
            folder.rename(folder.with_name(f".{folder.name}.old"))
        except OSError as error:
            _warn(folder, error)
    remove_partial(run)


def _warn(folder: Path, error: OSError) -> None:
    print(
        f"warning: {folder} cannot be removed ({error}); the next save tries again, or remove it",
        file=sys.stderr,
        flush=True,
    )


def restore(
    folder: Path,
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    step: int,
    config: ModelConfig,
) -> None:
    """Load the model and its optimiser from a checkpoint; each rank reads its own slices.

    Raises UserError if it holds another model or plan, or if a file is damaged.
    """
    stored = read_config(folder)
    if not stored.same(config):
        now = config.to_dict()
        for key, before in stored.to_dict().items():
            if key != "plan" and now[key] != before:  # records of a plan depend on the layers, too
                raise differs(f"model.{key}", now[key], before, folder.parent.parent)
        raise UserError(
            f"the checkpoint {folder} is of another plan ({stored.plan.name!r} there, "
            f"{config.plan.name!r} here); resume with the run's own config"
        )
    fill(model, TensorReader(folder, WEIGHTS))
    reader = TensorReader(folder, OPTIMIZER)
    parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
    for name, local, part in local_parameters(model):
        parameter = parameters[name]
        state = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        for moment, value in state.items():
            local_tensor(value).copy_(reader.part(f"{moment}.{name}", part))
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step), device=local.device),
            **state,
        }
