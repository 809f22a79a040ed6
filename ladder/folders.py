"""The folder that a command takes for a model: a model folder, or a run's folder.

This module does not import torch, which is slow, so that a missing folder is reported at once.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from ladder.files import hub_hint
from ladder.models.errors import UserError

ADAPTER = "adapter_config.json"  # of PEFT's folders


def checkpoints(run: Path) -> list[tuple[int, Path]]:
    """The pairs (step, folder) of a run's finished checkpoints, oldest first."""
    return _numbered(run / "checkpoints", "step")


def _numbered(parent: Path, name: str) -> list[tuple[int, Path]]:
    """The pairs (N, folder) of the folders NAME-N in `parent`, in the order of N."""
    found = []
    for folder in parent.glob(f"{name}-*"):
        if match := re.fullmatch(rf"{name}-(\d+)", folder.name):
            found.append((int(match[1]), folder))
    return sorted(found)


def _base(adapter: Path) -> str:
    """The name of the model that a PEFT adapter belongs to."""
    try:
        found = json.loads((adapter / ADAPTER).read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    name = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    return str(name or "a model")


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
    if not found and (inside := _numbered(path, "step")):
        run = f"{path.parent} (its newest) or " if path.name == "checkpoints" else ""
        raise UserError(f"{what} holds checkpoints of a run; give {run}{inside[-1][1]}")
    if not found and (path / ADAPTER).is_file():
        raise UserError(
            f"{what} holds an adapter of {_base(path)}, not a whole model; merge the two by peft's "
            f'AutoPeftModelForCausalLM.from_pretrained("{path}").merge_and_unload()'
            f'.save_pretrained("OUT"), and give OUT'
        )
    if not found:
        saved = [
            folder
            for _, folder in _numbered(path, "checkpoint")  # of transformers' Trainer
            if (folder / "config.json").is_file()
        ]
        if saved:
            raise UserError(f"{what} holds checkpoints of transformers' Trainer; give {saved[-1]}")
        raise UserError(
            f"{what} is neither a model folder (no config.json) nor a run with checkpoints; give a "
            "folder of one of the two"
        )
    return found[-1][1]
