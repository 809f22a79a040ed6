"""T ranks that are not alike: what waiting for the slowest costs, against closed forms."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from ladder.models import Plan, UserError, resolve_plan
from ladder.models.ranks import Ranks
from ladder.parallel.refusals import sharded_refusal
from ladder.perf.graph import Graph, Operation, forward, training
from ladder.perf.lower_decode import decode
from ladder.perf.lower_prefill import Way, prefill
from ladder.perf.simulate import Skew, meets, sends, simulate, waiting
from tests.samples import FUSED_PLANS, random_plan

PLANS = {name: resolve_plan(each, 4, 2) for name, each in FUSED_PLANS.items()}
PLANS |= {f"random {seed}": random_plan(random.Random(seed), 1 + seed % 6) for seed in range(10)}
T = 4


def cost(operation: Operation) -> float:
    """Another number for each operation, in thirds, which floats do not hold exactly."""
    return (1 + operation.index % 7) / 3 * (0.4 if meets(operation) else 1.0)


def beside(operation: Operation, other: Operation) -> float:
    return 0.7 if meets(other) else 0.8


def graphs(plan: Plan) -> dict[str, Graph]:
    found = {
        "push": decode(plan), "nccl": decode(plan, "nccl"), "forward": forward(plan),
        "ddp": training(plan, "all-reduce", "ddp"), "fsdp": training(plan, "all-reduce", "fsdp"),
    }  # fmt: skip
    if plan.last_attention is not None:
        found["prefill"] = prefill(plan, Way(T, large="two-shot", small="push"))
    if not sharded_refusal(plan, Ranks(2, 0, 1)):
        found["sharded"] = forward(plan, "sharded")
        found["prefill by rows"] = prefill(plan, Way(T, "copy", "two-shot", "push"))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_ranks_that_are_alike_are_one_rank(name: str) -> None:
    """To the last bit, also where two groups of TP share gradients."""
    for graph in graphs(PLANS[name]).values():
        for slowed in (None, beside):
            one = simulate(graph, cost, slowed)
            for skew in (Skew(T), Skew(T, tp=2), Skew(1, jitter=0.0)):
                found = simulate(graph, cost, slowed, skew)
                assert found.starts == one.starts * skew.ranks
                assert found.ends == one.ends * skew.ranks


@pytest.mark.parametrize("name", PLANS)
def test_a_rank_that_begins_late_is_paid_for_once(name: str) -> None:
    """Exactly once: all ranks need its embedding; and nothing more, whatever the lag."""
    for graph in graphs(PLANS[name]).values():
        one = simulate(graph, cost).total
        for late in (0.01, 5.0, 1000.0):
            found = simulate(graph, cost, skew=Skew(T, offsets=(0.0, late, 0.0, 0.0))).total
            assert late < found <= one + late + 1e-9
    chain = decode(resolve_plan("standard", 4))
    one = simulate(chain, cost).total
    found = simulate(chain, cost, skew=Skew(T, offsets=(0.0, 5.0, 0.0, 0.0))).total
    assert found == pytest.approx(one + 5.0)


@pytest.mark.parametrize("name", PLANS)
def test_waiting_grows_with_jitter(name: str) -> None:
    """And is never below nothing: what one rank has more, another has less."""
    for graph in graphs(PLANS[name]).values():
        alike = simulate(graph, cost).total
        found = [
            waiting(graph, cost, None, alike, T, T, jitter)
            for jitter in (0.0, 0.02, 0.05, 0.1, 0.25)
        ]
        assert found[0] == 0.0
        assert all(less <= more + 1e-9 for less, more in pairwise(found))


def test_jitter_adds_no_work_and_differs_by_seed() -> None:
    graph = decode(PLANS["standard"])
    skew = Skew(T, jitter=0.1)
    factors = skew.factors(graph.operations)
    for each in graph.operations:
        mine = [some[each.index] for some in factors]
        assert sum(mine) == pytest.approx(T)
        assert (len(set(mine)) == 1) == meets(each)
    numbers = [x - 1 for some in factors for x in some if x != 1.0]
    spread = (sum(x * x for x in numbers) / len(numbers)) ** 0.5
    assert spread == pytest.approx(0.1 * (1 - 1 / T) ** 0.5, rel=0.1)  # of T less their mean
    assert skew.factors(graph.operations) == factors
    assert Skew(T, jitter=0.1, seed=1).factors(graph.operations) != factors


@pytest.mark.parametrize("path", ["forward", "push"])
def test_where_every_reduce_blocks_each_stage_takes_its_slowest_rank(path: str) -> None:
    """The closed form of the maximum, for all-reduces and for what is pushed and landed."""
    graph = graphs(resolve_plan("standard", 5))[path]
    assert len({each.stream for each in graph.operations}) == 2
    skew = Skew(T, jitter=0.2, seed=3)
    factors = skew.factors(graph.operations)
    total, stage = 0.0, [0.0] * T
    for each in graph.operations:
        stage = [
            us + cost(each) * mine[each.index] * (not meets(each))
            for us, mine in zip(stage, factors, strict=True)
        ]
        if meets(each) or sends(each):
            total, stage = total + max(stage) + cost(each) * meets(each), [0.0] * T
    total += max(stage)
    assert simulate(graph, cost, skew=skew).total == pytest.approx(total, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_blocking_reduce_waits_for_the_expected_maximum(ranks: int) -> None:
    """Of `ranks` uniform numbers of standard deviation 1: sqrt(3) (T - 1) / (T + 1)."""

    def last_products(operation: Operation) -> float:
        return 10.0 if operation.part in ("output", "down") else 0.0

    graph, jitter, seeds = forward(resolve_plan("standard", 100)), 0.05, 4
    one = simulate(graph, last_products).total
    found = [
        simulate(graph, last_products, skew=Skew(ranks, jitter=jitter, seed=seed)).total - one
        for seed in range(seeds)
    ]
    expected = 200 * 10.0 * jitter * 3**0.5 * (ranks - 1) / (ranks + 1)
    assert sum(found) / seeds == pytest.approx(expected, rel=0.06)


@dataclass(frozen=True)
class Stumble(Skew):
    """Sublayer 4 of rank 0 takes `more`, and sublayer 5 as much less."""

    more: float = 0.0

    def factors(self, operations: list[Operation]) -> list[list[float]]:  # type: ignore[override]
        found = super().factors(operations)
        for each in operations:
            if each.kind == "product" and each.part in ("output", "down"):
                found[0][each.index] += self.more * {4: 1, 5: -1}.get(each.sublayer or 0, 0)
        return found


def test_a_lag_absorbs_what_is_within_its_slack() -> None:
    """A sum has the next sublayer's time to arrive: what a rank is late by costs nothing until
    that less the reduce, and then what is beyond. A plan without a lag pays all of it."""

    costs = {"landing": 0.0, "all-reduce": 12.0}

    def even(operation: Operation) -> float:
        return costs.get(operation.kind, 20.0 if operation.part in ("output", "down") else 5.0)

    def added(plan: str, more: float) -> float:
        graph = forward(resolve_plan(plan, 4))
        one = simulate(graph, even).total
        skew = Stumble(T, jitter=1e-12, more=more / 20.0)
        return simulate(graph, even, skew=skew).total - one

    slack = 5.0 + 20.0 - 12.0  # gate-up and down, less the sum that arrives under them
    for more in (0.5, 4.0, slack, slack + 3.0):
        assert added("standard", more) == pytest.approx(more, abs=1e-6)
        assert added("ladder", more) == pytest.approx(max(0.0, more - slack), abs=1e-6)


def test_groups_wait_for_each_other_only_for_gradients() -> None:
    """Two groups of TP 2: a rank that is late holds up its own group in the forward pass, and the
    other where gradients are summed."""
    graph = training(resolve_plan("standard", 2), "all-reduce", "ddp")
    count = len(graph.operations)
    late = simulate(graph, cost, skew=Skew(4, tp=2, offsets=(9.0, 0.0, 0.0, 0.0)))
    one = simulate(graph, cost)
    loss = next(each.index for each in graph.operations if each.kind == "loss")
    ends = [late.ends[rank * count + loss] for rank in range(4)]
    assert ends == pytest.approx([one.ends[loss] + 9.0] * 2 + [one.ends[loss]] * 2)
    last = [late.ends[rank * count + count - 1] for rank in range(4)]
    assert last[:2] == pytest.approx([one.total + 9.0] * 2)
    assert one.total < last[2] == last[3] < last[0]


def test_jitter_that_cannot_be_is_refused() -> None:
    for jitter in (-0.01, 0.26, float("nan")):
        with pytest.raises(UserError, match="--jitter="):
            Skew(2, jitter=jitter)
