"""The memory that kernels which push rows share between the ranks: one set of slots, and words.

Such a call has three steps on every rank, in one kernel or in several that follow one another:

1. *Open*: tell each peer that this rank's slots may be written, by its word `open` at that peer.
2. *Send*: wait until the peer's slots are open, clear the word, store rows there, and set the word
   `sent` at that peer.
3. *Receive*: wait for each peer's `sent`, clear it, and read the slots.

Why no memory is written too early, whatever the shapes, and if a graph of one call is replayed:

- *Slots.* A kernel that opens starts when all that its stream held before has ended, since it is
  launched without a dependent launch: so the slots have been read, by the call before or by the
  caller who was lent them. A peer stores only after that.
- *The word `open`* of call n + 1 is set by a rank that has ended call n, so after it saw `sent` of
  call n from the peer, who had cleared `open` before.
- *The word `sent`* of call n + 1 is set by a rank that saw `open` of call n + 1 from the peer; that
  one had ended call n by then, and cleared `sent`.

So one set of slots is enough, words are 0 or 1 and never overflow, and nothing counts calls. All
ranks make the same calls in the same order, on one stream for each mailbox. A word of a mailbox
has the same meaning in every call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ladder.comm import capture, symmetric
from ladder.ops import workspace
from ladder.ops.workspace import NOTHING, Workspace

MAX_TABLES = 64  # sets of addresses that are kept, beside those of captured graphs


class Mailbox:
    """Slots of `size` 32-bit words and `words` zeroed words on every rank of a group.

    counters: two zeroed words of this rank alone, by which its programs count themselves.
    """

    def __init__(self, space: Workspace, group: dist.ProcessGroup, size: int, words: int) -> None:
        self.size, self.flags = size, words
        self.rank, self.world = space.rank, space.world
        with torch.inference_mode(False):  # it is also written outside inference mode
            self.slots = symmetric.allocate((size,), torch.int32, group, space.device, NOTHING)
            self.words = symmetric.allocate((words,), torch.int32, group, space.device, 0)
            self.counters = torch.zeros(2, dtype=torch.int32, device=space.device)


def mailbox(group: dist.ProcessGroup, op: str, like: Tensor, size: int, words: int) -> Mailbox:
    """The mailbox of this group, operator and stream, whose slots have `size` bytes or more.

    The first that is large enough, so all ranks find the same one; they make a new one together.
    Former ones are kept, for graphs that use them. Raises UserError in a capture that needs a new
    one.
    """
    space = workspace.workspace(group, op, like.device)
    made: list[Mailbox] = space.made.setdefault("mailboxes", [])
    for each in made:
        if each.size * 4 >= size and each.flags >= words:
            return each
    needed = -(-size // 4)
    step = max(workspace.MIN_WORDS, 1 << max(0, needed.bit_length() - 3))  # at most a quarter more
    needed = -(-needed // step) * step
    space.check_capture(f"{needed * 4 / 2**20:.0f} MiB for each rank")
    made.append(Mailbox(space, group, needed, words))
    return made[-1]


def addresses(group: dist.ProcessGroup, op: str, tensors: list[Tensor]) -> Tensor:
    """The addresses of `tensors`, int64 [len(tensors)] on their device, made once for each set.

    Raises UserError in a capture that needs a new set, since the host's numbers are copied.
    """
    space = workspace.workspace(group, op, tensors[0].device)
    key = tuple(each.data_ptr() for each in tensors)
    tables: dict[tuple[int, ...], Tensor] = space.made.setdefault("addresses", {})
    captured: set[tuple[int, ...]] = space.made.setdefault("captured addresses", set())
    if capture.capturing():
        if key not in tables:
            space.check_capture("a table of its tensors' addresses")
        captured.add(key)
    elif key not in tables:
        free = [each for each in tables if each not in captured]
        if len(free) >= MAX_TABLES:
            del tables[free[0]]  # the oldest; the allocator reuses it in the order of the stream
        with torch.inference_mode(False):
            tables[key] = torch.tensor(key, device=space.device)
    return tables[key]
