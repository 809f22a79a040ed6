"""Token shards: documents as numbers on disk, written once and mapped into memory by training.

A prepared folder holds
    index.json         what is there: sizes, hashes, where the text came from
    tokenizer.json     the tokenizer that was used
    token_bytes.npy    bytes of text that each token stands for, int32
    train-00000.bin, heldout-00000.bin, ...
                       token ids, raw little-endian uint16 or uint32; each document is followed by
                       the end-of-text token, and may go on in the next shard
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ladder.data.sources import SPLITS, Document, open_corpus
from ladder.data.tokenizer import (
    FILE,
    end_of_text,
    load_tokenizer,
    pieces,
    token_byte_lengths,
    tokenizer_file,
)
from ladder.files import new_folder
from ladder.models.errors import UserError
from ladder.progress import Progress

INDEX = "index.json"
TOKEN_BYTES = "token_bytes.npy"
VERSION = 1
STORED = {"uint16": "<u2", "uint32": "<u4"}
BATCH = 2**21  # characters that are tokenised at once: some 100 MB of the library's memory

OURS = re.compile(rf"{INDEX}|{FILE}|{TOKEN_BYTES}|({'|'.join(SPLITS)})-\d+\.bin")


def prepare(
    paths: Sequence[str | Path] | None,
    tokenizer: str | Path,
    out: str | Path,
    *,
    heldout_fraction: float = 0.05,
    text_field: str = "text",
    shard_tokens: int = 2**24,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenise a corpus (see `open_corpus`) into a folder of shards, and return its index.

    All or nothing: the folder appears when it is complete. One that `out` already holds stays as
    it is, and usable, until then; it is replaced only with `overwrite`.

    Raises UserError for what is wrong with the paths, the tokenizer, `out` or an option.
    """
    if shard_tokens < 1:
        raise UserError(f"shard_tokens={shard_tokens} must be 1 or more")
    out = Path(out).resolve()
    _check_free(out, overwrite)
    encoder = load_tokenizer(tokenizer)
    definition = tokenizer_file(tokenizer).read_bytes()
    eos_id = end_of_text(encoder)
    token_bytes = token_byte_lengths(encoder)
    token_bytes[eos_id] = 0  # it stands for no text, even where a file calls it not special
    corpus = open_corpus(paths, heldout_fraction=heldout_fraction, text_field=text_field)

    dtype = "uint16" if len(token_bytes) <= 65535 else "uint32"
    splits: dict[str, dict[str, Any]] = {}
    with new_folder(out, overwrite=True) as partial:
        with Progress("tokenise", corpus.bytes, "bytes") as progress:

            def report() -> None:
                read = sum(record["bytes"] for record in splits.values())
                tokens = sum(record["tokens"] for record in splits.values())
                progress.update(read, f"{tokens:,} tokens")

            for split in SPLITS:
                splits[split] = {"tokens": 0, "bytes": 0, "documents": 0, "shards": []}
                batches = _encode(corpus.read(split), encoder, eos_id, np.dtype(STORED[dtype]))
                _write(batches, partial, split, shard_tokens, splits[split], report)
        index = {
            "version": VERSION,
            "dtype": dtype,
            "vocab_size": len(token_bytes),
            "eos_id": eos_id,
            "tokenizer_sha256": hashlib.sha256(definition).hexdigest(),
            "token_bytes": TOKEN_BYTES,
            "source": corpus.description,
            "splits": splits,
        }
        (partial / FILE).write_bytes(definition)
        np.save(partial / TOKEN_BYTES, token_bytes.astype("<i4"))
        (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return index


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuse an `out` that holds anything but, with `overwrite`, what an earlier call wrote."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"out={out} is a file; choose a folder")
    names = sorted(path.name for path in out.iterdir())
    foreign = [name for name in names if not OURS.fullmatch(name)]
    if names and (foreign or INDEX not in names):
        raise UserError(
            f"out={out} is no prepared folder (it holds {(foreign or names)[0]!r}) and is never "
            f"replaced; choose another folder"
        )
    if names and not overwrite:
        raise UserError(
            f"out={out} already holds prepared data; give --overwrite to replace it, or choose "
            f"another folder"
        )


class _Batch(NamedTuple):
    """The tokens of some texts, and of how many documents (those that end here) and bytes."""

    tokens: npt.NDArray[Any]
    documents: int
    bytes: int


def _encode(
    documents: Iterable[Document], tokenizer: Tokenizer, eos_id: int, dtype: np.dtype[Any]
) -> Iterator[_Batch]:
    """The tokens of all documents, end-of-text after each, in batches of moderate size."""
    texts: list[str] = []
    last: list[bool] = []  # whether each text ends its document
    size = read = 0

    def flush() -> _Batch:
        ids: list[int] = []
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for encoding, ends in zip(encodings, last, strict=True):
            ids.extend(encoding.ids)
            if ends:
                ids.append(eos_id)
        return _Batch(np.array(ids, dtype), sum(last), read)

    for document in documents:
        for piece in pieces(document.text):
            if size >= BATCH:
                yield flush()
                texts, last, size, read = [], [], 0, 0
            texts.append(piece)
            last.append(False)
            size += len(piece)
        last[-1] = True
        read += document.bytes
    if texts:
        yield flush()


def _write(
    batches: Iterable[_Batch],
    folder: Path,
    split: str,
    shard_tokens: int,
    record: dict[str, Any],
    report: Callable[[], None],
) -> None:
    """Write tokens to files of `shard_tokens` each, the last one shorter; `record` is filled in."""
    hashes: list[Any] = []
    for batch in batches:
        tokens = batch.tokens
        while len(tokens):
            if not hashes or record["shards"][-1]["tokens"] == shard_tokens:
                record["shards"].append({"file": f"{split}-{len(hashes):05d}.bin", "tokens": 0})
                hashes.append(hashlib.sha256())
            shard = record["shards"][-1]
            part, tokens = np.split(tokens, [shard_tokens - shard["tokens"]])
            data = part.tobytes()
            with (folder / shard["file"]).open("ab") as file:
                file.write(data)
            hashes[-1].update(data)
            shard["tokens"] += len(part)
        record["tokens"] += len(batch.tokens)
        record["documents"] += batch.documents
        record["bytes"] += batch.bytes
        report()
    for shard, found in zip(record["shards"], hashes, strict=True):
        shard["sha256"] = found.hexdigest()
