"""One process at a time in a folder: a lock file, which the end of its holder lets go of.

Processes of one machine ask the kernel (flock), which knows at once when a holder has ended, killed
or not. Between machines that share a file system flock may not reach. There the file itself tells:
it names the holder, who touches it every BEAT seconds; after STALE seconds without that the holder
counts as dead. So a process that stood still for longer can lose the lock, and so can one of two
machines that both take a stale one at the same moment: `Lock.check` tells it, before it writes what
would mix with the other's.
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
TRIES, PAUSE = 10, 0.05  # how often, and how many seconds apart, to look at what is changing hands


@dataclass(frozen=True)
class Holder:
    """Who has a lock. machine: equal where the kernel is the same."""

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
    """The lock file `path`, held by this process; `what` is what it keeps to one, in errors."""

    def __init__(self, path: Path, what: str, handle: int) -> None:
        self.path, self.what, self.handle = path, what, handle
        now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        self.holder = Holder(socket.gethostname(), _machine(), os.getpid(), now)
        text = json.dumps(asdict(self.holder)).encode()
        os.ftruncate(handle, 0)
        os.pwrite(handle, text, 0)
        os.fsync(handle)  # NFS shows others what was written only then
        self._over = threading.Event()
        _held.add(self)
        threading.Thread(target=self._beat, name="ladder-lock", daemon=True).start()

    def check(self) -> None:
        """Raise UserError where this process has the lock no more."""
        now = _holder(self.path)
        if now != self.holder:
            by = f"in use by another process: {now}" if now else f"without its lock, {self.path}"
            raise UserError(
                f"{self.what} is {by}; this process, {self.holder}, stood still for longer than "
                f"{STALE:.0f} s, or its lock was removed, and it writes nothing more there"
            )

    def release(self) -> None:
        if self not in _held:  # a fork, which never had it
            return
        _held.remove(self)
        self._over.set()
        with suppress(OSError):  # nobody minds: the kernel's lock goes, or the file gets old
            if _holder(self.path) == self.holder:
                self.path.unlink()
        os.close(self.handle)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with suppress(OSError):  # a server that is away for a moment
                if _holder(self.path) == self.holder:
                    os.utime(self.path)


_held: set[Lock] = set()  # by this process


def _let_go() -> None:
    """In a fork of this process, which would keep the kernel's locks when this one has ended."""
    while _held:
        os.close(_held.pop().handle)


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def hold(path: Path, what: str) -> Iterator[Lock]:
    """Within: this process alone has the lock file `path`, whose folder is made where it is absent.

    what: the option, and its value, whose folder is kept to one process. Afterwards neither the
    file nor an empty folder that was made for it is left. Raises UserError, which names the holder,
    where another process has it.
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
    """Remove those of the folders, the innermost first, that hold nothing."""
    for folder in folders:
        with suppress(OSError):  # it holds something, or is gone
            folder.rmdir()


def _take(path: Path, what: str) -> Lock:
    for left in reversed(range(TRIES)):
        with suppress(FileNotFoundError):  # a holder has removed it, or its folder, just now
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
                return lock
        time.sleep(PAUSE)
    raise UserError(f"{what} changes hands all the time; start again when nobody else does")


def _look(path: Path, what: str, last: bool) -> Lock | None:
    """`_judge` of the lock file, which is made where there is none."""
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder}: {error.strerror}") from error
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
    """The lock, if it can be had; None: look again. Raises UserError where another has it."""
    known, blocked = True, False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        blocked = True
    except OSError:  # a file system without locks: what the file says is all there is
        known = False
    if not _same(path, handle):
        return None
    holder = _holder(path)
    if not blocked and (created or (known and (holder is None or holder.is_here))):
        return Lock(path, what, handle)
    if not last and (holder is None or (blocked and holder.is_here and not _alive(holder.pid))):
        return None  # somebody who has just got it, and is about to say so
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
        return Lock(path, what, handle)
    path.unlink(missing_ok=True)  # a file server still holds it for a machine that has gone
    return None


def _refuse(path: Path, what: str, holder: Holder | None, remedy: str) -> NoReturn:
    who = holder or f"{path} does not say which"
    raise UserError(f"{what} is in use by another process: {who}; {remedy}")


def _holder(path: Path) -> Holder | None:
    """Who the file says has the lock; None where it says nothing."""
    try:
        found = Holder(**json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # or about to be written
        return None
    return found if isinstance(found.pid, int) else None


def _same(path: Path, handle: int) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _silent(path: Path) -> float:
    """Seconds since the file was touched, by its file system's clock, not by this machine's."""
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
    """What names this machine's kernel, until it starts anew: containers on it share it."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
