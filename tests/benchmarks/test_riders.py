"""benchmarks/riders.py: ways as they are written, and where they are taken."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from ladder.kernels import decode_shapes
from ladder.models.errors import UserError
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import riders


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0/0", ("0", "0")), ("1/4", ("1", "4")), ("b16/2", ("b16", "2")),
        ("b4/b12", ("b4", "b12")), ("today", None),
    ],
)  # fmt: skip
def test_a_way(text: str, expected: tuple[str, str] | None) -> None:
    assert riders.parse_way(text) == expected


NO_WAYS = ["1", "3/0", "0/", "today/today", "b/0", "b0/0", "b16/x", "b-1/0", ""]


@pytest.mark.parametrize("text", NO_WAYS)
def test_what_is_no_way_is_refused(text: str) -> None:
    with pytest.raises(
        UserError, match=f"--ways: '{text}' is not SEND/LANDING, each of 0, 1, 2, 4 or bN"
    ):
        riders.parse_way(text)


def test_what_rides_as_it_is_told() -> None:
    """Of any weight: sends of 64 and 16 rows of 4 chunks, beside 128 programs of gate and up, and
    landings beside as many of down."""
    today = decode_shapes.ride
    gate, down = (3584, 32, True), (4096, 32, False)
    with riders.riding(("1", "2")):
        assert decode_shapes.ride(True, 64, 4, *gate, True, 4) == (2, 0, 32, 28)
        assert decode_shapes.ride(True, 16, 4, *gate, True, 4) == (1, 0, 32, 28)
        assert decode_shapes.ride(True, 64, 4, 2016, 32, False, True, 4).programs == 256
        assert decode_shapes.ride(False, 16, 4, *down, False, 4) == (2, 0, 32, 32)
        assert decode_shapes.ride(False, 0, 0, *down, False, 4) == (1, 0, 32, 32)
    with riders.riding(("0", "0")):
        assert decode_shapes.ride(False, 64, 4, *down, False, 4) == (1, 256, 32, 32)
    with riders.riding(("b16", "b12")):
        assert decode_shapes.ride(True, 64, 4, *gate, True, 4) == (4, 16, 32, 32)
        assert decode_shapes.ride(True, 8, 2, *gate, False, 4) == (2, 8, 32, 32)
        assert decode_shapes.ride(False, 16, 4, *down, False, 2) == (2, 12, 64, 36)
        assert decode_shapes.ride(False, 0, 0, 32064, 64, False, False, 4) == (1, 0, 64, 64)
    with riders.riding(None):
        assert decode_shapes.ride is today
    assert decode_shapes.ride is today


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(times: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        times.copy_(torch.maximum(times, torch.tensor([15.0, 3.0])))

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    us = {"today": 10.04, "0/0": 20.0}
    assert riders.of_slowest(us, torch.device("cpu")) == {
        "today": 15.0, "0/0": 20.0,
    }  # fmt: skip
