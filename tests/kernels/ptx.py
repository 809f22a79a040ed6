"""What tests read in PTX, the text of a compiled kernel."""

from __future__ import annotations

import re

WAIT = "griddepcontrol.wait"  # for the previous kernel, under dependent launch


def follow(wanted: tuple[str, ...], ptx: str) -> bool:
    """Whether each is there, behind the one before it."""
    start = 0
    for each in wanted:
        match = re.compile(each).search(ptx, start)
        if match is None:
            return False
        start = match.end()
    return True


def before_the_wait(ptx: str) -> str:
    """What stands before the first wait in the text and may run before a wait: blocks that only
    follow one may stand there, too. What stands behind the first wait is not looked at: a loop
    whose first turn waits may end without a wait for all that its text says."""
    lines = [line.strip() for line in ptx[ptx.index("{") :].splitlines()]
    labels = {line.split(":")[0]: n for n, line in enumerate(lines) if line.startswith("$L")}
    found: set[int] = set()
    ways = [0]
    while ways:
        at = ways.pop()
        while at not in found and WAIT not in lines[at] and not lines[at].startswith("ret;"):
            found.add(at)
            jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", lines[at])
            if jump:
                ways.append(labels[jump[1]])
            at = labels[jump[1]] if jump and not lines[at].startswith("@") else at + 1
    first = next(n for n, line in enumerate(lines) if WAIT in line)
    return "\n".join(lines[at] for at in sorted(found) if at < first)
