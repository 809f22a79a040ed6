"""The folder that a command takes for a model: a model folder, or a run's folder.

This module does not import torch, which is slow, so that a missing folder is reported at once.
"""

from __future__ import annotations

import re
from pathlib import Path

from ladder.files import hub_hint
from ladder.models.errors import UserError


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """The pairs (step, folder) of a run's finished checkpoints, oldest first."""
    return _steps(run / "checkpoints")


def _steps(parent: Path) -> list[tuple[int, Path]]:
    found = []
    for folder in parent.glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", folder.name):
            found.append((int(match[1]), folder))
    return sorted(found)


def newest(path: Path, option: str = "") -> Path:
    """`path` itself if it is a model folder, else the newest checkpoint of the run in it.

    option: what precedes the path in errors, such as `init=`.
    """
    if (path / "config.json").is_file():
        return path
    what = f"{option}{path}"
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise UserError(f"{what} {state}; give a model folder or a run's folder{hub_hint(path)}")
    found = checkpoints(path)
    if not found and (path / "recipe.json").is_file():
        raise UserError(
            f"{what} is a run that has no checkpoint yet; train on with --resume, or give another "
            "folder"
        )
    if not found and (inside := _steps(path)):
        run = f"{path.parent} (its newest) or " if path.name == "checkpoints" else ""
        raise UserError(f"{what} holds checkpoints of a run; give {run}{inside[-1][1]}")
    if not found:
        raise UserError(
            f"{what} is neither a model folder (no config.json) nor a run with checkpoints; give a "
            "folder of one of the two"
        )
    return found[-1][1]
