"""ladder data prepare of streams of `datasets`. Each test says what it would catch."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ladder.cli import main
from ladder.data import streams
from ladder.data.formats import Field
from ladder.data.prepare import prepare
from ladder.data.prepared import open_data
from ladder.data.tokenizer import train_tokenizer
from ladder.models.errors import UserError
from tests.data.rows import TEXTS, fails_with, shards_of, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 300, out)
    return out


class _Rows:
    """A replacement of the streams of `datasets`, as far as we use them."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.at = rows, 0
        self.column_names = list(rows[0])

    def select_columns(self, names: list[str]) -> _Rows:
        return _Rows([{name: row[name] for name in names} for row in self.rows])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]


def _load_dataset(path: str, **options: Any) -> _Rows:
    if options != {"name": None, "split": "train", "revision": None, "streaming": True}:
        raise ValueError(f"no such dataset: {options}")
    lines = (Path(path) / "train.jsonl").read_text().splitlines()
    return _Rows([json.loads(line) for line in lines])


@pytest.fixture(params=["stand-in", "real"])
def dataset(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """A dataset of TEXTS in a folder, and `datasets` or a stand-in for it."""
    if request.param == "real":
        if importlib.util.find_spec("datasets") is None:
            pytest.skip("needs the package datasets")
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    else:
        module = types.ModuleType("datasets")
        module.load_dataset = _load_dataset  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
    (tmp_path / "dataset").mkdir()
    write_jsonl(tmp_path / "dataset" / "train.jsonl", TEXTS)
    return f"hf:{tmp_path / 'dataset'}"


def test_a_stream_equals_its_file(
    dataset: str, tokenizer: Path, tmp_path: Path, small: None
) -> None:
    """Catches rows lost, doubled or out of order between units."""
    prepare([dataset], tokenizer, tmp_path / "a", heldout_fraction=0, shard_tokens=50)
    file = tmp_path / "dataset" / "train.jsonl"
    prepare([file], tokenizer, tmp_path / "b", heldout_fraction=0, shard_tokens=50)
    assert shards_of(tmp_path / "a") == shards_of(tmp_path / "b")
    stream = open_data(tmp_path / "a").index["source"]["streams"][0]
    assert (stream["split"], stream["revision"]) == ("train", "")


@pytest.mark.parametrize("row", [1, 7, 8, 30, 60])
def test_a_stream_goes_on_where_it_was_left(dataset: str, row: int, small: None) -> None:
    """Catches rows read twice or passed over, and a state that JSON cannot keep."""
    stream = streams.parse_stream(dataset)
    first = streams.Reader(stream, Field("text"), None, 0)
    read = []
    for document in first:
        read.append(document)
        if first.number >= row:
            break
    state = json.loads(json.dumps(first.state()))
    rest = list(streams.Reader(stream, Field("text"), state, first.number))
    numbers = [int(document.name.rpartition(":")[2]) for document in [*read, *rest]]
    assert numbers == [n + 1 for n in range(60) if n != 7]
    assert [document.text for document in [*read, *rest]] == [text for text in TEXTS if text]


def test_streams_that_break_off_go_on(
    dataset: str, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """Catches a broken connection that costs what was done, or that is taken for the end."""
    options: dict[str, Any] = {"heldout_fraction": 0.2, "shard_tokens": 50}
    prepare([dataset], tokenizer, tmp_path / "whole", **options)
    state_dict = streams.Reader.state
    calls = []

    def breaking(reader: streams.Reader) -> dict[str, Any]:
        calls.append(reader.number)
        if len(calls) in (4, 7):
            raise UserError("broke off")
        return state_dict(reader)

    monkeypatch.setattr(streams.Reader, "state", breaking)
    for _ in range(2):
        with pytest.raises(UserError, match="broke off"):
            prepare([dataset], tokenizer, tmp_path / "out", **options)
    prepare([dataset], tokenizer, tmp_path / "out", **options)
    assert calls[4] > calls[2]  # not from the start
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("?split=nope", ["?split=nope", "cannot be opened", "split"]),
        ("?nane=x", ["unknown option", "'nane'", "did you mean 'name'"]),
        ("?name=", ["not of the form", "hf:OWNER/NAME?name=CONFIG"]),
    ],
)
def test_stream_mistakes(
    dataset: str,
    tokenizer: Path,
    tmp_path: Path,
    end: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a mistake that is taken for something else, or a library's exception."""
    fails_with(["data", "prepare", dataset + end], tokenizer, tmp_path, words, capsys)


def test_a_stream_without_the_column(
    dataset: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "prepare", dataset, "--text-field", "body"]
    fails_with(command, tokenizer, tmp_path, ["no column", "'body'", "columns: text"], capsys)


def test_a_stream_is_not_for_training_tokenizers(
    dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tokenizer", "train", dataset, "--out", str(tmp_path / "t")]) == 2
    assert "is a stream, too long to be read twice; give files" in capsys.readouterr().err


def test_no_network_is_the_users_error(
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches minutes of retries, and a traceback of the HTTP library."""
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Name or service\nnot known")

    monkeypatch.setattr(hub.HfApi, "dataset_info", refuse)
    words = ["hf:owner/name?name=x", "(ConnectionError: Name or service not known)", "network"]
    fails_with(["data", "prepare", "hf:owner/name?name=x"], tokenizer, tmp_path, words, capsys)
