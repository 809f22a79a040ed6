"""A small prepared corpus that the tests of training share, made once a session."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ladder.data.prepare import prepare
from ladder.data.sources import open_corpus
from ladder.data.tokenizer import train_tokenizer

WORDS = ("def", "return", "self", "value", "for", "in", "range", "print", "if", "else", "None")
VOCAB_SIZE = 300


def make_corpus(folder: Path) -> Path:
    """Write 40 documents of 60 words, a tokenizer and the token shards; returns the latter."""
    texts = folder / "texts"
    texts.mkdir()
    source = random.Random(1)
    for i in range(40):
        words = [source.choice(WORDS) + source.choice(("", "_x", "(y)")) for _ in range(60)]
        (texts / f"{i:02d}.txt").write_text(" ".join(words) + "\n", encoding="utf-8")
    corpus = open_corpus([texts], heldout_fraction=0.2)
    train_tokenizer((d.text for d in corpus.read("train")), VOCAB_SIZE, folder / "tokenizer")
    prepare([texts], folder / "tokenizer", folder / "data", heldout_fraction=0.2)
    return folder / "data"


def swap_two_tokens(file: Path) -> None:
    """Make a tokenizer.json one of as many tokens, two of which have each other's numbers."""
    definition = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = definition["model"]["vocab"]
    a, b = list(vocabulary)[50:52]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(definition), encoding="utf-8")
