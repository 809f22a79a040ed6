"""What the limit of power leaves of a GPU's speed.

A GPU that computes without a pause would take a power of 1, and `idle_power` of that while it only
communicates. Above `power_limit` its clock falls, by `power_exponent` of what the limit leaves of
the power. For the first `boost_ms` it may be above. Weights that were stored in fp8 have
three bits of a mantissa, and zeros for the others when they are converted to bfloat16, since their
scales are powers of two: their products take less power. (Those in int8 have other scales.)
"""

from __future__ import annotations

import math

from ladder.perf.machine import Machine


def power_share(
    machine: Machine, boost_ms: float, busy_us: float, total_us: float, fp8: bool = False
) -> float:
    """The share of their speed that products keep. fp8: of weights that are stored so."""
    idle = machine.value("idle_power")
    power = idle + (1 - idle) * min(1.0, busy_us / total_us)
    if fp8:
        power *= machine.value("fp8_power")
    share = min(1.0, (machine.value("power_limit") / power) ** machine.value("power_exponent"))
    time = total_us / 1e3 / boost_ms
    return share + (1 - share) * -math.expm1(-time) / time
