"""Documents: where the text comes from, and which of it is held out.

A document is a whole text file, or one line of a .jsonl file. It is named by its path inside the
folder that was given (a file: its own name; a line: the file's name and the line's number), and
held out where a hash of that name is low. So the split is the same on every machine, and adding
documents moves none of the others between the splits.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ladder.models.errors import UserError, unknown
from ladder.progress import Progress

SPLITS = ("train", "heldout")
HASH_RANGE = 2**64

# What the default corpus leaves out: foreign packages, tests, and what differs between machines.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
STDLIB_LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")


class Source(NamedTuple):
    """A file of one document, or of one per line; no two of a corpus have the same name."""

    name: str
    path: Path


class Document(NamedTuple):
    """One text. bytes: its length in UTF-8."""

    name: str
    text: str
    bytes: int


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, each in one split; their text is read as it is asked for.

    documents, bytes: how many of both splits. heldout_below: what is held out hashes below it.
    description: plain data that says what was read.
    """

    sources: tuple[Source, ...]
    text_field: str
    documents: int
    bytes: int
    heldout_below: int
    description: dict[str, Any]

    def read(self, split: str) -> Iterator[Document]:
        """The documents of `train` or `heldout`, one by one."""
        if split not in SPLITS:
            raise unknown("split", split, SPLITS)
        for document in _read(self.sources, self.text_field):
            if (name_hash(document.name) < self.heldout_below) == (split == "heldout"):
                yield document


def open_corpus(
    paths: Sequence[str | Path] | None = None,
    *,
    heldout_fraction: float = 0.05,
    text_field: str = "text",
) -> Corpus:
    """Find the documents, read each once to check it, and split them.

    paths: text files, .jsonl files (the text is in `text_field` of each line), folders (all files
        below them but hidden ones); None is the running Python's standard library, one document
        per .py file, without tests. Empty documents are passed over.
    heldout_fraction: of the documents, about. From 2 documents on, each split has at least one;
        0 holds none out.

    Raises UserError for a path that cannot be read, text that is not UTF-8, a broken line, no data.
    """
    if not 0 <= heldout_fraction < 1:
        raise UserError(f"heldout_fraction={heldout_fraction!r} must be 0 or more and below 1")
    if paths is None:
        sources = _standard_library()
        description: dict[str, Any] = {
            "kind": "standard library",
            "python": platform.python_version(),
        }
    else:
        if isinstance(paths, str | Path):
            paths = [paths]
        sources = _find(paths)
        description = {
            "kind": "files",
            "paths": [str(path) for path in paths],
            "text_field": text_field,
        }
    description["heldout_fraction"] = heldout_fraction

    count = size = 0
    lowest, highest = HASH_RANGE, -1
    with Progress("read", None, "documents") as progress:
        for document in _read(sources, text_field):
            count, size = count + 1, size + document.bytes
            key = name_hash(document.name)
            lowest, highest = min(lowest, key), max(highest, key)
            progress.update(count, f"{size / 1e6:,.1f} MB")
    if count == 0:
        where = "the standard library" if paths is None else ", ".join(map(str, paths))
        raise UserError(f"no text in {where}; give files or folders with text in them")
    below = int(heldout_fraction * HASH_RANGE)
    if count == 1:
        below = 0
    elif heldout_fraction > 0:  # at least the lowest is held out, and never the highest
        below = min(max(below, lowest + 1), highest)
    return Corpus(tuple(sources), text_field, count, size, below, description)


def name_hash(name: str) -> int:
    """A document's name to a number in [0, 2^64), the same everywhere and for ever."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _find(paths: Iterable[str | Path]) -> list[Source]:
    """The files that `paths` stand for, each once, under names that differ."""
    found: list[Source] = []
    names: set[str] = set()
    seen: set[Path] = set()
    for path in map(Path, paths):
        if os.path.isdir(path):
            files = [(file.relative_to(path).as_posix(), file) for file in _walk(path)]
        elif os.path.isfile(path):
            files = [(path.name, path)]
        elif os.path.exists(path):  # a pipe, say: it can be read only once
            raise UserError(
                f"data path {str(path)!r} is neither a file nor a folder; save it first"
            )
        else:
            raise UserError(
                f"data path {str(path)!r} does not exist or cannot be reached; give a file or a "
                f"folder"
            )
        for relative, file in sorted(files):
            resolved = file.resolve()
            if resolved in seen:  # twice in the corpus, it could be in both splits
                continue
            seen.add(resolved)
            name, copy = relative, 1
            while name in names:
                copy += 1
                name = f"{relative}#{copy}"
            names.add(name)
            found.append(Source(name, file))
    return found


def _walk(folder: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    """All files below `folder`, but hidden ones and those in folders `skipped` by name."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; check its permissions")

    entered: set[Path] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = Path(parent).resolve()
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in skipped
        )
        if real in entered:  # a link that leads back
            folders.clear()
            continue
        entered.add(real)
        for path in (Path(parent, name) for name in files if not name.startswith(".")):
            if path.is_file() or path.is_symlink():  # a broken link is an error when it is read
                yield path


def _standard_library() -> list[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for file in _walk(root, STDLIB_SKIPPED):
        parts = file.relative_to(root).parts
        local = any(part.startswith(STDLIB_LOCAL) for part in parts)
        if file.suffix != ".py" or local:
            continue
        try:
            file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # a few modules are kept in older encodings
        found.append(Source("/".join(parts), file))
    return sorted(found)


def _read(sources: Iterable[Source], text_field: str) -> Iterator[Document]:
    """Every document that is not empty, in order; one is in memory at a time."""
    for source in sources:
        try:
            if source.path.suffix == ".jsonl":
                yield from _read_lines(source, text_field)
                continue
            data = source.path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{source.path} cannot be read: {error.strerror}; check the path and permissions"
            ) from error
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{source.path} is not UTF-8 text (byte {error.start} is 0x{data[error.start]:02x})"
                f"; convert it, or take it out of the paths given"
            ) from error
        if data:
            yield Document(source.name, text, len(data))


def _read_lines(source: Source, text_field: str) -> Iterator[Document]:
    with source.path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{source.path} line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{where} is not valid JSON ({error}); mend or remove the line"
                ) from error
            if not isinstance(record, dict):
                raise UserError(
                    f"{where} is a JSON {type(record).__name__}, not an object with a field "
                    f"{text_field!r}; mend or remove the line"
                )
            if text_field not in record:
                known = ", ".join(record) or "none"
                raise UserError(
                    f"{where} has no field text_field={text_field!r}; its fields: {known}"
                )
            text = record[text_field]
            if not isinstance(text, str):
                raise UserError(
                    f"{where}: field {text_field!r} is a {type(text).__name__}, not a string; "
                    f"mend the line or choose another text_field"
                )
            try:
                size = len(text.encode("utf-8"))
            except UnicodeEncodeError as error:
                raise UserError(
                    f"{where}: the text has half a surrogate pair at character {error.start}, "
                    f"which is no Unicode text; mend or remove the line"
                ) from error
            if text:
                yield Document(f"{source.name}:{number}", text, size)
