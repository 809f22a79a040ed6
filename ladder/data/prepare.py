"""Token shards: tokenised documents on disk, written once and mapped into memory by training.

A prepared folder holds
    index.json         sizes and hashes of the files, and the source of the text
    tokenizer.json     the tokenizer that was used
    token_bytes.npy    bytes of text per token, int32
    train-00000.bin, heldout-00000.bin, ...
                       token ids, raw little-endian uint16 or uint32; each document is followed by
                       the end-of-text token, and may continue in the next shard. Conversations are
                       uint32 with the marks of ladder.data.encoded, and no token between them
    tokenizer_config.json, chat_template.jinja
                       for conversations: the chat template
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from ladder.data import units as cutting
from ladder.data.chat import EncodeChat
from ladder.data.compression import compressed
from ladder.data.config import MOST_LEFT_OUT
from ladder.data.formats import Field, Source, file_status
from ladder.data.index import INDEX, STORED, TOKEN_BYTES, VERSION
from ladder.data.shards import KEPT, Unfinished, unfinished
from ladder.data.sources import SPLITS, TEXT_FIELD, find_sources, heldout_below
from ladder.data.streams import Stream, recorded_commits
from ladder.data.template import load_template
from ladder.data.text import EncodeText
from ladder.data.tokenise import NOTHING, Tokenisation
from ladder.data.tokenizer import (
    FILE,
    TEMPLATE,
    TOKENIZER_CONFIG,
    end_of_text,
    load_tokenizer,
    token_byte_lengths,
    tokenizer_file,
)
from ladder.files import check_writable, checksum, refuse_inside
from ladder.models.errors import UserError
from ladder.parallel.environment import most_processes

OURS = re.compile(
    rf"{INDEX}|{FILE}|{TOKEN_BYTES}|{TOKENIZER_CONFIG}|{TEMPLATE}|({'|'.join(SPLITS)})-\d+\.bin"
)


def prepare(
    paths: Sequence[str | Path] | None,
    tokenizer: str | Path,
    out: str | Path,
    *,
    heldout_fraction: float = 0.05,
    text_field: str = TEXT_FIELD,
    chat_field: str = "",
    chat_template: str | Path | None = None,
    shard_tokens: int = 2**24,
    max_left_out: float = MOST_LEFT_OUT,
    max_tokens: int | None = None,
    workers: int = 1,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenise a corpus (see `find_sources`) into a folder of shards, and return its index.

    All or nothing: the folder appears when it is complete. Prepared data that `out` already holds
    stays usable until then, and is replaced only with `overwrite`. Finished shards are kept beside
    `out` (see ladder.data.shards), and a call with the same arguments resumes from them.

    chat_field: the field or column of .jsonl and .parquet files and of streams that holds a
        conversation (`prompt`: with that of `completion`), in place of text. The tokenizer's chat
        template, or the Jinja file `chat_template`, turns it into text; its answers are marked (see
        ladder.data.chat).
    max_left_out: the maximum share of unusable conversations, which are left out; more are an
        error. They are counted by reason.
    max_tokens: stop after the document, in the corpus's order, with which the splits together
        have that many tokens. workers: processes that tokenise. The result has the same bytes for
        any number of workers, and however often the work was interrupted.

    Raises UserError for bad paths, a bad tokenizer, `out` or option, and where the unfinished work
    of a call with other arguments would be lost.
    """
    _check_options(shard_tokens, workers, max_left_out, max_tokens)
    _check_kind(text_field, chat_field, chat_template, max_left_out)
    refuse_inside(Path(out), [paths] if isinstance(paths, str | Path) else paths or (), "out")
    out = Path(out).resolve()
    _check_free(out, overwrite)
    check_writable(out, "out")
    encoding = _open_encoding(tokenizer, text_field, chat_field, chat_template)

    def find(
        recorded: Mapping[str, str] | None,
    ) -> tuple[list[Source | Stream], dict[str, Any], dict[str, Any]]:
        sources, description = find_sources(paths, heldout_fraction, text_field, recorded)
        if chat_field:
            description["chat_field"] = chat_field
            description.pop("text_field", None)
        if max_tokens is not None:
            description["max_tokens"] = max_tokens
        return sources, description, _arguments(description, encoding, sources, shard_tokens)

    before = Unfinished(out)
    recorded = recorded_commits(before.state.get("arguments", {}))
    sources, description, arguments = find(recorded)
    if recorded and before.differs(arguments) and (overwrite or before.units < KEPT):
        sources, description, arguments = find(None)  # starts over, with the newest commits
    tokenisation = Tokenisation(
        sources,
        _size(sources),
        encoding.encode,
        heldout_fraction=heldout_fraction,
        shard_tokens=shard_tokens,
        max_left_out=max_left_out,
        max_tokens=max_tokens,
        workers=workers,
    )

    with unfinished(out) as work:
        _check_free(out, overwrite)
        _go_on_or_start(work, arguments, heldout_below(heldout_fraction), encoding.dtype, overwrite)
        tokenisation.run(work, paths)
        work.close_shards()
        index = {
            **encoding.facts,
            "source": description,
            "splits": work.state["splits"],
            **({"left_out": work.state["left_out"]} if chat_field else {}),
        }
        ends = work.state["answer_ends"]
        if len(ends) == 1 and ends[0] is not None:  # all answers end alike
            index["answer_end_id"] = ends[0]

        def fill(folder: Path) -> None:
            encoding.write(folder)
            index["token_bytes_sha256"] = checksum(folder / TOKEN_BYTES)
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

        work.finish(fill, partial(_check_free, out, overwrite))
    return index


def _check_options(
    shard_tokens: int,
    workers: int,
    max_left_out: float,
    max_tokens: int | None,
) -> None:
    for option, value in (("shard_tokens", shard_tokens), ("workers", workers)):
        if value < 1:
            raise UserError(f"{option}={value} must be 1 or more")
    if not 0 <= max_left_out <= 1:
        raise UserError(f"max_left_out={max_left_out} must be a share, from 0 to 1")
    if max_tokens is not None and not 1 <= max_tokens < 2**63:
        raise UserError(
            f"max_tokens={max_tokens} must be 1 or more, and below 2**63; leave it out to take all "
            f"documents"
        )
    most = most_processes()
    if workers > most:
        raise UserError(f"workers={workers} is too many for this machine; give {most} or fewer")


def _check_kind(
    text_field: str, chat_field: str, chat_template: str | Path | None, max_left_out: float
) -> None:
    """Refuse options of conversations without `chat_field`, and `text_field` beside it."""
    if chat_field and text_field != TEXT_FIELD:
        raise UserError(
            f"text_field={text_field} is for text; leave it out to prepare conversations "
            f"(--chat-field={chat_field})"
        )
    left_out = None if max_left_out == MOST_LEFT_OUT else max_left_out
    for option, value in (("chat_template", chat_template), ("max_left_out", left_out)):
        if value is not None and not chat_field:
            raise UserError(
                f"{option}={value} is for conversations; say where they are with --chat-field"
            )


@dataclass(frozen=True)
class Encoding:
    """A tokenizer, and how `prepare` encodes with it.

    definition: the bytes of its tokenizer.json. beside: the texts of the tokenizer's other files,
    by name. token_bytes: bytes of text per token, int32 [vocab_size]. dtype: of the stored tokens.
    """

    definition: bytes
    beside: dict[str, str]
    eos_id: int
    token_bytes: npt.NDArray[np.int32]
    dtype: str
    encode: EncodeText | EncodeChat

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of the index about the tokens."""
        return {
            "version": VERSION,
            "dtype": self.dtype,
            "vocab_size": len(self.token_bytes),
            "eos_id": self.eos_id,
            "tokenizer_sha256": hashlib.sha256(self.definition).hexdigest(),
            "token_bytes": TOKEN_BYTES,
        }

    def write(self, folder: Path) -> None:
        """Write the tokenizer's files, and token_bytes, into a prepared folder."""
        (folder / FILE).write_bytes(self.definition)
        for name, text in self.beside.items():
            (folder / name).write_text(text, encoding="utf-8")
        np.save(folder / TOKEN_BYTES, self.token_bytes.astype("<i4"))


def _open_encoding(
    tokenizer: str | Path, text_field: str, chat_field: str, chat_template: str | Path | None
) -> Encoding:
    encoder = load_tokenizer(tokenizer)
    definition = tokenizer_file(tokenizer).read_bytes()
    text = definition.decode("utf-8")
    beside: dict[str, str] = {}
    encode: EncodeText | EncodeChat
    if chat_field:
        given = None if chat_template is None else Path(chat_template)
        template, settings = load_template(tokenizer_file(tokenizer), encoder, given)
        eos_id = encoder.token_to_id(template.names["eos_token"])
        settings.pop("chat_template", None)  # the template used has a file of its own
        beside = {TOKENIZER_CONFIG: json.dumps(settings, indent=2), TEMPLATE: template.source}
        encode = EncodeChat(text, Field(chat_field, True), template)
        if not encode.ends_answers():
            print(
                f"the chat template of {template.where} writes no special token at the end of an "
                f"answer: a model that is trained on it does not learn to stop",
                file=sys.stderr,
            )
    else:
        eos_id = end_of_text(encoder)
    token_bytes = token_byte_lengths(encoder)
    token_bytes[eos_id] = 0  # it stands for no text, even where the tokenizer calls it not special
    # Marks have their own bits (see ladder.data.encoded).
    dtype = "uint16" if len(token_bytes) <= 65535 and not chat_field else "uint32"
    if not chat_field:
        encode = EncodeText(text, eos_id, STORED[dtype], Field(text_field))
    return Encoding(definition, beside, eos_id, token_bytes, dtype, encode)


def _size(sources: Sequence[Source | Stream]) -> int | None:
    """The bytes of the sources; None if one is a stream or compressed: its size is unknown."""
    size = 0
    for source in sources:
        if isinstance(source, Stream) or compressed(source.path):
            return None
        size += file_status(source).st_size
    return size


def _arguments(
    description: Mapping[str, Any],
    encoding: Encoding,
    sources: Sequence[Source | Stream],
    shard_tokens: int,
) -> dict[str, Any]:
    """All that determines the result: unfinished work resumes only where it is the same."""
    return {
        **description,
        "shard_tokens": shard_tokens,
        "tokenizer_sha256": encoding.facts["tokenizer_sha256"],
        "tokenizers": tokenizers.__version__,
        "files": _fingerprint(sources),
        "unit": cutting.UNIT,
        **({"chat": encoding.beside} if encoding.beside else {}),
    }


def _fingerprint(sources: Sequence[Source | Stream]) -> str:
    """A hash of the files' names, sizes and dates: resumed work needs unchanged files."""
    found = hashlib.sha256()
    for source in sources:
        if not isinstance(source, Stream):
            status = file_status(source)
            line = f"{source.name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            found.update(line.encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def _go_on_or_start(
    work: Unfinished, arguments: Mapping[str, Any], below: int, dtype: str, overwrite: bool
) -> None:
    if work.units:
        files = work.state["arguments"].get("files")
        changed = files != arguments["files"]
        other = work.differs({**arguments, "files": files})
        if (other or changed) and not overwrite and work.units >= KEPT:
            if other:
                raise UserError(
                    f"{work.folder} holds the unfinished work of a call with {other}; repeat that "
                    f"call to finish it, or give --overwrite to start over"
                )
            raise UserError(
                f"{work.folder} holds unfinished work on files whose names, sizes or dates have "
                f"changed since; give --overwrite to start over"
            )
        if not (other or changed) and work.go_on():
            # Work that an earlier version left unfinished lacks these keys.
            work.state.setdefault("first_left_out", {})
            work.state.setdefault("answer_ends", [])
            print(f"going on after {work.state['names'][0]:,} documents", file=sys.stderr)
            return
    state = {**NOTHING, "arguments": arguments, "heldout_below": below}
    work.start({**state, "itemsize": np.dtype(STORED[dtype]).itemsize}, SPLITS)


def _check_free(out: Path, overwrite: bool) -> None:
    """Refuse an `out` that holds foreign files, or, without `overwrite`, prepared data."""
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
