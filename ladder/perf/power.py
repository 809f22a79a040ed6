"""How much of its speed a GPU keeps under its power limit.

A GPU that computes without a pause would take a power of 1, and `idle_power` of that while it only
communicates. Above `power_limit` the clock falls by the factor limit / power, raised to
`power_exponent`. For the first `boost_ms` the power may be above the limit. Weights stored in fp8
have three bits of a mantissa. Converted to bfloat16 the other bits are zeros, since their scales
are powers of two, so their products take less power. (Weights in int8 have other scales.)
"""

from __future__ import annotations

import math

from ladder.perf.machine import Machine


def power_share(
    machine: Machine, boost_ms: float, busy_us: float, total_us: float, fp8: bool = False
) -> float:
    """The share of their speed that products keep. fp8: whether weights are stored in fp8."""
    idle = machine.value("idle_power")
    power = idle + (1 - idle) * min(1.0, busy_us / total_us)
    if fp8:
        power *= machine.value("fp8_power")
    share = min(1.0, (machine.value("power_limit") / power) ** machine.value("power_exponent"))
    time = total_us / 1e3 / boost_ms
    return share + (1 - share) * -math.expm1(-time) / time
