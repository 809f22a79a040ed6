"""Unfinished work of `ladder data prepare`, and several processes: always the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ladder import files
from ladder.data import shards, units
from ladder.data.prepare import prepare
from ladder.data.sources import Names
from ladder.data.tokenise import check_left_out
from ladder.data.tokenizer import train_tokenizer
from ladder.lock import hold
from ladder.models.errors import UserError
from tests import ROOT
from tests.distributed import PATIENCE

UNIT = 400  # bytes: the corpus has some thirty units
OPTIONS: dict[str, Any] = {"heldout_fraction": 0.2, "shard_tokens": 333}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, JSON lines and, where it can be, Parquet; long and short documents, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [f"document {n} é中 " + f"says {n * n} " * (n * 7 % 23) for n in range(90)]
    for n in range(30):
        (folder / f"{n:02d}.txt").write_text(texts[n])
    lines = [json.dumps({"text": text}) for text in texts[30:60]]
    (folder / "lines.jsonl").write_text("\n\n".join(lines))
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        (folder / "rows.jsonl").write_text("\n".join(lines))
    else:
        parquet.write_table(
            pyarrow.table({"text": texts[60:]}), folder / "rows.parquet", row_group_size=4
        )
    return folder


@pytest.fixture(scope="module")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((path.read_text() for path in corpus.glob("*.txt")), 300, out)
    return out


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT", UNIT)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The result of an uninterrupted call, with units of another size."""
    out = tmp_path_factory.mktemp("whole") / "out"
    before, units.UNIT = units.UNIT, 2**23
    prepare([corpus], tokenizer, out, **OPTIONS)
    units.UNIT = before
    return _contents(out)


def _killed(call: Callable[[], object]) -> bool:
    """Do `call` in a fork of this process; True if it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            call()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def _kill_at(moment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process killed before or in its `moment`th change of the disk."""
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for owner, name in (
        (files, "sync"),
        (Path, "open"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "write_bytes"),
        (Path, "write_text"),
        (Path, "unlink"),
        (shards.shutil, "rmtree"),
        (os, "truncate"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]
)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    corpus: Path, tokenizer: Path, tmp_path: Path, whole: dict[str, bytes], seed: int
) -> None:
    """Catches tokens written twice or never, an order of writes that a crash breaks."""
    out = tmp_path / "out"
    draw = random.Random(seed)
    kills = 0

    def once() -> None:
        with pytest.MonkeyPatch.context() as patch:
            _kill_at(moment, patch)
            prepare([corpus], tokenizer, out, **OPTIONS)

    while not out.exists():
        moment = draw.randrange(1, 60)
        kills += _killed(once)
        assert kills < 100
    assert kills > 2
    assert _contents(out) == whole
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ["out"] or not (tmp_path / ".out.unfinished" / "data").exists()


@pytest.mark.parametrize("name", ["rename", "replace"])
def test_killed_while_the_old_folder_is_replaced(
    corpus: Path, tokenizer: Path, tmp_path: Path, whole: dict[str, bytes], name: str
) -> None:
    """Catches an old folder lost, and one left aside after the next call."""
    out = tmp_path / "out"
    prepare([corpus / "00.txt"], tokenizer, out)
    old = _contents(out)

    def once(at: int) -> None:
        calls = 0
        real = Path.rename

        def rename(path: Path, target: Path) -> Path:
            nonlocal calls
            calls += 1
            if calls == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(path, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            prepare([corpus], tokenizer, out, overwrite=True, **OPTIONS)

    assert _killed(lambda: once(1 if name == "replace" else 2))
    if name == "replace":
        assert _contents(out) == old
    else:  # between the two renames
        assert not out.exists()
        with pytest.raises(UserError, match="already holds prepared data"):
            prepare([corpus], tokenizer, out, **OPTIONS)
        assert _contents(out) == old
    prepare([corpus], tokenizer, out, overwrite=True, **OPTIONS)
    assert _contents(out) == whole
    assert os.listdir(tmp_path) == ["out"]


def _interrupt(out: Path, corpus: Path, tokenizer: Path, at: int = 9) -> None:
    """A call that Ctrl-C ends after some units."""
    real = shards.Unfinished.commit

    def commit(work: shards.Unfinished, **facts: Any) -> None:
        real(work, **facts)
        if work.units == at:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards.Unfinished, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            prepare([corpus], tokenizer, out, **OPTIONS)


def test_what_is_done_is_not_done_again(
    corpus: Path,
    tokenizer: Path,
    tmp_path: Path,
    whole: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches an interruption that costs everything, and finished files read once more."""
    out = tmp_path / "out"
    _interrupt(out, corpus, tokenizer, at=9)
    assert f"kept in {tmp_path}/.out.unfinished; the same command" in capsys.readouterr().err
    assert not out.exists()
    commits = []
    real = shards.Unfinished.commit

    def commit(work: shards.Unfinished, **facts: Any) -> None:
        commits.append(work.units)
        real(work, **facts)

    monkeypatch.setattr(shards.Unfinished, "commit", commit)
    prepare([corpus], tokenizer, out, **OPTIONS)
    assert commits[0] == 9
    assert "going on after " in capsys.readouterr().err
    assert _contents(out) == whole
    assert os.listdir(tmp_path) == ["out"]


def test_work_of_an_earlier_version_goes_on(
    corpus: Path, tokenizer: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Work of a version that did not record the first conversation left out."""
    out = tmp_path / "out"
    _interrupt(out, corpus, tokenizer, at=9)
    progress = tmp_path / ".out.unfinished/progress.json"
    state = json.loads(progress.read_text())
    del state["first_left_out"]
    progress.write_text(json.dumps(state))
    prepare([corpus], tokenizer, out, **OPTIONS)
    assert _contents(out) == whole
    counted = {"left_out": {"without messages": 1}, "first_left_out": {}, "names": Names()}
    with pytest.raises(UserError, match="can be used: 1 without messages; correct"):
        check_left_out(counted, 0.1)


def test_other_arguments_do_not_go_on(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Catches two corpora in one folder, and hours of work deleted for a slip of the hand."""
    out = tmp_path / "out"
    _interrupt(out, corpus, tokenizer)
    kept = tmp_path / ".out.unfinished"
    for change, match in (
        ({"heldout_fraction": 0.5}, r"a call with heldout_fraction=0\.2 and not 0\.5"),
        ({"shard_tokens": 10}, r"shard_tokens=333 and not 10"),
        ({"max_tokens": 10}, r"max_tokens=None and not 10; repeat that call .*--overwrite"),
    ):
        with pytest.raises(UserError, match=match):
            prepare([corpus], tokenizer, out, **{**OPTIONS, **change})
        assert (kept / "progress.json").exists()
    index = prepare([corpus], tokenizer, out, **{**OPTIONS, "max_tokens": 1}, overwrite=True)
    assert sum(split["documents"] for split in index["splits"].values()) == 1
    assert os.listdir(tmp_path) == ["out"]


def test_one_unit_of_other_arguments_is_nothing_to_finish(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single unit is not kept: an error that asks to finish it would itself remove it."""
    out = tmp_path / "out"
    commit = shards.Unfinished.commit

    def once(work: Any, **facts: Any) -> None:
        commit(work, **facts)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(shards.Unfinished, "commit", once)
        assert _killed(lambda: prepare([corpus], tokenizer, out, **OPTIONS))
    assert (tmp_path / ".out.unfinished" / "progress.json").exists()
    prepare([corpus], tokenizer, out, **{**OPTIONS, "heldout_fraction": 0.5})
    assert os.listdir(tmp_path) == ["out"]


def test_changed_files_do_not_go_on(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Catches a corpus of which one half is old."""
    copy = tmp_path / "corpus"
    copy.mkdir()
    for path in corpus.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    _interrupt(tmp_path / "out", copy, tokenizer)
    (copy / "29.txt").write_text("other")
    changed = r"work on files whose names, sizes or dates have changed since; give --overwrite to"
    with pytest.raises(UserError, match=changed):
        prepare([copy], tokenizer, tmp_path / "out", **OPTIONS)
    with pytest.raises(UserError, match=r"a call with shard_tokens=333 and not 10; repeat"):
        prepare([copy], tokenizer, tmp_path / "out", **{**OPTIONS, "shard_tokens": 10})
    prepare([copy], tokenizer, tmp_path / "out", overwrite=True, **OPTIONS)


def test_damaged_work_starts_over(
    corpus: Path, tokenizer: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Catches shards that a crash of the machine cut short, gone on with."""
    for damage in ("shard", "progress"):
        out = tmp_path / damage
        _interrupt(out, corpus, tokenizer)
        kept = tmp_path / f".{damage}.unfinished"
        if damage == "shard":
            os.truncate(kept / "data" / "train-00000.bin", 10)
        else:
            (kept / "progress.json").write_text("{")
        prepare([corpus], tokenizer, out, **OPTIONS)
        assert _contents(out) == whole


def test_two_at_once_are_refused(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Catches two processes that write to the same shards."""
    held = hold(files.beside(tmp_path / "out"), "another")
    with held, pytest.raises(UserError, match=rf"out is in use by .*pid {os.getpid()}, .*wait"):
        prepare([corpus], tokenizer, tmp_path / "out", **OPTIONS)
    prepare([corpus], tokenizer, tmp_path / "out", **OPTIONS)


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_same_bytes(
    corpus: Path, tokenizer: Path, tmp_path: Path, whole: dict[str, bytes], workers: int
) -> None:
    """Catches shares that depend on who does them, and results in the order of their arrival."""
    prepare([corpus], tokenizer, tmp_path / "out", workers=workers, **OPTIONS)
    assert _contents(tmp_path / "out") == whole


def test_killed_with_its_workers(
    corpus: Path, tokenizer: Path, tmp_path: Path, whole: dict[str, bytes]
) -> None:
    """Catches workers that outlive the process; the work goes on with another number of them."""
    out = tmp_path / "out"
    code = (
        "import time, sys\n"
        "from ladder.data import prepare, shards, units\n"
        f"units.UNIT = {UNIT}\n"
        "commit = shards.Unfinished.commit\n"
        "def slow(*args, **kwargs): commit(*args, **kwargs); time.sleep(0.05)\n"
        "shards.Unfinished.commit = slow\n"
        "if __name__ == '__main__':\n"
        f"    prepare.prepare([{str(corpus)!r}], {str(tokenizer)!r}, {str(out)!r}, workers=2, "
        f"**{OPTIONS})\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    progress = tmp_path / ".out.unfinished" / "progress.json"
    limit = time.monotonic() + PATIENCE
    while not (progress.exists() and json.loads(progress.read_text())["units"] > 3):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.02)
    children = _children(process.pid)
    assert len(children) >= 2
    process.kill()
    process.wait()
    assert json.loads(progress.read_text())["units"] > 3
    for _ in range(200):
        if not any(map(_runs, children)):
            break
        time.sleep(0.02)
    assert not any(map(_runs, children))
    prepare([corpus], tokenizer, out, **OPTIONS)
    assert _contents(out) == whole


def _children(parent: int) -> list[int]:
    return [
        int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ]


def _runs(process: int) -> bool:
    """Whether there is such a process, not yet ended (a zombie waits for its parent only)."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
