"""The tokens of a unit of documents, as they are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ladder.data.sources import Names

# Bits beside a token's id, only in the shards of conversations (see ladder.data.chat).
ANSWER = 1 << 31  # part of an answer of the assistant, which is learnt
BEGINS = 1 << 30  # the first token of its conversation
TOKEN = BEGINS - 1


class Encoded(NamedTuple):
    """The tokens of some documents.

    keys: the hash of each document's name, uint64. lengths: tokens of each document. bytes: bytes
    of each document's text, int64. left_out: the number of documents left out, by reason. first:
    the name of the first document left out, by reason. answer_ends: the special tokens that end the
    learnt answers; None stands for answers without one.
    """

    tokens: npt.NDArray[Any]
    keys: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    left_out: Counter[str]
    first: Mapping[str, str]
    answer_ends: frozenset[int | None] = frozenset()

    def up_to(self, tokens: int) -> Encoded:
        """The first documents that together have at least `tokens` tokens."""
        ends = np.cumsum(self.lengths)
        count = int(np.searchsorted(ends, tokens)) + 1
        length = int(ends[:count][-1]) if len(ends) else 0
        return self._replace(
            tokens=self.tokens[:length],
            keys=self.keys[:count],
            lengths=self.lengths[:count],
            bytes=self.bytes[:count],
        )

    def names(self) -> Names:
        if not len(self.keys):
            return Names()
        return Names(len(self.keys), int(self.keys.min()), int(self.keys.max()))
