"""Documents, and the files that hold them: text, JSON lines, Parquet.

A document is a whole text file, one line of a .jsonl (or .ndjson) file or one row of a .parquet
file. Text and lines may be compressed by gzip. A file that is not compressed can be cut into parts
that are read independently; its documents do not depend on the cuts.
"""

from __future__ import annotations

import codecs
import csv
import json
import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ladder.data.compression import GZIP, compressed, open_text, readable
from ladder.data.conversations import (
    chat_field_of,
    columns_beside,
    conversation_text,
    remedy_for,
    unusable,
)
from ladder.models.errors import UserError, kind_of, reason

ROWS = 1024  # rows of a Parquet file that are in memory as Python strings at once
FORMS = {".jsonl": ".jsonl", ".ndjson": ".jsonl", ".parquet": ".parquet"}
TABLES = {".csv": ",", ".tsv": "\t"}


class Source(NamedTuple):
    """A file of one document, or of one per line or row. Names are unique in a corpus."""

    name: str
    path: Path


class Document(NamedTuple):
    """One text. bytes: its length in UTF-8."""

    name: str
    text: str
    bytes: int


@dataclass(frozen=True)
class Field:
    """The field or column of a record that holds its document: text, or a conversation.

    The text of a conversation is JSON, see ladder.data.conversations.
    """

    name: str
    conversations: bool = False

    def __str__(self) -> str:
        return f"{'chat_field' if self.conversations else 'text_field'}={self.name!r}"

    def columns(self, names: Collection[str]) -> list[str]:
        """The columns to read, of those that a file has: its own, and what belongs to it."""
        beside = columns_beside(self.name) if self.conversations else ()
        return [self.name, *(each for each in beside if each in names)]

    def missing(self, where: str, what: str, names: Collection[str]) -> UserError:
        option = "--chat-field" if self.conversations else "--text-field"
        if self.conversations:
            remedy = remedy_for(names)
        elif name := chat_field_of(names):
            remedy = f"for conversations, give `ladder data prepare` --chat-field {name}"
        else:
            remedy = "give the one that holds the text"
        return UserError(
            f"{where} has no {what} {self.name!r} ({option}); its {what}s: "
            f"{', '.join(names) or 'none'}; {remedy}"
        )


class FilePart(NamedTuple):
    """A part of a file: bytes of a .jsonl, row groups of a .parquet, the whole of any other file.
    Of compressed lines: those from a number on.

    start, stop: where the part begins and ends; None is the end of the file. number: the lines or
    rows before the part, for the names of its documents. size: its share of the file, in bytes.
    """

    source: Source
    start: int = 0
    stop: int | None = None
    number: int = 0
    size: int = 0


def form(path: Path) -> str:
    """.jsonl or .parquet, for files that hold many documents; empty for text."""
    if compressed(path):
        return GZIP[Path(path.stem).suffix.lower()]
    return FORMS.get(path.suffix.lower(), "")


def file_status(source: Source) -> os.stat_result:
    """The file's size, date and so on. Raises UserError for a file that cannot be read."""
    with readable(source.path):
        return source.path.stat()


def cut(
    source: Source, field: Field, start: int, number: int, room: int
) -> tuple[FilePart, int | None]:
    """The part of about `room` bytes of text that begins at `start`, after `number` lines or rows.

    Returns the part, and the number of lines or rows before the next part (None: no next part).
    """
    size = file_status(source).st_size
    with readable(source.path):
        if form(source.path) == ".jsonl":
            return _cut_lines(source, start, number, room, size)
        if form(source.path) == ".parquet":
            return _cut_rows(source, field, start, number, room, size)
    return FilePart(source, size=size), None


def read_documents(part: FilePart, field: Field) -> Iterator[Document]:
    """The documents of a part that are not empty, in order; one is in memory at a time.

    Raises UserError for a file that cannot be read, text that is not UTF-8, a broken line or row,
    and a .json file of records or a table that has the field.
    """
    path = part.source.path
    with readable(path):
        if form(path) == ".jsonl":
            yield from (document for _, document in read_lines(part, field))
            return
        if form(path) == ".parquet":
            yield from _read_rows(part, field)
            return
        if field.conversations:
            raise UserError(
                f"{path} is no .jsonl or .parquet file, where {field} has conversations; take it "
                f"out of the paths given, or, if it has one object a line, rename it to .jsonl"
            )
        with open_text(path) as file:
            data = file.read()
    mark = len(codecs.BOM_UTF8) if data.startswith(codecs.BOM_UTF8) else 0
    try:
        text = data[mark:].decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is {reason(error, mark)}; convert it, or take it out of the paths given"
        ) from error
    if path.suffix.lower() == ".json":
        _refuse_records(path, text, field)
    if path.suffix.lower() in TABLES:
        _refuse_table(path, text, field)
    if text:
        yield Document(part.source.name, text, len(data) - mark)


def _refuse_records(path: Path, text: str, field: Field) -> None:
    """Raise UserError for JSON lines or a list of records, which are not to be read as one text.

    Records are recognised by the text field of the first one: folders of code hold other JSON.
    """
    text = text.strip()
    what, remedy = "one object a line", f"rename it to {path.with_suffix('.jsonl').name}"
    first = text.partition("\n")[0]
    if start := re.match(r"\[\s*(?=\{)", text):
        first = text[start.end() :]
        what, remedy = "a list of records", "write one a line into a .jsonl file"
    try:
        record, _ = json.JSONDecoder().raw_decode(first)
    except (ValueError, RecursionError):
        return
    if not isinstance(record, dict) or field.name not in record:
        return
    raise UserError(
        f"{path} has {what}, and would be read as a single text; to read {field} of each, "
        f"{remedy}; to read it as it is, rename it to .txt"
    )


def _refuse_table(path: Path, text: str, field: Field) -> None:
    """Raise UserError for a table whose first row names the text field, for the same reason."""
    try:
        header = next(csv.reader([text.partition("\n")[0]], delimiter=TABLES[path.suffix.lower()]))
    except (csv.Error, StopIteration):
        return
    if field.name in header:
        raise UserError(
            f"{path} is a table, and would be read as a single text; to read {field} of each row, "
            f"write the rows into a .jsonl file; to read it as it is, rename it to .txt"
        )


def utf8_size(text: str, where: str) -> int:
    """The length of a text in UTF-8. Raises UserError, naming `where`, for invalid Unicode."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the text has half a surrogate pair at character {error.start}, which is no "
            f"Unicode text; correct or remove the line"
        ) from error


# ---- JSON lines


def _cut_lines(
    source: Source, start: int, number: int, room: int, size: int
) -> tuple[FilePart, int | None]:
    stop, lines = min(start + room, size), 0
    with source.path.open("rb") as file:
        file.seek(start)
        for at in range(start, stop, 2**20):
            lines += file.read(min(2**20, stop - at)).count(b"\n")
        rest = file.readline() if stop < size else b""  # the rest of the line at the cut
    stop, lines = stop + len(rest), lines + rest.endswith(b"\n")
    part = FilePart(source, start, stop, number, stop - start)
    return part, (number + lines if stop < size else None)


def read_lines(part: FilePart, field: Field) -> Iterator[tuple[int, Document]]:
    """The documents of a part of a file of lines, each with its line's number."""
    path = part.source.path
    with readable(path), open_text(path) as lines:
        if compressed(path):  # it is read from its beginning
            next(islice(lines, part.number, part.number), None)
        else:
            lines.seek(part.start)
        at = part.start
        for number, line in enumerate(lines, part.number + 1):
            if part.stop is not None and at >= part.stop:
                return
            at += len(line)
            if not line.strip():
                continue
            where = f"{path} line {number}"
            text = _text_of(line, where, field)
            size = utf8_size(text, where)
            if text:
                yield number, Document(f"{part.source.name}:{number}", text, size)


def _text_of(line: bytes, where: str, field: Field) -> str:
    if field.conversations:
        return _conversation_of(line, field)
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is {reason(error)}; convert the file") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({error}); correct the line") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{where} is {kind_of(record)}, not an object with a field "
            f"{field.name!r}; correct or remove the line"
        )
    if field.name not in record:
        raise field.missing(where, "field", record)
    text = record[field.name]
    if not isinstance(text, str):
        raise UserError(
            f"{where}: field {field.name!r} is {kind_of(text)}, not a string; correct the "
            f"line or choose another text_field"
        )
    return text


def _conversation_of(line: bytes, field: Field) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return unusable("that are no valid JSON")
    if not isinstance(record, dict):
        return unusable(f"without the field {field.name!r}")
    if field.name not in record:
        names = ", ".join([*record][:8])
        remedy = f" (their fields: {names}: {remedy_for(record)})" if record else ""
        return unusable(f"without the field {field.name!r}{remedy}")
    return conversation_text(record, field.name)


# ---- Parquet


@contextmanager
def _parquet(path: Path, field: Field) -> Iterator[Any]:
    """A Parquet file (pyarrow.parquet.ParquetFile) that has the column of documents."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise UserError(
            f"{path} is a Parquet file, which needs pyarrow ({error}): pip install -e '.[data]' in "
            f"the project's folder"
        ) from error
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            if field.name not in schema.names:
                raise field.missing(str(path), "column", schema.names)
            kind = schema.field(field.name).type
            if arrow.types.is_dictionary(kind):  # strings that are stored once each
                kind = kind.value_type
            types = arrow.types
            allowed, what = [types.is_string, types.is_large_string, types.is_string_view], "string"
            if field.conversations:
                # A prompt and its completion may be text.
                texts = allowed if "completion" in field.columns(schema.names) else []
                allowed, what = [types.is_list, types.is_large_list, *texts], "list"
            if not any(fits(kind) for fits in allowed):
                raise UserError(
                    f"{path}: column {field.name!r} is of type {kind}, not {what}; choose another "
                    f"{str(field).partition('=')[0]}"
                )
            yield file
    except (FileNotFoundError, PermissionError):
        raise
    except (arrow.ArrowException, OSError) as error:  # OSError: damaged pages, for instance
        raise UserError(
            f"{path} is no Parquet file, or damaged ({' '.join(str(error).split())}); copy it "
            f"again, or take it out of the paths given"
        ) from error


def _cut_rows(
    source: Source, field: Field, start: int, number: int, room: int, size: int
) -> tuple[FilePart, int | None]:
    """A part of whole row groups, at least one: the units in which a Parquet file is read."""
    with _parquet(source.path, field) as file:
        metadata = file.metadata
        read = field.columns(file.schema_arrow.names)
        groups, rows, text, stop = metadata.num_row_groups, 0, 0, start
        while stop < groups and text < room:
            group = metadata.row_group(stop)
            columns = (group.column(index) for index in range(group.num_columns))
            text += sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.split(".")[0] in read
            )
            rows, stop = rows + group.num_rows, stop + 1
        total = max(metadata.num_rows, 1)
    share = size * (number + rows) // total - size * number // total
    return FilePart(source, start, stop, number, share), (number + rows if stop < groups else None)


def _read_rows(part: FilePart, field: Field) -> Iterator[Document]:
    with _parquet(part.source.path, field) as file:
        stop = file.metadata.num_row_groups if part.stop is None else part.stop
        number = part.number
        columns = field.columns(file.schema_arrow.names)
        for group in range(part.start, stop):
            for batch in file.iter_batches(ROWS, row_groups=[group], columns=columns):
                for values in zip(*(batch.column(each) for each in columns), strict=True):
                    number += 1
                    where = f"{part.source.path} row {number}"
                    try:
                        text, *beside = (value.as_py() for value in values)
                    except UnicodeDecodeError as error:
                        raise UserError(
                            f"{where}: column {field.name!r} is not UTF-8 text ({error}); correct "
                            f"or remove the row"
                        ) from error
                    if field.conversations:
                        row = dict(zip(columns, (text, *beside), strict=True))
                        text = conversation_text(row, field.name)
                    if text is None:
                        raise UserError(
                            f"{where}: column {field.name!r} is null, not a string; fill or "
                            f"remove the rows without text"
                        )
                    if text:
                        yield Document(f"{part.source.name}:{number}", text, utf8_size(text, where))
