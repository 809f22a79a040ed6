"""Tokenising the sources of `prepare` into shards, unit by unit, so that it can resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ladder.data.chat import EncodeChat
from ladder.data.formats import Source
from ladder.data.shards import Unfinished
from ladder.data.sources import SPLITS, Names, heldout_below
from ladder.data.streams import Stream
from ladder.data.text import EncodeText
from ladder.data.tokenizer import FILE
from ladder.data.units import Cursor, units
from ladder.data.workers import in_order
from ladder.models.errors import UserError
from ladder.progress import Progress

NOTHING = {  # the state before any work is done
    "cursor": Cursor(), "read": 0, "names": Names(), "left_out": {}, "first_left_out": {},
    "answer_ends": [],
}  # fmt: skip
ENOUGH = 1000  # conversations read before the share left out is checked


@dataclass(frozen=True)
class Tokenisation:
    """The corpus of a call of `prepare`, and how to tokenise it.

    size: the sources' bytes, if known. encode: reads and tokenises a unit of the sources. The other
    fields are arguments of `prepare`.
    """

    sources: Sequence[Source | Stream]
    size: int | None
    encode: EncodeText | EncodeChat
    heldout_fraction: float
    shard_tokens: int
    max_left_out: float
    max_tokens: int | None
    workers: int

    def run(self, work: Unfinished, paths: Sequence[str | Path] | None) -> None:
        """Append all that is missing to the shards of `work`. paths: the corpus, for errors."""
        goal = (self.size, "bytes") if self.max_tokens is None else (self.max_tokens, "tokens")
        while True:
            start = work.state["read"] if self.max_tokens is None else _tokens(work)
            with Progress("tokenise", *goal, start=start) as progress:
                for _ in self._append_units(work, progress):
                    check_left_out(work.state, self.max_left_out, ENOUGH)
            check_left_out(work.state, self.max_left_out)
            names = Names(*work.state["names"])
            names.check(paths)
            below = heldout_below(self.heldout_fraction, names)
            if below == work.state["heldout_below"]:
                return
            # With few documents a split was left empty. Now all names are known: start over with a
            # threshold that gives each split at least one.
            work.start({**work.state, **NOTHING, "heldout_below": below}, SPLITS)

    def _append_units(self, work: Unfinished, progress: Progress) -> Iterator[None]:
        """Append the remaining units to the shards, in order; yields after each."""
        below = np.uint64(work.state["heldout_below"])
        if self.max_tokens is not None and _tokens(work) >= self.max_tokens:
            return
        todo = units(self.sources, self.encode.field, Cursor(*work.state["cursor"]))
        with closing(in_order(self.encode, todo, self.workers)) as results:
            for unit, encoded in results:
                if self.max_tokens is not None:
                    encoded = encoded.up_to(self.max_tokens - _tokens(work))
                heldout = encoded.keys < below
                for split, chosen in (("train", ~heldout), ("heldout", heldout)):
                    part = encoded.tokens[np.repeat(chosen, encoded.lengths)]
                    size = int(encoded.bytes[chosen].sum())
                    work.append(split, part, int(chosen.sum()), size, self.shard_tokens)
                work.commit(
                    cursor=unit.after,
                    read=work.state["read"] + unit.size,
                    names=Names(*work.state["names"]).merge(encoded.names()),
                    left_out=dict(encoded.left_out + Counter(work.state["left_out"])),
                    first_left_out={**encoded.first, **work.state["first_left_out"]},
                    answer_ends=[*{*work.state["answer_ends"], *encoded.answer_ends}],
                )
                yield
                _check_tokens(work, isinstance(self.encode, EncodeText))
                read, tokens = work.state["read"], _tokens(work)
                if self.max_tokens is None:
                    progress.update(read, f"{tokens:,} tokens")
                    continue
                progress.update(tokens, f"{read:,} bytes")
                if tokens >= self.max_tokens:
                    return


def check_left_out(state: Mapping[str, Any], most: float, enough: int = 1) -> None:
    """Raise UserError if more than the share `most` of the conversations is left out.

    enough: fewer conversations than that are not judged.
    """
    left_out = sum(state["left_out"].values())
    total = left_out + Names(*state["names"]).documents
    if total < enough or not (left_out > most * total or left_out == total > 0):
        return
    named = state["first_left_out"].items()
    first = {reason: f", the first of them {name}" for reason, name in named}
    reasons = "; ".join(
        f"{count:,} {reason}{first.get(reason, '')}" for reason, count in state["left_out"].items()
    )
    remedy = "correct them, or choose another --chat-field or --chat-template"
    if left_out == total:
        raise UserError(f"no conversation can be used: {reasons}; {remedy}")
    raise UserError(
        f"{left_out:,} of {total:,} conversations cannot be used, more than max_left_out={most:g} "
        f"of them: {reasons}; {remedy}, or leave them out with --max-left-out 1"
    )


def _check_tokens(work: Unfinished, ended: bool) -> None:
    """Raise UserError if the tokenizer drops the text. ended: documents have an end token."""
    documents = Names(*work.state["names"]).documents
    tokens = _tokens(work) - ended * documents
    if tokens < documents:
        raise UserError(
            f"the tokenizer makes {tokens:,} tokens of {documents:,} documents: it drops their "
            f"text; look at the normalizer, pre_tokenizer and post_processor of its {FILE}, or use "
            f"another"
        )


def _tokens(work: Unfinished) -> int:
    """The number of tokens so far, in both splits."""
    return sum(record["tokens"] for record in work.state["splits"].values())
