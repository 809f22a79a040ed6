"""The figures of T3 by their numbers."""

from __future__ import annotations

from collections.abc import Callable

from ladder.models.errors import UserError
from ladder.perf.scores import Result
from ladder.perf.t3.analytic import figure_4, figure_6, figure_14, figure_15, figure_18
from ladder.perf.t3.simulated import figure_16, figure_17, figure_19, figure_20
from ladder.perf.t3.system import System

FIGURES: dict[int, Callable[[System], Result]] = {
    4: figure_4, 6: figure_6, 14: figure_14, 15: figure_15, 16: figure_16,
    17: figure_17, 18: figure_18, 19: figure_19, 20: figure_20,
}  # fmt: skip


def known(number: int | str) -> int:
    """The number of a figure that is simulated. Raises UserError for another one."""
    if not str(number).isdecimal() or int(number) not in FIGURES:
        raise UserError(f"--figure {number}: choose from {', '.join(map(str, FIGURES))}")
    return int(number)


def figure(number: int, system: System | None = None) -> Result:
    """Figure `number` of the paper."""
    return FIGURES[number](system or System())
