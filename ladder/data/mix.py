"""Several prepared folders as one: sequences are drawn from each in proportion to its weight.

The source of each entry of the endless order repeats in a cycle, whose length is the sum of the
weights in lowest terms (0.7 and 0.3: ten entries). So the sequence of an entry is a pure function
of its number, as it is for one folder: the same for any number of ranks, with no state to resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ladder.data.batches import Batches, Windows, make_windows
from ladder.data.prepared import TokenData, open_data
from ladder.data.sources import SPLITS
from ladder.data.split import Split
from ladder.data.tokenizer import TEMPLATE
from ladder.data.weights import parse_sources, whole_shares
from ladder.models.errors import UserError


@dataclass(frozen=True)
class Mix(TokenData):
    """Prepared folders with the same tokenizer, and a weight each.

    splits: all sources' tokens, one source after another. folder, eos_id: of the first source with
    a chat template, else of the first, for its tokenizer. index: the sources' indices and shares,
    which must be the same when a run resumes.
    shares: the sequences of each source in one cycle, integers without a common divisor.
    """

    sources: tuple[TokenData, ...]
    shares: tuple[int, ...]

    @property
    def end_ids(self) -> list[int]:
        """The end tokens of all sources."""
        return list(dict.fromkeys(end for source in self.sources for end in source.end_ids))

    def _windows(self, split: str, seq_len: int) -> Batches:
        parts = []
        for number, source in enumerate(self.sources):
            try:
                parts.append(make_windows(source.split(split), seq_len, number))
            except UserError as error:
                raise UserError(f"data source {source.folder}: {error}") from error
        return MixedWindows(parts, self.shares, self.sources)


class MixedWindows(Batches):
    """The windows of several sources, numbered one source after another.

    Of the first n entries of the order, a source with the fraction w of the weights has n w, give
    or take less than one. The windows of a source are drawn in the source's own order, so that none
    is repeated before all have been drawn. Evaluation takes windows in the same proportions, evenly
    spread over each source; once a source is used up, the others go on without it.
    """

    def __init__(
        self, parts: Sequence[Windows], shares: Sequence[int], sources: Sequence[TokenData]
    ) -> None:
        self.parts, self.shares, self.sources = parts, shares, sources
        self.bases = np.cumsum([0, *(len(part) for part in parts)])
        self.source = plan_cycle(shares)  # the source of each entry of the cycle
        self.entries = [np.flatnonzero(self.source == k) for k in range(len(parts))]
        self.turn = np.empty(len(self.source), np.int64)  # earlier entries of the same source
        for entries in self.entries:
            self.turn[entries] = np.arange(len(entries))

    def __len__(self) -> int:
        return int(self.bases[-1])

    def _locate(self, i: int) -> tuple[int, int]:
        """The source of window i, and the window's number in that source."""
        assert 0 <= i < len(self), (i, len(self))
        source = int(np.searchsorted(self.bases, i, side="right")) - 1
        return source, i - int(self.bases[source])

    def read(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        located = map(self._locate, indices)
        pairs = [self.parts[source].read([number]) for source, number in located]
        tokens, targets = zip(*pairs, strict=True)
        return torch.cat(tokens), torch.cat(targets)

    def begins(
        self, indices: Sequence[int], tokens: torch.Tensor, end: int | None
    ) -> torch.Tensor | None:
        found = []
        for i, row in zip(indices, tokens.split(1), strict=True):
            source, number = self._locate(i)
            own = None if end is None else self.sources[source].eos_id
            found.append(self.parts[source].begins([number], row, own))
        if all(row is None for row in found):
            return None
        whole = torch.zeros_like(tokens[:1], dtype=torch.bool)
        whole[:, 0] = True
        return torch.cat([whole if row is None else row for row in found])

    def targets(self, indices: Sequence[int]) -> int:
        located = map(self._locate, indices)
        return sum(self.parts[source].targets([number]) for source, number in located)

    def notes(self, drawn: int) -> list[str]:
        cycles = drawn / len(self.source)
        passes = ", ".join(
            f"{source.folder}: {cycles * share / len(part):.2g}"
            for source, part, share in zip(self.sources, self.parts, self.shares, strict=True)
        )
        return [*(n for part in self.parts for n in part.notes(drawn)), f"passes over {passes}"]

    def draw(self, seed: int, entry: int) -> int:
        cycle, at = divmod(entry, len(self.source))
        source = int(self.source[at])
        turn = cycle * self.shares[source] + int(self.turn[at])
        return int(self.bases[source]) + self.parts[source].draw(seed, turn)

    def spread(self, limit: int | None) -> Sequence[int]:
        entries = []  # the entry that would draw each window if the sources were not shuffled
        for part, share, own in zip(self.parts, self.shares, self.entries, strict=True):
            cycle, turn = np.divmod(np.arange(len(part)), share)
            entries.append(cycle * len(self.source) + own[turn])
        drawn = np.argsort(np.concatenate(entries))[:limit]
        source = np.searchsorted(self.bases, drawn, side="right") - 1
        chosen = np.empty_like(drawn)
        for number, part in enumerate(self.parts):
            its = source == number
            chosen[its] = self.bases[number] + np.array(part.spread(int(its.sum())), np.int64)
        found: list[int] = chosen.tolist()
        return found


def plan_cycle(shares: Sequence[int]) -> npt.NDArray[np.int64]:
    """The source of each entry of a cycle: [sum of shares]; source k occurs shares[k] times.

    After n entries, a source's count differs from n share / sum by less than one. That gives each
    occurrence an earliest entry and a deadline; of the sources that may come next, the one with the
    earliest deadline does. For unit jobs with integer release times, earliest deadline first meets
    every deadline that can be met.
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

    Raises UserError for an incomplete or damaged folder, and for sources with other tokenizers or
    chat templates.
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
    chats = [source for source in sources if (source.folder / TEMPLATE).is_file()]
    home = chats[0] if chats else first
    for source in chats[1:]:
        template = home.folder / TEMPLATE
        if (source.folder / TEMPLATE).read_bytes() != template.read_bytes():
            raise UserError(
                f"data sources {home.folder} and {source.folder} were made with different chat "
                f"templates; prepare one again with --chat-template {template}"
            )
    shares = whole_shares([weight for _, weight in named])
    return Mix(
        home.folder,
        home.vocab_size,
        home.eos_id,
        home.token_bytes,
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
    """The concatenation of splits."""
    shards = tuple(shard for split in splits for shard in split.shards)
    return Split(
        splits[0].name,
        shards,
        np.cumsum([0, *(len(shard) for shard in shards)], dtype=np.int64),
        sum(split.documents for split in splits),
        sum(split.bytes for split in splits),
        splits[0].vocab_size,
    )
