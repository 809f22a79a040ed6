"""What the limit of power leaves of a GPU's speed.

A GPU that computes without a pause would take a power of 1, and `idle_power` of that while it only
communicates. Above `power_limit` its clock falls, by `power_exponent` of what the limit leaves of
the power. For the first `boost_ms` it may be above. Weights that were stored in 8 bits have few
bits that are not zero, also in the 16 to which they are converted: their products take less.
"""

from __future__ import annotations

import math

from ladder.perf.machine import Machine


def power_share(
    machine: Machine, boost_ms: float, busy_us: float, total_us: float, stored: bool = False
) -> float:
    """The share of their speed that products keep. stored: weights are stored in 8 bits."""
    idle = machine.value("idle_power")
    power = idle + (1 - idle) * min(1.0, busy_us / total_us)
    if stored:
        power *= machine.value("stored_power")
    share = min(1.0, (machine.value("power_limit") / power) ** machine.value("power_exponent"))
    time = total_us / 1e3 / boost_ms
    return share + (1 - share) * -math.expm1(-time) / time
