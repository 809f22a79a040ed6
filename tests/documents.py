"""A small corpus of awkward documents, and what the tests of ladder.data share around it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from ladder.data.tokenizer import EOS

NASTY = [
    "plain words, and  two   three spaces \n\n\n\tindented\r\nCRLF\rCR \n",
    " leading and trailing space ",
    "emoji 👩‍👩‍👧‍👦🏳️‍🌈 é é 中文没有空格 עברית \u202e \ufeff \x00 \x7f \x85 \u2028 \U0010ffff",
    f"the name {EOS} in a text, {EOS}{EOS} <|endoftext",
    "Ġ Ċ ▁ ## </s> 0123456789 \\u00e9 ",
    "\n",
    " ",
]


def write(folder: Path, texts: dict[str, str | bytes]) -> Path:
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def tokens_of(folder: Path, split: str) -> np.ndarray:
    """All tokens of a split, read without the code under test."""
    return np.concatenate(
        [np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}-*.bin"))]
    ).astype(np.int64)


def write_documents(folder: Path) -> Path:
    """40 documents, 7 of them nasty, in files and in a .jsonl."""
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
    return write(folder, texts)
