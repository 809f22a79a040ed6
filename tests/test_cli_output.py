"""Standard output that cannot take what a command prints: a full disk, a small encoding."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from ladder.cli import main
from ladder.parallel import launch

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="Linux's full device")
@pytest.mark.parametrize("words", [["--layers", "2", "ladder"], ["--json"]], ids=["short", "long"])
def test_output_without_room_is_one_line(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether Python writes at once or keeps it to the end, where its exit says `ignored`."""
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["plans", *words]) == 1
        full.flush()  # as at Python's exit: nothing is kept that cannot be written
    assert capsys.readouterr().err == (
        "error: the output, or a file, cannot be written: No space left on device; make "
        "room, or write elsewhere\n"
    )


def test_a_file_without_room_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> int:
        raise OSError(28, "No space left on device", "runs/x")

    assert launch.run(fails, ()) == 1
    assert capsys.readouterr().err.startswith("error: runs/x cannot be written: No space left")


def speaks() -> int:
    print("ü → b")
    return 0


@pytest.mark.parametrize(
    ("encoding", "errors", "said"),
    [
        ("latin-1", "strict", b"\xfc ? b\n"),
        ("ascii", "strict", b"? ? b\n"),
        ("ascii", "backslashreplace", b"\\xfc \\u2192 b\n"),  # the user's own choice
    ],
)
def test_a_character_that_the_output_lacks(
    encoding: str, errors: str, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors, newline="\n"))
    assert launch.run(speaks, ()) == 0
    assert written.getvalue() == said


def test_no_output_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `>&-`."""
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["plans", "ladder"]) == 0
