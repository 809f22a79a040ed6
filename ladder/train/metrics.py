"""A run's metrics: JSON lines, TensorBoard, and optionally Weights & Biases."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from ladder.files import write_text
from ladder.models.errors import UserError
from ladder.reader import read_json

FILE = "metrics.jsonl"
REMOTE = "wandb.json"  # the run's id at Weights & Biases


def check_packages(tensorboard: bool, wandb: str) -> None:
    """Raise UserError if a package that these options need is missing."""
    if tensorboard:
        try:
            import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise UserError(
                f"tensorboard=true needs the package tensorboard ({error}): install it, or set "
                f"tensorboard=false"
            ) from error
    if wandb:
        try:
            import_module("wandb")
        except ImportError as error:
            raise UserError(
                f"wandb={wandb!r} needs the package wandb ({error}): install it, or leave wandb out"
            ) from error


def connect(run: Path, wandb: str, recipe: Mapping[str, Any], resumed: bool) -> Any:
    """A Weights & Biases run in the project `wandb` with the config `recipe`; None: no project.

    resumed: continue the existing record of this folder's run, if Weights & Biases has one. Writes
    the run's id to the folder; to be called by one rank, before recipe.json is written. Raises
    UserError if Weights & Biases cannot start the run.
    """
    if not wandb:
        return None
    known = _remote_id(run) if resumed else None
    name = known or secrets.token_hex(8)
    try:
        remote = import_module("wandb").init(
            project=wandb, name=run.name, id=name, resume="allow" if known else None, dir=str(run),
            config=dict(recipe),
        )  # fmt: skip
    except Exception as error:  # wandb raises exceptions of many kinds
        said = " ".join(str(error).split())
        raise UserError(
            f"wandb={wandb!r} cannot be reached ({said}): log in with `wandb login`, set "
            f"WANDB_MODE=offline, or leave wandb out"
        ) from error
    write_text(run / REMOTE, json.dumps({"id": name}) + "\n")
    return remote


def _remote_id(run: Path) -> str | None:
    """The id at Weights & Biases of the run in a folder; None: it was never there."""
    path, recipe = run / REMOTE, run / "recipe.json"
    if path.is_file():
        found = read_json(path).get("id")
        if not isinstance(found, str) or not found:
            raise UserError(
                f"{path} has id={found!r}, no run's id; put it right, or remove the file"
            )
        return found
    if recipe.is_file() and read_json(recipe).get("wandb"):
        # Begun by a version that kept no id and derived it from the folder.
        return hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]
    return None


class Metrics:
    """Appends to metrics.jsonl and TensorBoard's event files in the run's folder.

    resumed: the step from which the run resumes; records of later steps are dropped, since they
    will be written again. enabled: False on ranks that do not write. remote: the result of
    `connect`, or None.
    """

    def __init__(
        self,
        run: Path,
        tensorboard: bool,
        resumed: int,
        enabled: bool,
        remote: Any = None,
    ) -> None:
        self.run, self.enabled, self.remote = run, enabled, remote
        self.board: Any = None
        if not enabled:
            return
        path = run / FILE
        kept = [record for record in read_metrics(run) if record["step"] <= resumed]
        write_text(path, "".join(json.dumps(record) + "\n" for record in kept))
        self.file = path.open("a", encoding="utf-8", buffering=1)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self.board = SummaryWriter(str(run / "tensorboard"), purge_step=resumed + 1)
            except OSError as failed:
                raise self._unwritten(failed) from failed

    def write(self, step: int, **values: float) -> None:
        """Record values of `step` (1 is the first)."""
        if not self.enabled:
            return
        try:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
            if self.board is not None:
                for name, value in values.items():
                    self.board.add_scalar(name, value, step)
        except OSError as failed:
            raise self._unwritten(failed) from failed
        if self.remote is not None:
            self.remote.log(values, step=step)

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self.enabled:
            return
        with ExitStack() as closing:
            if self.remote is not None:
                closing.callback(self.remote.finish, exit_code=0 if kind is None else 1)
            for each in (self.board, self.file):
                if each is not None:
                    closing.callback(self._close, each, error)

    def _close(self, file: Any, error: BaseException | None) -> None:
        try:
            file.close()  # flushes
        except OSError as failed:
            if error is None:  # an error of the body takes precedence
                raise self._unwritten(failed) from failed

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(
            f"the metrics in {self.run} cannot be written ({error.strerror or error}); the "
            f"checkpoints so far are untouched: make room, and continue with --resume"
        )


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run's metrics.jsonl, without an incomplete last line; [] without a file."""
    path = run / FILE
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # a line without its newline is incomplete
    return [_record(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:  # invalid JSON or UTF-8
        raise UserError(f"{where} is not valid JSON ({error}); delete that line") from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise UserError(f"{where} is no record with a step; delete that line")
    return record
