"""ladder.data: documents, splits, shards. Each test says what it would catch."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ladder import files
from ladder.data import sources
from ladder.data import text as encoding_text
from ladder.data.prepare import prepare
from ladder.data.prepared import open_data
from ladder.data.sources import name_hash, open_corpus
from ladder.data.tokenizer import (
    load_tokenizer,
    pieces,
    train_tokenizer,
)
from ladder.models.errors import UserError
from tests.documents import contents, tokens_of, write


def test_hash_is_the_same_everywhere() -> None:
    """Catches Python's own hash(), which differs from process to process, or a changed digest."""
    assert name_hash("a/é.txt") == 886992022658014132


def test_splits_are_disjoint_and_complete(documents: Path) -> None:
    """Catches a document in both splits or in none, an empty one kept, a hidden one read."""
    found = open_corpus([documents], heldout_fraction=0.3)
    train = [document.name for document in found.read("train")]
    heldout = [document.name for document in found.read("heldout")]
    assert not set(train) & set(heldout)
    assert len(train) + len(heldout) == len({*train, *heldout}) == found.documents == 40
    assert 4 <= len(heldout) <= 20
    assert "lines.jsonl:1" in train + heldout
    assert "lines.jsonl:2" not in train + heldout  # line 2 is blank, and counted
    assert "lines.jsonl:19" in train + heldout
    documents = [*found.read("train"), *found.read("heldout")]
    assert sum(len(document.text.encode()) for document in documents) == found.bytes
    assert sum(document.bytes for document in documents) == found.bytes


def test_split_is_stable(documents: Path, tmp_path: Path) -> None:
    """Catches a split by position or absolute path: elsewhere, with more, none may move."""
    before = {d.name for d in open_corpus([documents], heldout_fraction=0.3).read("heldout")}
    copy = write(tmp_path / "copy", dict(contents(documents)))
    write(copy, {f"a/new{n}.txt": "new" for n in range(9)})
    after = {d.name for d in open_corpus([copy], heldout_fraction=0.3).read("heldout")}
    assert {name for name in after if "new" not in name} == before


@pytest.mark.parametrize("fraction", [1e-12, 0.05, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("count", [2, 3])
def test_neither_split_is_empty(tmp_path: Path, fraction: float, count: int) -> None:
    """Catches a held-out split left empty by a small fraction, or a train split by a large one."""
    write(tmp_path, {f"{n}.txt": "text" for n in range(count)})
    found = open_corpus([tmp_path], heldout_fraction=fraction)
    held = [document.name for document in found.read("heldout")]
    assert 1 <= len(held) < count
    if fraction < 1e-9:
        assert held == [min((f"{n}.txt" for n in range(count)), key=name_hash)]


def test_one_document_or_none_held_out_is_all_train(tmp_path: Path) -> None:
    """Catches the only document held out, or fraction 0 not obeyed."""
    write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    for found in (
        open_corpus([tmp_path / "a.txt"], heldout_fraction=0.99),
        open_corpus([tmp_path], heldout_fraction=0),
    ):
        assert not list(found.read("heldout"))
        assert len(list(found.read("train"))) == found.documents


def test_same_names_and_same_files(tmp_path: Path) -> None:
    """Catches two files of one name always sharing a split, and one file read twice."""
    write(tmp_path, {"a/x.txt": "1", "b/x.txt": "2"})
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    given = [tmp_path / "a" / "x.txt", tmp_path / "a", tmp_path / "b", tmp_path]
    found = open_corpus(given)
    documents = [*found.read("train"), *found.read("heldout")]
    assert sorted(d.name for d in documents) == ["a/x.txt", "b/x.txt"]
    assert sorted(d.text for d in documents) == ["1", "2"]
    assert len(list(found.read("heldout"))) == 1


def test_names_do_not_depend_on_the_order_of_the_paths(tmp_path: Path) -> None:
    """Catches documents that change their split where the paths are given in another order."""
    inside = ("1/data/x.txt", "2/data/x.txt", "3/x.txt", "3/only.txt", "4/data/x.txt", "5/1/x.txt")
    write(tmp_path, {name: name for name in inside})
    given = [*(tmp_path / name for name in ("1/data", "2/data", "3")), tmp_path / "4/data/x.txt"]
    given.append(tmp_path / "5/1")
    expected = {
        "1/data/x.txt": "1/data/x.txt",
        "2/data/x.txt": "2/data/x.txt",
        "3/x.txt": "3/x.txt",
        "3/only.txt": "only.txt",  # as without the others
        "4/data/x.txt": "4/data/x.txt",
        "5/1/x.txt": "1/x.txt",
    }
    within = [tmp_path / "3", tmp_path / "3" / "only.txt", tmp_path / "1", tmp_path / "1/data"]
    shared = {"3/x.txt": "3/x.txt", "3/only.txt": "only.txt", "1/data/x.txt": "data/x.txt"}
    for several, names in ((given, expected), (within, shared)):
        for paths in (several, several[::-1], several[2:] + several[:2]):
            corpus = open_corpus(paths, heldout_fraction=0)
            assert {d.text: d.name for d in corpus.read("train")} == names


def test_text_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    """Catches a corpus held in memory: a file changed after the first document is seen changed."""
    write(tmp_path, {"a.txt": "a", "b.txt": "b", "c.jsonl": '{"text": "c"}'})
    reading = open_corpus([tmp_path], heldout_fraction=0).read("train")
    assert next(reading).text == "a"
    write(tmp_path, {"b.txt": "changed\r\n", "c.jsonl": '{"text": "also"}'})
    assert [document.text for document in reading] == ["changed\r\n", "also"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Of a text file or JSON lines; nor does it count as text."""
    mark = b"\xef\xbb\xbf"
    write(tmp_path, {"a.txt": mark + b"hello", "b.jsonl": mark + b'{"text": "\xc3\xa9"}\n'})
    write(tmp_path, {"c.txt": mark})
    found = open_corpus([tmp_path], heldout_fraction=0).read("train")
    assert [(each.text, each.bytes) for each in found] == [("hello", 5), ("é", 2)]


def test_standard_library_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches tests, installed packages, this machine's own files or broken encodings read."""
    kept: dict[str, str | bytes] = {"os.py": "import sys", "json/decoder.py": "é"}
    left: dict[str, str | bytes] = {
        "site-packages/torch.py": "x",
        "test/test_os.py": "x",
        "json/tests/test_a.py": "x",
        "idlelib/idle_test/test_b.py": "x",
        "__pycache__/os.py": "x",
        "_sysconfigdata__linux.py": "x",
        "config-3.11/python-config.py": "x",
        "LICENSE.txt": "x",
        "latin.py": b"# \xe9",
        "json/__init__.py": "",
    }
    write(tmp_path, kept | left)
    monkeypatch.setattr(sources.sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)
    found = open_corpus()
    names = [d.name for split in sources.SPLITS for d in found.read(split)]
    assert sorted(names) == sorted(kept)
    assert found.description["python"].startswith("3.")


def test_standard_library_of_this_python_is_found() -> None:
    """Catches a wrong root: the real one has its well-known modules."""
    names = {source.name for source in sources._standard_library()}
    assert {"os.py", "argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= names
    assert not [name for name in names if "test" in name.split("/")]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({"a.txt": b"ok \xff"}, r"a\.txt is not UTF-8 text \(byte 3 is 0xff\); convert it"),
        ({"a.txt": b"\xef\xbb\xbfab\xff"}, r"a\.txt is not UTF-8 text \(byte 5 is 0xff\)"),
        ({"a.jsonl": '{"text": "a"}\n{"text": '}, r"a\.jsonl line 2 is not valid JSON .*; correct"),
        (
            {"a.jsonl": b'\n{"text": "\xff"}'},
            r"a\.jsonl line 2 is not UTF-8 text \(byte 10 is 0xff\); convert",
        ),
        (
            {"a.jsonl": '{"body": "a", "id": 1}'},
            r"line 1 has no field 'text' \(--text-field\); .*: body, id; give the one that holds",
        ),
        ({"a.jsonl": '{"id": 1, "messages": []}'}, r"messages; for .* --chat-field messages$"),
        ({"a.jsonl": '{"conversations": []}'}, r"`ladder data prepare` --chat-field conversations"),
        ({"a.jsonl": '{"prompt": "", "completion": ""}'}, r"--chat-field prompt$"),
        ({"a.jsonl": '{"prompt": ""}'}, r"; give the one that holds the text$"),
        ({"a.jsonl": '{"text": 3}'}, r"line 1: field 'text' is an int, not a string; correct"),
        ({"a.jsonl": '["text"]'}, r"line 1 is a list, not an object"),
        ({"a.jsonl": '{"text": "\\ud800"}'}, r"line 1: the text has half a surrogate pair"),
        ({"a.txt": "", "b.jsonl": '\n{"text": ""}\n'}, r"no text in .*; give files or folders"),
    ],
)
def test_broken_data_is_named(tmp_path: Path, files: dict[str, str | bytes], match: str) -> None:
    """Catches a broken file passed over, or an error that does not say where it is."""
    write(tmp_path, files)
    with pytest.raises(UserError, match=match):
        open_corpus([tmp_path])


def test_broken_paths_are_named(tmp_path: Path, tokenizer: Path) -> None:
    """Catches a raw OSError, or a path silently passed over."""
    with pytest.raises(UserError, match=r"'.*/none' does not exist .*; give a file or a folder"):
        open_corpus([tmp_path / "none"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"'.*/pipe' is neither a file nor a folder"):
        open_corpus([tmp_path / "pipe"])
    links = write(tmp_path / "links", {"a.txt": "a"})
    for target, reason in (("gone", "No such file"), ("link.txt", "Too many levels of symbolic")):
        (links / "link.txt").unlink(missing_ok=True)
        (links / "link.txt").symlink_to(target)
        for read in (open_corpus, lambda paths: prepare(paths, tokenizer, tmp_path / "out")):
            with pytest.raises(UserError, match=rf"link\.txt cannot be read: {reason}"):
                read([links])
    with pytest.raises(UserError, match=r"heldout_fraction=1 must be 0 or more and below 1"):
        open_corpus(heldout_fraction=1)
    write(tmp_path / "ok", {"a.txt": "a"})
    with pytest.raises(UserError, match=r"unknown split 'held' .*'heldout'"):
        next(open_corpus([tmp_path / "ok"]).read("held"))


@pytest.mark.parametrize("small", [False, True])
def test_shards_decode_to_the_documents(
    documents: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Catches tokens lost or doubled at the ends of documents, batches, pieces and shards."""
    if small:  # many batches, and documents in many pieces
        monkeypatch.setattr(encoding_text, "BATCH", 50)
        monkeypatch.setattr(encoding_text, "pieces", lambda text: pieces(text, 16))
    out = tmp_path / "deep" / "out"
    index = prepare([documents], tokenizer, out, heldout_fraction=0.3, shard_tokens=37)
    assert index == json.loads((out / "index.json").read_text())
    loaded, found = load_tokenizer(tokenizer), open_corpus([documents], heldout_fraction=0.3)
    for split in ("train", "heldout"):
        tokens, record = tokens_of(out, split), index["splits"][split]
        ends = np.flatnonzero(tokens == 0)
        texts = [
            loaded.decode(part[part != 0].tolist()) for part in np.split(tokens, ends + 1)[:-1]
        ]
        assert texts == [document.text for document in found.read(split)]
        assert ends[-1] == len(tokens) - 1
        assert (record["documents"], record["tokens"]) == (len(texts), len(tokens))
        assert record["bytes"] == sum(len(text.encode()) for text in texts)
        sizes = [shard["tokens"] for shard in record["shards"]]
        assert len(sizes) > 3
        assert set(sizes[:-1]) == {37}
        assert sum(sizes) == len(tokens)
        for shard in record["shards"]:
            stored = (out / shard["file"]).read_bytes()
            assert len(stored) == 2 * shard["tokens"]
            assert hashlib.sha256(stored).hexdigest() == shard["sha256"]
    definition = (tokenizer / "tokenizer.json").read_bytes()
    assert (out / "tokenizer.json").read_bytes() == definition
    assert index["tokenizer_sha256"] == hashlib.sha256(definition).hexdigest()


def test_preparing_twice_gives_the_same_bytes(
    documents: Path, tokenizer: Path, prepared: Path
) -> None:
    """Catches dates, absolute paths of the output, or an order that depends on the threads."""
    again = prepared.with_name("again")
    prepare([documents], tokenizer, again, heldout_fraction=0.3, shard_tokens=100)
    assert contents(again) == contents(prepared)


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    """Catches ids above 65535 wrapped round in 16 bits."""
    train_tokenizer([], 257, tmp_path)
    big = load_tokenizer(tmp_path)
    big.add_tokens([f"<{n}>" for n in range(65536)])
    big.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, {"text/a.txt": "a<65535>b<7>é"})
    index = prepare([tmp_path / "text"], tmp_path, tmp_path / "out")
    assert (index["dtype"], index["vocab_size"]) == ("uint32", 257 + 65536)
    data = open_data(tmp_path / "out")
    tokens = data.split("train").read(0, len(data.split("train")))
    assert load_tokenizer(tmp_path).decode(tokens[:-1].tolist()) == "a<65535>b<7>é"
    assert tokens.max() == 257 + 65535
    assert data.token_bytes[tokens].sum() == len("a<65535>b<7>é".encode())
    assert not len(data.split("heldout"))


def test_more_shards_than_files_may_be_open(
    documents: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Catches a descriptor kept for each shard: 1024 are the usual limit. They stay files, mapped
    into memory, which nothing may write to."""
    prepare([documents], tokenizer, tmp_path, heldout_fraction=0.3, shard_tokens=37)
    expected = tokens_of(tmp_path, "train")
    taken = {int(number) for number in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in taken)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    leaves = next(itertools.islice(free, 16, None))  # 16 files to open: a limit is of numbers
    resource.setrlimit(resource.RLIMIT_NOFILE, (leaves, hard))
    try:
        split = open_data(tmp_path).split("train")
        assert len(split.shards) > 32
        assert split.read(0, len(split)).tolist() == expected.tolist()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not any(shard.flags.writeable or shard.flags.owndata for shard in split.shards)
    path = next(tmp_path.glob("train-00003.bin"))
    with path.open("r+b") as file:  # in place: a copy in memory would not show it
        file.write(np.array([299], "<u2").tobytes())
    assert split.shards[3][0] == 299


def test_prepared_data_is_replaced_only_when_asked(
    documents: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Catches data overwritten without --overwrite, and a user's own files deleted with it."""
    out = tmp_path / "out"
    out.mkdir()
    prepare([documents], tokenizer, out, shard_tokens=10**6)  # an empty folder is free
    before = contents(out)
    with pytest.raises(UserError, match=r"out=.* already holds prepared data; give --overwrite"):
        prepare([documents], tokenizer, out)
    assert contents(out) == before
    prepare([documents], out, out, shard_tokens=100, overwrite=True)  # with its own tokenizer
    assert len(contents(out)) > len(before)
    assert os.listdir(tmp_path) == ["out"]
    write(out, {"run/checkpoint": "precious"})
    before = contents(out)
    with pytest.raises(UserError, match=r"is no prepared folder \(it holds 'run'\)"):
        prepare([documents], tokenizer, out, overwrite=True)
    assert contents(out) == before
    with pytest.raises(UserError, match=r"out=.* is a file; choose a folder"):
        prepare([documents], tokenizer, out / "index.json", overwrite=True)
    with pytest.raises(UserError, match=r"cannot be written \(.*Not a directory"):
        prepare([documents], tokenizer, out / "index.json" / "deeper")
    with pytest.raises(UserError, match="shard_tokens=0 must be 1 or more"):
        prepare([documents], tokenizer, tmp_path / "other", shard_tokens=0)


def stop(kind: type[BaseException], at: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, but that its `at`th call raises `kind`."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise kind
        return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize(
    ("owner", "name", "at", "existing"),
    [
        (encoding_text, "pieces", 20, False),  # among the documents
        (encoding_text, "pieces", 20, True),
        (files, "sync", 2, False),  # complete but for the rename
        (files, "sync", 2, True),
        (Path, "rename", 1, False),  # in place of the rename
        (Path, "rename", 1, True),
        (Path, "rename", 2, True),  # between the two, where the old folder has gone aside
    ],
)
def test_interrupted_prepare_leaves_what_was_there(
    documents: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[BaseException],
    owner: Any,
    name: str,
    at: int,
    existing: bool,
) -> None:
    """Catches a half-written folder under the final name, one left aside, the old one lost."""
    out = tmp_path / "out"
    if existing:
        prepare([documents], tokenizer, out, shard_tokens=300)
    before = contents(tmp_path)
    monkeypatch.setattr(owner, name, stop(kind, at, getattr(owner, name)))
    monkeypatch.setattr(encoding_text, "BATCH", 50)
    with pytest.raises(UserError if kind is OSError else kind):
        prepare([documents], tokenizer, out, overwrite=True)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == (["out"] if existing else [])
