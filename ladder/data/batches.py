"""Batches of token windows: a pure function of the step.

The windows of a split are read, epoch by epoch, in an order that (seed, epoch) decides. Step s of
batch size B takes entries [s B, (s + 1) B) of that endless sequence, and rank r of R takes the r-th
part of them. So the order is the same for any number of ranks, and resuming at a step needs no
state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ladder.data.encoded import ANSWER
from ladder.data.index import IF_EMPTY
from ladder.data.packing import pack, survey
from ladder.data.split import Split
from ladder.models.documents import document_begins
from ladder.models.errors import UserError

NO_TARGET = -100


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

        end: the token that ends a document. If it is None, documents are not kept apart and the
        result is None, except for conversations, which are always kept apart.
        """
        return None if end is None else document_begins(tokens, end)

    @abstractmethod
    def targets(self, indices: Sequence[int]) -> int:
        """The number of targets in the windows `indices`."""

    def notes(self, drawn: int) -> list[str]:
        """Lines to print before training, which draws `drawn` windows."""
        return []

    @abstractmethod
    def draw(self, seed: int, entry: int) -> int:
        """The window at position `entry` of the endless order; a pure function."""

    @abstractmethod
    def spread(self, limit: int | None) -> Sequence[int]:
        """The windows to evaluate on: `limit`, evenly spread over all of them, or all (None).

        The first ones would be a part of the corpus only, which is in the order of its paths.
        """

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

    def spread(self, limit: int | None) -> Sequence[int]:
        count = len(self) if limit is None else min(limit, len(self))
        return [i * len(self) // count for i in range(count)]

    def _order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """The permutation of all windows in one epoch.

        The last two are cached, since a step may span two epochs. Raw generator output is sorted,
        since numpy guarantees that this output never changes, but not that of `permutation`. So a
        run that resumes after an upgrade of numpy reads on in the same order.
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

    def notes(self, drawn: int) -> list[str]:
        found, split = self.found, self.split.name
        used = found.sizes.sum() / (len(self) * self.seq_len)
        return [
            f"{split}: {len(found.starts):,} conversations in {len(self):,} windows of "
            f"{self.seq_len}, {used:.0%} filled; {found.targets.sum():,} tokens of answers; "
            f"{found.truncated:,} conversations truncated, {found.unanswered:,} left out because "
            f"their answers begin beyond a window"
        ]


def make_windows(split: Split, seq_len: int, source: int = 0) -> Windows:
    if not len(split):
        raise UserError(f"split {split.name!r} is empty; {IF_EMPTY}")
    return (PackedWindows if split.conversations else Windows)(split, seq_len, source)
