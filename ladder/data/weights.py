"""The folders and weights in a recipe's `data`, parsed without opening the folders.

This module does not import torch, so that a recipe's mistakes are reported before that import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from ladder.models.errors import UserError, check_keys

LONGEST_CYCLE = 100_000  # entries; planning them takes under a second


def parse_sources(data: Any) -> list[tuple[str, Fraction]]:
    """The folders and weights in a recipe's `data`. Raises UserError for invalid ones."""
    if isinstance(data, str):
        return [(data, Fraction(1))]
    if not isinstance(data, Sequence) or not data:
        raise UserError(
            f"data={data!r} is neither a prepared folder nor a list of them; give a path, or a "
            f"list with {{path: ..., weight: ...}} for each"
        )
    found = [_parse(f"data source {number}", item) for number, item in enumerate(data, 1)]
    resolved = [Path(path).resolve() for path, _ in found]
    for number, (path, _) in enumerate(found):
        if resolved[number] in resolved[:number]:
            raise UserError(f"data names {path} twice; name it once, with the weights added up")
    whole_shares([weight for _, weight in found])
    return found


def _parse(where: str, item: Any) -> tuple[str, Fraction]:
    if not isinstance(item, Mapping):
        raise UserError(f"{where} is {item!r}; give {{path: ..., weight: ...}}")
    check_keys(where, item, ["path", "weight"])
    for name in ("path", "weight"):
        if name not in item:
            raise UserError(f"{where} lacks {name}; give {{path: ..., weight: ...}}")
    path, weight = item["path"], item["weight"]
    if not isinstance(path, str) or not path:
        raise UserError(f"{where}: path={path!r} must be a prepared folder")
    try:
        number = float("nan") if isinstance(weight, bool) else float(weight)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not math.isfinite(number) or not number > 0:
        raise UserError(
            f"{where} ({path}): weight={weight!r} must be a finite number above 0; to leave the "
            f"source out, remove its entry"
        )
    return path, Fraction(str(weight))  # from the digits: 0.1 is exactly one tenth


def whole_shares(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Weights as integers without a common divisor."""
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    divisor = math.gcd(*whole)
    shares = tuple(value // divisor for value in whole)
    if sum(shares) > LONGEST_CYCLE:
        near = ", ".join(f"{max(float(weight / sum(weights)), 0.001):.3f}" for weight in weights)
        raise UserError(
            f"the data's weights are too fine: in lowest terms they sum to {sum(shares):,}, above "
            f"{LONGEST_CYCLE:,}; round them, say to {near}"
        )
    return shares
