"""The documents of a corpus, and their split into training and held-out text.

A document's name is its path inside the given folder (for a given file: the file's name; for a line
or row: the file's name and the number). Files that would share a name get longer ones: as many of
the folders above them as tell them apart. A document is held out if a hash of its name is low. So
the split is the same on every machine and for any order of the paths. Adding documents moves no
others between the splits, unless an added file shares a name with theirs, or the corpus is so small
that a split would be empty (see `heldout_below`).
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ladder.data.formats import Document, Field, FilePart, Source, form, read_documents
from ladder.data.index import INDEX, TOKEN_BYTES
from ladder.data.streams import SCHEME, Stream, parse_stream
from ladder.models.errors import UserError, unknown
from ladder.progress import Progress

SPLITS = ("train", "heldout")
TEXT_FIELD = "text"  # the default
HASH_RANGE = 2**64

# The default corpus leaves out foreign packages, tests, and files that differ between machines.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
STDLIB_LOCAL = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order, each in one split; their text is read lazily.

    documents, bytes: totals of both splits. heldout_below: names that hash below it are held out.
    description: the sources and options, as plain data.
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
        for document in _read(self.sources, Field(self.text_field)):
            if (name_hash(document.name) < self.heldout_below) == (split == "heldout"):
                yield document


def open_corpus(
    paths: Sequence[str | Path] | None = None,
    *,
    heldout_fraction: float = 0.05,
    text_field: str = "text",
) -> Corpus:
    """Find the documents, read each once to check it, and split them.

    paths, text_field, heldout_fraction: as for `find_sources` and `heldout_below`, but no streams.

    Raises UserError for a path that cannot be read, text that is not UTF-8, a broken line, no data.
    """
    sources, description = find_sources(paths, heldout_fraction, text_field)
    files = []
    for source in sources:
        if isinstance(source, Stream):
            raise UserError(
                f"{source.path} is a stream, too long to be read twice; give files here, such as "
                f"some of its Parquet files"
            )
        files.append(source)

    names = Names()
    size = 0
    with Progress("read", None, "documents") as progress:
        for document in _read(files, Field(text_field)):
            key = name_hash(document.name)
            names = names.merge(Names(1, key, key))
            size += document.bytes
            progress.update(names.documents, f"{size / 1e6:,.1f} MB")
    names.check(paths)
    below = heldout_below(heldout_fraction, names)
    return Corpus(tuple(files), text_field, names.documents, size, below, description)


def find_sources(
    paths: Sequence[str | Path] | None,
    heldout_fraction: float,
    text_field: str,
    recorded: Mapping[str, str] | None = None,
) -> tuple[list[Source | Stream], dict[str, Any]]:
    """The files and streams that hold the documents, and their description as plain data.

    paths: text files, .jsonl and .parquet files (the text is in the field or column `text_field`),
        folders (all files below them but hidden ones), `hf:OWNER/NAME` (a Hugging Face dataset, see
        ladder.data.streams); None is the running Python's standard library, one document per .py
        file, without tests. Empty documents are skipped. recorded: as for `parse_stream`.

    Raises UserError for a path that cannot be read, a fraction outside [0, 1), and a `text_field`
    of files that have no fields.
    """
    if not 0 <= heldout_fraction < 1:
        raise UserError(f"heldout_fraction={heldout_fraction!r} must be 0 or more and below 1")
    description: dict[str, Any]
    if paths is None:
        found: list[Source | Stream] = [*_standard_library()]
        description = {"kind": "standard library", "python": platform.python_version()}
    else:
        if isinstance(paths, str | Path):
            paths = [paths]
        found = _find(paths, recorded)
        description = {
            "kind": "files",
            "paths": [str(path) for path in paths],
            "text_field": text_field,
        }
        streams = [source for source in found if isinstance(source, Stream)]
        if streams:  # only their revision identifies their content
            description["streams"] = [stream._asdict() for stream in streams]
    fields = any(isinstance(source, Stream) or form(source.path) for source in found)
    if text_field != TEXT_FIELD and found and not fields:
        raise UserError(
            f"text_field={text_field!r} is of no use, since no file of {_named(paths)} is a .jsonl "
            f"or .parquet file; leave it out, rename files of JSON lines to .jsonl, or write the "
            f"rows of a table to one"
        )
    description["heldout_fraction"] = heldout_fraction
    return found, description


def _named(paths: Sequence[str | Path] | None) -> str:
    return "the standard library" if paths is None else ", ".join(map(str, paths))


class Names(NamedTuple):
    """The number of documents, and the lowest and highest hash of their names."""

    documents: int = 0
    lowest: int = HASH_RANGE
    highest: int = -1

    def merge(self, other: Names) -> Names:
        return Names(
            self.documents + other.documents,
            min(self.lowest, other.lowest),
            max(self.highest, other.highest),
        )

    def check(self, paths: Sequence[str | Path] | None) -> None:
        """Refuse a corpus without documents."""
        if self.documents == 0:
            raise UserError(f"no text in {_named(paths)}; give files or folders with text in them")


def heldout_below(fraction: float, names: Names | None = None) -> int:
    """The hash threshold below which documents are held out: about `fraction` of all.

    names: the documents' names, if known. Then each split has at least one of 2 or more
    documents: where the fraction alone would hold none out, it is the one with the lowest hash, so
    that an added document may take its place. A fraction of 0 holds none out.
    """
    below = int(fraction * HASH_RANGE)
    if names is None or fraction == 0:
        return below
    if names.documents == 1:
        return 0
    # at least the lowest is held out, and never the highest
    return min(max(below, names.lowest + 1), names.highest)


def name_hash(name: str) -> int:
    """A stable hash of a document's name, in [0, 2^64)."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _find(paths: Iterable[str | Path], recorded: Mapping[str, str] | None) -> list[Source | Stream]:
    """The files and streams that `paths` name, each once, with unique names."""
    found: list[Source | Stream] = []
    choices: list[list[str]] = []  # the names that each may have
    seen: dict[str, int] = {}  # where a real file is in `found`

    for given in paths:
        if isinstance(given, str) and given.startswith(SCHEME):
            stream = parse_stream(given, recorded)
            if stream.rows not in [each.rows for each in found if isinstance(each, Stream)]:
                found.append(stream)
                choices.append(stream.names)
            continue
        path = Path(given)
        if os.path.isdir(path):
            if all((path / name).is_file() for name in (INDEX, TOKEN_BYTES)):
                raise UserError(
                    f"data path {str(path)!r} is a folder of prepared data, and not of text; give "
                    f"the text that it was made from (`ladder eval --text` takes such a folder, "
                    f"alone)"
                )
            files = [(file.relative_to(path).as_posix(), file) for file in _walk(path)]
        elif os.path.isfile(path):
            files = [(path.name, path)]
        elif os.path.exists(path):  # such as a pipe, which can be read only once
            raise UserError(
                f"data path {str(path)!r} is neither a file nor a folder; save it first"
            )
        else:
            raise UserError(
                f"data path {str(path)!r} does not exist or cannot be reached; give a file or a "
                f"folder"
            )
        above = (path if os.path.isdir(path) else path.parent).absolute().parts
        for relative, file in sorted(files):
            longer = ("/".join((*above[at:], relative)) for at in reversed(range(len(above))))
            names = [relative, *longer]
            real = os.path.realpath(file)  # Path.resolve raises for cyclic links
            at = seen.setdefault(real, len(found))
            if at == len(found):
                found.append(Source(relative, file))
                choices.append(names)
            else:  # twice it could be in both splits; its name is the same for any order of paths
                choices[at] = min(choices[at], names, key=lambda each: (len(each[0]), each))
    return [each._replace(name=name) for each, name in zip(found, _unlike(choices), strict=True)]


def _unlike(choices: Sequence[Sequence[str]]) -> list[str]:
    """A name for each: the first of its choices, or, while another has the same one, the next.

    The order decides nothing. The last choices must differ from each other.
    """
    taken = [0] * len(choices)
    while True:
        names = [each[at] for each, at in zip(choices, taken, strict=True)]
        counts = Counter(names)
        shared = [n for n, name in enumerate(names) if counts[name] > 1]
        if not shared:
            return names
        for n in shared:
            taken[n] = min(taken[n] + 1, len(choices[n]) - 1)


def _walk(folder: Path, skipped: Collection[str] = ()) -> Iterator[Path]:
    """All files below `folder`, except hidden ones and those in folders named in `skipped`."""

    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}; check its permissions")

    entered: set[Path] = set()
    for parent, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = Path(parent).resolve()
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and name not in skipped
        )
        if real in entered:  # a symbolic link made a cycle
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
            continue  # a few modules have older encodings
        found.append(Source("/".join(parts), file))
    return sorted(found)


def _read(sources: Iterable[Source], field: Field) -> Iterator[Document]:
    """The documents that are not empty, in order; one is in memory at a time."""
    for source in sources:
        yield from read_documents(FilePart(source), field)
