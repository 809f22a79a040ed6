"""Writes that matter: they appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ladder.models.errors import UserError


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


@contextmanager
def new_folder(path: Path, overwrite: bool = False) -> Iterator[Path]:
    """Write a folder atomically: the body fills a temporary sibling, which then takes the name.

    An error in the body leaves nothing behind, and an old folder as it was. Raises UserError where
    `path` exists and `overwrite` is not set, or where it cannot be written.
    """
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists already; choose another folder, or remove it first")
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}") from error
    try:
        yield temporary
        for file in [*temporary.rglob("*"), temporary]:
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
        if path.exists():
            old = path.with_name(f".{path.name}.old-{os.getpid()}")
            os.replace(path, old)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
