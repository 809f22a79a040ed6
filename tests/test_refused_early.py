"""Impossible options and paths that cannot be written are refused in one line, before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ladder import hf
from ladder.cli import main
from ladder.data.prepare import prepare
from ladder.files import check_writable, refuse_inside
from ladder.models.errors import UserError
from ladder.train.loop import train
from tests.documents import contents
from tests.train.runs import recipe


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, of a model of two layers and a context of 512."""
    folder = tmp_path_factory.mktemp("refused") / "run"
    train(recipe(corpus, folder, plan="standard", steps=1, warmup_steps=0), device="cpu")
    return folder


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No document may be read and no tensor loaded."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("work was done before what is wrong was told")

    monkeypatch.setattr("ladder.eval.offline.open_corpus", never)
    monkeypatch.setattr("ladder.data.sources.open_corpus", never)
    monkeypatch.setattr("ladder.data.tokenise.Tokenisation.run", never)
    monkeypatch.setattr("ladder.convert.command.write_tensors", never)
    monkeypatch.setattr("ladder.convert.command.refuse_damage", never)
    monkeypatch.setattr("ladder.convert.sensitivity.load_for_inference", never)
    monkeypatch.setattr("ladder.bench.training.command.measure", never)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tokenizer train --vocab-size 0 --out {}/x", "--vocab-size=0 is too small"),
        ("tokenizer train --vocab-size -5 --out {}/x", "--vocab-size=-5 is too small"),
        ("tokenizer train --out {}/file/x", "--out={}/file/x/tokenizer.json cannot be written"),
        ("tokenizer train --out /proc/x", "--out=/proc/x/tokenizer.json cannot be written"),
        ("tokenizer train {texts} --out {texts}/x", "--out={texts}/x is in {texts}, which is"),
        ("data prepare --workers 1000000 --tokenizer {tok} --out {}/x", "--workers=1000000 is"),
        ("data prepare {texts} --tokenizer {tok} --out {}/file/x", "/file/x cannot be written"),
        (
            "data prepare {texts} --tokenizer {tok} --out {texts}/x",
            "is in {texts}, which is read",
        ),
        ("data prepare {texts}/.. --tokenizer {tok} --out {texts}/x", "is in {texts}/.., which"),
        ("convert {run} --out {run}/x", "--out={run}/x is in {run}, which is read"),
        ("convert {run} --out {run}/checkpoints/x", "is in {run}, which is read"),
        ("convert {run} --out {}/file", "--out={}/file exists already; choose another folder"),
        ("convert {run} --out {}/file/x", "--out={}/file/x cannot be written"),
        ("convert sensitivity {run} --data {data} --layers 99", "--layers=99 must be 1 to 2"),
        ("convert sensitivity {run} --data {data} --layers 0", "--layers=0 must be 1 to 2"),
        ("convert sensitivity {run} --data {data} --layers 1 --out {}/file/x", "cannot be written"),
        ("convert sensitivity {run} --data {data} --layers 1 --out {run}/x", "is in {run}"),
        ("eval {run} --out {run}/eval", "--out={run}/eval is in {run}, which is read"),
        ("eval {run} --text {texts} --out {texts}/eval", "is in {texts}, which is read"),
        ("eval {run} --out {}/file/x", "--out={}/file/x cannot be written"),
        (
            "train tiny data={data} out={}/x reducer=push",
            "reducer=push cannot be used here: it",
        ),
        (
            "train tiny data={data} out={}/x reducer=asinc",
            "unknown reducer 'asinc' (did you mean 'async'",
        ),
        (
            "train tiny data={data} out={}/x reducer=sequence",
            "reducer=sequence with sequence_parallel=false: use async or auto, or set",
        ),
        ("plans --model tiny --layers 99", "--layers=99: tiny has 4"),
        ("bench train --model tiny --layers 99", "--layers=99 must be 1 to the 4 layers of tiny"),
        ("bench train --model tiny --layers -1", "--layers=-1 must be 1 to the 4 layers of tiny"),
        ("bench train --model tiny --seq-len 4096", "--seq-len=4096 must be 1 to the context of"),
        ("bench train --model tiny --seq-len 0", "--seq-len=0 must be 1 or more"),
        ("bench train --model tiny --seq-len 64 --out {}/file", "{}/file/train.jsonl cannot be"),
        ("bench train --model tiny --batch 10000000000", "--batch=10000000000 is too large"),
        ("bench train --model tiny --nproc 1000000", "--nproc=1000000 is too many"),
    ],
)
def test_a_mistake_costs_no_work(
    words: str,
    said: str,
    run: Path,
    corpus: Path,
    tmp_path: Path,
    work: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    places = {"texts": corpus.parent / "texts", "tok": corpus.parent / "tokenizer", "run": run,
              "data": corpus}  # fmt: skip
    before = sorted(run.rglob("*"))
    assert main([word.format(tmp_path, **places) for word in words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert said.format(tmp_path, **places) in line
    assert sorted(run.rglob("*")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_out_within_a_source_is_seen_through_links(tmp_path: Path) -> None:
    (tmp_path / "source" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "source" / "deep")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    for out in ("source", "source/x", "link", "link/x/y", "other/../source/x"):
        with pytest.raises(UserError, match="is in"):
            refuse_inside(tmp_path / out, [tmp_path / "elsewhere", tmp_path / "source"])
    for out in ("source2", "x", "circle/x"):
        refuse_inside(tmp_path / out, [tmp_path / "source", "hf:owner/name"])


def test_a_place_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("as it was")
    for name in ("new/deep/x", "x", "kept", "."):
        check_writable(tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}
    assert (tmp_path / "kept").read_text() == "as it was"
    for name in ("kept/x", "n" * 300, "/proc/x/y"):
        with pytest.raises(UserError, match=r"--out=.* cannot be written \(.+\); choose"):
            check_writable(tmp_path / name)


def test_export_does_not_write_into_its_source(run: Path) -> None:
    with pytest.raises(UserError, match=f"out={run}/x is in {run}, which is read"):
        hf.export(run, run / "x")


def test_prepare_does_not_write_into_its_source(documents: Path, tokenizer: Path) -> None:
    before = contents(documents)
    with pytest.raises(UserError, match=r"is in .*, which is read"):
        prepare(documents, tokenizer, documents / "x")
    assert contents(documents) == before


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", 5, None])
def test_weights_are_looked_for_in_their_folder_alone(
    name: object, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf" / "inner"
    shutil.copytree(llama, folder)
    (folder / "model.safetensors").rename(tmp_path / "hf" / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert main(["convert", str(folder), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert f"{index} has {name!r} as the file of 'model.norm.weight', which is no plain" in error


@pytest.mark.parametrize(
    ("value", "said"), [(3, "an int"), ("[]", "a list"), (None, "null"), (2.5, "a float")]
)
def test_types_have_their_articles(
    value: object, said: str, tmp_path: Path, tokenizer: Path
) -> None:
    line = json.dumps({"text": [] if value == "[]" else value})
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=f"field 'text' is {said}, not a string"):
        prepare([tmp_path / "a.jsonl"], tokenizer, tmp_path / "out")
