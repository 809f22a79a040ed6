"""A Jinja sandbox for untrusted templates, with limits of time and memory.

Jinja's own sandbox refuses unsafe operations, but in it a few nested loops can run for years, and a
text doubled a few dozen times takes all memory.
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

SECONDS = 10.0  # limit; a conversation takes far below a thousandth of it
LONGEST = 2**26  # characters that a template may write
MEMORY = 2**30  # bytes that a template may take beyond what the process has
FRESH = 0.1  # seconds for which the process's memory is cached: reading it is as slow as rendering
BITS = 2**16  # the largest product or power
DECIMALS = 100  # the most decimals to round to
ONE = threading.Lock()
# What a template writes inside of {% generation %} lies between these marks: noncharacters, which
# Unicode keeps for a program's own use.
OPEN, CLOSE = "\ufdd0", "\ufdd1"
T = TypeVar("T")
STEPS = "steps of a loop"  # the name of a filter; with spaces, so no template can use it


class LimitError(Exception):
    """A template exceeds a limit; the message says which."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that compiles and renders templates, each `within_limits`.

    Every step of a loop, every call and every filter checks the clock. A signal would reach only
    the main thread, and a watching thread would be needed for each conversation.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        # The optimiser would evaluate constant expressions while it compiles.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        self.tagged = False  # whether the template has {% generation %} tags
        self.deadline = float("inf")
        self.memory, self.looked = 0, float("-inf")  # the process's, and when it was read
        self.fresh = True  # whether it was read for the current work
        del self.globals["lipsum"]  # generates text of any length
        self.filters = {name: self._watched(each) for name, each in self.filters.items()}
        self.filters[STEPS] = self._steps

    def check(self) -> None:
        if time.monotonic() > self.deadline:
            raise LimitError(f"it works for more than {SECONDS:g} seconds")

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, run `within_limits`.

        `work` runs again if it ran out of memory and the process's memory was a cached figure: what
        the process has taken since (threads of a tokenizer, a mapped file) does not count.
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
        """Raise LimitError or MemoryError in the body when it exceeds a limit.

        One body runs at a time, since the memory limit is that of the process.
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
        @wraps(work)  # keeps Jinja's marks (pass_context, ...)
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
    """The tags `{% generation %}` and `{% endgeneration %}` of some templates, which enclose what
    the model writes: they write OPEN and CLOSE."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        self.environment.tagged = True  # type: ignore[attr-defined]
        return [_text(OPEN), *body, _text(CLOSE)]


def _text(text: str) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(text)])
