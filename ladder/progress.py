"""Progress of long work: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal


def amount(nbytes: int) -> str:
    """A number of bytes as text, in the unit that gives one to three digits before the point."""
    size, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    digits = 0 if units[0] == "bytes" or size >= 99.5 else 1
    return f"{size:.{digits}f} {units[0]}"


class Progress:
    """Shows progress on standard error. Use as a context manager and call `update(done, facts)`.

    label: the name of the work. total: in `unit`s; None if unknown. quiet: show nothing (on ranks
    other than 0). start: units that were finished before.
    """

    def __init__(
        self, label: str, total: int | None, unit: str, quiet: bool = False, start: int = 0
    ) -> None:
        self.start = start
        self.label, self.total, self.unit, self.quiet = label, total, unit, quiet
        self.started = self.shown = time.monotonic()
        self.done, self.facts, self.last_shown = 0, "", -1
        self.bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        console = Console(stderr=True)
        if console.is_terminal and not self.quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[count]}"),
                TextColumn("{task.fields[facts]}"),
                TimeRemainingColumn(),
            )
            self.bar = RichProgress(*columns, console=console)
            self.task = self.bar.add_task(
                self.label, total=self.total, completed=self.start, count="", facts=""
            )
            self.bar.start()
        return self

    def update(self, done: int, facts: str = "") -> None:
        """`done` units are finished; `facts` is shown beside them."""
        self.done, self.facts = done, facts
        if self.bar is not None:
            self.bar.update(self.task, completed=done, count=self._count(), facts=facts)
        elif time.monotonic() - self.shown >= PLAIN_INTERVAL:
            self._line()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        elif kind is None and self.done != self.last_shown:
            self._line()

    def _count(self) -> str:
        # The last document may exceed the tokens asked for: then no total is shown.
        of = "" if self.total is None or self.done > self.total else f"/{self.total:,}"
        return f"{self.done:,}{of} {self.unit}"

    def _line(self) -> None:
        if self.quiet:
            return
        self.shown = now = time.monotonic()
        self.last_shown = self.done
        spent = now - self.started
        left = ""
        fresh = self.done - self.start
        if self.total and fresh > 0 and self.done < self.total:
            left = f", {spent * (self.total - self.done) / fresh:.0f} s left"
        facts = f", {self.facts}" if self.facts else ""
        print(f"{self.label}: {self._count()}{facts}, {spent:.0f} s{left}", file=sys.stderr)
