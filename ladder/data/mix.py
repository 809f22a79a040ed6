"""Several prepared folders as one: sequences drawn from each in the proportion of its weight.

Which source each place of the endless order takes repeats in a cycle, as long as the sum of the
weights in lowest terms (0.7 and 0.3: ten places). So where a place reads is a function of its
number, as it is for one folder: the same for any number of ranks, with no state to resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ladder.data.batches import (
    Batches,
    Split,
    TokenData,
    Windows,
    make_windows,
    open_data,
)
from ladder.data.sources import SPLITS
from ladder.data.weights import parse_sources, whole_shares
from ladder.models.errors import UserError


@dataclass(frozen=True)
class Mix(TokenData):
    """Prepared folders with one tokenizer and a weight each.

    splits: all sources' tokens, one source after another. folder: the first, for its tokenizer.
    index: what the sources hold and their shares, which a continued run must find again.
    shares: the sequences of each source in one cycle: whole numbers without a common divisor.
    """

    sources: tuple[TokenData, ...]
    shares: tuple[int, ...]

    def _windows(self, split: str, seq_len: int) -> Batches:
        parts = []
        for number, source in enumerate(self.sources):
            try:
                parts.append(make_windows(source.split(split), seq_len, number))
            except UserError as error:
                raise UserError(f"data source {source.folder}: {error}") from error
        return MixedWindows(parts, self.shares, [source.eos_id for source in self.sources])


class MixedWindows(Batches):
    """The windows of several sources, numbered one source after another.

    Of the first n places of the order, n times its part of the weights belong to a source, give or
    take less than one. Its own windows come in its own order, so that all of them are drawn before
    one comes again. Evaluation takes the windows of each source from the first on, in the same
    proportions; once a source is used up, the others go on without it.
    """

    def __init__(
        self, parts: Sequence[Windows], shares: Sequence[int], ends: Sequence[int]
    ) -> None:
        # Text ends with the tokenizer's end-of-text token, and conversations with their template's.
        self.parts, self.shares, self.ends = parts, shares, ends
        self.bases = np.cumsum([0, *(len(part) for part in parts)])
        self.source = plan_cycle(shares)  # of each place in the cycle
        self.places = [np.flatnonzero(self.source == k) for k in range(len(parts))]
        self.turn = np.empty(len(self.source), np.int64)  # how often it was drawn in the cycle yet
        for places in self.places:
            self.turn[places] = np.arange(len(places))

    def __len__(self) -> int:
        return int(self.bases[-1])

    def _place(self, i: int) -> tuple[int, int]:
        """The source of window i, and its number there."""
        assert 0 <= i < len(self), (i, len(self))
        source = int(np.searchsorted(self.bases, i, side="right")) - 1
        return source, i - int(self.bases[source])

    def read(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = map(self._place, indices)
        pairs = [self.parts[source].read([number]) for source, number in places]
        return torch.cat([tokens for tokens, _ in pairs]), torch.cat([after for _, after in pairs])

    def begins(
        self, indices: Sequence[int], tokens: torch.Tensor, end: int | None
    ) -> torch.Tensor | None:
        found = []
        for i, row in zip(indices, tokens.split(1), strict=True):
            source, number = self._place(i)
            own = None if end is None else self.ends[source]
            found.append(self.parts[source].begins([number], row, own))
        if all(row is None for row in found):
            return None
        whole = torch.zeros_like(tokens[:1], dtype=torch.bool)
        whole[:, 0] = True
        return torch.cat([whole if row is None else row for row in found])

    def targets(self, indices: Sequence[int]) -> int:
        places = map(self._place, indices)
        return sum(self.parts[source].targets([number]) for source, number in places)

    def notes(self) -> list[str]:
        return [note for part in self.parts for note in part.notes()]

    def draw(self, seed: int, entry: int) -> int:
        cycle, at = divmod(entry, len(self.source))
        source = int(self.source[at])
        turn = cycle * self.shares[source] + int(self.turn[at])
        return int(self.bases[source]) + self.parts[source].draw(seed, turn)

    def first(self, limit: int | None) -> Sequence[int]:
        places = []  # of every window in the order that each source would go through unshuffled
        for part, share, own in zip(self.parts, self.shares, self.places, strict=True):
            cycle, turn = np.divmod(np.arange(len(part)), share)
            places.append(cycle * len(self.source) + own[turn])
        chosen: list[int] = np.argsort(np.concatenate(places))[:limit].tolist()
        return chosen


def plan_cycle(shares: Sequence[int]) -> npt.NDArray[np.int64]:
    """Which source each place of a cycle takes: [sum of shares], source k shares[k] times.

    After n places a source has been taken less than once more or less than n share / sum. Its next
    turn may not come before that allows, and of those that may, the most urgent is taken: for unit
    jobs that start and end at whole times, earliest deadline first keeps every deadline there is.
    """
    length = sum(shares)
    taken = [0] * len(shares)
    cycle = np.empty(length, np.int64)
    for n in range(length):
        _, source = min(
            (-(-(count + 1) * length // share), k)
            for k, (count, share) in enumerate(zip(taken, shares, strict=True))
            if count * length < share * (n + 1)
        )
        cycle[n] = source
        taken[source] += 1
    return cycle


def open_sources(data: Any) -> TokenData:
    """Open a recipe's `data`: a prepared folder, or a list of `{path, weight}`.

    Raises UserError for a folder that is not whole, and for sources that differ in tokenizer.
    """
    if isinstance(data, str):
        return open_data(data)
    named = parse_sources(data)
    sources = tuple(open_data(path) for path, _ in named)
    first = sources[0]
    for source in sources[1:]:
        if source.index["tokenizer_sha256"] != first.index["tokenizer_sha256"]:
            raise UserError(
                f"data sources {first.folder} and {source.folder} were made with different "
                f"tokenizers; prepare one again with the other's tokenizer.json"
            )
    if len(sources) == 1:
        return first
    shares = whole_shares([weight for _, weight in named])
    return Mix(
        first.folder,
        first.vocab_size,
        first.eos_id,
        first.token_bytes,
        {name: _join([source.split(name) for source in sources]) for name in SPLITS},
        {
            "tokenizer_sha256": first.index["tokenizer_sha256"],
            "splits": [
                [share, source.index["splits"]]
                for share, source in zip(shares, sources, strict=True)
            ],
        },
        sources,
        shares,
    )


def _join(splits: Sequence[Split]) -> Split:
    """Splits one after another. Their tokens are of one size, for they share a vocabulary."""
    shards = tuple(shard for split in splits for shard in split.shards)
    return Split(
        splits[0].name,
        shards,
        np.cumsum([0, *(len(shard) for shard in shards)], dtype=np.int64),
        sum(split.documents for split in splits),
        sum(split.bytes for split in splits),
        splits[0].vocab_size,
    )
