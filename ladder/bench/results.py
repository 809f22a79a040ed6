"""Result files of the benchmarks: JSON lines; old keys are translated to the current ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ladder.models.errors import UserError

# Renamed keys of records and points, which files in benchmarks/results still have.
RENAMED = {"dropped": "no_comm", "silent": "no_comm", "without_reduces": "no_comm"}


WRITTEN = "name the results of a benchmark, a .jsonl that `ladder bench` has written"


def read_results(file: Path) -> list[dict[str, Any]]:
    """The records of a file. Raises UserError if a line is not JSON, or not a record."""
    records: list[dict[str, Any]] = []
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text; {WRITTEN}") from error
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            remedy = f"{WRITTEN}; if it is one, remove the line, whose writing was interrupted"
            if records:
                remedy = "its writing was interrupted; remove the line"
            raise UserError(f"line {number} of {file} is not JSON ({error}): {remedy}") from error
        parts = ("point", "machine", "result")
        if not isinstance(record, dict) or any(
            record.get(part) is not None and not isinstance(record[part], dict) for part in parts
        ):
            raise UserError(f"line {number} of {file} is no record of a benchmark; {WRITTEN}")
        record = _renamed(record)
        if record.get("point"):
            record["point"] = _renamed(record["point"])
        records.append(record)
    return records


def _renamed(record: dict[str, Any]) -> dict[str, Any]:
    return {RENAMED.get(key, key): value for key, value in record.items()}
