"""ladder.data: windows of the shards, their order, damage. Each test says what it would catch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ladder.data.batches import Windows
from ladder.data.prepared import heldout_windows, open_data
from ladder.data.split import Split
from ladder.data.tokenizer import (
    load_tokenizer,
    token_byte_lengths,
)
from ladder.models.errors import UserError
from tests.documents import contents, tokens_of, write


@pytest.mark.parametrize("seq_len", [1, 7, 33, 100, 250])
def test_windows_cross_shards(prepared: Path, seq_len: int) -> None:
    """Catches a window that stops, repeats or shifts at a shard's end, and targets off by one."""
    tokens = tokens_of(prepared, "train")
    windows = Windows(open_data(prepared).split("train"), seq_len)
    assert len(windows) == (len(tokens) - 1) // seq_len
    inputs, targets = windows.read(range(len(windows)))
    assert inputs.dtype == targets.dtype == torch.int64
    used = len(windows) * seq_len
    assert inputs.flatten().tolist() == tokens[:used].tolist()
    assert targets.flatten().tolist() == tokens[1 : used + 1].tolist()


def test_split_reads_any_range(prepared: Path) -> None:
    """Catches errors at a shard's first and last token, which windows of one size may miss."""
    tokens, split = tokens_of(prepared, "train"), open_data(prepared).split("train")
    assert len(split.shards) > 5
    assert len(split) == len(tokens)
    edges = [0, 1, 99, 100, 101, 199, 200, 201, 299, 300, len(tokens) - 1, len(tokens)]
    for start in edges:
        for stop in (edge for edge in edges if edge >= start):
            assert split.read(start, stop).tolist() == tokens[start:stop].tolist()


@pytest.mark.parametrize("batch_size", [4, 12, 1000])
def test_an_epoch_has_every_window_once(prepared: Path, batch_size: int) -> None:
    """Catches sampling with replacement, a dropped last batch, epochs in one and the same order."""
    windows = Windows(open_data(prepared).split("train"), 16)
    count = len(windows)
    assert count % batch_size
    steps = -(-3 * count // batch_size)
    sequence = [i for step in range(steps) for i in windows.order(step, batch_size, seed=1)]
    epochs = [sequence[n * count : (n + 1) * count] for n in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(count))] * 3
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != list(range(count))
    assert windows.order(0, count, seed=2) != epochs[0]


def test_order_is_the_same_for_any_number_of_ranks(prepared: Path) -> None:
    """Catches ranks that read the same windows, or an order that depends on how many there are."""
    split = open_data(prepared).split("train")
    for step in (0, 3, 40):
        whole = Windows(split, 16).batch(step, 8, seed=5)
        for ranks in (1, 2, 4):
            parts = [Windows(split, 16).batch(step, 8, 5, rank, ranks) for rank in range(ranks)]
            assert {part[0].shape for part in parts} == {(8 // ranks, 16)}
            for side in (0, 1):
                assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


def test_a_batch_depends_on_its_step_only(prepared: Path) -> None:
    """Catches state carried from step to step: resuming anywhere gives what a whole run gave."""
    split = open_data(prepared).split("train")
    running = Windows(split, 16)
    run = [running.batch(step, 6, seed=3) for step in range(60)]
    assert len(running) < 60 * 6 / 3  # several epochs, so that orders fall out of the cache
    for step in (59, 0, 17, 31, 1):
        for windows in (Windows(split, 16), running):
            tokens, targets = windows.batch(step, 6, seed=3)
            assert torch.equal(tokens, run[step][0])
            assert torch.equal(targets, run[step][1])
    assert len(running._orders) <= 2  # each is as long as an epoch


def test_order_never_changes() -> None:
    """Catches another shuffle: a run resumed after an upgrade would see windows twice."""
    windows = Windows(Split("train", (np.arange(21),), np.array([0, 21]), 1, 1, 21), seq_len=2)
    assert windows.order(0, 10, seed=7) == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert windows.order(1, 10, seed=7) == [1, 3, 2, 7, 8, 4, 5, 9, 0, 6]


def test_heldout_windows_give_bytes(prepared: Path, tokenizer: Path) -> None:
    """Catches the inputs' bytes for the targets', windows out of order or counted twice."""
    opened, tokens = open_data(prepared), tokens_of(prepared, "heldout")
    lengths = token_byte_lengths(load_tokenizer(tokenizer))
    batches = list(heldout_windows(opened, 16, batch_size=5))
    used = (len(tokens) - 1) // 16 * 16
    assert torch.cat([b[0] for b in batches]).flatten().tolist() == tokens[:used].tolist()
    assert torch.cat([b[1] for b in batches]).flatten().tolist() == tokens[1 : used + 1].tolist()
    sizes = torch.cat([b[2] for b in batches]).flatten().tolist()
    assert sizes == lengths[tokens[1 : used + 1]].tolist()
    total = opened.split("heldout").bytes
    assert sum(sizes) + lengths[tokens[0]] + lengths[tokens[used + 1 :]].sum() == total
    assert {len(batch[0]) for batch in batches[:-1]} == {5}
    limited = list(heldout_windows(opened, 16, limit=7, batch_size=5))
    assert [len(batch[0]) for batch in limited] == [5, 2]
    # The first ones would be the first documents only: a corpus of two halves needs both.
    every, count = torch.cat([b[0] for b in batches]), used // 16
    spread = [i * count // 7 for i in range(7)]
    assert spread[-1] >= count * 6 // 7 > 7
    assert torch.equal(torch.cat([b[0] for b in limited]), every[spread])
    assert torch.equal(torch.cat([b[0] for b in heldout_windows(opened, 16, 10**9, 5)]), every)


def test_the_first_number_beyond_the_vocabulary_is_no_token() -> None:
    shard, starts = np.array([3, 7], np.uint16), np.array([0, 2])
    assert Split("train", (shard,), starts, 1, 2, 8).read(0, 2).tolist() == [3, 7]
    with pytest.raises(UserError, match="holds token 7, beyond vocab_size=7"):
        Split("train", (shard,), starts, 1, 2, 7).read(0, 2)


def test_window_errors(prepared: Path) -> None:
    """Catches an epoch of no windows (an endless loop or ZeroDivisionError), uneven ranks."""
    opened = open_data(prepared)
    split = opened.split("train")
    count = len(split)
    with pytest.raises(
        UserError, match=rf"seq_len={count} is longer than split 'train'.* {count - 1:,}; use"
    ):
        Windows(split, count)
    assert len(Windows(split, count - 1)) == 1
    with pytest.raises(UserError, match="seq_len=0 must be 1 or more"):
        Windows(split, 0)
    with pytest.raises(UserError, match="batch_size=6 must be a multiple of the 4 data-parallel"):
        Windows(split, 8).batch(0, 6, seed=0, rank=0, ranks=4)
    with pytest.raises(UserError, match="seed=-1 must be 0 or more"):
        Windows(split, 8).batch(0, 6, seed=-1)
    with pytest.raises(UserError, match=r"unknown split 'test'.*known: train, heldout"):
        opened.split("test")
    with pytest.raises(UserError, match="limit=0 must be 1 or more"):
        next(heldout_windows(opened, 8, limit=0))


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (
            lambda f: (f / "index.json").unlink(),
            r"no prepared data in .*; make it by .* --out .*, or give",
        ),
        (lambda f: (f / "index.json").write_text("{"), r"index\.json is damaged \(JSON"),
        (lambda f: (f / "index.json").write_text("[]"), r"index\.json is damaged"),
        (lambda f: edit(f / "index.json", version=9), r"has version=9, this program reads 1"),
        (lambda f: edit(f / "index.json", dtype="int8"), r"is damaged: dtype='int8' is none of"),
        (lambda f: edit(f / "index.json", splits=3), r"is damaged"),
        (lambda f: edit(f / "index.json", vocab_size=9), r"says vocab_size=9; prepare"),
        (lambda f: (f / "train-00002.bin").unlink(), r"train-00002\.bin cannot be read: No such"),
        (
            lambda f: os.truncate(f / "train-00001.bin", 198),
            r"train-00001\.bin is truncated: 198 bytes where index\.json says 200; copy it again",
        ),
        (lambda f: os.truncate(f / "heldout-00000.bin", 202), r"heldout-00000\.bin is too long"),
        (lambda f: (f / "token_bytes.npy").unlink(), r"token_bytes\.npy cannot be read \(No such"),
        (lambda f: os.truncate(f / "token_bytes.npy", 40), r"token_bytes\.npy cannot be read"),
    ],
)
def test_damaged_folders_are_refused(
    prepared: Path, tmp_path: Path, damage: Callable[[Path], object], match: str
) -> None:
    """Catches a damaged folder that trains on rubbish, or whose error does not name the file."""
    folder = write(tmp_path, dict(contents(prepared)))
    open_data(folder)
    damage(folder)
    with pytest.raises(UserError, match=match):
        open_data(folder)
