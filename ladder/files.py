"""Atomic writes of files and folders: they appear complete or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ladder.lock import hold, remove_empty
from ladder.lock import make_folder as make_folder  # lock needs it, and imports nothing from here
from ladder.models.errors import UserError, brief

TRIES = 5  # attempts to write while other processes make and remove folders


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def usual_mode(path: Path) -> None:
    """Give a file the default mode of new files; safetensors restricts its files to the owner.

    A new file shows that mode. Reading the umask would change it for a moment, in all threads.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        new.touch()
        with suppress(PermissionError):  # a file system with modes of its own
            path.chmod(stat.S_IMODE(new.stat().st_mode))
    finally:
        new.unlink(missing_ok=True)


def refuse_inside(out: Path, sources: Iterable[str | Path], option: str = "--out") -> None:
    """Raise UserError if `out` is, or lies in, one of the folders `sources`, which are read."""
    real = Path(os.path.realpath(out))  # Path.resolve raises for cyclic links
    for source in sources:
        if Path(os.path.realpath(source)) in (real, *real.parents):
            raise UserError(
                f"{option}={out} is in {source}, which is read; choose a folder outside it"
            )


def check_writable(path: Path, option: str = "--out") -> None:
    """Raise UserError unless `path` can be written, as tried with a temporary file beside it.

    To be called before long work whose result goes to `path`.
    """
    for left in reversed(range(TRIES)):
        try:
            _probe(path)
            return
        except OSError as error:
            if isinstance(error, FileNotFoundError) and left:
                continue  # another process, which checks too, has removed a folder that it made
            shown = brief(str(path), 80) if error.errno == errno.ENAMETOOLONG else path
            raise UserError(
                f"{option}={shown} cannot be written ({error.strerror}); choose another path, or "
                f"make it writable"
            ) from error


def check_new_folder(path: Path, option: str = "--out") -> None:
    """Raise UserError, before the work, unless `new_folder(path)` may write it."""
    beside(path)
    if os.path.lexists(path):  # a link that leads nowhere is in the way, too
        raise _exists(f"{option}={path}")
    check_writable(path, option)


def _exists(what: object) -> UserError:
    return UserError(f"{what} exists already; choose another folder, or remove it first")


def check_names_file(path: Path, option: str) -> None:
    """Raise UserError, before the work, unless `path` names a file in a folder that exists."""
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{option}={path}: name a file in a folder that exists")


def _probe(path: Path) -> None:
    folder, missing = path.parent, list[Path]()
    probe = folder / f".{path.name}.{secrets.token_hex(4)}"
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        with suppress(FileExistsError):  # a file is in the way: the probe's error is clearer
            folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        if path.is_dir():
            probe = path / probe.name
            probe.touch()
            probe.unlink()
        elif path.exists():
            path.open("ab").close()
    finally:
        remove_empty(missing)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old file or the new one, even after an error.

    Raises UserError if it cannot be written (for example, because the disk is full).
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); choose another folder or make room"
        ) from error
    finally:
        if temporary.exists():
            temporary.unlink()


@contextmanager
def new_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder atomically: the body fills a temporary sibling, which is then renamed.

    An old folder stays usable until the new one is complete. An error in the body leaves no files
    behind; those of a killed process are removed by the next writer of the same path. Raises
    UserError if `path` exists and `overwrite` is not set, if another process is writing it, or if
    it cannot be written (for example, because the disk is full).
    """
    with hold(beside(path), str(path)):
        yield from _new_folder(path, overwrite)


def beside(path: Path) -> Path:
    """The lock file of a folder that is written atomically.

    Raises UserError for a path without a final name.
    """
    if path.name in ("", ".."):
        raise UserError(f"{path} is no name for a new folder; choose one")
    return path.with_name(f".{path.name}.lock")


def _new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    temporary, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    try:
        if old.exists() and not path.exists():  # a process was killed between two renames
            old.rename(path)
        if os.path.lexists(path) and not overwrite:
            raise _exists(path)
        for left in (temporary, old):
            shutil.rmtree(left, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        for file in (*temporary.rglob("*"), temporary):
            sync(file)
        try:
            if overwrite and path.exists():
                path.rename(old)
            temporary.rename(path)  # fails where another process has made it meanwhile
        except BaseException:
            if old.exists() and not path.exists():
                old.rename(path)
            raise
        sync(path.parent)
    except BrokenPipeError:  # the reader of the body's output has ended, as with `| head`
        raise
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error}); choose another folder or make room"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def hub_hint(path: str | Path) -> str:
    """The command that downloads a model of the Hugging Face hub; "" if `path` is no such name, or
    one of our own folders, which are in `runs`."""
    path = Path(path)
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path))
    if not named or path.parts[0] == "runs" or path.parent.exists():
        return ""
    return (
        f"; if {path} is a name on the Hugging Face hub, fetch it first: hf download {path} "
        f"--local-dir {path.name}"
    )
