"""Lock files, which give one process at a time exclusive use of a folder.

On one machine the kernel's flock decides; it is released when its holder ends, even if killed.
Machines that share a file system may not see each other's flock. For them the file names its
holder, which touches it every BEAT seconds; after STALE seconds without a touch the holder counts
as dead. So a process that was suspended for longer can lose the lock, and so can one of two
machines that take a stale lock at the same moment: `Lock.check` detects this before a write.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from ladder.models.errors import UserError

BEAT, STALE = 15.0, 120.0  # seconds
TRIES, PAUSE = 10, 0.05  # attempts, and seconds between them, while a lock changes hands


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock. machine: an id of the running kernel (see `_machine`)."""

    host: str
    machine: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}, since {self.since}"

    @property
    def is_here(self) -> bool:
        return self.machine == _machine()


class Lock:
    """The lock file `path`, held by this process. what: the locked folder's name in errors.

    inherited: the file was there, left by a process that has died.
    """

    def __init__(self, path: Path, what: str, handle: int, inherited: bool) -> None:
        self.path, self.what, self.handle, self.inherited = path, what, handle, inherited
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        self.holder = Holder(socket.gethostname(), _machine(), os.getpid(), now)
        text = json.dumps(asdict(self.holder)).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, text, 0)
        os.fsync(handle)  # NFS shows a write to other machines only after that
        self._over = threading.Event()
        _held.add(self)
        threading.Thread(target=self._beat, name="ladder-lock", daemon=True).start()

    def check(self) -> None:
        """Raise UserError if this process has lost the lock."""
        now = _holder(self.path)
        if now != self.holder:
            by = f"in use by another process: {now}" if now else f"without its lock, {self.path}"
            raise UserError(
                f"{self.what} is {by}; this process, {self.holder}, was suspended for longer than "
                f"{STALE:.0f} s, or its lock was removed, and it writes nothing more there"
            )

    def release(self) -> None:
        if self not in _held:  # in a fork, which does not hold the lock
            return
        _held.remove(self)
        self._over.set()
        with suppress(OSError):  # harmless: flock is released below, or the file goes stale
            if _holder(self.path) == self.holder:
                self.path.unlink()
        os.close(self.handle)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError):  # a file server that is unreachable for a moment
                if _holder(self.path) == self.holder:
                    os.utime(self.path)


_held: set[Lock] = set()  # the locks of this process


def _let_go() -> None:
    """Close this process's locks in a fork, which would otherwise hold them after it has ended."""
    while _held:
        os.close(_held.pop().handle)


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def hold(path: Path, what: str) -> Iterator[Lock]:
    """Hold the lock file `path` inside a `with`; its folder is made if it does not exist.

    what: the option and value that name the locked folder, for errors. At the end the file is
    removed, and so are folders that were made for it and are empty. Raises UserError, which names
    the holder, if another process holds the lock.
    """
    made = [folder for folder in path.parents if not folder.exists()]
    try:
        lock = _take(path, what)
        try:
            yield lock
        finally:
            lock.release()
    finally:
        remove_empty(made)


def remove_empty(folders: Sequence[Path]) -> None:
    """Remove the empty ones of these folders, which are listed from the innermost outwards."""
    for folder in folders:
        with suppress(OSError):  # it is not empty, or is gone
            folder.rmdir()


def _take(path: Path, what: str) -> Lock:
    inherited = False  # also true if `_judge` has removed the lock file of a dead machine
    for left in reversed(range(TRIES)):
        with suppress(FileNotFoundError):  # a holder has removed it, or its folder, just now
            there = path.exists()
            try:
                lock = _look(path, what, last=not left)
            except FileNotFoundError:
                raise
            except OSError as error:
                raise UserError(
                    f"{path} cannot be written ({error.strerror}); choose another folder or make "
                    f"room"
                ) from error
            if lock is not None:
                lock.inherited |= inherited
                return lock
            inherited |= there and not path.exists()
        time.sleep(PAUSE)
    raise UserError(
        f"{what} is locked by one process after another; start again when no other process uses it"
    )


def make_folder(path: Path, what: str = "") -> None:
    """Create a folder and its parents if they do not exist. Raises UserError if that fails.

    what: the option and value for which it is made, for errors; by default `--out=PATH`.
    """
    what = what or f"--out={path}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        for each in (path, *path.parents):
            if os.path.isfile(each):  # unlike Path.is_file, False where a folder may not be read
                said = what if what.endswith(f"={each}") else f"{what}: {each}"
                raise UserError(f"{said} is a file; give a folder") from error
        raise UserError(
            f"{what} cannot be created ({error.strerror}); choose another path, or make it writable"
        ) from error


def _look(path: Path, what: str, last: bool) -> Lock | None:
    """The result of `_judge` for the lock file, which is made if it does not exist."""
    folder = path.parent
    make_folder(folder, what)
    created = True
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        created = False
        handle = os.open(path, os.O_RDWR)
    lock = None
    try:
        lock = _judge(path, what, handle, created, last)
    finally:
        if lock is None:
            os.close(handle)
    return lock


def _judge(path: Path, what: str, handle: int, created: bool, last: bool) -> Lock | None:
    """The lock, if it is free; None: try again. Raises UserError if another process holds it."""
    known, blocked = True, False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        blocked = True
    except OSError:  # a file system without locks: only the file's content tells
        known = False
    if not _same(path, handle):
        return None
    holder = _holder(path)
    if not blocked and (created or (known and (holder is None or holder.is_here))):
        return Lock(path, what, handle, not created)
    if not last and (holder is None or (blocked and holder.is_here and not _alive(holder.pid))):
        return None  # another process has just taken the lock, and is about to write its name
    silent = _silent(path)
    if blocked and (holder is None or holder.is_here):
        _refuse(path, what, holder, "wait for it, end it, or choose another folder")
    if silent < STALE:
        remedy = (
            f"it was there {max(silent, 0):.0f} s ago: if it has ended since, start again in "
            f"{STALE - silent:.0f} s, or remove {path}"
        )
        _refuse(path, what, holder, remedy)
    if not blocked:
        return Lock(path, what, handle, not created)
    path.unlink(missing_ok=True)  # a file server still holds the lock of a dead machine
    return None


def _refuse(path: Path, what: str, holder: Holder | None, remedy: str) -> NoReturn:
    who = holder or f"{path} does not say which"
    raise UserError(f"{what} is in use by another process: {who}; {remedy}")


def _holder(path: Path) -> Holder | None:
    """The holder that the file names; None if it names none."""
    try:
        found = Holder(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # absent, or not yet written
        return None
    return found if isinstance(found.pid, int) else None


def _same(path: Path, handle: int) -> bool:
    """Whether `path` still names the open file `handle`."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _silent(path: Path) -> float:
    """Seconds since the file was touched, by the file system's clock and not this machine's."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.") as new:
        return os.fstat(new.fileno()).st_mtime - path.stat().st_mtime


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _machine() -> str:
    """An id of this machine's kernel until its next boot, which containers on it share."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
