"""The tokens of one split: its shards, mapped into memory and read as one array."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ladder.data.encoded import TOKEN
from ladder.data.index import INDEX, REMEDY
from ladder.models.errors import UserError


@dataclass(frozen=True)
class Split:
    """The tokens of one split: shards mapped into memory, read as if they were one array.

    starts: the position of each shard's first token, then the total number of tokens.
    bytes: size of the documents' text in UTF-8. conversations: whether the documents are
    conversations, whose tokens are stored with marks (see ladder.data.encoded).
    """

    name: str
    shards: tuple[npt.NDArray[Any], ...]
    starts: npt.NDArray[np.int64]
    documents: int
    bytes: int
    vocab_size: int
    conversations: bool = False

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop), which may lie in several shards."""
        return self.tokens(self.read_marked(start, stop))

    def tokens(self, marked: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Stored tokens without their marks. Raises UserError for an id beyond the vocabulary."""
        tokens = marked & TOKEN if self.conversations else marked
        if len(tokens) and tokens.max() >= self.vocab_size:
            raise UserError(
                f"split {self.name!r} holds token {tokens.max()}, beyond vocab_size="
                f"{self.vocab_size}: a shard is damaged; copy it again, or {REMEDY}"
            )
        return tokens

    def read_marked(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Tokens [start, stop) as stored: in conversations, with their marks."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        tokens = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        at = start
        while at < stop:
            first, end = int(self.starts[shard]), min(int(self.starts[shard + 1]), stop)
            tokens[at - start : end - start] = self.shards[shard][at - first : end - first]
            at, shard = end, shard + 1
        return tokens


def map_shard(folder: Path, shard: Mapping[str, Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    path, expected = folder / shard["file"], shard["tokens"] * dtype.itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(
            f"shard {path} cannot be read: {error.strerror}; copy the whole folder again, or "
            f"{REMEDY}"
        ) from error
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise UserError(
            f"shard {path} is {state}: {size:,} bytes where {INDEX} says {expected:,}; copy it "
            f"again, or {REMEDY}"
        )
    try:
        # np.memmap and mmap keep a file descriptor open for as long as the mapping lives, and there
        # may be more shards than a process may open files. torch.from_file closes it. The pages are
        # private: the file does not change.
        mapped = torch.from_file(
            str(path), shared=False, size=size, dtype=torch.uint8, device="cpu"
        )
    except RuntimeError:
        try:  # private pages count as committed memory, which a system may limit; memmap's do not
            return np.memmap(path, dtype, mode="r")
        except OSError as error:
            raise UserError(
                f"shard {path} cannot be mapped into memory ({error.strerror}); make it "
                f"readable, and raise the limits of the process (ulimit -n, ulimit -v)"
            ) from error
    tokens = mapped.numpy().view(dtype)
    tokens.flags.writeable = False
    return tokens
