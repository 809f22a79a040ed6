"""Packing conversations into windows: as many as fit; only those longer than a window are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ladder.data.encoded import ANSWER, BEGINS

Integers = npt.NDArray[np.int64]
CHUNK = 2**24  # tokens in memory at once


class Conversations(NamedTuple):
    """The conversations of a split that have targets.

    starts: the position of each one's first token. sizes: the positions that it takes in a window.
    targets: how many of those have a target. truncated: the number of conversations cut because
    they are longer than a window. unanswered: the number left out because no answer begins within
    a window.
    """

    starts: Integers
    sizes: Integers
    targets: Integers
    truncated: int
    unanswered: int


def survey(read: Callable[[int, int], Integers], length: int, seq_len: int) -> Conversations:
    """Find the conversations of a split of `length` tokens; `read` returns tokens with their marks.

    A conversation of n tokens takes n - 1 positions: its last token is only a target.
    """
    begins: list[Integers] = [np.empty(0, np.int64)]
    for at in range(0, length, CHUNK):
        begins.append(at + np.flatnonzero(read(at, min(at + CHUNK, length)) & BEGINS))
    starts = np.concatenate(begins)
    lengths = np.diff(starts, append=length)
    sizes = np.minimum(lengths - 1, seq_len)
    targets = np.empty(len(starts), np.int64)
    first = 0
    while first < len(starts):
        # Whole conversations, at least one.
        end = int(np.searchsorted(starts, starts[first] + CHUNK))
        end = max(end - (end < len(starts)), first + 1)
        stop = int(starts[end]) if end < len(starts) else length
        answers = read(int(starts[first]), stop) & ANSWER != 0
        sums = np.concatenate(([0], np.cumsum(answers)))
        inside = starts[first:end] - starts[first] + 1
        targets[first:end] = sums[inside + sizes[first:end]] - sums[inside]
        first = end
    kept = targets > 0
    truncated = int((lengths[kept] - 1 > seq_len).sum())
    return Conversations(starts[kept], sizes[kept], targets[kept], truncated, int((~kept).sum()))


def pack(sizes: Integers, room: int) -> list[list[int]]:
    """The numbers of the conversations in each window of `room` positions: best-fit decreasing.

    Conversations of equal size are shuffled, so that windows do not follow the order of the files.
    """
    shuffle = np.random.PCG64(0).random_raw(len(sizes))
    windows: list[list[int]] = []
    left: dict[int, list[int]] = {}  # free positions -> windows
    present = 0  # the keys of `left`, as bits
    for number in np.lexsort((shuffle, -sizes)).tolist():
        size = int(sizes[number])
        fits = present >> size
        if fits:
            space = size + (fits & -fits).bit_length() - 1  # the smallest that fits
            window = left[space].pop()
            if not left[space]:
                present ^= 1 << space
        else:
            space, window = room, len(windows)
            windows.append([])
        windows[window].append(number)
        space -= size
        if space:
            left.setdefault(space, []).append(window)
            present |= 1 << space
    return windows
