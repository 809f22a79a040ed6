"""Writes that matter: they appear whole or not at all."""

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
from ladder.models.errors import UserError, brief

TRIES = 5  # to write where other processes make and remove folders


def sync(path: Path) -> None:
    """Have a file, or a folder's entries, on the disk."""
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
    """Give a file the mode that a new one gets here; safetensors makes its for the owner alone.

    A new one shows it: to ask for the umask is to change it, for every thread.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        new.touch()
        with suppress(PermissionError):  # a file system with modes of its own
            path.chmod(stat.S_IMODE(new.stat().st_mode))
    finally:
        new.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder, and those above it, unless it is there; UserError where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {path}: {error.strerror}") from error


def refuse_inside(out: Path, sources: Iterable[str | Path], option: str = "--out") -> None:
    """Raise UserError where `out` is, or lies in, one of the `sources`, folders that are read."""
    place = Path(os.path.realpath(out))  # Path.resolve raises for links that lead in a circle
    for source in sources:
        if Path(os.path.realpath(source)) in (place, *place.parents):
            raise UserError(
                f"{option}={out} lies in {source}, which is read; choose a folder outside it"
            )


def check_writable(path: Path, option: str = "--out") -> None:
    """Raise UserError unless `path` can be written, by a file that is made beside it and removed.

    Before work is done, for what cannot be written afterwards has been done in vain.
    """
    for left in reversed(range(TRIES)):
        try:
            _probe(path)
            return
        except OSError as error:
            if isinstance(error, FileNotFoundError) and left:
                continue  # another process, which looks as we do, has removed a folder it had made
            shown = brief(str(path), 80) if error.errno == errno.ENAMETOOLONG else path
            raise UserError(
                f"{option}={shown} cannot be written ({error.strerror}); choose another place, or "
                f"make it writable"
            ) from error


def _probe(path: Path) -> None:
    folder, missing = path.parent, list[Path]()
    probe = folder / f".{path.name}.{secrets.token_hex(4)}"
    try:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        with suppress(FileExistsError):  # a file is in the way: the probe says so in plain words
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
    """Write a file atomically: a reader sees the old one or the new one, and no error leaves both.

    Raises UserError where it cannot be written (a full disk, say).
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
    """Write a folder atomically: the body fills a temporary sibling, which then takes the name.

    An error in the body leaves nothing behind, and an old folder as it was and usable until the
    new one is complete. What a process left that was killed is removed by the next one that writes
    there. Raises UserError where `path` exists and `overwrite` is not set, where another process
    is writing it, or where it cannot be written (a full disk, say).
    """
    with hold(beside(path), str(path)):
        yield from _new_folder(path, overwrite)


def beside(path: Path) -> Path:
    """The lock file of a folder that takes its name when it is complete.

    Raises UserError for a path that ends in no name.
    """
    if path.name in ("", ".."):
        raise UserError(f"{path} is no name for a new folder; choose one")
    return path.with_name(f".{path.name}.lock")


def _new_folder(path: Path, overwrite: bool) -> Iterator[Path]:
    temporary, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    try:
        if old.exists() and not path.exists():  # a process was killed between two renames
            old.rename(path)
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists already; choose another folder, or remove it first")
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
    except BrokenPipeError:  # nobody reads what the body prints, as with `| head`
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
    """How to fetch what looks like a model's name on the Hugging Face hub; else nothing."""
    path = Path(path)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path)) or path.parent.exists():
        return ""
    return (
        f"; if {path} is a name on the Hugging Face hub, fetch it first: hf download {path} "
        f"--local-dir {path.name}"
    )
