"""Commands in processes of their own that begin at once.

    def test_it(start: Start) -> None:
        command = start(main, ["train", "tiny", "--nproc", "2"])
        assert command.wait() == 0

`python -m ladder` imports torch for seconds before it does anything. What `start` starts is a fork
of a process that has imported it and done nothing else, as the ranks of `--nproc` are forks of
their launcher. It leads a session, which is ended with the test, whatever became of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.distributed import PATIENCE, PRELOAD

# On a CPU, with one thread, and gloo where a container can resolve its address.
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _run(
    function: Callable[..., int], arguments: tuple, folder: str, environment: dict, file_size: int
) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(ROOT)
    os.environ.update(environment)
    if file_size:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
    import torch

    from ladder.parallel import launch

    torch.set_num_threads(1)
    launch._may_fork = lambda: True  # torch is imported, and nothing else has happened
    sys.exit(function(*arguments))


class Command:
    """A process of `start`."""

    def __init__(
        self,
        function: Callable[..., int],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        file_size: int,
    ) -> None:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="ladder-command-")
        self._process = server.Process(
            target=_run,
            args=(
                function, arguments, self._folder.name, {**ENVIRONMENT, **environment}, file_size
            ),
        )  # fmt: skip
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Its exit code, minus a signal's number, or None while it runs."""
        return self._process.exitcode

    def wait(self, limit: float = PATIENCE) -> int:
        self._process.join(limit)
        code = self.poll()
        assert code is not None, f"{self.pid} runs on after {limit:g} s\n{self.err}"
        return code

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until it holds, or the process has ended."""
        end = time.monotonic() + PATIENCE
        while not condition() and self.poll() is None:
            assert time.monotonic() < end, f"nothing happened\n{self.err}"
            time.sleep(0.005)

    def ranks(self) -> list[int]:
        """The processes that `--nproc` started: its children."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended since
                if int(stat.read_text().rpartition(")")[2].split()[1]) == self.pid:
                    found.append(int(stat.parent.name))
        return found

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    @property
    def out(self) -> str:
        return (Path(self._folder.name) / "out").read_text()

    @property
    def err(self) -> str:
        return (Path(self._folder.name) / "err").read_text()

    def result(self) -> subprocess.CompletedProcess[str]:
        """The result of the process; waits for its end."""
        code = self.wait()
        return subprocess.CompletedProcess([], code, self.out, self.err)

    def end(self) -> None:
        """Kill the remaining processes of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        self._process.close()
        self._folder.cleanup()


class Start:
    """`start(function, *arguments)` runs it in a process whose exit code is what it returns.

    environment: more variables. file_size: the bytes beyond which no file may grow.
    """

    def __init__(self) -> None:
        self._started: list[Command] = []

    def __call__(
        self,
        function: Callable[..., int],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        file_size: int = 0,
    ) -> Command:
        command = Command(function, arguments, environment or {}, file_size)
        self._started.append(command)
        return command

    def end(self) -> None:
        for command in self._started:
            command.end()


@pytest.fixture
def start() -> Iterator[Start]:
    found = Start()
    yield found
    found.end()
