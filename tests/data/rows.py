"""Rows of text that the tests of Parquet files and of streams prepare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ladder.cli import main

TEXTS = [f"row {n} é中👩‍👦 says\r\n {'word ' * (n % 7)}" for n in range(60)]
TEXTS[7] = ""  # empty rows are passed over, and counted


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


def fails_with(
    command: list[str],
    tokenizer: Path,
    tmp_path: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command exits with 2 and one line that has the words, and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    more = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert main([*command, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert sorted(tmp_path.iterdir()) == before
