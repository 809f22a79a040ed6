"""Orders and regret of made-up scores, known by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.bench.inference.points import InferencePoint
from ladder.perf.machine_files import load
from ladder.perf.prediction.ranking import rankings, table
from ladder.perf.prediction.records import Run, Score, scores
from tests import ROOT

RESULTS = ROOT / "benchmarks/results"
FILES = [RESULTS / f"2026-11-21-{name}-h200x4.jsonl" for name in ("inference", "figures")]
# Of plans and reducers on these records: the least tau of all, and the largest regret.
LIMITS = {"decode": (0.99, 0.028), "prefill": (0.9, 0.017)}


def score(plan: str, measured: float, predicted: float, **fields: object) -> Score:
    given = {"reducer": "push", "tp": 4, "batch": 1, "prompt": 16, "new_tokens": 4, "layers": 2}
    point = InferencePoint(model="tiny", plan=plan, **{**given, **fields})  # type: ignore[arg-type]
    return Score("decode", point, measured, predicted, False)


def test_orders_and_regret() -> None:
    """Five pairs are more than 3 % apart, of which hybrid and standard are in the wrong order."""
    found = [
        score("standard", 1.30, 1.10), score("ladder", 1.00, 1.01), score("hybrid", 1.20, 1.20),
        score("parallel", 1.02, 1.00), score("none", 0.50, 9.9),
        score("ladder", 0.10, 9.9, no_comm=True), score("ladder", 9.0, 9.0, batch=2),
    ]  # fmt: skip
    (each,) = rankings(found)
    assert (each.choices, each.pairs, each.right) == (4, 5, 4)
    assert each.tau == pytest.approx(0.6)
    assert each.recommended == "parallel, push"
    assert each.regret == pytest.approx(0.02)
    assert each.speedup == (pytest.approx(100 * (1.10 / 1.01 - 1.30)),)


def test_cases_are_apart_and_pooled() -> None:
    """The right order and its reverse: a tau of 0 in all."""
    found = [score(plan, n, n) for n, plan in enumerate(("ladder", "hybrid", "standard"), 1)]
    found += [
        score(plan, n, 9 - n, batch=2) for n, plan in enumerate(("ladder", "hybrid", "standard"), 1)
    ]
    ranked = rankings(found)
    assert [each.tau for each in ranked] == [1.0, -1.0]
    assert [each.regret for each in ranked] == [0.0, 2.0]
    last = table(ranked)[-1]
    assert last[:4] == ["all", "6", "6", "0.00"]
    assert "200.0 %" in last


def test_reducers_are_choices_of_one_case() -> None:
    found = [score("standard", 2.0, 1.0, reducer="async"), score("standard", 1.0, 2.0)]
    (each,) = rankings(found)
    assert (each.recommended, each.tau, each.speedup) == ("standard, async", -1.0, ())


@pytest.mark.parametrize(
    ("gain", "plan", "regret"), [(1.02, "standard", 0.05), (1.04, "ladder", 0.0)]
)
def test_recommended_is_what_ladder_predict_recommends(
    gain: float, plan: str, regret: float
) -> None:
    """`standard`, unless another plan gains 3 %: what that loses is regret."""
    (each,) = rankings([score("standard", 1.05, gain), score("ladder", 1.0, 1.0)])
    assert (each.recommended, each.regret) == (f"{plan}, push", pytest.approx(regret))


def test_training_layouts_are_compared_by_their_tokens() -> None:
    """On four GPUs a step of data parallelism has four times the tokens of TP 4."""
    found = []
    for layout, ms in (("ddp", 200.0), ("tp4+sp", 100.0)):
        run = Run("tiny", 2, "standard", layout, 16, 1, 1, "bfloat16", "none", True, gpus=4)
        found.append(Score("train", run, ms, ms, False))
    (each,) = rankings(found)
    assert (each.recommended, each.regret, each.tau) == ("standard, ddp", 0.0, 1.0)
    found[0] = replace(found[0], predicted=500.0)  # by tokens slower than TP 4, measured faster
    (each,) = rankings(found)
    assert (each.recommended, each.regret) == ("standard, tp4+sp", pytest.approx(1.0))


def test_of_a_prompt_that_ran_both_ways_the_one_by_operators_counts() -> None:
    by_copies = replace(score("standard", 2.0, 2.0), inside=False)
    by_operators = replace(score("standard", 1.5, 1.5), inside=True)
    (each,) = rankings([by_operators, by_copies, score("ladder", 1.0, 1.1)])
    assert (each.choices, each.pairs) == (2, 1)
    assert each.speedup == (pytest.approx(100 * (1.5 / 1.1 - 1.5)),)


@pytest.mark.parametrize("phase", LIMITS)
def test_what_is_recommended_is_near_the_best(phase: str) -> None:
    ranked = rankings(scores(FILES, load("h200x4"), phase))
    pairs, right = (sum(getattr(each, name) for each in ranked) for name in ("pairs", "right"))
    regret = max(each.regret for each in ranked)
    least, most = LIMITS[phase]
    assert 2 * right / pairs - 1 >= least, 2 * right / pairs - 1
    assert regret <= most, regret
