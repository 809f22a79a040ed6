"""Intervals of predictions, and that the shipped errors are those of today's predictions."""

from __future__ import annotations

import pytest

from benchmarks import prediction_errors
from ladder.perf.planner import intervals
from ladder.perf.prediction.records import MEASURED


def test_intervals_are_of_the_nearest_records() -> None:
    """Of the 20 nearest, 1.00 to 1.19 times what was predicted, the 17th: 16 of 20 would be 80 % of
    those recorded, 17 are 80 % of 21."""
    points = [(100.0 + n, 1.0 + n / 100) for n in range(40)] + [(1e6, 9.0)]
    assert intervals.width(points, 100.0) == pytest.approx(1.16)
    slower = [(us, 1 / ratio) for us, ratio in points]
    assert intervals.width(slower, 100.0) == pytest.approx(1.16)
    assert intervals.width(points[:3], 100.0) == 1.02  # of few all


def test_a_prediction_is_within_its_interval() -> None:
    """Of every recorded kind of pass and time, where all measured times are above it, too."""
    for each in intervals.recorded():
        for us in (0.5 * each["points"][0][0], *(point[0] for point in each["points"])):
            for model in (each["model"], "none of them"):
                key = each["phase"], each["gpu"], each["gpus"], each["reducer"], model
                low, high = intervals.interval(*key, us).of(us) or (0.0, 0.0)
                assert low <= us <= high, key


def test_intervals_say_when_nothing_like_it_was_recorded() -> None:
    near = intervals.interval("prefill", "NVIDIA H200", 4, "push", "llama-3-8b", 1e4)
    assert not near.far
    assert not intervals.interval("decode", "NVIDIA H200", 4, "push", "llama-3-8b", 1500.0).far
    older = intervals.interval("decode", "NVIDIA H200", 2, "async", "llama-3-8b", 1500.0)
    assert older.far
    assert "(decode, async, 2 x NVIDIA H200, older kernels)" in older.source
    assert not intervals.interval("decode", "NVIDIA H200", 1, "", "quarter-8b", 1500.0).far
    more = intervals.interval("decode", "NVIDIA H200", 8, "push", "llama-3-8b", 1500.0)
    assert more.far
    assert "(decode, push, other numbers of GPUs)" in more.source
    other = intervals.interval("decode", "another GPU", 4, "push", "llama-3-8b", 1500.0)
    assert other.far
    assert "(decode, push, NVIDIA H100 80GB HBM3, NVIDIA H200)" in other.source
    assert intervals.interval("decode", "NVIDIA H200", 4, "push", "llama-3-8b", 1e6).far
    assert intervals.interval("knitting", "NVIDIA H200", 4, "push", "tiny", 1.0).of(1.0) is None


def test_intervals_of_other_models_are_wider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of one model are off by a half for the other: so are those of a third expected."""
    points = {
        "one": [[100.0 + n, 1.0] for n in range(10)],
        "two": [[100.0 + n, 1.5] for n in range(10)],
    }
    made = tuple(
        {"gpu": "made up", "gpus": 2, "phase": "decode", "reducer": "push", "model": model,
         "points": each} for model, each in points.items()
    )  # fmt: skip
    monkeypatch.setattr(intervals, "recorded", lambda: made)
    known, other = (
        intervals.interval("decode", "made up", 2, "push", model, 100.0)
        for model in ("one", "three")
    )
    assert known.of(1.0) == (pytest.approx(1 / 1.5), pytest.approx(1.5))
    assert other.of(1.0) == (pytest.approx(1 / 1.5**2), pytest.approx(1.5**2))
    assert other.wider
    assert not known.wider


def test_recorded_passes_are_within_the_intervals_of_the_others() -> None:
    """Of each phase 80 %, and not many more."""
    for phase, (count, share) in intervals.coverage().items():
        assert 0.78 <= share <= 0.9, (phase, count, share)


@pytest.mark.parametrize(
    "phases", [["decode"], pytest.param(list(MEASURED), marks=pytest.mark.slow)], ids=len
)
def test_shipped_intervals_hold_what_was_recorded(phases: list[str]) -> None:
    """Fails when predictions have changed and benchmarks/prediction_errors.py was not run
    again."""
    made = prediction_errors.entries(phases)
    names = ("gpu", "gpus", "phase", "reducer", "model")
    stored = {
        (*(e[name] for name in names), e.get("older")): e for e in intervals.recorded()
    }  # fmt: skip
    inside, count = 0, 0
    for each in made:
        key = (*(each[name] for name in names), each.get("older"))
        assert len(stored[key]["points"]) == len(each["points"]), key
        for us, ratio in each["points"]:
            found = intervals.interval(
                *(each[key] for key in ("phase", "gpu", "gpus", "reducer", "model")), us
            )
            assert found.low is not None
            assert found.high is not None
            inside += found.low <= ratio <= found.high
            count += 1
    assert 0.78 <= inside / count <= 0.92, (inside / count, "run benchmarks/prediction_errors.py")
