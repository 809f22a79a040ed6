"""Jinja for templates of strangers: its sandbox, with an end to the time and memory of a template.

Jinja's own refuses what is unsafe, but a few nested loops work for years in it, and a few doublings
of a text take all memory.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 10.0  # a conversation takes far below one thousandth of that
LONGEST = 2**26  # characters of its text
MEMORY = 2**30  # bytes that a template may take beside what the process has
FRESH = 0.1  # seconds for which that is not looked up again: it takes as long as to render
BITS = 2**16  # of a product or a power
DECIMALS = 100  # that are rounded to
ONE = threading.Lock()
T = TypeVar("T")
STEPS = "steps of a loop"  # a filter that no template can name


class LimitError(Exception):
    """What a template does without end."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Where templates are compiled and rendered, each `within_limits`.

    The clock is looked at in every step of a loop, every call and every filter. Not by a signal,
    which only a main thread can get, nor by a thread, which would be one for each conversation.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        # The optimiser would compute what is constant while it compiles.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.deadline = float("inf")
        self.memory, self.looked = 0, float("-inf")  # of the process, and when that was seen
        self.fresh = True  # whether it was seen for the work that is limited
        del self.globals["lipsum"]  # text by the yard
        self.filters = {name: self._watched(each) for name, each in self.filters.items()}
        self.filters[STEPS] = self._steps

    def check(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitError(f"it works for more than {SECONDS:g} seconds")

    def run(self, work: Callable[[], T]) -> T:
        """What `work` gives, `within_limits`.

        Once more where it lacks memory, and that of the process was seen before: what the process
        has taken since (the threads of a tokenizer, a file that is mapped) is none of the work's.
        """
        try:
            with self.within_limits():
                return work()
        except MemoryError:
            if self.fresh:
                raise
        self.looked = float("-inf")
        with self.within_limits():
            return work()

    @contextmanager
    def within_limits(self) -> Iterator[None]:
        """End what runs inside by an exception: LimitError, or MemoryError.

        One at a time in a process, whose limit it is.
        """
        with ONE:
            yield from self._limited()

    def _limited(self) -> Iterator[None]:
        now = time.monotonic()
        self.fresh = now > self.looked + FRESH
        if self.fresh:
            self.memory, self.looked = _memory(), now
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        allowed = self.memory + MEMORY
        limited = self.memory > 0 and (soft == resource.RLIM_INFINITY or allowed < soft)
        self.deadline = now + SECONDS
        try:
            if limited:
                resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
            yield
        finally:
            self.deadline = float("inf")
            if limited:
                resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def _parse(self, *arguments: Any) -> nodes.Template:
        tree = super()._parse(*arguments)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, STEPS, [], [], None, None, lineno=loop.lineno)
        tree.set_environment(self)
        return tree

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.check()
            yield item

    def _watched(self, work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)  # with what it says of the arguments that it wants
        def watched(*arguments: Any, **options: Any) -> Any:
            self.check()
            if work.__name__ == "do_round" and _most((*arguments[1:], *options.values())):
                raise LimitError(f"it rounds to more than {DECIMALS} decimals")
            return work(*arguments, **options)

        return watched

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            if bits + (operator == "*") * right.bit_length() > BITS:
                raise LimitError(f"it computes a number of more than {BITS:,} bits")
        return super().call_binop(context, operator, left, right)


def _memory() -> int:
    """Bytes of this process's address space; 0 where the system does not say."""
    with suppress(OSError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        return pages * resource.getpagesize()
    return 0


def _most(values: Iterable[Any]) -> bool:
    return any(isinstance(value, int) and value > DECIMALS for value in values)


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, by which some templates mark answers."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
