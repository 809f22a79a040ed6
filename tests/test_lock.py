"""One process at a time in a folder: on one machine, and on several that share a file system."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ladder import lock
from ladder.checkpoint import checkpoints
from ladder.convert.command import convert
from ladder.files import beside
from ladder.lock import STALE, hold
from ladder.models.errors import UserError
from ladder.train import state
from ladder.train.loop import train
from tests.commands import Start
from tests.distributed import Pools
from tests.train.runs import fail_on_ranks, losses, recipe, steps_of, training, untimed

HERE = rf"pid {os.getpid()}, since \d\d\d\d-"
FLOCK = fcntl.flock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "of" / "a" / "run" / ".lock"


@pytest.fixture
def write(path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Leaves a lock file, as a process does that is killed; its last beat was `silent` ago."""
    monkeypatch.setattr(lock, "PAUSE", 0.001)
    path.parent.mkdir(parents=True)

    def left(machine: str | None = None, silent: float = 0.0, pid: int = 2**22 + 1) -> None:
        holder = {
            "host": "node7",
            "machine": machine or lock._machine(),
            "pid": pid,
            "since": "noon",
        }
        path.write_text(json.dumps(holder))
        now = time.time()
        os.utime(path, (now - silent, now - silent))

    return left


def no_locks(*arguments: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_the_second_is_refused_and_nothing_is_left(path: Path, tmp_path: Path) -> None:
    with hold(path, "out=x") as held:
        with (
            pytest.raises(
                UserError, match=rf"^out=x is in use by another process: host .*, {HERE}"
            ),
            hold(path, "out=x"),
        ):
            raise AssertionError
        held.check()
    assert not list(tmp_path.iterdir())
    with hold(path, "out=x"):
        (path.parent / "kept").touch()
    assert [each.name for each in path.parent.iterdir()] == ["kept"]
    with hold(path, "out=x"):
        pass


def test_a_folder_that_cannot_be_made_is_named_with_its_option(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, words in (
        (file, f"out={file} is a file; give a folder"),
        (file / "run", f"out={file}/run: {file} is a file; give a folder"),
        (Path("/proc/nope"), "out=/proc/nope cannot be created (No such file or directory); "),
    ):
        with (
            pytest.raises(UserError, match=f"^{re.escape(words)}"),
            hold(path / ".lock", f"out={path}"),
        ):
            raise AssertionError


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 5}', None])
def test_a_killed_holder_of_this_machine_holds_nothing(
    path: Path, write: Callable[..., None], text: str | None
) -> None:
    """At once, whatever it had written: the kernel knows. Catches waiting for STALE seconds."""
    write()
    if text is not None:
        path.write_text(text)
    with hold(path, "out=x") as held:
        assert json.loads(path.read_text())["pid"] == os.getpid()
        assert held.inherited
        held.check()
    with hold(path, "out=x") as held:
        assert not held.inherited


@pytest.mark.parametrize("flock", [FLOCK, no_locks], ids=["flock", "no flock"])
def test_another_machine_is_believed_until_it_is_silent(
    path: Path, write: Callable[..., None], flock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    write("another kernel", silent=20.0, pid=os.getpid())
    words = (
        r"host node7, pid \d+, since noon; it was there \d+ s ago: .* in \d+ s, or remove .*lock"
    )
    with pytest.raises(UserError, match=words), hold(path, "out=x"):
        raise AssertionError
    assert json.loads(path.read_text())["host"] == "node7"
    write("another kernel", silent=STALE + 1.0)
    with hold(path, "out=x") as held:
        held.check()


def test_without_locks_of_the_kernel_the_file_tells(
    path: Path, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have none. Catches two of one machine there."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    for silent in (0.0, STALE + 1.0):
        write(silent=silent)
        if not silent:
            with pytest.raises(UserError, match="in use by another"), hold(path, "out=x"):
                raise AssertionError
    words = rf"{HERE}.* start again in 120 s, or remove"
    with hold(path, "out=x"), pytest.raises(UserError, match=words), hold(path, "out=x"):
        raise AssertionError
    path.touch()  # of one that is about to say who it is
    with pytest.raises(UserError, match=r"in use by .*does not say which"), hold(path, "out=x"):
        raise AssertionError


def test_a_file_server_that_holds_a_dead_machines_lock(
    path: Path, write: Callable[..., None]
) -> None:
    """Where flock does reach other machines, as over NFS: for as long as the lock is touched."""
    write("another kernel", silent=20.0)
    with path.open() as theirs:
        FLOCK(theirs, fcntl.LOCK_EX)
        for silent in (0.0, STALE + 1.0):  # here it is alive, whatever the file says
            write(silent=silent, pid=os.getpid())
            with pytest.raises(UserError, match="wait for it, end it"), hold(path, "out=x"):
                raise AssertionError
        write("another kernel", silent=20.0)
        with pytest.raises(UserError, match="start again in"), hold(path, "out=x"):
            raise AssertionError
        write("another kernel", silent=STALE + 1.0)
        with hold(path, "out=x") as held:
            assert json.loads(path.read_text())["pid"] == os.getpid()
            assert held.inherited


def test_a_holder_shows_that_it_lives(
    path: Path, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the lock is its own: once another has it, it neither touches nor removes it."""
    monkeypatch.setattr(lock, "BEAT", 0.01)
    with hold(path, "out=x") as held:
        os.utime(path, (0, 0))
        end = time.monotonic() + 30.0
        while path.stat().st_mtime == 0:
            assert time.monotonic() < end
            time.sleep(0.01)
        write("another kernel", silent=20.0)
        with pytest.raises(
            UserError, match=rf"out=x is in use by .*node7.*; this process, .*{HERE}"
        ):
            held.check()
        time.sleep(0.05)
        assert time.time() - path.stat().st_mtime > 19.0
    assert json.loads(path.read_text())["host"] == "node7"
    with hold(beside(path), "out=y") as held:
        beside(path).unlink()
        with pytest.raises(UserError, match="out=y is without its lock"):
            held.check()


def test_a_file_that_its_holder_removes_meanwhile_is_no_lock(
    path: Path, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two holders, of the file that is gone and of the one that took its name."""
    write()
    turns = iter([path.unlink])

    def late(*arguments: Any) -> None:
        next(turns, lambda: None)()
        FLOCK(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold(path, "out=x"), pytest.raises(UserError, match=HERE), hold(path, "out=x"):
        raise AssertionError


def test_a_fork_does_not_hold_its_parents_lock(path: Path) -> None:
    """A worker that outlives its parent has the parent's files open, but not what they lock."""
    end, ending = os.pipe()
    parent = os.fork()
    if not parent:
        try:
            with hold(path, "out=x"):
                child = os.fork()
                if child:
                    os.kill(os.getpid(), signal.SIGKILL)
            os.close(ending)
            os.read(end, 1)
        finally:
            os._exit(0)
    try:
        assert os.WIFSIGNALED(os.waitpid(parent, 0)[1])
        assert path.exists(), "which the fork has removed"
        with hold(path, "out=x") as held:
            held.check()
    finally:
        os.close(ending)
        os.close(end)


def race(path: Path, begin: int, end: int, told: int) -> None:
    """In a fork: take the lock as the others do, and leave without letting go of it."""
    try:
        os.read(begin, 1)
        with hold(path, "out=x"):
            os.write(told, f"held {os.getpid()}\n".encode())
            os.read(end, 1)
            os._exit(0)
    except UserError as error:
        os.write(told, f"{error}\n".encode())
    finally:
        os._exit(0)


def test_of_several_that_begin_at_once_one_has_it(path: Path) -> None:
    """Also where a killed one's lock lies, of the turn before; the others name the one that has it.
    Catches a lock that is looked at before it is taken."""
    for _ in range(6):
        (begin, go), (end, leave), (reads, told) = os.pipe(), os.pipe(), os.pipe()
        children = []
        for _ in range(4):
            if not (child := os.fork()):
                os.close(go)
                os.close(leave)
                race(path, begin, end, told)
            children.append(child)
        os.close(told)
        os.close(go)
        text = b""
        while text.count(b"\n") < 4:
            text += os.read(reads, 2**16) or b"nothing from the rest\n" * 4
        os.close(leave)
        for child in children:
            os.waitpid(child, 0)
        for pipe in (begin, end, reads):
            os.close(pipe)
        first, *others = sorted(text.decode().splitlines(), key=lambda line: line[:4] != "held")
        named = f"in use by another process: host {os.uname().nodename}, pid {first[5:]}, since"
        assert [named in line for line in others] == [True] * 3, text
        assert first.startswith("held"), text
        assert path.exists()


def test_a_run_is_one_process_at_a_time(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    """Begun or gone on with, on one rank or two: told on every rank, before anything is written."""
    run = tmp_path / "run"
    config = recipe(corpus, run)
    words = rf"out={run} is in use by another process: host .*, {HERE}.*; wait for it"
    with hold(run / state.LOCK, "another"):
        for resume in (False, True):
            with pytest.raises(UserError, match=words):
                train(config, device="cpu", resume=resume)
        for message in pools(2).run(fail_on_ranks, config.to_dict(), False):
            assert f"pid {os.getpid()}, since" in message
        assert [path.name for path in run.iterdir()] == [state.LOCK]
    train(config, device="cpu", stop_after=3)
    before = untimed(run)
    with hold(run / state.LOCK, "another"), pytest.raises(UserError, match=words):
        train(config, device="cpu", resume=True)
    assert untimed(run) == before
    train(config, device="cpu", resume=True)
    assert not (run / state.LOCK).exists()


def test_of_two_that_begin_a_run_at_once_one_trains(
    corpus: Path, tmp_path: Path, start: Start
) -> None:
    """Catches a checkpoint of both, and a second that is told twice, by its two ranks."""
    run = tmp_path / "run"
    config = recipe(corpus, run, steps=20_000)
    alone = training(start, config)
    ranks = training(start, config, "seed=1", "--nproc", "2")
    alone.until(lambda: ranks.poll() is not None)
    first, second = (alone, ranks) if alone.poll() is None else (ranks, alone)
    assert second.poll() == 2
    assert second.err.count("in use by another process: ") == second.err.count("error: ") == 1
    first.until(lambda: len(losses(run)) > 1)
    first.send(signal.SIGTERM)
    assert first.wait() == 0, first.err
    record = state.verified(checkpoints(run))
    assert record["config"]["seed"] == int(first is ranks)
    assert len(losses(run)) == record["step"]


def test_a_run_that_lost_its_folder_saves_nothing_there(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stood still for long, and another machine went on with the run."""
    run = tmp_path / "run"
    stays = lock._holder

    def taken(path: Path) -> lock.Holder | None:
        return stays(path) and lock.Holder("node7", "another kernel", 5, "noon")

    monkeypatch.setattr(lock, "_holder", taken)
    with pytest.raises(UserError, match=rf"out={run} is in use by .*host node7, pid 5, since noon"):
        train(recipe(corpus, run, checkpoint_interval=2), device="cpu")
    assert steps_of(run) == []


def test_a_conversion_is_one_process_at_a_time(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with hold(beside(out), "another"), pytest.raises(UserError, match=rf"out is in use .*{HERE}"):
        convert(llama, out)
    assert not list(tmp_path.iterdir())
