"""A queue of processes, one for each GPU at a time, for benchmarks of whole runs; exit codes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Generic, Protocol, TypeVar, cast

import torch

import ladder
from ladder.models.errors import UserError

POLL_S = 0.1


class Job(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def folder(self) -> Path:
        """The folder that the job writes; its output goes beside it."""

    @property
    def command(self) -> list[str]:
        """The arguments of Python."""

    def prepare(self) -> None:
        """Make ready to start; remove what an interrupted try has left in the folder."""


J = TypeVar("J", bound=Job)


@dataclass
class Started(Generic[J]):
    """A running job, whose output goes to a file."""

    job: J
    process: subprocess.Popen[bytes]
    log: Path
    stream: IO[bytes]
    since: float

    def tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    @property
    def arguments(self) -> list[str]:
        """The arguments of Python, as the process got them."""
        return [str(each) for each in cast("list[str]", self.process.args)[1:]]

    @property
    def wall_s(self) -> float:
        return round(time.monotonic() - self.since, 1)


def add_report(verbs: Any, table: Callable[[Path], str]) -> None:
    """Add the verb `report FILE`, which prints a file's table, to a script's subparsers."""

    def report(options: argparse.Namespace) -> int:
        if options.file.is_file() and not options.file.stat().st_size:
            raise UserError(f"{options.file} is empty; give a file of results")
        print(table(options.file))
        return 0

    add = verbs.add_parser("report", help="print the table of a file of results")
    add.set_defaults(verb=report)
    add.add_argument("file", type=Path)


def finish(options: argparse.Namespace) -> int:
    """Run the verb of a command line; returns the exit code: 2 for a user's mistake, 130 if
    interrupted."""
    try:
        code: int = options.verb(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def deadline(minutes: float | None) -> float:
    """The end of --budget on the monotonic clock."""
    if minutes is not None and not minutes > 0:
        raise UserError(f"--budget={minutes} must be above 0 minutes")
    return time.monotonic() + 60 * (minutes or float("inf"))


def visible_gpus(count: int | None) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES for each concurrent job; None leaves it unchanged."""
    there = torch.cuda.device_count()
    if count is not None and not 1 <= count <= there:
        raise UserError(f"--gpus={count}: this machine has {there}; leave it out for all of them")
    if not there:
        return [None]
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = own.split(",") if own else [str(n) for n in range(there)]
    return list(names[: count or there])


def run_all(
    waiting: list[J], gpus: Sequence[str | None], deadline: float,
    expected_s: Callable[[J], float], finished: Callable[[Started[J]], str],
) -> list[J]:  # fmt: skip
    """Run all jobs, one for each of `gpus` at a time; returns those that failed.

    A job that would end after the deadline, by `expected_s`, is not started. finished: records a
    job's result and returns a line to print.
    """
    running: dict[str | None, Started[J]] = {}
    failed: list[J] = []
    try:
        while waiting or running:
            for gpu in [gpu for gpu in gpus if gpu not in running]:
                fits = [e for e in waiting if time.monotonic() + expected_s(e) < deadline]
                if fits:
                    waiting.remove(fits[0])
                    running[gpu] = start(fits[0], gpu)
                    print(f"{fits[0].name}: begun{on(gpu)}", flush=True)
            if not running:
                break
            time.sleep(POLL_S)
            for gpu, started in list(running.items()):
                if started.process.poll() is None:
                    continue
                del running[gpu]
                started.stream.close()
                if started.process.returncode:
                    failed.append(started.job)
                    print(f"error: {started.job.name}{on(gpu)}: {started.tail()} (all of it: "
                          f"{started.log})", file=sys.stderr, flush=True)  # fmt: skip
                    continue
                print(f"{started.job.name}: {finished(started)}", flush=True)
    finally:
        for started in running.values():
            started.process.kill()
            started.process.wait()
    if waiting:
        print(f"left out, the budget is spent: {', '.join(each.name for each in waiting)}")
    return failed


def on(gpu: str | None) -> str:
    return "" if gpu is None else f" on GPU {gpu}"


def start(job: J, gpu: str | None) -> Started[J]:
    job.prepare()
    log = job.folder.with_name(f"{job.folder.name}.log")
    stream = log.open("wb")
    package = Path(ladder.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if gpu is not None:
        env["CUDA_VISIBLE_DEVICES"] = gpu
    process = subprocess.Popen(
        [sys.executable, *job.command], env=env, stdin=subprocess.DEVNULL, stdout=stream,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Started(job, process, log, stream, time.monotonic())
