"""A value on its way: the one type of all that is started now and waited for later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass
class InFlight(Generic[Value]):
    """A value that `wait()` gives.

    value: what was started with, kept alive until then. arrive: waits, and makes the value of it;
    None: the value is here.
    """

    value: Value
    arrive: Callable[[Value], Value] | None = None

    @property
    def here(self) -> bool:
        """Whether nothing has to be waited for."""
        return self.arrive is None

    def wait(self) -> Value:
        """The value, waited for once: a second call gives it again."""
        if self.arrive is not None:
            arrive, self.arrive = self.arrive, None
            self.value = arrive(self.value)
        return self.value
