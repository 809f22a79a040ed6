"""benchmarks/cuts.py: cuts as they are written, and where they are taken."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ladder.config import model_config
from ladder.kernels import decode_shapes
from ladder.kernels.decode_shapes import Cut
from ladder.models import resolve_plan
from ladder.models.errors import UserError
from ladder.models.reducer import Reducer
from ladder.parallel.decode import DecodePass, DecodeReducer
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import cuts

KEYS = cuts.products(model_config("quarter-8b"))


@pytest.mark.parametrize(
    ("text", "rows", "expected"),
    [
        ("4x1024x2", 1, Cut(1, 4, 1024, 2, 0)),
        ("2x2048x8", 2, Cut(2, 2, 2048, 8, 0)),
        ("16x256x4x7x4", 9, Cut(16, 16, 256, 4, 7, 4)),
        ("32x128x4x6s", 33, Cut(64, 32, 128, 4, 6, swapped=True)),
        ("64x256x4x4/2", 33, Cut(64, 64, 256, 4, 4, shares=2)),
    ],
)
def test_a_cut(text: str, rows: int, expected: Cut) -> None:
    assert cuts.parse_cut(text, rows) == expected


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("down=4x1024", r"--cuts: '4x1024' is no cut; give BLOCKxSTEPxWARPS"),
        ("up=4x1024x2", r"--cuts: 'up=4x1024x2' is not PRODUCT=CUT,..; products: qkv, o, gate-up"),
        ("down", r"--cuts: 'down' is not PRODUCT=CUT"),
        ("qkv=64x256x4x4/0", r"'64x256x4x4/0': /0 needs 1 or more"),
        ("qkv=2x2048x8/4", r"'2x2048x8/4': /4 needs 1 or more, and the stages of a tile"),
        ("down=64x256x4x4/2", r"programs share the tiles of qkv alone"),
    ],
)
def test_what_is_no_cut_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        cuts.parse_cuts([word], 1, KEYS)


def test_less_than_one_rank_is_refused() -> None:
    with pytest.raises(UserError, match=r"--ranks 0: give 1"):
        cuts.main(Namespace(ranks=0))


def test_what_is_pushed_to_all_ranks_is_in_the_own_slots_of_all() -> None:
    made = Reducer(), resolve_plan("ladder", 2)
    decode = DecodeReducer(*made)
    residual = torch.zeros(3, 1, 8, dtype=torch.bfloat16)
    with cuts.pushing_to_itself(4):
        pushing = DecodeReducer(*made)
        step: Any = SimpleNamespace(decode=pushing, residual=residual, turn=0)
        found = [DecodePass._new_slots(step) for _ in range(pushing.sets + 1)]
    assert pushing.pushes
    assert not decode.pushes
    for arriving, target in found:
        slots = arriving.wait()
        assert slots.shape == (4, 3, 8)
        assert torch.signbit(slots).all()
        assert (target.rank, target.world) == (0, 4)
        places = target.buffers + 2 * target.start
        assert places.tolist() == [each.data_ptr() for each in slots]
    assert found[0][1].start == found[-1][1].start
    assert len({target.start for _, target in found}) == pushing.sets


def test_only_the_named_product_is_cut_otherwise() -> None:
    """The shapes are those that the engine multiplies by (`ladder.infer.fused.pack`)."""
    tried = Cut(1, 4, 1024, 2, 0)
    today = {name: decode_shapes.blocks(1, *key, 2) for name, key in KEYS.items()}
    with cuts.cut_as({KEYS["down"]: tried}):
        found = {name: decode_shapes.blocks(1, *key, 2) for name, key in KEYS.items()}
        beside = decode_shapes.blocks(1, *KEYS["o"], 2, beside=True)
    assert found == today | {"down": tried}
    assert beside == decode_shapes.blocks(1, *KEYS["o"], 2, beside=True) != today["o"]
    assert KEYS["gate-up"] == (3584, 4096, True)
    assert KEYS["qkv"] == (1536, 4096, False)
