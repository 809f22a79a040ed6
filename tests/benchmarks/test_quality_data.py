"""benchmarks/quality_data.py: the corpus of the quality benchmark."""

from __future__ import annotations

import gzip
import json
import sys
import tarfile
from pathlib import Path

import pytest

from ladder.data.prepared import open_data
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import quality_data


def test_a_manual_page_loses_its_navigation_and_keeps_its_code() -> None:
    html = """<div class="sidebar"><p>Search</p></div><div class="body" role="main"><div><h1>Locks
      <a class="headerlink" href="#x">P</a></h1><p>Take <em>one</em>
      lock.</p><pre>a:\n    b &lt; 1\n</pre></div><p>End.</p></div><div><p>Footer</p></div>"""
    lines = [line for line in quality_data.Page.text(html).splitlines() if line]
    assert [" ".join(line.split()) for line in lines[:2]] == ["Locks", "Take one lock."]
    assert lines[2:] == ["a:", "    b < 1", "End."]


def test_the_archive_holds_prepared_data_and_follows_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page stands in for a source that quotes code; translations and pictures are left out."""
    monkeypatch.setattr(quality_data, "python", lambda: iter(["import os\n" * 9] * 9))
    call = ["--root", str(tmp_path), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    call += ["--heldout-fraction", "0.3", "--archive"]
    assert quality_data.main([*call, str(tmp_path / "none.tar.xz")]) == 2
    assert "install linux-doc-6.1" in capsys.readouterr().err

    linux = tmp_path / quality_data.LINUX
    for name, text in {
        "Documentation/api.rst.gz": ".. kernel-doc:: lib/list.c\n",
        "Documentation/plain.rst": "Plain words.\n",
        "Documentation/translations/it/plain.rst": "Parole.\n",
        "Documentation/picture.svg": "<svg/>\n",
        "html/api.html": '<div role="main"><p>A list is doubly linked.</p></div>',
    }.items():
        file = linux / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    entry = "Word\n   Its meaning, and more of it.\n"
    file = tmp_path / quality_data.GCIDE
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress((entry * 1000).encode() + b"\x92"))
    for name in ("a.tar.xz", "b.tar.xz"):
        assert quality_data.main([*call, str(tmp_path / name)]) == 0
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()

    lines = (tmp_path / "out/texts/linux.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].strip() for line in lines]
    assert texts == ["A list is doubly linked.", "Plain words."]
    lines = (tmp_path / "out/texts/gcide.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert all(json.loads(line)["text"].startswith(entry) for line in lines)
    with tarfile.open(tmp_path / "a.tar.xz") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    data = open_data(tmp_path / "unpacked" / "data")
    assert sum(split.documents for split in data.splits.values()) == 9 + 2 + 3
