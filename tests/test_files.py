"""Folders that appear whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ladder.files import new_folder
from ladder.models import UserError


def fill(out: Path, overwrite: bool = False) -> None:
    with new_folder(out, overwrite) as folder:
        (folder / "new").write_text("new")


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """Long work for the same place, twice: the second to end must not remove the first's."""
    out = tmp_path / "out"
    late = new_folder(out)
    (late.__enter__() / "late").write_text("late")
    fill(out)
    with pytest.raises(UserError, match="out cannot be written"):
        late.__exit__(None, None, None)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_what_is_replaced_is_gone_when_the_new_folder_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out)
    (out / "old").write_text("old")
    with pytest.raises(UserError, match="exists already"):
        fill(out)
    with pytest.raises(RuntimeError), new_folder(out, overwrite=True):
        raise RuntimeError
    assert {path.name for path in out.iterdir()} == {"old", "new"}
    fill(out, overwrite=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_a_reader_of_what_is_printed_that_has_left_is_no_fault_of_the_folder(
    tmp_path: Path,
) -> None:
    with pytest.raises(BrokenPipeError), new_folder(tmp_path / "out"):
        raise BrokenPipeError
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from ladder.files import new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_folder(tmp_path: Path) -> None:
    """And not what a living one is writing."""
    out = tmp_path / "out"
    for name in (out, tmp_path / "other"):
        assert subprocess.run([sys.executable, "-c", KILLED, str(name)], check=False).returncode < 0
    left = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert left == {".out.partial", ".other.partial"}
    with new_folder(out):  # a second writer, later: it is the first to end
        fill(out)
        assert len(list(tmp_path.glob(".out.partial-*"))) == 1, "the living one's alone"
        (out / "new").unlink()
        out.rmdir()
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"out", ".other.partial"}
