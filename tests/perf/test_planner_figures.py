"""What the planner's figures draw."""

from __future__ import annotations

import pytest

from ladder.perf.planner.candidates import ask
from ladder.perf.planner.drawing import _ticks, front
from ladder.perf.planner.question import Question
from ladder.perf.planner.subject import machines, subject


@pytest.mark.parametrize(("low", "high"), [(1.2, 9.0), (11_900.0, 19_000.0), (100.0, 101.0)])
def test_axes_have_ticks(low: float, high: float) -> None:
    found = _ticks(low, high)
    assert 2 <= len(found) <= 9
    assert all(low <= each <= high for each in found)


def test_the_front_is_what_nothing_beats() -> None:
    question = Question(
        subject("llama-3-8b"), machines(["h200x4"]), "decode", (1, 16), 1024, ("standard", "ladder")
    )
    rows = ask(question)[0]
    best = front(rows)
    for row in rows:
        beaten = any(o.us <= row.us and o.tokens_s >= row.tokens_s and o is not row for o in rows)
        assert beaten != any(row is each for each in best)
