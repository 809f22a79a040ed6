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
from ladder.data.sources import find_sources
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


def test_a_stream_of_conversations(dataset: str) -> None:
    """With the columns that belong to a conversation: its tools, a prompt's completion."""
    row = {"prompt": "a", "completion": "b", "tools": [{"name": "f"}], "other": 1}
    folder = Path(dataset.removeprefix("hf:"))
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    reader = streams.Reader(streams.parse_stream(dataset), Field("prompt", True), None, 0)
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (found,) = [json.loads(document.text) for document in reader]
    assert found == {"messages": said, "tools": [{"name": "f"}]}
    with pytest.raises(UserError, match="tools, other; give --chat-field prompt"):
        streams.Reader(streams.parse_stream(dataset), Field("messages", True), None, 0)


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


class _Hub:
    """A dataset on the Hub that changes. asked: the revisions that the Hub was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.newest = "a" * 40
        self.asked: list[str] = []
        module = types.ModuleType("datasets")
        module.load_dataset = self.load  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "datasets", module)
        monkeypatch.setattr(streams, "_resolve", self.resolve)

    def resolve(self, path: str, dataset: str, revision: str) -> str:
        self.asked.append(revision)
        return self.newest

    def load(self, path: str, *, revision: str, **_: Any) -> _Rows:
        return _Rows([{"text": f"{revision[:3]} {text}" if text else ""} for text in TEXTS])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> _Hub:
    return _Hub(monkeypatch)


def _interrupted(
    path: str, tokenizer: Path, out: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> None:
    """A call that ends after some units."""
    calls = []
    with monkeypatch.context() as patch:
        state = streams.Reader.state

        def breaking(reader: streams.Reader) -> dict[str, Any]:
            calls.append(reader.number)
            if len(calls) == 5:
                raise KeyboardInterrupt
            return state(reader)

        patch.setattr(streams.Reader, "state", breaking)
        with pytest.raises(KeyboardInterrupt):
            prepare([path], tokenizer, out, heldout_fraction=0.2, **options)


@pytest.mark.parametrize(
    ("first", "again", "asks"),
    [
        ("hf:owner/name", "hf:owner/name", 1),
        ("hf:owner/name", "hf:owner/name?split=train", 1),
        ("hf:owner/name?revision=main", "hf:owner/name?revision=main", 1),
        ("hf:owner/name", f"hf:owner/name?revision={'a' * 40}", 1),
        (f"hf:owner/name?revision={'a' * 40}", f"hf:owner/name?revision={'a' * 40}", 0),
    ],
)
def test_a_stream_goes_on_after_a_commit_on_the_hub(
    hub: _Hub,
    first: str,
    again: str,
    asks: int,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small: None,
) -> None:
    """Catches work that no command can finish, and rows of two commits in one folder."""
    prepare([first], tokenizer, tmp_path / "whole", heldout_fraction=0.2)
    hub.asked.clear()
    _interrupted(first, tokenizer, tmp_path / "out", monkeypatch)
    capsys.readouterr()
    hub.newest = "b" * 40
    index = prepare([again], tokenizer, tmp_path / "out", heldout_fraction=0.2)
    assert "going on after" in capsys.readouterr().err
    assert len(hub.asked) == asks
    assert index["source"]["streams"][0]["revision"] == "a" * 40
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "whole")


def test_another_call_does_not_take_an_old_commit(
    hub: _Hub, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    """What starts over reads the newest; what would mix two revisions is refused."""
    _interrupted("hf:owner/name", tokenizer, tmp_path / "out", monkeypatch)
    hub.newest = "b" * 40
    for path, more, words in (
        ("hf:owner/name?revision=main", {}, "unfinished work of a call with streams="),
        ("hf:owner/name", {"max_tokens": 900}, "unfinished work of a call with max_tokens=None"),
        ("hf:owner/name?split=test", {}, "unfinished work of a call with streams="),
        ("hf:owner/other", {}, "unfinished work of a call with paths="),
    ):
        with pytest.raises(UserError, match=words):
            prepare([path], tokenizer, tmp_path / "out", heldout_fraction=0.2, **more)  # type: ignore[arg-type]
    index = prepare(["hf:owner/name"], tokenizer, tmp_path / "out", max_tokens=900, overwrite=True)
    assert index["source"]["streams"][0]["revision"] == "b" * 40


def test_a_stream_that_is_named_twice_is_read_once(hub: _Hub) -> None:
    """However it is written: a row that occurred twice could be in both splits."""
    paths = ["hf:owner/name", "hf:owner/name?split=train", f"hf:owner/name?revision={'a' * 40}"]
    given = [*paths, "hf:owner/name?split=test"]
    longer = ["owner/name?name=&split=train", "owner/name?name=&split=test"]
    assert [each.name for each in find_sources(given, 0.1, "text")[0]] == longer
    assert [each.name for each in find_sources(given[::-1], 0.1, "text")[0]] == longer[::-1]
