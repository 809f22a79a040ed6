"""Hugging Face datasets, streamed: rows are downloaded as they are read.

A document is a row; its name is that of the dataset and the row's number, from 1 on. One process
reads a stream, in its own order, and can resume after any row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from ladder.data.conversations import conversation_text
from ladder.data.formats import Document, Field, utf8_size
from ladder.models.errors import UserError, kind_of, unknown

SCHEME = "hf:"
KEYS = ("name", "split", "revision")
COMMIT = re.compile(r"[0-9a-f]{40}")


class Stream(NamedTuple):
    """A split of a dataset.

    name: the prefix of its documents' names. path: as given by the user. dataset: OWNER/NAME, or a
    folder. config: the dataset's configuration; empty: its only one. revision: the commit on the
    Hub; empty for a folder.
    """

    name: str
    path: str
    dataset: str
    config: str
    split: str
    revision: str

    @property
    def rows(self) -> tuple[str, str, str, str]:
        """The values that determine the rows. Streams with equal ones are the same stream."""
        return self.dataset, self.config, self.split, self.revision

    @property
    def names(self) -> list[str]:
        """The names that it may have, the shortest first; the longest differs where `rows` do."""
        longer = f"{self.dataset}?{urlencode({'name': self.config, 'split': self.split})}"
        return [self.dataset, longer, f"{longer}&{urlencode({'revision': self.revision})}"]


def parse_stream(path: str, recorded: Mapping[str, str] | None = None) -> Stream:
    """The stream that `hf:OWNER/NAME?name=CONFIG&split=SPLIT&revision=COMMIT` names.

    The default split is `train`. The default revision is the Hub's current commit.

    recorded: the commits of streams by the paths that named them, in place of the Hub's answer: a
        resumed call reads the data with which it was begun.

    Raises UserError for a path of another form, a missing package or dataset.
    """
    asked = _asked(path)
    dataset, config, split, revision = asked
    _datasets(path)
    if not Path(dataset).is_dir() and not COMMIT.fullmatch(revision):
        known = (commit for other, commit in (recorded or {}).items() if _asked(other) == asked)
        revision = next(known, "") or _resolve(path, dataset, revision)
    return Stream(dataset, path, dataset, config, split, revision)


def recorded_commits(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The commits of the streams in a description by `find_sources`, by path."""
    return {stream["path"]: stream["revision"] for stream in arguments.get("streams", ())}


def compared(key: str, value: Any) -> Any:
    """An entry of a description by `find_sources`, without how the user wrote the streams."""
    if key == "paths" and isinstance(value, list):
        return [path.partition("?")[0] if path.startswith(SCHEME) else path for path in value]
    if key == "streams" and isinstance(value, list):
        return [{**stream, "path": ""} for stream in value]
    return value


def _asked(path: str) -> tuple[str, str, str, str]:
    """The dataset, configuration, split and revision in a path; the revision may be empty."""
    dataset, _, query = path.removeprefix(SCHEME).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for key in options:
        if key not in KEYS:
            raise unknown(f"option of {path!r}", key, KEYS)
    if not dataset or not all(options.values()):
        raise UserError(
            f"data path {path!r} is not of the form hf:OWNER/NAME or "
            f"hf:OWNER/NAME?name=CONFIG&split=train"
        )
    revision = options.get("revision", "")
    return dataset, options.get("name", ""), options.get("split", "train"), revision


class Reader:
    """The documents of a stream, one by one, from a given row on.

    number: the rows read so far, including empty ones. A new Reader resumes from `state()`, which
    is plain data, and `number`.
    """

    def __init__(
        self, stream: Stream, field: Field, state: Mapping[str, Any] | None, number: int
    ) -> None:
        self.stream, self.field, self.number = stream, field, number
        try:
            self.rows = _datasets(stream.path).load_dataset(
                stream.dataset,
                name=stream.config or None,
                split=stream.split,
                revision=stream.revision or None,
                streaming=True,
            )
            columns = self.rows.column_names  # None: unknown until a row is read
            if columns is not None and field.name in columns:
                self.rows = self.rows.select_columns(field.columns(columns))
            if state is not None:
                self.rows.load_state_dict(dict(state))
        except Exception as error:  # the library raises nothing narrower
            raise UserError(
                f"{stream.path} cannot be opened ({_line(error)}); check its name, the "
                f"configuration (?name=), the split and the network"
            ) from error
        if columns is not None:
            self._check(columns)

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = self.rows.state_dict()
        return found

    def __iter__(self) -> Iterator[Document]:
        rows = iter(self.rows)
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # the network, decompression or a file's format
                raise UserError(
                    f"{self.stream.path} broke off after row {self.number} ({_line(error)}); check "
                    f"the network, and run the same command again"
                ) from error
            if row is None:
                return
            self.number += 1
            where = f"{self.stream.path} row {self.number}"
            self._check(row)
            text = row[self.field.name]
            if self.field.conversations:
                text = conversation_text(row, self.field.name)
            if not isinstance(text, str):
                raise UserError(
                    f"{where}: column {self.field.name!r} is {kind_of(text)}, not a "
                    f"string; choose another text_field"
                )
            if text:
                yield Document(f"{self.stream.name}:{self.number}", text, utf8_size(text, where))

    def _check(self, columns: Any) -> None:
        if self.field.name not in columns:
            raise self.field.missing(self.stream.path, "column", columns)


def _datasets(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is a Hugging Face dataset, which needs the package datasets ({error}): pip "
            f"install -e '.[data]' in the project's folder"
        ) from error
    return datasets


def _resolve(path: str, dataset: str, revision: str) -> str:
    """The commit of a revision; for an empty one, the Hub's current commit."""
    from huggingface_hub import HfApi  # datasets depends on it

    try:
        return str(HfApi().dataset_info(dataset, revision=revision or None).sha)
    except Exception as error:  # the network, the Hub, or an invalid name
        raise UserError(
            f"{path} cannot be reached ({_line(error)}); check the dataset's name and the network; "
            f"if it needs a login, run `hf auth login`"
        ) from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
