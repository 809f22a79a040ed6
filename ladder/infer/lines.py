"""The files of `ladder generate`, in JSON lines: prompts to continue and their completions."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ladder.config import parse_json
from ladder.files import write_text
from ladder.models.errors import UserError, kind_of, reason
from ladder.parallel import launch


def line_name(file: str, number: int) -> str:
    """What errors call a line of --prompts, numbered from 1."""
    return f"{'stdin' if file == '-' else file} line {number}"


def read_prompts(file: str) -> dict[int, str]:
    """The prompts of --prompts by the number of their line, from 1. Empty lines hold none. `-` is
    standard input.

    Raises UserError for a line that is no JSON object with a text as its `prompt`.
    """
    if file == "-" and launch.world_size() > 1:
        raise UserError("--prompts=- has no standard input that all ranks share; give a file")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise UserError(
            f"--prompts={file} cannot be read ({reason(error)}); give a file of JSON lines"
        ) from error
    if not data.strip():
        raise UserError(f'--prompts={file} is empty; give lines such as {{"prompt": "The"}}')
    prompts = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        where = line_name(file, number)
        try:
            record = parse_json(line)
        except ValueError as error:
            raise UserError(f"{where} is not valid JSON ({error}); correct the line") from error
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(prompt, str):
            found = f"prompt={prompt!r}" if isinstance(record, dict) else kind_of(record)
            raise UserError(f'{where} has {found}; write it as {{"prompt": "some text"}}')
        prompts[number] = prompt
    return prompts


def write_completions(file: Path, completions: Sequence[dict[str, Any]]) -> None:
    """Write the completions, one a line, all or nothing. Raises UserError if it cannot be done."""
    lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in completions)
    write_text(file, "".join(lines))
