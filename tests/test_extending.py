"""docs/extending.md: its diffs apply to the package as it is, and its checks pass then."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT, pages
from tests.distributed import PATIENCE

PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
BLOCKS = pages.parse(PAGE)
DIFFS = {block.note: block.text for block in BLOCKS if block.language == "diff"}


def files_of(diff: str) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)$", diff, flags=re.MULTILINE))


def test_the_table_says_which_files_are_touched() -> None:
    rows = re.findall(r"^\| \[[^]]+\]\(#[\w-]+\) \| (\d+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    stated = [(int(count), set(re.findall(r"ladder/[\w/]+\.py", names))) for count, names in rows]
    assert stated == [(len(files_of(diff)), files_of(diff)) for diff in DIFFS.values()]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git, to apply a diff")
@pytest.mark.parametrize("name", list(DIFFS))
def test_an_extension(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the code that a diff touches, or of what its check calls, fails this."""
    shutil.copytree(ROOT / "ladder", tmp_path / "ladder")
    monkeypatch.chdir(tmp_path)
    pages.write_files(BLOCKS)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "GIT_CEILING_DIRECTORIES": str(tmp_path.parent),  # no repository's paths
    }
    check = f"check_{name.removesuffix('.diff')}.py"
    for command in (["git", "apply", name], [sys.executable, check]):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
