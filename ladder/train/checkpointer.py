"""Asynchronous checkpoints: the state is copied to the CPU, and a thread writes the copy.

The thread calls `dcp.save`. `dcp.async_save` would write only the tensors in the background; the
other files, checksums, the rename and the removal of older checkpoints must follow there, too, in
order, with failures known to every rank. It would also allocate staging memory for each save, and
on every replica. A process instead of the thread would outlive a killed rank and need shared
memory.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import threading
import time
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh

from ladder.checkpoint import (
    GENERATION,
    generation_settings,
    huggingface_config,
    read_json,
    write_checksums,
    write_config,
)
from ladder.data.prepared import TokenData
from ladder.data.tokenizer import FILE, TEMPLATE, TOKENIZER_CONFIG
from ladder.files import checksum, sync, write_text
from ladder.lock import Lock
from ladder.models.config import ModelConfig
from ladder.models.errors import UserError
from ladder.models.transformer import Transformer
from ladder.parallel.data import size_of
from ladder.parallel.sharding import local_tensor, own_parts
from ladder.train import state
from ladder.train.shards import MOMENTS, Shard, ShardPlanner, ShardWriter

# DCP warns at every save of a single process.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")


class Checkpointer:
    """Saves a run's checkpoints, one at a time. Every rank has one and makes the same calls.

    start: the folder of the initial weights, if any; checkpoints take its Hugging Face config and
    generation settings, and the tokenizer files that the data lacks. keep: the number of
    checkpoints to keep; 0: all. lock: the lock of the run's folder, on rank 0. A context manager:
    its exit waits for the save in progress, also after an exception.
    """

    def __init__(
        self,
        run: Path,
        model: Transformer,
        optimizer: torch.optim.Optimizer,
        data: TokenData,
        mesh: DeviceMesh | None,
        keep: int,
        start: Path | None = None,
        lock: Lock | None = None,
    ) -> None:
        self.run, self.model, self.optimizer, self.data, self.keep, self.lock = (
            run, model, optimizer, data, keep, lock,
        )  # fmt: skip
        self.main = mesh is None or mesh.get_rank() == 0
        self.companions: dict[str, bytes] = {}  # read now: the folders may be deleted later
        for folder in (start, data.folder) if self.main else ():
            for name in (FILE, TOKENIZER_CONFIG, TEMPLATE):
                if folder is not None and (folder / name).is_file():
                    self.companions[name] = (folder / name).read_bytes()
        if self.main and start is not None and (start / GENERATION).is_file():
            self.companions[GENERATION] = generation_settings(start / GENERATION, data.end_ids)
        self.huggingface = None
        if start is not None:
            self.huggingface = huggingface_config(read_json(start / "config.json"))
        # A group of its own: the thread's collectives must not mix with those of training. With
        # gloo, since it sends data from the CPU.
        self.group = dist.new_group(backend="gloo") if mesh is not None else None
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        replica = mesh.get_local_rank("replicate") if mesh is not None else 0
        replicas = size_of(mesh, "replicate") if mesh is not None else 1
        self.parts = dict(own_parts(model, replica, replicas))
        self.planner = ShardPlanner()
        self._allocate()

    def _allocate(self) -> None:
        """Allocate the staging memory, once: allocation takes longer than a copy.

        It is one block, page-locked if the model is on a GPU (torch would round pinned tensors up
        to powers of two). It is zeroed so that all its pages are allocated now.
        """
        parameters = dict(self.model.named_parameters())
        locals_ = {name: local_tensor(parameters[name]) for name in self.parts}
        size = sum(_room(local) for local in locals_.values()) * len(_keys(""))
        self.memory = torch.empty(size, dtype=torch.uint8).zero_()
        self.pinned = size > 0 and any(local.is_cuda for local in locals_.values())
        if self.pinned:
            cudart = torch.cuda.cudart()
            torch.cuda.check_error(int(cudart.cudaHostRegister(self.memory.data_ptr(), size, 1)))
        self.shards: dict[str, Shard] = {}
        offset = 0
        for name, local in locals_.items():
            start = tuple(each.start for each in self.parts[name])
            for key in _keys(name):
                value = self.memory[offset : offset + local.nbytes].view(local.dtype)
                self.shards[key] = Shard(value.view(local.shape), start, self.model.shapes[name])
                offset += _room(local)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            if self.main:  # the error that ended training takes precedence
                error.add_note(f"also: {failed}")
        finally:
            if self.pinned:
                torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            if self.group is not None:
                dist.destroy_process_group(self.group)

    def save(self, record: dict[str, Any], config: ModelConfig, keep_all: bool = False) -> float:
        """Begin to save the current state; returns the seconds for which training was blocked.

        record: `step` (the number of steps done), the data's fingerprint, the layout and the run's
        `config`. config: the model's, with the plan in force. keep_all: remove no older checkpoint.
        Waits for the previous save. If that could not be written, this save takes its place, and is
        waited for: raises its error if it fails too.
        """
        begun = time.perf_counter()
        name = f"step-{record['step']:06d}"
        failed = None
        try:
            self.wait()
        except UserError as error:
            failed = error.__cause__
            if not isinstance(failed, OSError):
                raise
            if self.main:
                same = self.folder.name == name
                print(
                    f"warning: {self.folder.name} could not be written ({failed}); "
                    f"{'trying again' if same else f'saving {name} in its place'}",
                    file=sys.stderr,
                    flush=True,
                )
        self._stage()
        self.folder: Path = self.run / "checkpoints" / name
        arguments = record, config, keep_all
        self.thread = threading.Thread(target=self._write, args=arguments, daemon=True)
        self.thread.start()
        if failed is not None:
            self.wait()
        return time.perf_counter() - begun

    @torch.no_grad()
    def _stage(self) -> None:
        parameters = dict(self.model.named_parameters())
        for name in self.parts:
            parameter = parameters[name]
            values = [parameter, *(self.optimizer.state[parameter][each] for each in MOMENTS)]
            for key, value in zip(_keys(name), values, strict=True):
                self.shards[key].value.copy_(local_tensor(value), non_blocking=True)
        if self.pinned:
            torch.cuda.current_stream().synchronize()

    def lost(self) -> bool:
        """Wait for the save in progress; whether it failed, the same on every rank."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        return self.failure is not None

    def wait(self) -> None:
        """Wait for the save in progress; raises, on every rank, the error of a failed save."""
        self.lost()
        if self.failure is not None:
            error, self.failure = self.failure, None
            raise _explained(error, self.folder)

    def _write(self, record: dict[str, Any], config: ModelConfig, keep_all: bool) -> None:
        """Write the staged state as a checkpoint, atomically."""
        folder = self.folder
        temporary = folder.with_name(f".{folder.name}.partial")

        def commit(sums: dict[str, str]) -> None:
            try:
                finish(sums)
            except UserError as error:
                if isinstance(error.__cause__, OSError):  # the other ranks get no `__cause__`
                    raise error.__cause__ from None
                raise

        def finish(sums: dict[str, str]) -> None:
            write_config(temporary, config, self.data.ends, self.huggingface)
            for name, content in self.companions.items():
                (temporary / name).write_bytes(content)
            write_text(temporary / "train.json", json.dumps(record, indent=1) + "\n")
            for file in temporary.iterdir():
                if file.name not in sums:
                    sync(file)
                    sums[file.name] = checksum(file)
            write_checksums(temporary, sums)
            sync(temporary)
            if self.lock is not None:
                self.lock.check()
            temporary.rename(folder)
            sync(folder.parent)
            if not (self.run / state.SAVED).exists():
                write_text(self.run / state.SAVED, json.dumps({"step": record["step"]}) + "\n")
            state.remove_old(self.run, 0 if keep_all else self.keep)

        try:
            dcp.save(
                dict(self.shards),
                storage_writer=ShardWriter(temporary, commit),
                planner=self.planner,
                process_group=self.group,
                no_dist=self.group is None,
            )
        except BaseException as error:  # DCP's CheckpointException is no Exception
            self.failure = error
            if self.main:
                shutil.rmtree(temporary, ignore_errors=True)


def _keys(name: str) -> list[str]:
    """The keys of a parameter's saved tensors: itself and its moments."""
    return [name, *(f"{moment}.{name}" for moment in MOMENTS)]


def _room(local: torch.Tensor) -> int:
    """Bytes of staging memory for a tensor, in whole cache lines."""
    return math.ceil(local.nbytes / 64) * 64


def _explained(error: BaseException, folder: Path) -> Exception:
    """The error for a failed save: a UserError where the user can correct the cause.

    Its `__cause__` is the OSError of a failed write; DCP gives every rank the same.
    """
    failed: Exception = RuntimeError(f"{folder} cannot be written: {error}")
    failed.__cause__ = error
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, UserError):
            return cause
        if isinstance(cause, FileExistsError):
            failed = UserError(
                f"{folder} cannot be written: {cause.filename}, which an interrupted save left, "
                f"cannot be removed; remove it, and continue with --resume"
            )
            failed.__cause__ = cause
        elif isinstance(cause, OSError):
            on = f" on rank {rank}" if dist.is_initialized() else ""
            failed = UserError(
                f"{folder} cannot be written ({cause}{on}); the checkpoints before it are "
                f"untouched: make room, and continue with --resume"
            )
            failed.__cause__ = cause
    return failed
