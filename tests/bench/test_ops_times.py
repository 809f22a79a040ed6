"""How `ladder bench ops` compares and times: ranks, turns, clocks, torch's warnings."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.bench.ops import measure
from ladder.bench.ops.measure import slowest
from tests.distributed import Pools

CPU = torch.device("cpu")


def test_errors_that_hide() -> None:
    exact = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert measure.compare([exact + 0.5], [exact]) == 0.125
    assert measure.compare([torch.tensor([float("nan"), -4.0])], [exact]) == float("inf")
    assert measure.compare([exact[None]], [exact]) == float("inf")


def timed_by_rank(rank: int, world_size: int) -> Any:
    """Ranks whose turns take 1, 20 and 3, and 10, 2 and 30 us, of two calls each."""
    turns = iter([[1.0, 20.0, 3.0], [10.0, 2.0, 30.0]][rank] for _ in range(99))
    ready = measure.Ready(measure.Way("ours", "operator", int), "eager", int, 2, 0.0)
    with mock.patch.object(measure, "clock", side_effect=lambda *_: (next(turns), 0.0)):
        return measure.measure([ready], CPU)


def test_the_slowest_rank_counts(pools: Pools) -> None:
    for times in pools(2).run(timed_by_rank):
        us = [5.0, 10.0, 15.0] * measure.ROUNDS
        assert times == {("ours", "eager"): measure.Turns(us)}


def clocked_by_rank(rank: int, world_size: int) -> Any:
    """Clocks, and what the host takes for two calls, over the rounds, of which the first warms
    up."""
    meter = mock.Mock(mhz=mock.Mock(side_effect=[[1400.0, 1300.0], [1500.0, 1600.0]][rank] * 9))
    ready = measure.Ready(measure.Way("ours", "operator", int), "eager", int, 2, 0.0)
    on_gpu: Any = mock.Mock(type="cuda")

    def on_cpu(times: list[float], device: Any) -> list[float]:
        return slowest(times, CPU)

    with (
        mock.patch.object(measure, "clock", return_value=([1.0], 10.0 + 2 * rank)),
        mock.patch.object(measure, "Meter", return_value=meter),
        mock.patch.object(measure, "slowest", on_cpu),
    ):
        turns = measure.measure([ready], on_gpu)["ours", "eager"]
        return turns.mhz, turns.host_us


def test_the_slowest_clock_and_host_are_recorded(pools: Pools) -> None:
    assert pools(2).run(clocked_by_rank) == [(1400.0, 6.0)] * 2


def test_the_ways_take_turns_after_a_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(measure.dist, "barrier", lambda: order.append("|"))
    monkeypatch.setattr(measure, "slowest", lambda times, device: times)
    monkeypatch.setattr(measure, "TURNS", 1)
    monkeypatch.setattr(measure, "ROUNDS", 9)
    ready = [
        measure.Ready(measure.Way(n, "operator", int), "eager", lambda n=n: order.append(n), 1, 0.0)
        for n in "abc"
    ]
    measure.measure(ready, CPU)
    rounds = "".join(order).split("|")[1:]
    assert len(rounds) == 30  # the first round warms up
    orders = ["".join(rounds[n : n + 3]) for n in range(0, 30, 3)]
    assert {"".join(sorted(each)) for each in orders} == {"abc"}
    assert len(set(orders)) > 3  # none always follows the same other
    order.clear()
    measure.measure(ready, CPU)
    assert "".join(order).split("|")[1:] == rounds  # the same on all ranks


def warn_in(within: Any) -> None:
    text = f"{measure.DEPRECATED}. There is no need to call this function anymore."
    with within():
        warnings.warn(text, FutureWarning, stacklevel=1)
        warnings.warn("another", FutureWarning, stacklevel=1)


def test_torchs_deprecation_is_silent_in_its_own_operators_only() -> None:
    for within, count in ((measure._native, 1), (measure._not_native, 1), (nullcontext, 2)):
        with pytest.warns(FutureWarning) as seen:
            warn_in(within)
        assert len(seen) == count
        assert str(seen[-1].message) == "another"
