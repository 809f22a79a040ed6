"""One rank's kernels in Triton's interpreter, beside peers that follow a script; and mutations.

A peer does each thing at the worst moment that its protocol allows: what a kernel waits for comes
with its third look and not before, and what it tells a peer is acted on at once. So a wait that is
left out, or a word that is set too early, gives another result in every run. Mutations prove it:

    with weakened(kernel, "wait(flag, 1, SPIN_LIMIT)", "pass"), pytest.raises(AssertionError):
        check()
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import Tensor

from tests.kernels.weakened import weaken

LOOKS = 3  # after so many a peer is there
MOST, ENDLESS = 300, "waits for ever"  # looks, after which nothing will come any more


@contextlib.contextmanager
def before(access: str, action: Callable[..., object]) -> Iterator[None]:
    """Calls action(interpreter, *arguments) before each access of this kind to memory.

    access: "create_masked_load" (pointers first), "create_atomic_rmw" (pointers second), ...
    """
    from triton.runtime import interpreter

    accessed = getattr(interpreter.InterpreterBuilder, access)

    def noted(*args: Any) -> Any:
        action(*args)
        return accessed(*args)

    with mock.patch.object(interpreter.InterpreterBuilder, access, noted):
        yield


@contextlib.contextmanager
def coming(flags: Tensor, action: Callable[[int], object]) -> Iterator[list[int]]:
    """flags[i] is set with the third look at it, after action(i); yields the i of each look."""
    looks: list[int] = []

    def looked(_: Any, kind: Any, pointer: Any, *rest: Any) -> None:
        at = (int(pointer.data.flat[0]) - flags.data_ptr()) // flags.element_size()
        if 0 <= at < len(flags):
            looks.append(at)
            if looks.count(at) == LOOKS:
                action(at)
                flags[at] = 1

    with before("create_atomic_rmw", looked):
        yield looks


@contextlib.contextmanager
def weakened(function: Any, old: str, new: str) -> Iterator[None]:
    """The Triton function has `new` in place of `old`, which its text has once."""
    from triton.runtime.interpreter import InterpretedFunction

    prepare = function.rewriter._prepare_source

    def changed(lines: list[str]) -> str:
        return weaken(prepare(lines), old, new)

    with (
        mock.patch.dict(InterpretedFunction.rewritten_fn),
        mock.patch.object(function.rewriter, "_prepare_source", changed),
    ):
        InterpretedFunction.rewritten_fn.pop(function.fn, None)
        yield


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """A wait without an end is a failed assertion, as a wrong result is."""
    from triton.runtime.errors import InterpreterError

    try:
        yield
    except InterpreterError as error:
        if ENDLESS in str(error):
            raise AssertionError(ENDLESS) from error
        raise


class Script:
    """Flags that peers set for this rank's kernels (`comes`), and those set for peers (`told`)."""

    def __init__(self) -> None:
        self._due: dict[int, Callable[[], object]] = {}
        self._told: dict[int, Callable[[], object]] = {}
        self._looks: Counter[int] = Counter()

    def comes(self, words: Tensor, at: int, action: Callable[[], object]) -> None:
        """A peer does `action`, and then sets words[at], when a kernel has waited for it."""

        def happens() -> None:
            action()
            words[at] = 1

        self._due[words[at].data_ptr()] = happens

    def told(self, words: Tensor, at: int, action: Callable[[], object]) -> None:
        """A peer does `action` as soon as words[at] is to be set: what is not there is missed."""
        self._told[words[at].data_ptr()] = action

    def late(self, words: Tensor, at: int) -> None:
        """What should have been waited for comes now if nobody has waited."""
        self._due.pop(words[at].data_ptr(), lambda: None)()

    @contextlib.contextmanager
    def played(self) -> Iterator[None]:
        with no_hang(), before("create_atomic_rmw", self._accessed):
            yield

    def _accessed(self, _: Any, kind: Any, pointer: Any, *rest: Any) -> None:
        at = int(pointer.data.flat[0])
        self._looks[at] += 1
        assert self._looks[at] < MOST, ENDLESS
        if self._looks[at] == LOOKS:
            self._due.pop(at, lambda: None)()
        self._told.pop(at, lambda: None)()


@contextlib.contextmanager
def arriving(looks: dict[int, Callable[[], object]]) -> Iterator[None]:
    """looks[n]() comes before the nth volatile load: slots, whose data is its own flag, fill."""
    count = 0

    def looked(*args: Any) -> None:
        nonlocal count
        if args[-1]:  # volatile
            count += 1
            assert count < MOST, ENDLESS
            looks.get(count, lambda: None)()

    with no_hang(), before("create_masked_load", looked):
        yield
