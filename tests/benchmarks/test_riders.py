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
    [("0/0", (0, 0)), ("1/4", (1, 4)), ("today", None)],
)
def test_a_way(text: str, expected: tuple[int, int] | None) -> None:
    assert riders.parse_way(text) == expected


@pytest.mark.parametrize("text", ["1", "3/0", "0/", "today/today"])
def test_what_is_no_way_is_refused(text: str) -> None:
    with pytest.raises(
        UserError, match=f"--ways: '{text}' is not SEND/LANDING, each of 0, 1, 2, 4,"
    ):
        riders.parse_way(text)


def test_what_has_a_place_in_the_products_programs_rides_there() -> None:
    """Of any weight; 64 rows of 4 chunks each, beside 128 programs, and 16 rows."""
    many, few, none = (64, 4, 128), (16, 4, 128), (0, 0, 128)
    today = decode_shapes.span
    with riders.riding((1, 2)):
        assert decode_shapes.span(True, *many, eight_bits=True) == 2
        assert decode_shapes.span(True, *few, eight_bits=True) == 1
        assert decode_shapes.span(True, 64, 4, 63, eight_bits=True) == 0
        assert decode_shapes.span(False, *few, eight_bits=False) == 2
        assert decode_shapes.span(False, *none, eight_bits=False) == 0
    with riders.riding((0, 0)):
        assert decode_shapes.span(False, *many, eight_bits=False) == 0
    with riders.riding(None):
        assert decode_shapes.span is today
    assert decode_shapes.span is today


def test_the_slowest_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def reduce(times: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        times.copy_(torch.maximum(times, torch.tensor([15.0, 3.0])))

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
    us = {"today": 10.04, "0/0": 20.0}
    assert riders.of_slowest(us, torch.device("cpu")) == {
        "today": 15.0, "0/0": 20.0,
    }  # fmt: skip
