"""InFlight: the type of every value whose computation has started and is waited for later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass
class InFlight(Generic[Value]):
    """A value that `wait()` returns.

    value: the operation's input, kept alive until the operation is done; then its result. arrive:
    waits, and computes the result from the input; None: the result is available.
    """

    value: Value
    arrive: Callable[[Value], Value] | None = None

    def wait(self) -> Value:
        """Wait for the value and return it; a second call returns it again."""
        if self.arrive is not None:
            arrive, self.arrive = self.arrive, None
            self.value = arrive(self.value)
        return self.value
