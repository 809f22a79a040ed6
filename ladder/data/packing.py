"""Which conversations share a window: as many as fit, none of them cut but those longer than it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ladder.data.encoded import ANSWER, BEGINS

Integers = npt.NDArray[np.int64]
CHUNK = 2**24  # tokens that are in memory at once


class Conversations(NamedTuple):
    """Of each conversation of a split that can be learnt from: where its first token is, how many
    places it takes in a window, and how many of them have a target.

    truncated: how many are longer than a window, and end with it. silent: how many are left out,
    for no answer of theirs begins in it.
    """

    starts: Integers
    sizes: Integers
    targets: Integers
    truncated: int
    silent: int


def survey(read: Callable[[int, int], Integers], length: int, seq_len: int) -> Conversations:
    """Find the conversations of a split of `length` tokens, `read(start, stop)` with their marks.

    A conversation of n tokens takes n - 1 places: its last token is a target alone.
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
        # Whole conversations, one at least.
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
    """Windows of `room` places and the numbers of what is in each: best fit, the largest first.

    What is of one size comes in an order of its own, so that windows do not follow the files'.
    """
    shuffle = np.random.PCG64(0).random_raw(len(sizes))
    windows: list[list[int]] = []
    left: dict[int, list[int]] = {}  # places left -> windows
    present = 0  # its keys, as the bits of a number
    for number in np.lexsort((shuffle, -sizes)).tolist():
        size = int(sizes[number])
        fits = present >> size
        if fits:
            space = size + (fits & -fits).bit_length() - 1  # the least that is enough
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
