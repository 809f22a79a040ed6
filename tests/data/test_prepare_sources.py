"""ladder data prepare: Parquet, streams and configs. Each test says what it would catch."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ladder.cli import main
from ladder.config import find
from ladder.data import streams, units
from ladder.data.config import load_prepare_config
from ladder.data.formats import Field, cut, read_documents
from ladder.data.prepare import prepare
from ladder.data.prepared import open_data
from ladder.data.sources import Source, open_corpus
from ladder.data.tokenizer import load_tokenizer, train_tokenizer
from ladder.models.errors import UserError

TEXTS = [f"row {n} é中👩‍👦 says\r\n {'word ' * (n % 7)}" for n in range(60)]
TEXTS[7] = ""  # empty rows are passed over, and counted


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 300, out)
    return out


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of 300 bytes, so that a small corpus has many."""
    monkeypatch.setattr(units, "UNIT", 300)


def _parquet(path: Path, columns: dict[str, Any], group: int = 11, **options: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), path, row_group_size=group, **options)
    return path


def _jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


# ---------------------------------------------------------------- Parquet


def test_parquet_equals_jsonl(tokenizer: Path, tmp_path: Path, small: None) -> None:
    """Catches rows lost, doubled or out of order between row groups and units."""
    kept = {}
    for path in (
        _jsonl(tmp_path / "a.jsonl", TEXTS),
        _parquet(tmp_path / "a.parquet", {"id": list(range(60)), "text": TEXTS}),
        _parquet(tmp_path / "one.parquet", {"text": TEXTS}, group=1000),
    ):
        out = tmp_path / f"{path.name}.data"
        index = prepare([path], tokenizer, out, heldout_fraction=0, shard_tokens=50)
        assert index["splits"]["train"]["documents"] == 59
        kept[path.name] = _shards(out)
    assert kept["a.parquet"] == kept["a.jsonl"] == kept["one.parquet"]
    tokens = open_data(tmp_path / "a.parquet.data").split("train")
    text = load_tokenizer(tokenizer).decode(tokens.read(0, len(tokens)).tolist())
    assert text == "".join(TEXTS)


def test_rows_are_named_by_their_number(tmp_path: Path) -> None:
    """Catches rows counted within their row group: names, and so the held-out split, would repeat.

    Also strings kept as large strings or dictionaries, which Parquet files of pandas have.
    """
    arrow = pytest.importorskip("pyarrow")
    expected = [f"x.parquet:{n + 1}" for n in range(60) if n != 7]
    for kind in (arrow.large_string(), arrow.dictionary(arrow.int32(), arrow.string())):
        column = arrow.array(TEXTS).cast(kind)
        _parquet(tmp_path / "x.parquet", {"text": column})
        found = open_corpus([tmp_path / "x.parquet"], heldout_fraction=0).read("train")
        documents = list(found)
        assert [document.name for document in documents] == expected
        assert [document.text for document in documents] == [text for text in TEXTS if text]


def test_no_more_than_some_rows_are_in_memory(tmp_path: Path) -> None:
    """Catches a file or a row group read whole: with 500 kB a row it would show."""
    arrow = pytest.importorskip("pyarrow")
    path = _parquet(tmp_path / "x.parquet", {"text": [str(n) * 500_000 for n in range(9)]}, group=1)
    source = Source("x", path)
    part, number = cut(source, Field("text"), 0, 0, 1)
    assert (part.start, part.stop, number) == (0, 1, 1)
    before = arrow.total_allocated_bytes()
    most = 0
    for document in read_documents(cut(source, Field("text"), 0, 0, 10**9)[0], Field("text")):
        most = max(most, arrow.total_allocated_bytes() - before)
        assert document.bytes == 500_000
    assert most < 2_000_000


def _broken(path: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[60:200] = bytes(140)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: _parquet(p, {"body": ["a"], "id": [1]}), ["no column", "'text'", "body, id"]),
        (lambda p: _parquet(p, {"text": [1]}), ["column 'text'", "int64", "not string"]),
        (lambda p: _parquet(p, {"text": ["a", None]}), ["row 2", "null", "fill or remove"]),
        (lambda p: p.write_bytes(b"no parquet"), ["a.parquet", "no Parquet file", "copy it"]),
        (lambda p: p.write_bytes(b""), ["a.parquet", "no Parquet file"]),
        (
            lambda p: _broken(_parquet(p, {"text": TEXTS}, write_page_checksum=True)),
            ["a.parquet", "damaged"],
        ),
    ],
)
def test_broken_parquet_is_named(
    tokenizer: Path,
    tmp_path: Path,
    make: Callable[[Path], Any],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a library's exception, and nulls read as text or passed over."""
    pytest.importorskip("pyarrow")
    make(tmp_path / "a.parquet")
    _fails(["data", "prepare", str(tmp_path / "a.parquet")], tokenizer, tmp_path, words, capsys)


def _fails(
    command: list[str],
    tokenizer: Path,
    tmp_path: Path,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command exits with 2 and one line that has the words, and leaves nothing."""
    before = sorted(tmp_path.iterdir())
    more = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert main([*command, *more]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("package", "path"), [("pyarrow", "a.parquet"), ("datasets", "hf:owner/name")]
)
def test_missing_packages_are_named(
    tokenizer: Path,
    tmp_path: Path,
    package: str,
    path: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches an ImportError's traceback, or an error that does not say what to install."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    words = [path, f"needs {'pyarrow' if package == 'pyarrow' else 'the package datasets'}"]
    _fails(
        ["data", "prepare", path], tokenizer, tmp_path, [*words, "pip install 'ladder[data]'"],
        capsys,
    )  # fmt: skip


# ---------------------------------------------------------------- streams


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
    _jsonl(tmp_path / "dataset" / "train.jsonl", TEXTS)
    return f"hf:{tmp_path / 'dataset'}"


def test_a_stream_equals_its_file(
    dataset: str, tokenizer: Path, tmp_path: Path, small: None
) -> None:
    """Catches rows lost, doubled or out of order between units."""
    prepare([dataset], tokenizer, tmp_path / "a", heldout_fraction=0, shard_tokens=50)
    file = tmp_path / "dataset" / "train.jsonl"
    prepare([file], tokenizer, tmp_path / "b", heldout_fraction=0, shard_tokens=50)
    assert _shards(tmp_path / "a") == _shards(tmp_path / "b")
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
    _fails(["data", "prepare", dataset + end], tokenizer, tmp_path, words, capsys)


def test_a_stream_without_the_column(
    dataset: str, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["data", "prepare", dataset, "--text-field", "body"]
    _fails(command, tokenizer, tmp_path, ["no column", "'body'", "columns: text"], capsys)


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
    _fails(["data", "prepare", "hf:owner/name?name=x"], tokenizer, tmp_path, words, capsys)


# ---------------------------------------------------------------- how much, and configs


@pytest.mark.parametrize("most", [1, 500, "met", 10**9])
def test_max_tokens_ends_with_a_document(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | str
) -> None:
    """Catches a document cut in two, one too many or too few, an end that the units decide.

    met: exactly, by the third document's last token.
    """
    path = _jsonl(tmp_path / "a.jsonl", TEXTS)
    encoder = load_tokenizer(tokenizer)
    lengths = [len(encoder.encode(text).ids) + 1 for text in TEXTS if text]
    ends = np.cumsum(lengths)
    limit = int(ends[2]) if isinstance(most, str) else most
    kept = []
    for size in (10**6, 300, 1):
        monkeypatch.setattr(units, "UNIT", size)
        out = tmp_path / f"{size}"
        index = prepare([path], tokenizer, out, heldout_fraction=0.2, max_tokens=limit)
        kept.append({file.name: file.read_bytes() for file in out.iterdir()})
    assert kept[0] == kept[1] == kept[2]
    count = 3 if most == "met" else min(int((ends < limit).sum()) + 1, len(ends))
    splits = index["splits"].values()
    assert sum(split["documents"] for split in splits) == count
    assert sum(split["tokens"] for split in splits) == ends[count - 1]


@pytest.mark.parametrize("fraction", [1e-12, 1 - 1e-12])
def test_few_documents_leave_no_split_empty(
    tokenizer: Path, tmp_path: Path, fraction: float, small: None
) -> None:
    """Catches another split than `open_corpus` makes, which reads everything beforehand."""
    path = _jsonl(tmp_path / "a.jsonl", TEXTS)
    index = prepare([path], tokenizer, tmp_path / "out", heldout_fraction=fraction)
    found = open_corpus([path], heldout_fraction=fraction)
    for split in ("train", "heldout"):
        assert index["splits"][split]["documents"] == len(list(found.read(split))) > 0


def test_a_config_and_options(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an option that a config overrides, and one that is lost."""
    path = _jsonl(tmp_path / "a.jsonl", TEXTS)
    config = tmp_path / "mine.yaml"
    config.write_text(f"paths: [{path}]\nheldout_fraction: 0\nmax_tokens: 9\ntokenizer: /no\n")
    words = ["--config", str(config), "--tokenizer", str(tokenizer)]
    assert main(["data", "prepare", *words, "--out", str(tmp_path / "a")]) == 0
    more = ["--max-tokens", "700", "--heldout-fraction", "0.5"]
    assert main(["data", "prepare", *words, *more, "--out", str(tmp_path / "b")]) == 0
    first, second = (json.loads((tmp_path / x / "index.json").read_text()) for x in "ab")
    assert first["splits"]["heldout"]["tokens"] == 0
    assert 9 <= first["splits"]["train"]["tokens"] < 100
    assert second["source"]["max_tokens"] == 700
    assert second["splits"]["heldout"]["tokens"] > 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("tokeniser: x", "unknown key of data config .*'tokeniser'.*did you mean 'tokenizer'"),
        ("workers: many", "workers='many' is not of the type int"),
        ("paths: 3", "paths=3 must be a path or a list of paths"),
        ("paths: []", r"paths=\[\] must be a path or a list of paths"),
        ("text_field: x", "--tokenizer is missing"),
    ],
)
def test_config_mistakes(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    given = {} if "token" in match else {"tokenizer": "x"}
    with pytest.raises(UserError, match=match):
        load_prepare_config(str(tmp_path / "mine.yaml"), given)


def test_the_shipped_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a key or a path that the command does not take."""
    config = load_prepare_config("fineweb-edu", {"workers": 3})
    assert (config.workers, config.tokenizer) == (3, "runs/starcoder")
    monkeypatch.setattr(streams, "_datasets", lambda path: None)
    monkeypatch.setattr(streams, "_resolve", lambda path, dataset, revision: "abc")
    assert find("data", "fineweb-edu").is_file()
    (path,) = config.paths
    assert streams.parse_stream(path)[2:] == (
        "HuggingFaceFW/fineweb-edu",
        "sample-100BT",
        "train",
        "abc",
    )


@pytest.mark.parametrize("option", ["workers", "max_tokens", "shard_tokens"])
def test_counts_are_positive(tokenizer: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=f"{option}=0 must be 1 or more"):
        prepare([tokenizer], tokenizer, tmp_path / "out", **{option: 0})  # type: ignore[arg-type]
