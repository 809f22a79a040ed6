"""The line that ends a command: what to run next, with the paths that it has read or written."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TextIO

from ladder.parallel import launch

PROMPT = "The"


def say_next(*words: object, file: TextIO | None = None) -> None:
    """Print `next: ladder ...`, a command that works as it stands; on rank 0 alone."""
    if launch.rank() == 0:
        line = shlex.join(["ladder", *map(str, words)])
        print(f"next: {line}", file=file or sys.stdout, flush=True)


def free(path: Path) -> Path:
    """`path`, or where something is there `path-2`, `path-3`, ..."""
    found, number = path, 1
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found
