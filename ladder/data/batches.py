"""Batches of token windows: a pure function of the step.

The windows of a split are read, epoch by epoch, in an order that (seed, epoch) decides. Step s of
batch size B takes entries [s B, (s + 1) B) of that endless sequence, and rank r of R takes the r-th
part of them. So the order is the same for any number of ranks, and resuming at a step needs no
state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ladder.data.encoded import ANSWER, TOKEN
from ladder.data.index import REMEDY, check_own_tokenizer, load_token_bytes, read_index
from ladder.data.packing import pack, survey
from ladder.data.prepare import INDEX, STORED
from ladder.data.tokenizer import FILE, load_tokenizer
from ladder.files import checksum
from ladder.models.documents import document_begins
from ladder.models.errors import UserError, unknown

NO_TARGET = -100


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
        """Tokens [start, stop) as stored; those of conversations have their marks."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        tokens = np.empty(stop - start, np.int64)
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        at = start
        while at < stop:
            first, end = int(self.starts[shard]), min(int(self.starts[shard + 1]), stop)
            tokens[at - start : end - start] = self.shards[shard][at - first : end - first]
            at, shard = end, shard + 1
        return tokens


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
            tuple(_map(folder, shard, dtype) for shard in record["shards"]),
            np.cumsum([0, *(shard["tokens"] for shard in record["shards"])], dtype=np.int64),
            record["documents"],
            record["bytes"],
            index["vocab_size"],
            "chat_field" in index["source"],
        )
        for name, record in index["splits"].items()
    }
    check_own_tokenizer(folder / FILE, index["tokenizer_sha256"])
    token_bytes = load_token_bytes(
        folder / index["token_bytes"], index["vocab_size"], index.get("token_bytes_sha256")
    )
    return TokenData(folder, index["vocab_size"], index["eos_id"], token_bytes, splits, index)


def _map(folder: Path, shard: Mapping[str, Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
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
                f"shard {path} cannot be mapped into memory ({error.strerror}); let this user read "
                f"it, and raise what limits the process (ulimit -n, ulimit -v)"
            ) from error
    tokens = mapped.numpy().view(dtype)
    tokens.flags.writeable = False
    return tokens


class Batches(ABC):
    """Numbered windows, and the endless order in which training draws them."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of windows."""

    @abstractmethod
    def read(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the windows `indices`: two int64 [len(indices), seq_len].

        A negative target has no loss.
        """

    def begins(
        self, indices: Sequence[int], tokens: torch.Tensor, end: int | None
    ) -> torch.Tensor | None:
        """Whether a document begins at each position of `tokens`: bool [len(indices), seq_len].

        end: the token that ends a document. None: documents are not kept apart, and the result is
        None, but for conversations, which are always kept apart.
        """
        return None if end is None else document_begins(tokens, end)

    @abstractmethod
    def targets(self, indices: Sequence[int]) -> int:
        """The number of targets in the windows `indices`."""

    def notes(self) -> list[str]:
        """Lines about the windows, to print before training."""
        return []

    @abstractmethod
    def draw(self, seed: int, entry: int) -> int:
        """The window at position `entry` of the endless order; a pure function."""

    @abstractmethod
    def first(self, limit: int | None) -> Sequence[int]:
        """The windows to evaluate on: the first `limit`, or all of them where `limit` is None."""

    def batch(
        self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of this rank's part of one step: int64 [batch_size / ranks, seq_len].

        batch_size: windows of the whole step, over all ranks. rank, ranks: data-parallel rank and
        size (the TP ranks of one model copy take the same batch).
        """
        return self.read(self.order(step, batch_size, seed, rank, ranks))

    def order(
        self, step: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> list[int]:
        """The windows that `batch` reads."""
        if batch_size < 1 or batch_size % ranks:
            raise UserError(
                f"batch_size={batch_size} must be a multiple of the {ranks} data-parallel ranks"
            )
        if seed < 0:
            raise UserError(f"seed={seed} must be 0 or more")
        assert step >= 0, step
        assert 0 <= rank < ranks, (rank, ranks)
        part = batch_size // ranks
        first = step * batch_size + rank * part
        return [self.draw(seed, entry) for entry in range(first, first + part)]


class Windows(Batches):
    """The non-overlapping windows of a split.

    Window i covers tokens [i S, i S + S + 1), S = seq_len: S inputs, and the tokens that follow
    them as targets. So each token of the split is a target at most once. The first token and the
    last fewer than S tokens, which fill no window, are never targets.

    source: the number of the data source; each source is shuffled with a seed of its own.
    """

    def __init__(self, split: Split, seq_len: int, source: int = 0) -> None:
        if seq_len < 1:
            raise UserError(f"seq_len={seq_len} must be 1 or more")
        if len(split) < seq_len + 1:
            raise UserError(
                f"seq_len={seq_len} is longer than split {split.name!r}, whose {len(split):,} "
                f"tokens allow at most {max(len(split) - 1, 0):,}; use a shorter one, or prepare "
                f"more documents"
            )
        self.split, self.seq_len, self.source = split, seq_len, source
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return (len(self.split) - 1) // self.seq_len

    def read(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.seq_len
        block = np.empty((len(indices), size + 1), np.int64)
        for row, i in enumerate(indices):
            assert 0 <= i < len(self), (i, len(self))
            block[row] = self.split.read(i * size, i * size + size + 1)
        tokens = torch.from_numpy(block)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def draw(self, seed: int, entry: int) -> int:
        epoch, at = divmod(entry, len(self))
        return int(self._order(seed, epoch)[at])

    def targets(self, indices: Sequence[int]) -> int:
        return len(indices) * self.seq_len

    def first(self, limit: int | None) -> Sequence[int]:
        return range(len(self))[:limit]

    def _order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The permutation of all windows in one epoch.

        The last two are cached, since a step may span two epochs. Raw generator output is sorted
        because numpy guarantees that it never changes, which it does not for `permutation`: a run
        that resumes after an upgrade reads on in the same order.
        """
        key = (seed, epoch)
        if key not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            entropy = (*key, self.source) if self.source else key
            random = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(len(self))
            self._orders[key] = np.argsort(random, kind="stable")
        return self._orders[key]


class PackedWindows(Windows):
    """Windows of whole conversations, kept apart from each other; only answers are targets.

    The content of a window depends only on the split and seq_len; epochs differ in the windows'
    order. The unused end of a window is padding: a document of its own, without targets.
    """

    def __init__(self, split: Split, seq_len: int, source: int = 0) -> None:
        if seq_len < 1:
            raise UserError(f"seq_len={seq_len} must be 1 or more")
        self.split, self.seq_len, self.source = split, seq_len, source
        self._orders: dict[tuple[int, int], npt.NDArray[np.int64]] = {}
        self.found = survey(split.read_marked, len(split), seq_len)
        windows = pack(self.found.sizes, seq_len)
        if not windows:
            raise UserError(
                f"seq_len={seq_len}: split {split.name!r} has no conversation whose answer begins "
                f"within a window; use a longer one, or prepare more conversations"
            )
        self.members = np.array([number for window in windows for number in window], np.int64)
        self.bounds = np.cumsum([0, *map(len, windows)])

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def _inside(self, i: int) -> npt.NDArray[np.int64]:
        """The conversations in window i."""
        assert 0 <= i < len(self), (i, len(self))
        return self.members[self.bounds[i] : self.bounds[i + 1]]

    def read(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.zeros((len(indices), self.seq_len), np.int64)
        targets = np.full_like(tokens, NO_TARGET)
        for row, i in enumerate(indices):
            at = 0
            for number in self._inside(i):
                start, size = int(self.found.starts[number]), int(self.found.sizes[number])
                marked = self.split.read_marked(start, start + size + 1)
                said = self.split.tokens(marked)
                tokens[row, at : at + size] = said[:-1]
                targets[row, at : at + size] = np.where(marked & ANSWER, said, NO_TARGET)[1:]
                at += size
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def begins(
        self, indices: Sequence[int], tokens: torch.Tensor, end: int | None
    ) -> torch.Tensor | None:
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        for row, i in enumerate(indices):
            ends = np.cumsum(self.found.sizes[self._inside(i)])
            begins[row, [0, *ends[ends < self.seq_len].tolist()]] = True
        return begins

    def targets(self, indices: Sequence[int]) -> int:
        return sum(int(self.found.targets[self._inside(i)].sum()) for i in indices)

    def notes(self) -> list[str]:
        found, split = self.found, self.split.name
        used = found.sizes.sum() / (len(self) * self.seq_len)
        return [
            f"{split}: {len(found.starts):,} conversations in {len(self):,} windows of "
            f"{self.seq_len}, {used:.0%} filled; {found.targets.sum():,} tokens of answers; "
            f"{found.truncated:,} conversations truncated, {found.silent:,} left out because "
            f"their answers begin beyond a window"
        ]


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


def make_windows(split: Split, seq_len: int, source: int = 0) -> Windows:
    if not len(split):
        raise UserError(
            f"split {split.name!r} is empty; prepare more documents, or with a heldout_fraction "
            f"above 0"
        )
    return (PackedWindows if split.conversations else Windows)(split, seq_len, source)


def text_bytes(data: TokenData, targets: torch.Tensor) -> torch.Tensor:
    """The bytes of text per target, int64 in the shape of targets; 0 where there is no target."""
    lengths = torch.from_numpy(data.token_bytes.astype(np.int64))
    return lengths[targets.clamp(min=0)].where(targets >= 0, 0)


def heldout_order(windows: Batches, limit: int | None, batch_size: int) -> Iterator[Sequence[int]]:
    """The windows to evaluate on (see `Batches.first`), in batches."""
    if batch_size < 1 or (limit is not None and limit < 1):
        raise UserError(f"batch_size={batch_size} and limit={limit} must be 1 or more")
    chosen = windows.first(limit)
    for start in range(0, len(chosen), batch_size):
        yield chosen[start : start + batch_size]


def heldout_windows(
    data: TokenData, seq_len: int, limit: int | None = None, batch_size: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The held-out windows in batches, from the first on, for bits per byte.

    Several sources are mixed in the proportions of their weights until one is used up (see `Mix`).

    limit: the maximum number of windows; None is all. Yields inputs, targets and the bytes of text
    per target: three int64 [batch, seq_len], where only the last batch may be below `batch_size`.
    Bits per byte is the sum of the targets' losses in nats / ln 2 / the sum of the bytes.
    """
    windows = data.windows("heldout", seq_len)
    for chosen in heldout_order(windows, limit, batch_size):
        tokens, targets = windows.read(chosen)
        yield tokens, targets, text_bytes(data, targets)
