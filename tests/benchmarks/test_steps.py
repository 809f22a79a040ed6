"""benchmarks/steps.py: from which step on decoding is settled."""

from __future__ import annotations

import sys

import pytest

from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import steps


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([2.0] * 8, (2.0, 0, 0.0)),
        ([3.0, 2.5, 2.04, 2.5, 2.0, 2.0, 2.0, 9.0], (2.0, 2, 5.5)),  # not what comes later
        ([3.0, 2.05, 1.0, 1.0, 4.0, 2.0, 2.0, 2.0], (2.0, 2, 5.05)),
    ],
)
def test_settled(times: list[float], expected: tuple[float, int, float]) -> None:
    assert steps.settled(times) == expected
