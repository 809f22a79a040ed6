"""A rank that dies ends the job within seconds, and is named; on a CPU, in real processes."""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ladder.models.errors import UserError
from ladder.parallel import launch
from tests.commands import Start

LIMIT = 30.0  # seconds from the death to the job's end
DEATH = "LADDER_TEST_DEATH"  # names the file that a rank touches before it leaves


def reduce_until(end: str) -> int:
    """All-reduces for ever; rank 1 leaves as `end` says after a few."""
    launch.join("cpu")
    value = torch.ones(1000)
    for turn in range(10**9):
        if turn == 5 and launch.rank() == 1:
            Path(os.environ[DEATH]).touch()
            if end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if end == "mistaken":
                raise UserError("rank 1 is mistaken")
            if end == "unread":
                raise BrokenPipeError
            os._exit(int(end))
        dist.all_reduce(value)
    return 0


def stuck(end: str) -> int:
    """Rank 1 leaves as `end` says; the others never notice, and do not end when asked to."""
    if launch.rank() == 1:
        time.sleep(1.0)
        Path(os.environ[DEATH]).touch()
        if end == "unread":
            raise BrokenPipeError
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
    return 0


def run(command: Callable[..., int], end: str) -> int:
    """A job of three ranks."""
    if command is stuck:
        launch.PATIENCE = 0.3  # waiting longer changes nothing
    return launch.run(command, (end,), 3)


@pytest.mark.parametrize(
    ("command", "end", "code", "words"),
    [
        (reduce_until, "killed", 1, "error: rank 1 was killed by signal 9 (SIGKILL)"),
        (reduce_until, "7", 7, "error: rank 1 ended with exit code 7 and no message"),
        (reduce_until, "0", 1, "error: rank 1 ended with exit code 0 and no message"),
        (reduce_until, "mistaken", 2, "error: rank 1 is mistaken"),
        (stuck, "killed", 1, "error: rank 1 was killed by signal 9 (SIGKILL)"),
    ],
    ids=["killed", "left", "left-with-0", "mistaken", "survivors-that-will-not-end"],
)
@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_dead_rank_ends_the_job_and_is_named(
    command: Callable[..., int], end: str, code: int, words: str, tmp_path: Path, start: Start
) -> None:
    """In one line. A launcher that reports the survivors' lost connection or waits for them fails,
    as does a survivor that reports it itself."""
    death = tmp_path / "death"
    job = start(run, command, end, environment={DEATH: str(death)})
    assert job.wait() == code
    assert time.time() - death.stat().st_mtime < LIMIT
    assert job.err == f"{words}\n"


def ended(end: str, options: argparse.Namespace) -> int:
    """The words of a job whose command has these options."""
    return launch.run(dies, (options, end), 2)


def dies(options: argparse.Namespace, end: str) -> int:
    if launch.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else os._exit(7)
    return 0


@pytest.mark.parametrize("end", ["killed", "left"])
@pytest.mark.parametrize("resumes", [True, False])
def test_a_dead_rank_of_a_run_says_how_to_go_on(end: str, resumes: bool, start: Start) -> None:
    """As an interrupt does; other commands have nothing to resume."""
    options = argparse.Namespace(**({"resume": False} if resumes else {}))
    job = start(ended, end, options)
    assert job.wait() == (1 if end == "killed" else 7)
    what = "was killed by signal 9 (SIGKILL)" if end == "killed" else "ended with exit code 7 and"
    assert job.err.startswith(f"error: rank 1 {what}")
    told = "; --resume continues from the last checkpoint, if one was written\n"
    assert job.err.endswith(told) == resumes
    assert job.err.count("\n") == 1


class Rank:
    """A process that leaves with `exitcode`, `delay` seconds after it has let go of the others."""

    def __init__(self, exitcode: int, delay: float = 0.0) -> None:
        self.exitcode = exitcode
        self.sentinel, self.end = os.pipe()
        threading.Timer(delay, os.close, [self.end]).start()

    def join(self) -> None:
        os.close(self.sentinel)


KILLED = "error: rank 0 was killed by signal 9 (SIGKILL)\n"
LOST = "Traceback: a peer is gone\n"


@pytest.mark.parametrize(
    ("ends", "failure", "expected"),
    [
        ([(-9, 0.2), (1, 0.0)], (1, LOST), (1, KILLED)),
        ([(-9, 0.2), (2, 0.0)], (2, "error: a mistake\n"), (2, "error: a mistake\n")),
        ([(1, 0.0), (-6, 0.1)], (1, LOST), (1, LOST)),
        ([(0, 0.0), (1, 0.1), (1, 0.0)], (2, "error: first\nalso\n"), (2, "error: first\nalso\n")),
    ],
    ids=["killed, noticed late", "killed after a mistake", "aborted after a failure", "failed"],
)
def test_one_message_whatever_is_noticed_first(
    ends: list[tuple[int, float]],
    failure: tuple[int, str],
    expected: tuple[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Only the cause is reported: not errors after a rank's death, nor deaths after an error."""
    monkeypatch.setattr(launch, "_report_folder", tmp_path)
    for rank, (code, message) in enumerate((failure, (1, "what another rank says later\n"))):
        monkeypatch.setenv("RANK", str(rank))
        assert launch._fail(code, message) == code
    ranks: Any = [Rank(*end) for end in ends]
    for n, (code, _) in enumerate(ends):
        if code >= 0:
            launch._note(f"{launch.ORDERLY}{n}")
    assert (launch._watch(ranks, tmp_path), capfd.readouterr().err) == expected


def test_notes_belong_to_the_message(capfd: pytest.CaptureFixture[str]) -> None:
    error = UserError("what ended the run")
    error.add_note("also: the save that was under way")

    def fails() -> int:
        raise error

    assert launch.run(fails, ()) == 2
    expected = "error: what ended the run\nalso: the save that was under way\n"
    assert capfd.readouterr().err == expected


@pytest.mark.parametrize("command", [reduce_until, stuck])
def test_output_that_nobody_reads_ends_the_job_without_a_word(
    command: Callable[..., int], tmp_path: Path, start: Start
) -> None:
    """As `| head` leaves it. Catches the others' lost connections, and waiting for them."""
    death = tmp_path / "death"
    job = start(run, command, "unread", environment={DEATH: str(death)})
    assert job.wait() == 0
    assert time.time() - death.stat().st_mtime < LIMIT
    assert job.err == ""


def fails_alone() -> int:
    return 3


def test_an_orderly_exit_code_needs_no_words(start: Start) -> None:
    job = start(launch.run, fails_alone, (), 2)
    assert job.wait() == 3
    assert job.err == ""


def leaves(folder: str) -> int:
    launch.join("cpu")
    atexit.register((Path(folder) / str(launch.rank())).touch)
    return 0


@pytest.mark.parametrize("how", ["spawned", "forks"])
def test_ranks_that_are_done_clean_up(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Catches torch's compile workers that are left behind, with a warning at the end of a run.
    This process has used torch, so that ranks that it starts itself are no forks of it."""
    if how == "forks":
        assert start(launch.run, leaves, (str(tmp_path),), 2).wait() == 0
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        assert not launch._may_fork()
        assert launch.run(leaves, (str(tmp_path),), nproc=2) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
