"""ladder data prepare: Parquet, limits and configs. Each test says what it would catch."""

from __future__ import annotations

import bz2
import gzip
import json
import sys
from collections.abc import Callable
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
from tests.data.rows import TEXTS, fails_with, shards_of, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, 300, out)
    return out


def _views(texts: list[str]) -> Any:
    """A column of another type of strings."""
    arrow = pytest.importorskip("pyarrow")
    return arrow.array(texts, arrow.string_view())


def _parquet(path: Path, columns: dict[str, Any], group: int = 11, **options: Any) -> Path:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), path, row_group_size=group, **options)
    return path


# ---------------------------------------------------------------- Parquet


def test_parquet_equals_jsonl(tokenizer: Path, tmp_path: Path, small: None) -> None:
    """Catches rows lost, doubled or out of order between row groups and units."""
    kept = {}
    for path in (
        write_jsonl(tmp_path / "a.jsonl", TEXTS),
        _parquet(tmp_path / "a.parquet", {"id": list(range(60)), "text": TEXTS}),
        _parquet(tmp_path / "one.parquet", {"text": TEXTS}, group=1000),
        _parquet(tmp_path / "view.parquet", {"text": _views(TEXTS)}),
    ):
        out = tmp_path / f"{path.name}.data"
        index = prepare([path], tokenizer, out, heldout_fraction=0, shard_tokens=50)
        assert index["splits"]["train"]["documents"] == 59
        kept[path.name] = shards_of(out)
    assert kept["a.parquet"] == kept["a.jsonl"] == kept["one.parquet"] == kept["view.parquet"]
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
    fails_with(["data", "prepare", str(tmp_path / "a.parquet")], tokenizer, tmp_path, words, capsys)


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
    fails_with(
        ["data", "prepare", path], tokenizer, tmp_path, [*words, "pip install -e '.[data]'"],
        capsys,
    )  # fmt: skip


# ---------------------------------------------------------------- how much, and configs


@pytest.mark.parametrize("most", [1, 500, "met", 10**9])
def test_max_tokens_ends_with_a_document(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | str
) -> None:
    """Catches a document cut in two, one too many or too few, an end that the units decide.

    met: exactly, by the third document's last token.
    """
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
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
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    index = prepare([path], tokenizer, tmp_path / "out", heldout_fraction=fraction)
    found = open_corpus([path], heldout_fraction=fraction)
    for split in ("train", "heldout"):
        assert index["splits"][split]["documents"] == len(list(found.read(split))) > 0


def test_a_config_and_options(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an option that a config overrides, and one that is lost."""
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
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
        ("tokeniser: x", "unknown key 'tokeniser' of data config .*did you mean 'tokenizer'"),
        ("workers: many", "workers='many' must be a whole number"),
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


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.NdJson"])
def test_other_names_of_json_lines(tokenizer: Path, tmp_path: Path, name: str, small: None) -> None:
    """Catches a file that is taken for one text."""
    options: dict[str, Any] = {"text_field": "body", "heldout_fraction": 0}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    lines = "".join(json.dumps({"body": text}) + "\n" for text in TEXTS)
    for folder, file in (("a", "a.jsonl"), ("b", name)):
        (tmp_path / folder / file).write_text(lines)
        prepare([tmp_path / folder / file], tokenizer, tmp_path / f"{folder}-out", **options)
    assert shards_of(tmp_path / "a-out") == shards_of(tmp_path / "b-out")


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.ndjson.GZ"])
def test_compressed_lines_equal_plain_ones(
    tokenizer: Path, tmp_path: Path, name: str, small: None
) -> None:
    """Catches lines lost or read twice between units, and where an interrupted call goes on."""
    plain, packed = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / name
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        prepare([path], tokenizer, tmp_path / f"{path.name}.data", heldout_fraction=0)
    assert shards_of(tmp_path / f"{name}.data") == shards_of(tmp_path / "a.jsonl.data")
    source, field = Source("a", packed), Field("text")
    expected = [(f"a:{n}", text) for n, text in enumerate(TEXTS, 1) if text]
    found = list(units.units([source], field, units.Cursor()))
    assert len(found) > 3
    for at, unit in enumerate(found):
        rest = [*found[: at + 1], *units.units([source], field, unit.after)]
        assert [(d.name, d.text) for each in rest for d in each.read(field)] == expected


def test_compressed_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é\nb".encode()))
    found = open_corpus([tmp_path], heldout_fraction=0).read("train")
    assert [(each.text, each.bytes) for each in found] == [("é\nb", 4)]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\0", ["compressed (Zstandard); decompress it"]),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), ["compressed (gzip)", ".jsonl.gz"]),
        ("a.md.gz", gzip.compress(b"a", mtime=0), ["compressed (gzip)"]),
        ("a.txt.bz2", bz2.compress(b"a"), ["compressed (bzip2)"]),
        ("a.txt.gz", b"plain", ["a.txt.gz is no gzip file, or damaged"]),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}' * 99, mtime=0)[:-9],
            ["or damaged", "copy it again"],
        ),
        ("a.csv", b"id,text\n1,a\n", ["is a table", "text_field='text'", "into a .jsonl", ".txt"]),
        ("a.tsv", b'id\t"text"\r\n1\ta\r\n', ["is a table"]),
    ],
)
def test_what_would_be_misread_is_refused(
    tokenizer: Path,
    tmp_path: Path,
    name: str,
    data: bytes,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches an archive called no UTF-8, and a table of documents taken for one text."""
    (tmp_path / name).write_bytes(data)
    fails_with(["data", "prepare", str(tmp_path / name)], tokenizer, tmp_path, words, capsys)


def test_a_table_without_the_field_is_a_text(tmp_path: Path) -> None:
    """As other JSON is: folders of code hold tables."""
    (tmp_path / "a.csv").write_text("time,loss\n1,2\n")
    found = open_corpus([tmp_path], heldout_fraction=0).read("train")
    assert [each.text for each in found] == ["time,loss\n1,2\n"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"text": "a"}\n{"text": "b"}\n', ["one object a line", "rename it to a.jsonl"]),
        ('\ufeff{"text": ""} \r\n{"id": 2}', ["one object a line", "text_field='text'"]),
        ('{"text": "a"}', ["one object a line", ".txt"]),
        ('[{"text": "a"}, {"text": "b"}]', ["a list of records", "one a line into a .jsonl file"]),
        ('[\n  {\n    "text": 1\n  }\n]\n', ["a list of records", ".txt"]),
    ],
)
def test_json_of_records_is_refused(
    tokenizer: Path, tmp_path: Path, text: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches records whose braces and names are tokenised with their text."""
    (tmp_path / "a.json").write_text(text)
    command = ["data", "prepare", str(tmp_path / "a.json")]
    fails_with(command, tokenizer, tmp_path, ["a.json", *words], capsys)
    (tmp_path / "a.json").rename(tmp_path / "a.txt")
    prepare([tmp_path / "a.txt"], tokenizer, tmp_path / "out", heldout_fraction=0)


@pytest.mark.parametrize(
    "text",
    [
        *('{\n  "name": "x"\n}', '{"name": "x"}', "[1, 2]", '["a"]', "{", "[{", "", "3"),
        *('[{"name": "x"}]', '{"name": "x"}\n{"name": "y"}'),
    ],
)
def test_other_json_is_a_text(tmp_path: Path, text: str) -> None:
    """A project's package.json, say."""
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.txt").write_text("b")
    found = {each.text for each in open_corpus([tmp_path], heldout_fraction=0).read("train")}
    assert found == {text, "b"} - {""}


def test_a_field_where_none_is(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an option without effect."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    command = ["data", "prepare", str(folder), "--text-field", "body"]
    fails_with(command, tokenizer, tmp_path, ["--text-field=body", "leave it out"], capsys)
    fails_with(
        ["data", "prepare", "--text-field", "body"],
        tokenizer, tmp_path, ["--text-field=body", "the standard library"], capsys,
    )  # fmt: skip
    (folder / "b.jsonl").write_text('{"body": "b"}')
    texts = open_corpus([folder], heldout_fraction=0, text_field="body").read("train")
    assert [each.text for each in texts] == ["a", "b"]


def test_options_of_text_and_of_conversations_exclude_each_other(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches an option without effect."""
    command = ["data", "prepare", str(write_jsonl(tmp_path / "a.jsonl", TEXTS))]
    words = ["--max-left-out=0.5 is for conversations", "--chat-field"]
    fails_with([*command, "--max-left-out", "0.5"], tokenizer, tmp_path, words, capsys)
    both = [*command, "--text-field", "body", "--chat-field", "messages"]
    words = ["--text-field=body is for text", "(--chat-field=messages)"]
    fails_with(both, tokenizer, tmp_path, words, capsys)


@pytest.mark.parametrize("option", ["workers", "max_tokens", "shard_tokens"])
def test_counts_are_positive(tokenizer: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(UserError, match=f"{option}=0 must be 1 or more"):
        prepare([tokenizer], tokenizer, tmp_path / "out", **{option: 0})  # type: ignore[arg-type]


def test_prepared_folders_are_no_text(tokenizer: Path, tmp_path: Path) -> None:
    """Their shards would be read as text, or refused as no UTF-8."""
    source = tmp_path / "text.jsonl"
    write_jsonl(source, TEXTS)
    prepare([source], tokenizer, tmp_path / "data")
    with pytest.raises(UserError, match=r"data path '.*data' is a folder of prepared data"):
        prepare([source, tmp_path / "data"], tokenizer, tmp_path / "again")
