"""Reading a prepared folder: checks of its index and of the files that the index names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from reprlib import repr  # of bounded length: a damaged file may hold anything
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.config import parse_json
from ladder.files import checksum
from ladder.models.errors import UserError, is_plain_name, reason

INDEX = "index.json"
TOKEN_BYTES = "token_bytes.npy"
VERSION = 1
STORED = {"uint16": "<u2", "uint32": "<u4"}  # dtype in the index -> numpy's, of the shards

REMEDY = "prepare the data again"
IF_EMPTY = (  # what to do about a split without text
    "prepare two documents or more (files, or lines of a .jsonl file), with a heldout_fraction "
    "above 0"
)
MANY = 2**62  # greater than any valid count


def read_index(folder: Path) -> dict[str, Any]:
    """The content of the folder's index.json. Raises UserError unless it has `prepare`'s form."""
    path = folder / INDEX
    try:
        # No limit: the index has seven values per shard, and any number of shards.
        index = parse_json(path.read_bytes(), math.inf)
    except OSError as error:
        raise UserError(
            f"no prepared data in {folder} ({INDEX}: {error.strerror}); make it by `ladder data "
            f"prepare --tokenizer FOLDER --out {folder}`, or give the folder that holds {INDEX}"
        ) from error
    except ValueError as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {REMEDY}") from error
    try:
        _check(index)
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; {REMEDY}") from error
    if index["version"] != VERSION:
        raise UserError(
            f"{path} has version={repr(index['version'])}, this program reads {VERSION}; {REMEDY}"
        )
    assert isinstance(index, dict)
    return index


def holds_chats(index: Mapping[str, Any]) -> bool:
    """Whether the data are conversations."""
    return "chat_field" in index["source"]


def _check(index: Any) -> None:
    """Raise ValueError where this is no valid index of this version."""
    if not isinstance(index, dict):
        raise ValueError("it holds no object")
    for key in ("version", "dtype", "vocab_size", "eos_id", "tokenizer_sha256", "token_bytes",
                "source", "splits"):  # fmt: skip
        if key not in index:
            raise ValueError(f"it lacks {key}")
    if index["version"] != VERSION:
        return
    if index["dtype"] not in [*STORED]:
        raise ValueError(f"dtype={repr(index['dtype'])} is none of {', '.join(STORED)}")
    _check_count(index, "vocab_size", 1)
    _check_count(index, "eos_id", 0, index["vocab_size"])
    if "answer_end_id" in index:  # folders of earlier versions lack it
        _check_count(index, "answer_end_id", 0, index["vocab_size"])
    _check_type(index, "tokenizer_sha256", str, "a text")
    _check_name(index, "token_bytes")
    if "token_bytes_sha256" in index:  # folders of earlier versions lack it
        _check_type(index, "token_bytes_sha256", str, "a text")
    for key in ("source", "splits"):
        _check_type(index, key, dict, "an object")
    for name in index["splits"]:
        try:
            _check_type(index["splits"], name, dict, "an object")
            _check_split(index["splits"][name])
        except ValueError as error:
            raise ValueError(f"split {name!r}: {error}") from error


def _check_split(record: Mapping[str, Any]) -> None:
    for key in ("tokens", "bytes", "documents"):
        _check_count(record, key)
    _check_type(record, "shards", list, "a list")
    for shard in record["shards"]:
        if not isinstance(shard, dict):
            raise ValueError(f"shard {repr(shard)} must be an object")
        _check_name(shard, "file")
        _check_count(shard, "tokens")
        _check_type(shard, "sha256", str, "a text")
    if (found := sum(shard["tokens"] for shard in record["shards"])) != record["tokens"]:
        raise ValueError(f"tokens={record['tokens']}, and its shards have {found}")


def _check_count(data: Mapping[str, Any], key: str, low: int = 0, end: int = MANY) -> None:
    value = data.get(key)
    if type(value) is not int or not low <= value < end:
        limit = f" and below {end:,}" if end < MANY else ""
        raise ValueError(f"{key}={repr(value)} must be a whole number, {low} or more{limit}")


def _check_type(data: Mapping[str, Any], key: str, kind: type, name: str) -> None:
    if not isinstance(data.get(key), kind):
        raise ValueError(f"{key}={repr(data.get(key))} must be {name}")


def _check_name(data: Mapping[str, Any], key: str) -> None:
    if not is_plain_name(data.get(key)):
        raise ValueError(f"{key}={repr(data.get(key))} must be the name of a file in the folder")


def check_own_tokenizer(path: Path, digest: str) -> None:
    """Raise UserError unless the folder's tokenizer.json has the SHA-256 `digest`."""
    try:
        found = checksum(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}): the folder is not whole; copy it again, or "
            f"{REMEDY}"
        ) from error
    if found != digest:
        raise UserError(f"{path} is not the tokenizer that the tokens were made with; {REMEDY}")


def load_token_bytes(
    path: Path, vocab_size: int, digest: str | None = None
) -> npt.NDArray[np.int32]:
    """The bytes of text per token: int32 [vocab_size].

    digest: the file's SHA-256; None where the index lacks it.
    """
    try:
        # Mapped: a damaged header may announce more than fits into memory.
        lengths = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError, EOFError, OverflowError) as error:
        raise UserError(f"{path} cannot be read ({reason(error)}); {REMEDY}") from error
    if lengths.shape != (vocab_size,):
        raise UserError(
            f"{path} has shape {lengths.shape} where {INDEX} says vocab_size={vocab_size}; {REMEDY}"
        )
    if lengths.dtype.kind not in "iu" or lengths.min() < 0 or lengths.max() >= 2**31:
        raise UserError(
            f"{path} is damaged: it must hold whole numbers from 0 to 2**31 - 1; {REMEDY}"
        )
    if digest is not None and checksum(path) != digest:
        raise UserError(f"{path} is damaged: its SHA-256 is not the one in {INDEX}; {REMEDY}")
    return lengths.astype(np.int32)
