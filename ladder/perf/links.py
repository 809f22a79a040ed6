"""The latency and rate of links, from the times of collectives over them."""

from __future__ import annotations

from ladder.perf.machine import Curve, Link


def fit_link(tier: str, curve: Curve, gpus: int) -> Link:
    """Latency and rate of the link that explain an all-reduce best, by relative least squares.

    In a ring each GPU sends 2 (N - 1) / N of the message.
    """
    share = 2 * (gpus - 1) / gpus
    sums = [0.0] * 5
    for size, us in curve.points:  # us = alpha + x * slope, weighted by 1 / us
        x, weight = size * share, us**-2
        for n, term in enumerate((1.0, x, x * x, us, x * us)):
            sums[n] += weight * term
    one, x1, x2, y, xy = sums
    slope = (one * xy - x1 * y) / (one * x2 - x1 * x1)
    alpha = (y - slope * x1) / one
    errors = [abs(alpha + slope * share * size - us) / us for size, us in curve.points]
    text = f"fitted to {curve}: largest error {100 * max(errors):.0f} %; {curve.provenance}"
    return Link(tier, round(alpha, 2), round(1e-3 / slope, 1), text)
