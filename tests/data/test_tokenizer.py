"""ladder.data: the tokenizer. Each test says what it would catch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ladder.checkpoint import newest
from ladder.data.prepare import prepare
from ladder.data.sources import open_corpus
from ladder.data.tokenizer import (
    EOS,
    load_tokenizer,
    pieces,
    token_byte_lengths,
    train_tokenizer,
)
from ladder.models.errors import UserError
from tests.documents import NASTY, contents, write


@pytest.mark.parametrize("text", NASTY)
def test_tokenizer_is_lossless(tokenizer: Path, text: str) -> None:
    """Catches an added prefix space, a normaliser, a small alphabet, special tokens in text."""
    loaded = load_tokenizer(tokenizer)
    ids = loaded.encode(text, add_special_tokens=False).ids
    assert loaded.decode(ids, skip_special_tokens=False) == text
    assert loaded.decode(ids, skip_special_tokens=True) == text
    assert 0 not in ids


def test_tokenizer_training_is_deterministic(
    documents: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Catches an alphabet in hash order and merges that depend on the order of the texts."""
    texts = [document.text for document in open_corpus([documents]).read("train")]
    for n, given in enumerate((texts, texts[::-1])):
        train_tokenizer(given, 400, tmp_path / f"{n}.json")
        assert (tmp_path / f"{n}.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()
    assert sorted(contents(tmp_path)) == ["0.json", "1.json"]  # no temporary file left


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


def test_tokenizer_errors(tmp_path: Path, documents: Path) -> None:
    """Catches raw library exceptions, and bytes counted wrong for what is not byte-level."""
    with pytest.raises(UserError, match=r"vocab_size=256 is too small .*; give 257 or more"):
        train_tokenizer([], 256, tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer at .*tokenizer\.json; train one"):
        load_tokenizer(tmp_path / "none")
    write(tmp_path, {"tokenizer.json": "{}", "file": ""})
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"^--out=.*file is a file; give a folder$"):
        train_tokenizer([], 257, tmp_path / "file")
    words = Tokenizer(models.WordLevel({"hello": 0, EOS: 1, "[UNK]": 2}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    with pytest.raises(UserError, match=r"not byte-level \(token \d is "):
        prepare([documents], tmp_path / "words.json", tmp_path / "out")
    bare = Tokenizer(models.BPE({"a": 0}, []))
    bare.save(str(tmp_path / "bare.json"))
    with pytest.raises(UserError, match=r"no end-of-text token"):
        prepare([documents], tmp_path / "bare.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_broken_corpus_while_training_is_the_users_error(tmp_path: Path) -> None:
    """Catches the library swallowing an error that the texts' iterator raises."""

    def texts() -> Iterator[str]:
        yield "a"
        raise UserError("line 2 is broken")

    with pytest.raises(UserError, match="line 2 is broken"):
        train_tokenizer(texts(), 300, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_sentencepiece_model_is_not_taken_for_none(tmp_path: Path) -> None:
    """Older Llamas have nothing else; transformers makes the other of it."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    for path in (tmp_path, tmp_path / "tokenizer.model"):
        with pytest.raises(UserError, match=r"has tokenizer\.model.* no tokenizer\.json: make one"):
            load_tokenizer(path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"give .*/tokenizer\.json, beside it"):
        load_tokenizer(tmp_path / "tokenizer.model")


def test_a_name_on_the_hub_is_told_how_to_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For models and tokenizers alike; not for mistyped paths, nor for folders that commands write,
    before `runs` exists."""
    monkeypatch.chdir(tmp_path)
    fetch = "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"
    for read in (load_tokenizer, newest):
        with pytest.raises(UserError, match=fetch):
            read(Path("meta-llama/Llama-3.1-8B"))
        for path in ("runs/Llama-3.1-8B", "Llama-3.1-8B", "/meta-llama/Llama-3.1-8B", "a/b/c"):
            with pytest.raises(UserError) as error:
                read(Path(path))
            assert "hf download" not in str(error.value)
