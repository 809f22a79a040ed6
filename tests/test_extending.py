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
QUICK = "rule.diff"  # whose check `make test` runs

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git, to apply a diff")


def files_of(diff: str) -> set[str]:
    return set(re.findall(r"^\+\+\+ b/(\S+)$", diff, flags=re.MULTILINE))


def test_the_table_says_which_files_are_touched() -> None:
    rows = re.findall(r"^\| \[[^]]+\]\(#[\w-]+\) \| (\d+) \| (.+) \|$", PAGE, flags=re.MULTILINE)
    stated = [(int(count), set(re.findall(r"ladder/[\w/]+\.py", names))) for count, names in rows]
    assert stated == [(len(files_of(diff)), files_of(diff)) for diff in DIFFS.values()]


@needs_git
@pytest.mark.parametrize("name", list(DIFFS))
def test_a_diff_applies(name: str) -> None:
    """To the code as it is, of which nothing is changed. `make test-all` runs each one's check."""
    command = ["git", "apply", "--check", "-"]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, input=f"{DIFFS[name]}\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@needs_git
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in DIFFS]
)
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
