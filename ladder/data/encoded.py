"""What becomes of a unit of documents: their tokens, as they are stored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ladder.data.sources import Names

# Beside a token's number, in the shards of conversations alone (see ladder.data.chat).
ANSWER = 1 << 31  # the assistant says it: it is to be learnt
BEGINS = 1 << 30  # the first token of its conversation
TOKEN = BEGINS - 1


class Encoded(NamedTuple):
    """The tokens of some documents.

    Of each document: keys, the hash of its name (uint64), lengths in tokens, bytes of text (int64).
    left_out: how many documents were, by the reason; first: the name of the first, by the reason.
    """

    tokens: npt.NDArray[Any]
    keys: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]
    left_out: Counter[str]
    first: Mapping[str, str]

    def up_to(self, tokens: int) -> Encoded:
        """The documents up to the one with which there are `tokens` tokens."""
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
