"""The settings of a generation. Torch is slow to import; without it, mistakes are told at once."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from dataclasses import dataclass
from numbers import Real

from ladder.models.errors import UserError, is_whole

COLDEST = 1e-5  # below this, logits divided by the temperature may overflow


@dataclass(frozen=True)
class Sampling:
    """The sampling options.

    temperature: 0 is greedy. top_k: 0 keeps all tokens; otherwise exactly that many are kept, the
    lowest ids of equally likely tokens. top_p: 1 keeps all tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature)
        if self.temperature < 0:
            raise UserError(f"temperature={self.temperature} must be 0 (greedy) or above")
        if 0 < self.temperature < COLDEST:
            raise UserError(
                f"temperature={self.temperature} is too low to divide by; use 0 (greedy), or "
                f"{COLDEST} and above"
            )
        check_count("top_k", self.top_k, 0, " (all tokens)")
        check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1 (all tokens)")
        if self.temperature == 0 and (self.top_k or self.top_p < 1):
            name = f"top_k={self.top_k}" if self.top_k else f"top_p={self.top_p}"
            raise UserError(
                f"{name} has no effect at temperature=0 (greedy); also give a temperature, as 0.8"
            )
        check_count("seed", self.seed, 0)
        # Python's own, since the integers of NumPy and torch overflow.
        for name, kind in (
            ("temperature", float), ("top_p", float), ("top_k", operator.index),
            ("seed", operator.index),
        ):  # fmt: skip
            object.__setattr__(self, name, kind(getattr(self, name)))
        if self.seed >= 2**63:
            raise UserError(f"seed={self.seed} must be below 2**63")


def check_number(name: str, value: object) -> None:
    """Raise UserError unless it is a finite number, of Python or NumPy."""
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not math.isfinite(value):  # type: ignore[arg-type]
        raise UserError(f"{name}={value!r} must be a finite number; give a float, as 0.8")


def check_count(name: str, value: object, least: int, meaning: str = "") -> None:
    """Raise UserError unless it is a whole number from `least` on."""
    if not is_whole(value) or operator.index(value) < least:  # type: ignore[arg-type]
        raise UserError(f"{name}={value!r} must be a whole number, {least}{meaning} or above")


def check_ids(name: str, value: object) -> None:
    """Raise UserError unless it is a collection of whole numbers, as of token ids."""
    if not isinstance(value, Collection) or not all(map(is_whole, value)):
        raise UserError(f"{name}={value!r} must be token ids; give a list of integers")
