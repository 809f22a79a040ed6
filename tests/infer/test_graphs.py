"""The clock of CUDA graphs, with events that read a counter in place of a GPU's time."""

from __future__ import annotations

import pytest
import torch

from ladder.infer.graphs import time_turns


def test_each_turn_is_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    lengths = iter((3.0, 1.0, 2.0))

    def work() -> None:
        now[0] += next(lengths)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert time_turns(work, 3) == [3, 1, 2]
