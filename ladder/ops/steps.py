"""The steps of a schedule, as plain data: what a rank's CUDA streams do, and how they synchronise.

What they mean together is in `ladder.ops.schedules`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

Stream = Literal["main", "second", "copies", "copies 2", "copies 3"]
LANES: tuple[Stream, ...] = ("main", "second")  # of the products
COPIES: tuple[Stream, ...] = ("copies", "copies 2", "copies 3")
# `full`: a count of tiles, in the sender's own memory.
Kind = Literal["free", "arrived", "full"]
KINDS: tuple[Kind, ...] = ("free", "arrived", "full")
ALL = -1  # the chunk of a step that does all of them


@dataclass(frozen=True)
class Word:
    """An int32 in the memory of a rank, one for each set."""

    rank: int
    kind: Kind
    index: int


@dataclass(frozen=True)
class Await:
    """The stream waits until the word is `value`."""

    stream: Stream
    word: Word
    value: int = 1


@dataclass(frozen=True)
class Put:
    """The stream writes the word, after all that came before in it."""

    stream: Stream
    word: Word
    value: int


@dataclass(frozen=True)
class Record:
    """The event happens when the stream has come here."""

    stream: Stream
    event: str


@dataclass(frozen=True)
class Follow:
    """The stream waits for an event that was recorded before, in this call."""

    stream: Stream
    event: str


@dataclass(frozen=True)
class Work:
    """The stream runs an action of the operator on a chunk.

    waits: words that the action itself waits for, until they are 1.
    """

    stream: Stream
    action: str
    chunk: int
    waits: tuple[Word, ...] = ()


Step = Await | Put | Record | Follow | Work
Schedule = tuple[Step, ...]


def jobs(schedule: Schedule) -> list[tuple[Step, ...]]:
    """What the host enqueues, job by job: consecutive words of a stream are one job."""

    def kind(step: Step) -> object:
        return step.stream if isinstance(step, Await | Put) else id(step)

    return [tuple(each) for _, each in groupby(schedule, kind)]
