"""Batches read ahead of training: the same, in order, with errors, and no thread left behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ladder.data.prepared import open_data
from ladder.models import UserError
from ladder.train import loop, metrics, step
from ladder.train.loop import train
from ladder.train.prefetch import DEPTH, Batch, MicroBatch, Prefetcher, read_batch
from tests.train.runs import losses, recipe

CPU = torch.device("cpu")


def numbered(step: int) -> Batch:
    tokens = torch.full((1, 2), step)
    return Batch([step], [MicroBatch(tokens, tokens, None)], 2)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("batches")]


def after(condition: Callable[[], bool]) -> bool:
    """Whether it holds within ten seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.001)
    return condition()


def test_batches_come_in_order_and_no_further_ahead() -> None:
    """Reads that take different times. Catches several readers that overtake each other, steps
    beyond the last, batches skipped or doubled, and reading ahead without end or not at all."""
    asked: list[int] = []

    def read(step: int) -> Batch:
        asked.append(step)
        time.sleep(0.01 * (step % 3 == 0))
        return numbered(step)

    with Prefetcher(read, range(3, 12), CPU) as batches:
        for step, batch in zip(range(3, 12), batches, strict=True):
            assert batch.windows == [step]
            assert batch.parts[0].tokens.tolist() == [[step, step]]
            ahead = min(step + DEPTH, 11)
            assert after(lambda ahead=ahead: asked[-1] == ahead)
            time.sleep(0.005)
            assert asked[-1] == ahead
    assert asked == list(range(3, 12))
    assert not threads()


def test_an_error_comes_with_its_own_batch() -> None:
    """Catches an error that is lost in the thread, which would hang, and one that is raised before
    the good batches that come first are trained on."""

    def read(step: int) -> Batch:
        if step == 2:
            raise UserError("a shard is damaged")
        return numbered(step)

    seen = []

    def run() -> None:
        with Prefetcher(read, range(5), CPU) as batches:
            for batch in batches:
                time.sleep(0.01)
                seen.extend(batch.windows)

    with pytest.raises(UserError, match="a shard is damaged"):
        run()
    assert seen == [0, 1]
    assert not threads()


def test_the_thread_ends_with_an_error_of_training() -> None:
    """Catches a reader that goes on behind a run that has failed, or keeps its process alive."""

    def run() -> None:
        with Prefetcher(numbered, range(9), CPU) as batches:
            next(batches)
            assert threads()
            raise RuntimeError("of training")

    with pytest.raises(RuntimeError, match="of training"):
        run()
    assert not threads()


def test_waiting_is_measured() -> None:
    """Catches the time of training counted as waiting, and waiting not counted."""

    def slow(step: int) -> Batch:
        time.sleep(0.05)
        return numbered(step)

    with Prefetcher(slow, range(4), CPU) as batches:
        for _ in batches:
            pass
    assert 0.19 < batches.waited < 2
    with Prefetcher(slow, range(4), CPU) as batches:
        for _ in batches:
            time.sleep(0.2)
    assert 0.04 < batches.waited < 0.5  # of 0.85 seconds; the first batch alone


def test_a_batch_is_what_the_windows_give(corpus: Path, tmp_path: Path) -> None:
    """Catches micro-batches in another order, and documents of the whole batch in each of them."""
    data = open_data(corpus)
    windows = data.windows("train", 256)
    config = recipe(corpus, tmp_path, seq_len=256, batch_size=8, mask_documents=True)
    drawn, parts, count = read_batch(windows, config, 3, 1, 2, 2, data.eos_id)
    assert count == 4 * 256
    tokens, targets = windows.batch(3, 8, config.seed, 1, 2)
    assert drawn == windows.order(3, 8, config.seed, 1, 2)
    assert torch.equal(torch.cat([part.tokens for part in parts]), tokens)
    assert torch.equal(torch.cat([part.targets for part in parts]), targets)
    assert len(parts) == 2
    for part in parts:
        ends = [i + 1 for i, token in enumerate(part.tokens.flatten()) if token == data.eos_id]
        assert part.documents is not None
        assert part.documents.tolist() == sorted({0, 256, 512, *ends})


def test_the_share_of_waiting_is_recorded(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a share that goes back beyond what it is divided by, which an evaluation or a
    checkpoint begins again (it would be above 1), and waiting that is not seen. Slow batches change
    no loss."""
    settings = {"log_interval": 2, "eval_interval": 3}
    train(recipe(corpus, tmp_path / "fast", **settings), device="cpu")
    read = loop.read_batch

    def slow(windows, config, step, *rest):  # type: ignore[no-untyped-def]
        time.sleep(0.4 if step < 3 else 0)
        return read(windows, config, step, *rest)

    monkeypatch.setattr(loop, "read_batch", slow)
    train(recipe(corpus, tmp_path / "slow", **settings), device="cpu")
    shares = {
        name: [r["data_wait"] for r in metrics.read_metrics(tmp_path / name) if "data_wait" in r]
        for name in ("fast", "slow")
    }
    assert all(0 <= share < 1 for each in shares.values() for share in each)
    first, _, last = shares["slow"]
    assert first > 0.5 > last
    assert losses(tmp_path / "slow") == losses(tmp_path / "fast")


def test_a_run_leaves_no_thread(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Done, stopped early, or failed in a step or in a read. The error of a read ends the run."""
    train(recipe(corpus, tmp_path / "done"), device="cpu", stop_after=2)
    assert not threads()
    with monkeypatch.context() as patch:
        patch.setattr(step, "clip_gradients", lambda *_: torch.tensor(float("nan")))
        with pytest.raises(UserError, match=r"step 1: .*not finite"):
            train(recipe(corpus, tmp_path / "failed"), device="cpu")
    assert not threads()

    def damaged(windows, config, step, *rest):  # type: ignore[no-untyped-def]
        if step == 3:
            raise UserError("a shard is damaged")
        return read_batch(windows, config, step, *rest)

    monkeypatch.setattr(loop, "read_batch", damaged)
    with pytest.raises(UserError, match="a shard is damaged"):
        train(recipe(corpus, tmp_path / "damaged"), device="cpu")
    assert len(losses(tmp_path / "damaged")) == 3
    assert not threads()
