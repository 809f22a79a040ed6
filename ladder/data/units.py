"""Units of work: consecutive parts of a corpus, each tokenised by one process.

The end of a unit depends only on the corpus, not on the number of processes or earlier work. Each
unit has the cursor of the next one, which suffices to resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from ladder.data.compression import compressed
from ladder.data.formats import (
    Document,
    Field,
    FilePart,
    Source,
    cut,
    form,
    read_documents,
    read_lines,
)
from ladder.data.streams import Reader, Stream

UNIT = 2**23  # bytes of text: seconds of work, which a process loses when it is interrupted


class Cursor(NamedTuple):
    """A position in a corpus, which can be stored as JSON.

    source: the number of the file or stream. at: the position in it, as in `FilePart.start` or
    `Reader.state`; None is the beginning, or, of compressed lines, not known. number: the lines or
    rows before that position.
    """

    source: int = 0
    at: Any = None
    number: int = 0


class Unit(NamedTuple):
    """Parts of files, or documents of a stream or of compressed lines, which cannot be cut.

    size: approximate bytes of input. after: where the next unit begins.
    """

    parts: tuple[FilePart, ...]
    documents: tuple[Document, ...]
    size: int
    after: Cursor

    def read(self, field: Field) -> Iterator[Document]:
        yield from self.documents
        for part in self.parts:
            yield from read_documents(part, field)


def units(sources: Sequence[Source | Stream], field: Field, cursor: Cursor) -> Iterator[Unit]:
    """All units from a cursor on, generated lazily."""
    parts: list[FilePart] = []
    size = 0
    for index in range(cursor.source, len(sources)):
        source = sources[index]
        here = cursor if index == cursor.source else Cursor(index)
        if isinstance(source, Stream) or (compressed(source.path) and form(source.path)):
            if parts:
                yield Unit(tuple(parts), (), size, here)
                parts, size = [], 0
            yield from _of_documents(source, field, here)
            continue
        number: int | None = here.number
        while number is not None:
            part, number = cut(source, field, here.at or 0, here.number, UNIT - size)
            ended = number is None
            here = Cursor(index + 1) if number is None else Cursor(index, part.stop, number)
            parts.append(part)
            size += part.size
            if size >= UNIT or not ended:  # a part that does not reach its file's end fills a unit
                yield Unit(tuple(parts), (), size, here)
                parts, size = [], 0
    if parts:
        yield Unit(tuple(parts), (), size, Cursor(len(sources)))


def _of_documents(source: Source | Stream, field: Field, here: Cursor) -> Iterator[Unit]:
    found: Iterable[tuple[int, Document]]
    state: Callable[[], Any]
    if isinstance(source, Stream):
        reader = Reader(source, field, here.at, here.number)
        found, state = ((reader.number, document) for document in reader), reader.state
    else:
        found, state = read_lines(FilePart(source, number=here.number), field), lambda: None
    documents: list[Document] = []
    size = 0
    for number, document in found:
        documents.append(document)
        size += document.bytes
        if size >= UNIT:
            yield Unit((), tuple(documents), size, Cursor(here.source, state(), number))
            documents, size = [], 0
    yield Unit((), tuple(documents), size, Cursor(here.source + 1))
