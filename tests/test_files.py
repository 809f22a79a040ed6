"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ladder.files import check_new_folder, check_writable, new_folder
from ladder.models import UserError


def fill(out: Path, overwrite: bool = False) -> None:
    with new_folder(out, overwrite) as folder:
        (folder / "new").write_text("new")


def test_a_folder_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    """Long work for the same place, twice: the second is refused as it begins. And what something
    else has made by the end stays."""
    out = tmp_path / "out"
    late = new_folder(out)
    (late.__enter__() / "late").write_text("late")
    with pytest.raises(UserError, match=rf"out is in use by another process: .*pid {os.getpid()}"):
        fill(out)
    out.mkdir()
    (out / "new").write_text("new")
    with pytest.raises(UserError, match="out cannot be written"):
        late.__exit__(None, None, None)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "new"]


def test_a_folder_that_another_removes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands that begin at once, and make and remove the same folder to see if they can."""
    touch, removed = Path.touch, []

    def remove_first(path: Path) -> None:
        if not removed:
            removed.append(path.parent)
            path.parent.rmdir()
        touch(path)

    monkeypatch.setattr(Path, "touch", remove_first)
    check_writable(tmp_path / "runs" / "out")
    assert removed == [tmp_path / "runs"]
    assert not any(tmp_path.iterdir())


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


def test_a_link_that_leads_nowhere_is_in_the_way(tmp_path: Path) -> None:
    """The folder would be renamed to it at the end of the work, which fails."""
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"--out=.*out exists already"):
        check_new_folder(tmp_path / "out")
    with pytest.raises(UserError, match="out exists already"):
        fill(tmp_path / "out")


def test_a_reader_of_what_is_printed_that_has_left_is_no_fault_of_the_folder(
    tmp_path: Path,
) -> None:
    with pytest.raises(BrokenPipeError), new_folder(tmp_path / "out"):
        raise BrokenPipeError
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
from pathlib import Path
from ladder.files import check_writable, new_folder
with new_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_goes_with_the_next_folder(tmp_path: Path) -> None:
    """Its lock too, and nothing of another folder's. One that was killed between two renames had
    put the old folder aside."""
    out = tmp_path / "out"
    for name in (out, tmp_path / "other"):
        assert subprocess.run([sys.executable, "-c", KILLED, str(name)], check=False).returncode < 0
    others = {".other.partial", ".other.lock"}
    assert {path.name for path in tmp_path.iterdir()} == {".out.partial", ".out.lock", *others}
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "old").write_text("old")
    with pytest.raises(UserError, match="exists already"):
        fill(out)
    assert [path.name for path in out.iterdir()] == ["old"]
    fill(out, overwrite=True)
    assert [path.name for path in out.iterdir()] == ["new"]
    assert {path.name for path in tmp_path.iterdir()} == {"out", *others}
