"""Records of measurements: JSON lines with the machine, versions and command."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ladder import __version__
from ladder.models.errors import UserError


def append(file: Path, records: Sequence[dict[str, Any]]) -> None:
    """Append one line per record, all lines in one write.

    If the file's last line is incomplete, since its writing was interrupted, a new line is begun.
    """
    text = "".join(json.dumps(record) + "\n" for record in records)
    try:
        with file.open("ab+") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                text = text if stream.read(1) == b"\n" else f"\n{text}"
            stream.write(text.encode())
    except OSError as error:
        raise UserError(
            f"{file} cannot be written ({error.strerror}); make room, or make it writable"
        ) from error


def file_name(text: str) -> str:
    """A text as a part of a file's name: without slashes and other special characters."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")


def facts(gpu: str) -> dict[str, Any]:
    """The fields of every record: the machine, versions and command."""
    return {
        "gpu": gpu,
        "driver": driver_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ladder": __version__,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["ladder", *sys.argv[1:]]),
        "environment": {
            key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")
        },
    }


def driver_version() -> str:
    """The NVIDIA driver's version, or `unknown`."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="utf-8").strip() if path.is_file() else "unknown"


def commit() -> str:
    """The commit of the checkout that this package lies in, or `unknown`; with `-dirty` if the
    package's files are not those of the commit."""
    git = ["git", "-C", str(Path(__file__).parent)]

    def output(*words: str) -> str:
        run = subprocess.run([*git, *words], capture_output=True, text=True, check=False)
        return run.stdout.strip()

    changed = output("status", "--porcelain", "--untracked-files=no", "--", ".")
    return (output("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")
