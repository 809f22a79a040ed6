"""A folder of prepared data, opened: its splits, its index, and its held-out windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ladder.data.batches import Batches, make_windows
from ladder.data.index import STORED, check_own_tokenizer, holds_chats, load_token_bytes, read_index
from ladder.data.split import Split, map_shard
from ladder.data.tokenizer import FILE, load_tokenizer
from ladder.files import checksum
from ladder.models.errors import UserError, unknown


@dataclass(frozen=True)
class TokenData:
    """A prepared folder, opened.

    token_bytes: bytes of text per token, int32 [vocab_size]; 0 for special tokens.
    """

    folder: Path
    vocab_size: int
    eos_id: int
    token_bytes: npt.NDArray[np.int32]
    splits: Mapping[str, Split]
    index: Mapping[str, Any]
    made: dict[Any, Batches] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    @property
    def ends(self) -> int | list[int]:
        """The tokens that end a text, for a model that learns from it: one, or several."""
        return self.end_ids if len(self.end_ids) > 1 else self.end_ids[0]

    @property
    def end_ids(self) -> list[int]:
        """The token that ends the answers of conversations, if known; the end-of-text token."""
        return list(dict.fromkeys([self.index.get("answer_end_id", self.eos_id), self.eos_id]))

    def split(self, name: str) -> Split:
        if name not in self.splits:
            raise unknown("split", name, self.splits)
        return self.splits[name]

    def windows(self, split: str, seq_len: int) -> Batches:
        """The windows of `seq_len` tokens of a split, from which batches are drawn."""
        key = (split, seq_len)
        if key not in self.made:  # packing is slow
            self.made[key] = self._windows(split, seq_len)
        return self.made[key]

    def _windows(self, split: str, seq_len: int) -> Batches:
        return make_windows(self.split(split), seq_len)


def open_data(folder: str | Path) -> TokenData:
    """Open a folder that `prepare` wrote. Raises UserError if it is incomplete or damaged."""
    folder = Path(folder)
    index = read_index(folder)
    dtype = np.dtype(STORED[index["dtype"]])
    splits = {
        name: Split(
            name,
            tuple(map_shard(folder, shard, dtype) for shard in record["shards"]),
            np.cumsum([0, *(shard["tokens"] for shard in record["shards"])], dtype=np.int64),
            record["documents"],
            record["bytes"],
            index["vocab_size"],
            holds_chats(index),
        )
        for name, record in index["splits"].items()
    }
    check_own_tokenizer(folder / FILE, index["tokenizer_sha256"])
    token_bytes = load_token_bytes(
        folder / index["token_bytes"], index["vocab_size"], index.get("token_bytes_sha256")
    )
    return TokenData(folder, index["vocab_size"], index["eos_id"], token_bytes, splits, index)


def check_tokenizer(data: TokenData, folder: Path, where: str, model: str) -> None:
    """Raise UserError where the tokenizer in a model's folder has another vocabulary than the data.

    where, model: names of the data and the model, for the error. Only the vocabularies are
    compared, not the bytes of tokenizer.json.
    """
    own = folder / FILE
    if not own.is_file() or checksum(own) == data.index["tokenizer_sha256"]:
        return
    both = (load_tokenizer(path).get_vocab(True) for path in (own, data.folder / FILE))
    if next(both) != next(both):
        raise UserError(
            f"{where} was made with another vocabulary than {own} of {model}; prepare the data "
            f"with --tokenizer {folder}"
        )


def text_bytes(data: TokenData, targets: torch.Tensor) -> torch.Tensor:
    """The bytes of text per target, int64 in the shape of targets; 0 where there is no target."""
    lengths = torch.from_numpy(data.token_bytes.astype(np.int64))
    return lengths[targets.clamp(min=0)].where(targets >= 0, 0)


def heldout_order(windows: Batches, limit: int | None, batch_size: int) -> Iterator[Sequence[int]]:
    """The windows to evaluate on (see `Batches.spread`), in batches."""
    if batch_size < 1 or (limit is not None and limit < 1):
        raise UserError(f"batch_size={batch_size} and limit={limit} must be 1 or more")
    chosen = windows.spread(limit)
    for start in range(0, len(chosen), batch_size):
        yield chosen[start : start + batch_size]


def heldout_windows(
    data: TokenData, seq_len: int, limit: int | None = None, batch_size: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The held-out windows in batches, for bits per byte.

    Several sources are mixed in the proportions of their weights until one is used up (see `Mix`).

    limit: the maximum number of windows, evenly spread over all of them; None is all. Yields
    inputs, targets and the bytes of text per target: three int64 [batch, seq_len], where only the
    last batch may be below `batch_size`.
    Bits per byte is the sum of the targets' losses in nats / ln 2 / the sum of the bytes.
    """
    windows = data.windows("heldout", seq_len)
    for chosen in heldout_order(windows, limit, batch_size):
        tokens, targets = windows.read(chosen)
        yield tokens, targets, text_bytes(data, targets)
