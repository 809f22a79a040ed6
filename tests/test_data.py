"""ladder.data: documents, tokenizer, shards, batches. Each test says what it would catch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from ladder import files
from ladder.data import prepare as preparing
from ladder.data import sources
from ladder.data.batches import Split, Windows, heldout_windows, open_data
from ladder.data.prepare import prepare
from ladder.data.sources import name_hash, open_corpus
from ladder.data.tokenizer import (
    EOS,
    load_tokenizer,
    pieces,
    token_byte_lengths,
    train_tokenizer,
)
from ladder.models.errors import UserError

NASTY = [
    "plain words, and  two   three spaces \n\n\n\tindented\r\nCRLF\rCR \n",
    " leading and trailing space ",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 é é 中文没有空格 עברית \u202e \ufeff \x00 \x7f \x85 \u2028 \U0010ffff",
    f"the name {EOS} in a text, {EOS}{EOS} <|endoftext",
    "Ġ Ċ ▁ ## </s> 0123456789 \\u00e9 ",
    "\n",
    " ",
]


def _write(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def _contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 40 documents, 7 of them nasty, in files and in a .jsonl."""
    text = "the stream reads a ladder of partial sums while ranks wait for peers"
    words = text.split()
    texts: dict[str, str | bytes] = {
        f"part{n % 3}/{n:02d}.txt": " ".join(words[(n * k) % 13] for k in range(1, 60 + n)) + "\n"
        for n in range(23)
    }
    texts |= {f"nasty/{n}.txt": text for n, text in enumerate(NASTY)}
    lines = [json.dumps({"id": n, "text": f"line {n} says é{n}\n" * 9}) for n in range(10)]
    texts["lines.jsonl"] = "\n\n".join(lines)  # blank lines between, none at the end
    texts["empty.txt"] = ""
    texts[".hidden/secret.txt"] = b"\xff"
    return _write(tmp_path_factory.mktemp("corpus"), texts)


@pytest.fixture(scope="module")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer((d.text for d in open_corpus([corpus]).read("train")), 400, out)
    return out


@pytest.fixture(scope="module")
def data(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, prepared, in shards of 100 tokens."""
    out = tmp_path_factory.mktemp("data") / "prepared"
    prepare([corpus], tokenizer, out, heldout_fraction=0.3, shard_tokens=100)
    return out


def _tokens(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split, read without the code under test."""
    return np.concatenate(
        [np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}-*.bin"))]
    ).astype(np.int64)


# ---------------------------------------------------------------- documents


def test_hash_is_the_same_everywhere() -> None:
    """Catches Python's own hash(), which differs from process to process, or a changed digest."""
    assert name_hash("a/é.txt") == 886992022658014132


def test_splits_are_disjoint_and_complete(corpus: Path) -> None:
    """Catches a document in both splits or in none, an empty one kept, a hidden one read."""
    found = open_corpus([corpus], heldout_fraction=0.3)
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


def test_split_is_stable(corpus: Path, tmp_path: Path) -> None:
    """Catches a split by position or absolute path: elsewhere, with more, none may move."""
    before = {d.name for d in open_corpus([corpus], heldout_fraction=0.3).read("heldout")}
    copy = _write(tmp_path / "copy", dict(_contents(corpus)))
    _write(copy, {f"a/new{n}.txt": "new" for n in range(9)})
    after = {d.name for d in open_corpus([copy], heldout_fraction=0.3).read("heldout")}
    assert {name for name in after if "new" not in name} == before


@pytest.mark.parametrize("fraction", [1e-12, 0.05, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("count", [2, 3])
def test_neither_split_is_empty(tmp_path: Path, fraction: float, count: int) -> None:
    """Catches a held-out split left empty by a small fraction, or a train split by a large one."""
    _write(tmp_path, {f"{n}.txt": "text" for n in range(count)})
    found = open_corpus([tmp_path], heldout_fraction=fraction)
    held = [document.name for document in found.read("heldout")]
    assert 1 <= len(held) < count
    if fraction < 1e-9:
        assert held == [min((f"{n}.txt" for n in range(count)), key=name_hash)]


def test_one_document_or_none_held_out_is_all_train(tmp_path: Path) -> None:
    """Catches the only document held out, or fraction 0 not obeyed."""
    _write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    for found in (
        open_corpus([tmp_path / "a.txt"], heldout_fraction=0.99),
        open_corpus([tmp_path], heldout_fraction=0),
    ):
        assert not list(found.read("heldout"))
        assert len(list(found.read("train"))) == found.documents


def test_same_names_and_same_files(tmp_path: Path) -> None:
    """Catches two files of one name always sharing a split, and one file read twice."""
    _write(tmp_path, {"a/x.txt": "1", "b/x.txt": "2"})
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
    given = [tmp_path / "a" / "x.txt", tmp_path / "a", tmp_path / "b", tmp_path]
    found = open_corpus(given)
    documents = [*found.read("train"), *found.read("heldout")]
    assert sorted(d.name for d in documents) == ["x.txt", "x.txt#2"]
    assert sorted(d.text for d in documents) == ["1", "2"]
    assert len(list(found.read("heldout"))) == 1


def test_text_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    """Catches a corpus held in memory: a file changed after the first document is seen changed."""
    _write(tmp_path, {"a.txt": "a", "b.txt": "b", "c.jsonl": '{"text": "c"}'})
    reading = open_corpus([tmp_path], heldout_fraction=0).read("train")
    assert next(reading).text == "a"
    _write(tmp_path, {"b.txt": "changed\r\n", "c.jsonl": '{"text": "also"}'})
    assert [document.text for document in reading] == ["changed\r\n", "also"]


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
    _write(tmp_path, kept | left)
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
        ({"a.jsonl": '{"text": "a"}\n{"text": '}, r"a\.jsonl line 2 is not valid JSON .*; mend"),
        ({"a.jsonl": b'\n{"text": "\xff"}'}, r"a\.jsonl line 2 is not valid JSON"),
        ({"a.jsonl": '{"body": "a", "id": 1}'}, r"line 1 has no field .*'text'; .*: body, id"),
        ({"a.jsonl": '{"text": 3}'}, r"line 1: field 'text' is a int, not a string; mend"),
        ({"a.jsonl": '["text"]'}, r"line 1 is a JSON list, not an object"),
        ({"a.jsonl": '{"text": "\\ud800"}'}, r"line 1: the text has half a surrogate pair"),
        ({"a.txt": "", "b.jsonl": '\n{"text": ""}\n'}, r"no text in .*; give files or folders"),
    ],
)
def test_broken_data_is_named(tmp_path: Path, files: dict[str, str | bytes], match: str) -> None:
    """Catches a broken file passed over, or an error that does not say where it is."""
    _write(tmp_path, files)
    with pytest.raises(UserError, match=match):
        open_corpus([tmp_path])


def test_broken_paths_are_named(tmp_path: Path) -> None:
    """Catches a raw OSError, or a path silently passed over."""
    with pytest.raises(UserError, match=r"'.*/none' does not exist .*; give a file or a folder"):
        open_corpus([tmp_path / "none"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"'.*/pipe' is neither a file nor a folder"):
        open_corpus([tmp_path / "pipe"])
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"link\.txt cannot be read: No such file"):
        open_corpus([tmp_path])
    with pytest.raises(UserError, match=r"heldout_fraction=1 must be 0 or more and below 1"):
        open_corpus(heldout_fraction=1)
    _write(tmp_path / "ok", {"a.txt": "a"})
    with pytest.raises(UserError, match=r"unknown split 'held' .*'heldout'"):
        next(open_corpus([tmp_path / "ok"]).read("held"))


# ---------------------------------------------------------------- tokenizer


@pytest.mark.parametrize("text", NASTY)
def test_tokenizer_is_lossless(tokenizer: Path, text: str) -> None:
    """Catches an added prefix space, a normaliser, a small alphabet, special tokens in text."""
    loaded = load_tokenizer(tokenizer)
    ids = loaded.encode(text, add_special_tokens=False).ids
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert loaded.decode(ids, skip_special_tokens=True) == text
    assert 0 not in ids


def test_tokenizer_training_is_deterministic(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Catches an alphabet in hash order and merges that depend on the order of the texts."""
    texts = [document.text for document in open_corpus([corpus]).read("train")]
    for n, given in enumerate((texts, texts[::-1])):
        train_tokenizer(given, 400, tmp_path / f"{n}.json")
        assert (tmp_path / f"{n}.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert sorted(_contents(tmp_path)) == ["0.json", "1.json"]  # no temporary file left


def test_vocabulary(tmp_path: Path) -> None:
    """Catches EOS elsewhere than 0, bytes missing, and the size asked for reported as the real."""
    assert train_tokenizer(["ab ab ab"], 5000, tmp_path) < 300
    assert train_tokenizer(["ab ab ab"], 258, tmp_path) == 258
    assert train_tokenizer([], 257, tmp_path) == 257
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.token_to_id(EOS) == 0
    assert loaded.get_vocab_size() == 257


def test_token_byte_lengths_sum_to_the_text(tokenizer: Path) -> None:
    """Catches lengths in characters, or of the byte alphabet's own UTF-8 (2 for most bytes)."""
    loaded = load_tokenizer(tokenizer)
    lengths = token_byte_lengths(loaded)
    assert lengths.shape == (loaded.get_vocab_size(),)
    assert lengths.dtype == np.int32
    assert lengths[0] == 0
    assert (lengths[1:257] == 1).all()
    for text in NASTY:
        assert lengths[loaded.encode(text).ids].sum() == len(text.encode())


def test_pieces_tokenise_as_the_whole(tmp_path: Path) -> None:
    """Catches a cut within a word or a run of spaces, and text lost or doubled at a cut."""
    prose = (
        "the stream  reads\n\n  a ladder, of\tpartial sums;    then waits \n for its peers.\n" * 9
    )
    train_tokenizer([prose], 5000, tmp_path)  # has a token for every word and run of spaces
    loaded = load_tokenizer(tmp_path)
    whole = loaded.encode(prose).ids
    for size in range(24, 90):
        cut = list(pieces(prose, size))
        assert "".join(cut) == prose
        assert max(map(len, cut)) <= size
        assert len(cut) >= len(prose) // size
        assert [i for piece in cut for i in loaded.encode(piece).ids] == whole
    for text in (*NASTY, " " * 100, "中" * 100):  # nowhere to cut
        for size in (1, 2, 7):
            assert "".join(pieces(text, size)) == text


def test_truncation_in_the_file_is_off(tokenizer: Path, tmp_path: Path) -> None:
    """Catches a tokenizer file's own truncation or padding losing or adding tokens."""
    loaded = load_tokenizer(tokenizer)
    loaded.enable_truncation(3)
    loaded.enable_padding(length=99)
    loaded.save(str(tmp_path / "tokenizer.json"))
    again = load_tokenizer(tmp_path)
    assert again.decode(again.encode(NASTY[0]).ids, skip_special_tokens=False) == NASTY[0]


def test_tokenizer_errors(tmp_path: Path, corpus: Path) -> None:
    """Catches raw library exceptions, and bytes counted wrong for what is not byte-level."""
    with pytest.raises(UserError, match=r"vocab_size=256 is too small .*; give 257 or more"):
        train_tokenizer([], 256, tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer at .*tokenizer\.json; train one"):
        load_tokenizer(tmp_path / "none")
    _write(tmp_path, {"tokenizer.json": "{}", "file": ""})
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"cannot create the folder .*file: File exists"):
        train_tokenizer([], 257, tmp_path / "file")
    words = Tokenizer(models.WordLevel({"hello": 0, EOS: 1, "[UNK]": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(UserError, match=r"not byte-level \(token \d is "):
        prepare([corpus], tmp_path / "words.json", tmp_path / "out")
    bare = Tokenizer(models.BPE({"a": 0}, []))
    bare.save(str(tmp_path / "bare.json"))
    with pytest.raises(UserError, match=r"no end-of-text token"):
        prepare([corpus], tmp_path / "bare.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_corpus_while_training_is_the_users_error(tmp_path: Path) -> None:
    """Catches the library swallowing an error that the texts' iterator raises."""

    def texts() -> Iterator[str]:
        yield "a"
        raise UserError("line 2 is broken")

    with pytest.raises(UserError, match="line 2 is broken"):
        train_tokenizer(texts(), 300, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- shards


@pytest.mark.parametrize("small", [False, True])
def test_shards_decode_to_the_documents(
    corpus: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    """Catches tokens lost or doubled at the ends of documents, batches, pieces and shards."""
    if small:  # many batches, and documents in many pieces
        monkeypatch.setattr(preparing, "BATCH", 50)
        monkeypatch.setattr(preparing, "pieces", lambda text: pieces(text, 16))
    out = tmp_path / "deep" / "out"
    index = prepare([corpus], tokenizer, out, heldout_fraction=0.3, shard_tokens=37)
    assert index == json.loads((out / "index.json").read_text())
    loaded, found = load_tokenizer(tokenizer), open_corpus([corpus], heldout_fraction=0.3)
    for split in ("train", "heldout"):
        tokens, record = _tokens(out, split), index["splits"][split]
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


def test_preparing_twice_gives_the_same_bytes(corpus: Path, tokenizer: Path, data: Path) -> None:
    """Catches dates, absolute paths of the output, or an order that depends on the threads."""
    again = data.with_name("again")
    prepare([corpus], tokenizer, again, heldout_fraction=0.3, shard_tokens=100)
    assert _contents(again) == _contents(data)


def test_a_large_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    """Catches ids above 65535 wrapped round in 16 bits."""
    train_tokenizer([], 257, tmp_path)
    big = load_tokenizer(tmp_path)
    big.add_tokens([f"<{n}>" for n in range(65536)])
    big.save(str(tmp_path / "tokenizer.json"))
    _write(tmp_path, {"text/a.txt": "a<65535>b<7>é"})
    index = prepare([tmp_path / "text"], tmp_path, tmp_path / "out")
    assert (index["dtype"], index["vocab_size"]) == ("uint32", 257 + 65536)
    data = open_data(tmp_path / "out")
    tokens = data.split("train").read(0, len(data.split("train")))
    assert load_tokenizer(tmp_path).decode(tokens[:-1].tolist()) == "a<65535>b<7>é"
    assert tokens.max() == 257 + 65535
    assert data.token_bytes[tokens].sum() == len("a<65535>b<7>é".encode())
    assert not len(data.split("heldout"))


def test_prepared_data_is_replaced_only_when_asked(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Catches data overwritten without --overwrite, and a user's own files deleted with it."""
    out = tmp_path / "out"
    out.mkdir()
    prepare([corpus], tokenizer, out, shard_tokens=10**6)  # an empty folder is free
    before = _contents(out)
    with pytest.raises(UserError, match=r"out=.* already holds prepared data; give --overwrite"):
        prepare([corpus], tokenizer, out)
    assert _contents(out) == before
    prepare([corpus], out, out, shard_tokens=100, overwrite=True)  # with its own tokenizer
    assert len(_contents(out)) > len(before)
    assert os.listdir(tmp_path) == ["out"]
    _write(out, {"run/checkpoint": "precious"})
    before = _contents(out)
    with pytest.raises(UserError, match=r"is no prepared folder \(it holds 'run'\)"):
        prepare([corpus], tokenizer, out, overwrite=True)
    assert _contents(out) == before
    with pytest.raises(UserError, match=r"out=.* is a file; choose a folder"):
        prepare([corpus], tokenizer, out / "index.json", overwrite=True)
    with pytest.raises(UserError, match=r"cannot be written \(.*Not a directory"):
        prepare([corpus], tokenizer, out / "index.json" / "deeper")
    with pytest.raises(UserError, match="shard_tokens=0 must be 1 or more"):
        prepare([corpus], tokenizer, tmp_path / "other", shard_tokens=0)


def _stop(kind: type[BaseException], at: int, call: Callable[..., Any]) -> Callable[..., Any]:
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
        (preparing, "pieces", 20, False),  # among the documents
        (preparing, "pieces", 20, True),
        (files, "sync", 2, False),  # complete but for the rename
        (files, "sync", 2, True),
        (Path, "rename", 1, False),  # in place of the rename
        (Path, "rename", 1, True),
        (Path, "rename", 2, True),  # between the two, where the old folder has gone aside
    ],
)
def test_interrupted_prepare_leaves_what_was_there(
    corpus: Path,
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
        prepare([corpus], tokenizer, out, shard_tokens=300)
    before = _contents(tmp_path)
    monkeypatch.setattr(owner, name, _stop(kind, at, getattr(owner, name)))
    monkeypatch.setattr(preparing, "BATCH", 50)
    with pytest.raises(UserError if kind is OSError else kind):
        prepare([corpus], tokenizer, out, overwrite=True)
    assert _contents(tmp_path) == before
    assert os.listdir(tmp_path) == (["out"] if existing else [])


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("seq_len", [1, 7, 33, 100, 250])
def test_windows_cross_shards(data: Path, seq_len: int) -> None:
    """Catches a window that stops, repeats or shifts at a shard's end, and targets off by one."""
    tokens = _tokens(data, "train")
    windows = Windows(open_data(data).split("train"), seq_len)
    assert len(windows) == (len(tokens) - 1) // seq_len
    inputs, targets = windows.read(range(len(windows)))
    assert inputs.dtype == targets.dtype == torch.int64
    used = len(windows) * seq_len
    assert inputs.flatten().tolist() == tokens[:used].tolist()
    assert targets.flatten().tolist() == tokens[1 : used + 1].tolist()


def test_split_reads_any_range(data: Path) -> None:
    """Catches errors at a shard's first and last token, which windows of one size may miss."""
    tokens, split = _tokens(data, "train"), open_data(data).split("train")
    assert len(split.shards) > 5
    assert len(split) == len(tokens)
    edges = [0, 1, 99, 100, 101, 199, 200, 201, 299, 300, len(tokens) - 1, len(tokens)]
    for start in edges:
        for stop in (edge for edge in edges if edge >= start):
            assert split.read(start, stop).tolist() == tokens[start:stop].tolist()


@pytest.mark.parametrize("batch_size", [4, 12, 1000])
def test_an_epoch_has_every_window_once(data: Path, batch_size: int) -> None:
    """Catches sampling with replacement, a dropped last batch, epochs in one and the same order."""
    windows = Windows(open_data(data).split("train"), 16)
    count = len(windows)
    assert count % batch_size
    steps = -(-3 * count // batch_size)
    sequence = [i for step in range(steps) for i in windows.order(step, batch_size, seed=1)]
    epochs = [sequence[n * count : (n + 1) * count] for n in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(count))
    assert windows.order(0, count, seed=2) != epochs[0]


def test_order_is_the_same_for_any_number_of_ranks(data: Path) -> None:
    """Catches ranks that read the same windows, or an order that depends on how many there are."""
    split = open_data(data).split("train")
    for step in (0, 3, 40):
        whole = Windows(split, 16).batch(step, 8, seed=5)
        for ranks in (1, 2, 4):
            parts = [Windows(split, 16).batch(step, 8, 5, rank, ranks) for rank in range(ranks)]
            assert {part[0].shape for part in parts} == {(8 // ranks, 16)}
            for side in (0, 1):
                assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


def test_a_batch_depends_on_its_step_only(data: Path) -> None:
    """Catches state carried from step to step: resuming anywhere gives what a whole run gave."""
    split = open_data(data).split("train")
    running = Windows(split, 16)
    run = [running.batch(step, 6, seed=3) for step in range(60)]
    assert len(running) < 60 * 6 / 3  # several epochs, so that orders fall out of the cache
    for step in (59, 0, 17, 31, 1):
        for windows in (Windows(split, 16), running):
            tokens, targets = windows.batch(step, 6, seed=3)
            assert torch.equal(tokens, run[step][0])
            assert torch.equal(targets, run[step][1])
    assert len(running._orders) <= 2  # each is as long as an epoch


def test_order_never_changes() -> None:
    """Catches another shuffle: a run resumed after an upgrade would see windows twice."""
    windows = Windows(Split("train", (np.arange(21),), np.array([0, 21]), 1, 1, 21), seq_len=2)
    assert windows.order(0, 10, seed=7) == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert windows.order(1, 10, seed=7) == [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]


def test_heldout_windows_give_bytes(data: Path, tokenizer: Path) -> None:
    """Catches the inputs' bytes for the targets', windows out of order or counted twice."""
    opened, tokens = open_data(data), _tokens(data, "heldout")
    lengths = token_byte_lengths(load_tokenizer(tokenizer))
    batches = list(heldout_windows(opened, 16, batch_size=5))
    used = (len(tokens) - 1) // 16 * 16
    assert torch.cat([b[0] for b in batches]).flatten().tolist() == tokens[:used].tolist()
    assert torch.cat([b[1] for b in batches]).flatten().tolist() == tokens[1 : used + 1].tolist()
    sizes = torch.cat([b[2] for b in batches]).flatten().tolist()
    assert sizes == lengths[tokens[1 : used + 1]].tolist()
    total = opened.split("heldout").bytes
    assert sum(sizes) + lengths[tokens[0]] + lengths[tokens[used + 1 :]].sum() == total
    assert {len(batch[0]) for batch in batches[:-1]} == {5}
    limited = list(heldout_windows(opened, 16, limit=7, batch_size=5))
    assert [len(batch[0]) for batch in limited] == [5, 2]
    assert torch.equal(limited[0][0], batches[0][0])


def test_window_errors(data: Path) -> None:
    """Catches an epoch of no windows (an endless loop or ZeroDivisionError), uneven ranks."""
    opened = open_data(data)
    split = opened.split("train")
    count = len(split)
    with pytest.raises(
        UserError, match=rf"seq_len={count} is longer than split 'train'.* {count - 1:,}; use"
    ):
        Windows(split, count)
    assert len(Windows(split, count - 1)) == 1
    with pytest.raises(UserError, match="seq_len=0 must be 1 or more"):
        Windows(split, 0)
    with pytest.raises(UserError, match="batch_size=6 must be a multiple of the 4 data-parallel"):
        Windows(split, 8).batch(0, 6, seed=0, rank=0, ranks=4)
    with pytest.raises(UserError, match="seed=-1 must be 0 or more"):
        Windows(split, 8).batch(0, 6, seed=-1)
    with pytest.raises(UserError, match=r"unknown split 'test'.*known: train, heldout"):
        opened.split("test")
    with pytest.raises(UserError, match="limit=0 must be 1 or more"):
        next(heldout_windows(opened, 8, limit=0))


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda f: (f / "index.json").unlink(), r"no prepared data in .*; prepare it, or give"),
        (lambda f: (f / "index.json").write_text("{"), r"index\.json is damaged \(JSON"),
        (lambda f: (f / "index.json").write_text("[]"), r"index\.json is damaged"),
        (lambda f: _edit(f / "index.json", version=9), r"has version=9, this program reads 1"),
        (lambda f: _edit(f / "index.json", dtype="int8"), r"is damaged \(KeyError: 'int8'\)"),
        (lambda f: _edit(f / "index.json", splits=3), r"is damaged"),
        (lambda f: _edit(f / "index.json", vocab_size=9), r"says vocab_size=9; prepare"),
        (lambda f: (f / "train-00002.bin").unlink(), r"train-00002\.bin cannot be read: No such"),
        (
            lambda f: os.truncate(f / "train-00001.bin", 198),
            r"train-00001\.bin is truncated: 198 bytes where index\.json says 200; copy it again",
        ),
        (lambda f: os.truncate(f / "heldout-00000.bin", 202), r"heldout-00000\.bin is too long"),
        (lambda f: (f / "token_bytes.npy").unlink(), r"token_bytes\.npy cannot be read"),
        (lambda f: os.truncate(f / "token_bytes.npy", 40), r"token_bytes\.npy cannot be read"),
    ],
)
def test_damaged_folders_are_refused(
    data: Path, tmp_path: Path, damage: Callable[[Path], object], match: str
) -> None:
    """Catches a damaged folder that trains on rubbish, or whose error does not name the file."""
    folder = _write(tmp_path, dict(_contents(data)))
    open_data(folder)
    damage(folder)
    with pytest.raises(UserError, match=match):
        open_data(folder)
