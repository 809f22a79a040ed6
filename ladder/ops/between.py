"""Whether a table's entry holds for a call whose sizes lie between the measured ones.

An entry is for a bucket of sizes, and was measured at some of them. Calls of measured sizes use it.
Calls of other sizes use it if two bounds show that it is not slower than the implementation that
would run without it:

- The first bound is for an implementation that cuts the product (`Implementation.surplus`). Its
  products take longer than one of all rows, in waves of tiles (`ladder.ops.waves`). This surplus
  may be at most, for every measured size, the surplus there plus the gain there, less NOISE. The
  gain, as a share of the time, is in proportion to the exchange's bytes over the product's
  operations: to 1 / n for a gather and 1 / k for a scatter.
- The second is for eager calls. The host may take `host_us` to enqueue a call, and then the call
  takes as long. So the implementation that would run without the entry must take `host_us` or more;
  its time is in proportion to the operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ladder.models.errors import UserError
from ladder.operator_names import GATHER, SCATTER_BACKWARD
from ladder.ops.registry import OPERATORS, Call

# For each measured size: the times of the implementation, and of what would run without it.
FIELDS = {"sizes": list, "us": int | float, "instead_us": int | float}
# `collective` and the baseline of `ladder bench ops` do the same; their medians differ by this.
NOISE = 0.01
GATHERED = (GATHER, SCATTER_BACKWARD)  # gathers of a product's input


def refusal(call: Call, entry: Mapping[str, Any]) -> str | None:
    """Why the entry of the call's bucket is not for this call, or None."""
    measured = entry["measured"]
    surplus = OPERATORS[call.op].implementations[entry["implementation"]].surplus
    if not measured or not all(call.exact):
        return None
    if not call.exact or any(tuple(each["sizes"]) == call.exact for each in measured):
        return None
    operations = math.prod(call.exact)
    instead = min(each["instead_us"] * operations / math.prod(each["sizes"]) for each in measured)
    if call.mode == "eager" and instead < entry["host_us"]:
        return (
            f"which the host may take {entry['host_us']:.0f} us to enqueue, and a call without it "
            f"takes about {instead:.0f}"
        )
    if surplus is None:
        return None
    longer, allowed = surplus(call, entry["options"]), math.inf
    for each in measured:
        there = replace(call, exact=tuple(each["sizes"]))
        gained = (each["instead_us"] / each["us"] - 1) * _width(there) / _width(call)
        allowed = min(allowed, surplus(there, entry["options"]) + gained - NOISE)
    if longer <= allowed:
        return None
    return (
        f"whose tiles take {longer:.1%} longer at this size than those of one product, and "
        f"{max(0.0, allowed):.1%} is sure to be gained"
    )


def said(entry: Mapping[str, Any]) -> str:
    """The measured times, in words."""
    times = ((each["us"], each["instead_us"]) for each in entry["measured"])
    return "".join(
        f"; {us:.1f} us" + (f", {instead:.1f} without it" if instead != us else "")
        for us, instead in times
    )


def _width(call: Call) -> int:
    """A product's operations for each number that its exchange moves, up to a constant factor."""
    _, outputs, inputs = call.exact
    return outputs if call.op in GATHERED else inputs


def check(where: str, entry: Mapping[str, Any]) -> None:
    """Raise UserError unless the entry's `measured` and `host_us` are valid."""
    host_us = entry["host_us"]
    if isinstance(host_us, bool) or not 0 <= host_us < math.inf:
        raise UserError(f"{where}: host_us={host_us!r} must be a time in microseconds, 0 or more")
    for each in entry["measured"]:
        right = isinstance(each, dict) and each.keys() == FIELDS.keys()
        right = right and all(isinstance(each[key], kind) for key, kind in FIELDS.items())
        right = right and len(each["sizes"]) == len(entry["sizes"])
        right = right and all(map(_inside, each["sizes"], entry["sizes"]))
        if not right or not all(0 < each[key] < math.inf for key in ("us", "instead_us")):
            raise UserError(
                f"{where}: measured has {each!r}; give {', '.join(FIELDS)}, with sizes that round "
                f"up to the entry's, as `ladder bench ops --write-table` does"
            )


def _inside(size: Any, rounded: int) -> bool:
    """Whether a size is one that is rounded up to this power of two."""
    return type(size) is int and 0 < size <= rounded < 2 * size
