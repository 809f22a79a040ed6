"""Reading files, compressed by gzip or not, with errors that name the file."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ladder.models.errors import UserError

GZIP = {".jsonl": ".jsonl", ".ndjson": ".jsonl", ".json": ".jsonl", ".txt": ""}  # before .gz
COMPRESSED = {  # by how such a file begins
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
}


def compressed(path: Path) -> bool:
    """Whether the file is read through gzip: text or lines of JSON with .gz behind their names."""
    return path.suffix.lower() == ".gz" and Path(path.stem).suffix.lower() in GZIP


@contextmanager
def readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} is no gzip file, or damaged ({error}); copy it again, or take it out of the "
            f"paths given"
        ) from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror or error}; check the path and permissions"
        ) from error


@contextmanager
def open_text(path: Path) -> Iterator[io.BufferedIOBase]:
    """The file's text, decompressed. Raises UserError for what is compressed under another name."""
    if compressed(path):
        with gzip.open(path, "rb") as file:
            yield file
        return
    with path.open("rb") as file:
        start = file.read(max(map(len, COMPRESSED)))
        for known, kind in COMPRESSED.items():
            if start.startswith(known):
                raise UserError(
                    f"{path} is compressed ({kind}); decompress it, or take it out of the paths "
                    f"given (only .jsonl.gz, .json.gz and .txt.gz are read as they are)"
                )
        file.seek(0)
        yield file
