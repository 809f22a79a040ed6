"""The last line of a command: the command to run next, with the paths of this one."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ladder.parallel import launch

PROMPT = "The"
GREETING = "Hi"  # of a chat


def say_next(*words: object, file: TextIO | None = None, before: Sequence[str] = ()) -> None:
    """Print `next: ladder ...`, a command ready to run, on rank 0 only. before: what runs it."""
    if launch.rank() == 0:
        line = shlex.join([*before, "ladder", *map(str, words)])
        print(f"next: {line}", file=file or sys.stdout, flush=True)


def free(path: Path) -> Path:
    """`path`, or if that exists, the first of `path-2`, `path-3`, ... that does not; of a page
    `name-2.html`."""
    page = path.suffix if path.suffix == ".html" else ""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name.removesuffix(page)}-{number}{page}")
    return found
