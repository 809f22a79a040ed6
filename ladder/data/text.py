"""Text as tokens: the documents of a unit of work, an end-of-text token after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from ladder.data.encoded import Encoded
from ladder.data.formats import Document, Field
from ladder.data.sources import name_hash
from ladder.data.tokenizer import encode_batch, parse_tokenizer, pieces
from ladder.data.units import Unit

BATCH = 2**21  # characters that are tokenised at once: some 100 MB of the library's memory


class EncodeText:
    """Reads and tokenises a unit of work. Pickling keeps the definition and not the tokenizer.

    definition: the text of a tokenizer.json. dtype: that of the tokens as stored.
    """

    def __init__(self, definition: str, eos_id: int, dtype: str, field: Field) -> None:
        self.definition, self.eos_id, self.dtype = definition, eos_id, dtype
        self.field = field
        self._tokenizer: Tokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}

    def __call__(self, unit: Unit) -> Encoded:
        if self._tokenizer is None:
            self._tokenizer = parse_tokenizer(self.definition)
        keys: list[int] = []
        sizes: list[int] = []

        def noted() -> Iterator[Document]:
            for document in unit.read(self.field):
                keys.append(name_hash(document.name))
                sizes.append(document.bytes)
                yield document

        tokens: list[npt.NDArray[Any]] = [np.empty(0, self.dtype)]
        ends: list[int] = [0]
        done = 0
        for batch, inside in _encode(noted(), self._tokenizer, self.eos_id, np.dtype(self.dtype)):
            tokens.append(batch)
            ends += [done + end for end in inside]
            done += len(batch)
        lengths = np.array(ends[1:], np.int64) - np.array(ends[:-1], np.int64)
        return Encoded(
            np.concatenate(tokens), np.array(keys, np.uint64), lengths, np.array(sizes, np.int64),
            Counter(), {},
        )  # fmt: skip


def _encode(
    documents: Iterable[Document], tokenizer: Tokenizer, eos_id: int, dtype: np.dtype[Any]
) -> Iterator[tuple[npt.NDArray[Any], list[int]]]:
    """The tokens of all documents, end-of-text after each, in batches of moderate size.

    Each batch comes with the positions in it where documents end.
    """
    texts: list[str] = []
    last: list[bool] = []  # whether each text ends its document
    size = 0

    def flush() -> tuple[npt.NDArray[Any], list[int]]:
        ids: list[int] = []
        ends: list[int] = []
        encodings = encode_batch(tokenizer, texts)
        for encoding, is_last in zip(encodings, last, strict=True):
            ids.extend(encoding.ids)
            if is_last:
                ids.append(eos_id)
                ends.append(len(ids))
        return np.array(ids, dtype), ends

    for document in documents:
        for piece in pieces(document.text):
            if size >= BATCH:
                yield flush()
                texts, last, size = [], [], 0
            texts.append(piece)
            last.append(False)
            size += len(piece)
        last[-1] = True
    if texts:
        yield flush()
