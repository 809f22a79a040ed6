"""The arguments of a forward pass: positions, a mask, a cache, places to compute logits of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ladder.models import UserError
from tests.samples import model_at, relative_error, sample_tokens

EXACT = 1e-9  # float64, relative to the largest value
DIFFERENT = 1e-2  # two architectures, or two weights, are at least this far apart


def test_positions_are_what_rotary_embedding_sees() -> None:
    """Shifting all positions changes nothing, shifting some does; virtual ranks get them too."""
    for name, ranks in (("standard", 1), ("ladder", 4), ("desync-2x", 2)):
        model = model_at(name, ranks)
        tokens = sample_tokens(model.config, seed=2, batch=3)
        expected = model(tokens)
        positions = torch.arange(9).expand(3, 9)
        assert relative_error(model(tokens, positions=positions), expected) < EXACT
        shifted = model(tokens, positions=positions + 11)
        assert relative_error(shifted, expected) < 1e-5  # angles are float32
        stretched = model(tokens, positions=positions * torch.tensor([[1], [2], [1]]))
        assert relative_error(stretched[[0, 2]], expected[[0, 2]]) < EXACT
        assert relative_error(stretched[1], expected[1]) > DIFFERENT
        # As many sequences as positions, however few: tables are for each virtual rank's own.
        pair = model(tokens[:2], positions=positions[:2] * torch.tensor([[1], [2]]))
        assert relative_error(pair, stretched[:2]) < EXACT


class GrowingCache:
    """The plainest KeyValueCache: all keys and values so far, one after another."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.kept:
            old_keys, old_values = self.kept[layer]
            keys, values = torch.cat((old_keys, keys), 2), torch.cat((old_values, values), 2)
        self.kept[layer] = keys, values
        return keys, values


CACHED = [("standard", 1), ("parallel", 2), ("ladder", 4), ("desync-2x", 2), ("dtp-2", 4),
          ("accumulate-4x", 2), ("accumulate-2x-lag1", 2)]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), CACHED)
def test_a_mask_replaces_the_causal_one(name: str, ranks: int) -> None:
    """True where attended, per sequence; virtual ranks get it too."""
    model = model_at(name, ranks)
    tokens = sample_tokens(model.config, seed=2, batch=3)
    expected = model(tokens)
    mask = torch.ones(9, 9, dtype=torch.bool).tril().repeat(3, 1, 1, 1)
    assert relative_error(model(tokens, mask=mask, cache=GrowingCache()), expected) < EXACT
    mask[1] = True
    seen = model(tokens, mask=mask, cache=GrowingCache())
    assert relative_error(seen[[0, 2]], expected[[0, 2]]) < EXACT
    assert relative_error(seen[1], expected[1]) > DIFFERENT


@pytest.mark.parametrize(("name", "ranks"), CACHED)
def test_a_cache_takes_the_place_of_what_was_read(name: str, ranks: int) -> None:
    """A prompt, then token by token, is the same as all at once. Catches a plan that carries the
    residual of one forward pass into the next, and a cache that two layers share."""
    model = model_at(name, ranks)
    tokens = sample_tokens(model.config, seed=2, batch=3)
    expected = model(tokens)
    cache, found = GrowingCache(), []
    for start, end in ((0, 5), (5, 6), (6, 7), (7, 9)):
        positions = torch.arange(start, end).unsqueeze(0)
        mask = (torch.arange(end) <= positions.T).expand(3, 1, -1, -1)
        found.append(model(tokens[:, start:end], positions=positions, mask=mask, cache=cache))
    assert sorted(cache.kept) == [0, 1, 2, 3]
    assert relative_error(torch.cat(found, 1), expected) < EXACT


@pytest.mark.parametrize(("name", "ranks"), CACHED)
def test_last_picks_one_place_of_each_sequence(name: str, ranks: int) -> None:
    """Catches one place for all sequences, a place taken from the wrong dimension, and an MLP after
    the last attention that computes the others too."""
    model = model_at(name, ranks)
    tokens = sample_tokens(model.config, seed=2, batch=3)
    last = torch.tensor([8, 0, 5])
    expected = model(tokens)[torch.arange(3), last].unsqueeze(1)
    read: list[torch.Size] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[-3:-1]))
    assert relative_error(model(tokens, last=last), expected) < EXACT
    assert read == [(3, 9)] * (len(read) - 1) + [(3, 1)]


def test_the_future_is_not_seen() -> None:
    model = model_at("ladder", 2)
    tokens = sample_tokens(model.config, seed=2)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 67
    before, after = model(tokens), model(changed)
    assert relative_error(after[:, :6], before[:, :6]) < EXACT
    assert relative_error(after[:, 6:], before[:, 6:]) > DIFFERENT


def test_a_sequence_longer_than_the_model() -> None:
    model = model_at("ladder", 1, max_seq_len=8)
    assert model(sample_tokens(model.config, 1, length=8)).shape == (2, 8, 67)
    with pytest.raises(UserError, match="max_seq_len=8"):
        model(sample_tokens(model.config, 1, length=9))
