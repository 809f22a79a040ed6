"""What `ladder predict scale` computes, by the names of its studies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ladder.perf.report import Study
from ladder.perf.scale import curves, figure_15, tables
from ladder.perf.scores import Result

RESULTS: dict[str, tuple[Callable[[], Result], ...]] = {
    "dlrm": (figure_15.batches, figure_15.variants),
    "ladder": (tables.table_1, tables.table_2, tables.table_6),
    "curves": (curves.training, curves.gain, curves.decoding),
}
FITTED = {"dlrm": {}, "ladder": tables.FITTED, "curves": curves.FITTED}
DECLARED = {"dlrm": figure_15.DECLARED, "ladder": tables.DECLARED, "curves": curves.DECLARED}


def study(names: Sequence[str]) -> Study:
    """The studies of these names, one after the other."""
    fitted: dict[str, str] = {}
    for name in names:
        fitted |= FITTED[name]
    return Study(
        "Several nodes, simulated: nothing here was measured by us",
        [compute() for name in names for compute in RESULTS[name]],
        fitted,
        [line for name in names for line in DECLARED[name]],
    )
