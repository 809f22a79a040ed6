"""Several weighted sources: proportions, epochs, ranks, resuming; each says what it catches."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ladder.checkpoint import newest
from ladder.config import build, load_mapping
from ladder.data.mix import Mix, open_sources, parse_sources, plan_cycle
from ladder.data.prepare import prepare
from ladder.data.prepared import TokenData, heldout_windows, open_data
from ladder.data.split import Split
from ladder.data.tokenizer import train_tokenizer
from ladder.models.errors import UserError
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools
from tests.train.runs import losses, run_on_ranks

LENGTHS = (21, 9, 47)  # windows of each source
SHARES = (5, 2, 4)
SEQ = 3


def _source(number: int, windows: int) -> TokenData:
    """Training tokens that say where they are from: 1000 x (source + 1) + position."""
    base = 1000 * (number + 1)

    def split(name: str, count: int, offset: int) -> Split:
        tokens = base + offset + np.arange(count * SEQ + 1)
        return Split(name, (tokens,), np.array([0, len(tokens)]), 1, 1, 9999)

    # The held-out split is of another length, so that neither can pass for the other.
    splits = {"train": split("train", windows, 0), "heldout": split("heldout", windows // 3, 500)}
    sizes = np.ones(9999, np.int32)
    return TokenData(Path(f"source{number}"), 9999, 0, sizes, splits, {})


@pytest.fixture(scope="module")
def mix() -> Mix:
    sources = tuple(_source(number, windows) for number, windows in enumerate(LENGTHS))
    first = sources[0]
    return Mix(Path("source0"), 9999, 0, first.token_bytes, first.splits, {}, sources, SHARES)


def _origins(tokens: torch.Tensor) -> list[tuple[int, int]]:
    """The source and window of each row, from the tokens alone; rows must be whole windows."""
    found = []
    for row in tokens.tolist():
        source, at = divmod(row[0], 1000)
        assert row == list(range(row[0], row[0] + SEQ))
        window, rest = divmod(at % 500, SEQ)
        assert rest == 0
        found.append((source - 1, window))
    return found


def _drawn(mix: Mix, count: int, seed: int = 1) -> list[tuple[int, int]]:
    windows = mix.windows("train", SEQ)
    tokens, targets = windows.batch(0, count, seed)
    assert torch.equal(targets, tokens + 1)
    return _origins(tokens)


def _random_shares() -> list[list[int]]:
    pick = random.Random(0)
    some = [[pick.randint(1, 40) for _ in range(pick.randint(2, 12))] for _ in range(60)]
    # One large and many small ones, which stride scheduling and rounding to the nearest get wrong.
    return [*some, [1, 1], [1], [9000, 1], [1, 9000], [90, *[1] * 10], [1] * 30, [7, 7, 1, 1, 1, 1]]


@pytest.mark.parametrize("shares", _random_shares(), ids=str)
def test_proportions_hold_at_every_place(shares: list[int]) -> None:
    """Catches shares met on average only, in blocks, or with errors that add up over sources."""
    length = sum(shares)
    cycle = plan_cycle(shares)
    taken = np.cumsum(cycle[:, None] == np.arange(len(shares)), axis=0)
    due = np.arange(1, length + 1)[:, None] * np.array(shares)  # x length: whole numbers
    assert (abs(taken * length - due) < length).all()
    assert taken[-1].tolist() == shares


def test_batches_follow_the_weights_for_ever(mix: Mix) -> None:
    """Catches a cycle that starts again with each batch or epoch, or indexes the wrong source."""
    drawn = _drawn(mix, 700)
    taken = [0] * len(SHARES)
    for n, (source, _) in enumerate(drawn, 1):
        taken[source] += 1
        for count, share in zip(taken, SHARES, strict=True):
            assert abs(count - n * share / sum(SHARES)) < 1


def test_each_source_has_every_window_once_per_epoch(mix: Mix) -> None:
    """Catches windows drawn twice or never where a source ends an epoch amid a cycle or batch."""
    drawn = _drawn(mix, 700)
    for source, length in enumerate(LENGTHS):
        own = [window for number, window in drawn if number == source]
        epochs = [own[n : n + length] for n in range(0, len(own) - length + 1, length)]
        assert len(epochs) >= 3
        for epoch in epochs:
            assert sorted(epoch) == list(range(length))
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_equal_sources_are_shuffled_apart() -> None:
    """Catches one permutation for all sources of a length: parallel texts would come in pairs."""
    sources = (_source(0, 20), _source(1, 20))
    first = sources[0]
    twins = Mix(Path("a"), 9999, 0, first.token_bytes, first.splits, {}, sources, (1, 1))
    drawn = _drawn(twins, 40)
    orders = [[window for number, window in drawn if number == source] for source in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_order_does_not_depend_on_ranks(mix: Mix, ranks: int) -> None:
    """Catches ranks that count sources for themselves, overlap, or leave windows out."""
    for step in (0, 3, 58):
        whole = mix.windows("train", SEQ).batch(step, 12, 5)
        parts = [mix.windows("train", SEQ).batch(step, 12, 5, r, ranks) for r in range(ranks)]
        for side in (0, 1):
            assert torch.equal(torch.cat([part[side] for part in parts]), whole[side])


def test_a_batch_depends_on_its_step_only(mix: Mix) -> None:
    """Catches state: resuming at any step, backwards too, reads what one long run read."""
    running = mix.windows("train", SEQ)
    run = [running.batch(step, 7, 3)[0] for step in range(60)]
    assert torch.equal(torch.cat(run), mix.windows("train", SEQ).batch(0, 420, 3)[0])
    for step in (59, 0, 31, 1):
        for windows in (mix.windows("train", SEQ), running):
            assert torch.equal(windows.batch(step, 7, 3)[0], run[step])


def test_order_never_changes(mix: Mix) -> None:
    """Catches another plan or shuffle: a run resumed after an upgrade would see windows twice."""
    assert plan_cycle(SHARES).tolist() == [0, 2, 0, 1, 2, 0, 0, 2, 0, 1, 2]
    assert _drawn(mix, 12, seed=7) == [
        (0, 6),
        (2, 24),
        (0, 20),
        (1, 5),
        (2, 0),
        (0, 3),
        (0, 12),
        (2, 28),
        (0, 11),
        (1, 1),
        (2, 3),
        (0, 4),
    ]


def test_heldout_is_in_proportion_and_each_window_once(mix: Mix) -> None:
    """Catches training windows, one source for all, repeats of a short one, a tail left out."""
    lengths = [length // 3 for length in LENGTHS]  # 7, 3 and 15

    def origins(limit: int | None) -> list[tuple[int, int]]:
        batches = list(heldout_windows(mix, SEQ, limit, 4))
        assert all((row % 1000 >= 500).all() for row, _, _ in batches)
        assert all(torch.equal(sizes, torch.ones_like(sizes)) for _, _, sizes in batches)
        return _origins(torch.cat([tokens for tokens, _, _ in batches]))

    everything = origins(None)
    assert sorted(everything) == [(k, i) for k, n in enumerate(lengths) for i in range(n)]
    # Of a part, as many of each source as the first 11 have, spread over the whole source.
    assert [source for source, _ in origins(11)] == [source for source, _ in everything[:11]]
    for source, (length, share) in enumerate(zip(lengths, SHARES, strict=True)):
        own = [window for number, window in origins(11) if number == source]
        assert own == [i * length // share for i in range(share)]
    assert origins(999) == everything
    assert [sum(source == k for source, _ in everything[:11]) for k in range(3)] == list(SHARES)
    for source in range(3):
        own = [window for number, window in everything if number == source]
        assert own == list(range(lengths[source]))
    assert {source for source, _ in everything[-6:]} == {2}  # the others are used up


def test_a_source_too_short_is_named(mix: Mix) -> None:
    """Catches an error that leaves the user to guess which of the sources is meant."""
    with pytest.raises(UserError, match=r"data source source1: seq_len=28 is longer than split"):
        mix.windows("train", 28)  # source 1 has 28 tokens, of which 27 are targets


# ---------------------------------------------------------------- the recipe's `data`


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([3, 6], (1, 2)),
        ([0.1, 0.3], (1, 3)),  # in binary, neither is a tenth
        (["3e-1", 0.6], (1, 2)),  # YAML reads 3e-1 as a string
        ([1e-3, 1], (1, 1000)),
    ],
)
def test_weights_are_exact(corpus: Path, second: Path, weights: list[Any], shares: Any) -> None:
    """Catches floating-point weights, which no short cycle meets, and weights not normalised."""
    third = second.with_name("third")
    paths = [corpus, second, third][: len(weights)]
    named = [{"path": str(p), "weight": w} for p, w in zip(paths, weights, strict=True)]
    opened = open_sources(named)
    assert isinstance(opened, Mix)
    assert opened.shares == shares
    assert len(opened.split("train")) == sum(len(open_data(p).split("train")) for p in paths)


A = {"path": "a", "weight": 1}


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ([], r"data=\[\] is neither a prepared folder nor a list"),
        (3, r"data=3 is neither"),
        ({"path": "a", "weight": 1}, r"is neither a prepared folder nor a list"),
        (["a"], r"data source 1 is 'a'; give \{path"),
        ([A, {"path": "b"}], r"data source 2 lacks weight"),
        ([A, {"weight": 1}], r"data source 2 lacks path"),
        ([A, {"path": "b", "wieght": 1}], r"'wieght'"),
        ([A, {"path": "", "weight": 1}], r"path='' must be a prepared folder"),
        ([A, {"path": "b", "weight": 0}], r"data source 2 \(b\): weight=0 must be a finite"),
        ([A, {"path": "b", "weight": -1}], r"weight=-1 must be"),
        ([A, {"path": "b", "weight": True}], r"weight=True must be"),
        ([A, {"path": "b", "weight": "many"}], r"weight='many' must be"),
        ([A, {"path": "b", "weight": float("inf")}], r"weight=inf must be"),
        ([A, {"path": "b", "weight": None}], r"weight=None must be"),
        ([A, {"path": "./a", "weight": 2}], r"data names \./a twice"),
        ([A, {"path": "b", "weight": 0.1234567}], r"too fine.*11,234,567.*say to 0\.890, 0\.110"),
    ],
)
def test_a_wrong_data_list_is_refused_at_once(data: Any, match: str) -> None:
    """Catches a mistake found only once ranks have started, or not at all."""
    with pytest.raises(UserError, match=match):
        build(TrainConfig, {"data": data, "out": "x"}, "test")


def test_the_list_is_read_from_yaml(tmp_path: Path) -> None:
    """Catches a list that the recipe's own loader or its saved form does not carry."""
    (tmp_path / "r.yaml").write_text(
        "out: x\ndata:\n  - {path: a, weight: 3}\n  - path: b\n    weight: 1e-1\n"
    )
    config = build(TrainConfig, load_mapping(tmp_path / "r.yaml"), "test")
    assert [(path, float(weight)) for path, weight in parse_sources(config.data)] == [
        ("a", 3.0),
        ("b", 0.1),
    ]
    assert build(TrainConfig, config.to_dict(), "test") == config


# ---------------------------------------------------------------- training


def _prepare(folder: Path, corpus: Path, name: str, tokenizer: Path | None = None) -> Path:
    texts = folder / f"{name}-texts"
    texts.mkdir()
    for number in range(12):
        words = f"{name} counts {number} rungs of the other ladder and climbs on\n" * 20
        (texts / f"{number}.txt").write_text(words)
    out = folder / name
    prepare([texts], tokenizer or corpus / "tokenizer.json", out, heldout_fraction=0.3)
    return out


@pytest.fixture(scope="module")
def second(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source beside `corpus`, with its tokenizer; a third lies next to it."""
    folder = tmp_path_factory.mktemp("sources")
    _prepare(folder, corpus, "third")
    return _prepare(folder, corpus, "second")


def _recipe(data: Any, out: Path, **changes: Any) -> TrainConfig:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    settings: dict[str, Any] = {
        "data": data,
        "out": str(out),
        "model": {"name": "tiny", **shape, "num_heads": 4, "num_kv_heads": 2},
        "steps": 8,
        "seq_len": 16,
        "batch_size": 4,
        "warmup_steps": 2,
        "log_interval": 1,
        "eval_windows": 6,
        "checkpoint_interval": 3,
        "tensorboard": False,
    }
    return build(TrainConfig, settings | changes, "test recipe")


def _named(*sources: tuple[Path, float]) -> list[dict[str, Any]]:
    return [{"path": str(path), "weight": weight} for path, weight in sources]


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(newest(run) / "model.safetensors")


def test_a_mix_resumes_to_the_bit(corpus: Path, second: Path, tmp_path: Path) -> None:
    """Catches a resumed run that begins the mix again, or evaluates on other windows."""
    data = _named((corpus, 0.7), (second, 0.3))
    whole = train(_recipe(data, tmp_path / "whole"), device="cpu")
    train(_recipe(data, tmp_path / "parts"), device="cpu", stop_after=5)
    assert train(_recipe(data, tmp_path / "parts"), resume=True, device="cpu") == whole
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    expected = _weights(tmp_path / "whole")
    for name, found in _weights(tmp_path / "parts").items():
        assert torch.equal(found, expected[name]), name
    train(_recipe(str(corpus), tmp_path / "alone"), device="cpu")
    assert losses(tmp_path / "alone") != losses(tmp_path / "whole")  # the second one counts


def test_one_source_in_a_list_is_the_folder(corpus: Path, tmp_path: Path) -> None:
    """Catches another order, or a refused resume, for the same data written the other way."""
    train(_recipe(str(corpus), tmp_path / "run"), device="cpu", stop_after=5)
    train(_recipe(_named((corpus, 3)), tmp_path / "run"), resume=True, device="cpu")
    train(_recipe(_named((corpus, 1)), tmp_path / "whole"), device="cpu")
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_changed_sources_do_not_resume(corpus: Path, second: Path, tmp_path: Path) -> None:
    """Catches a run continued on other weights, another order or content of its sources."""
    run = tmp_path / "run"
    data = _named((corpus, 0.7), (second, 0.3))
    train(_recipe(data, run), device="cpu", stop_after=3)
    third = second.with_name("third")
    for other in (
        _named((corpus, 0.6), (second, 0.4)),
        _named((second, 0.3), (corpus, 0.7)),
        _named((second, 0.7), (corpus, 0.3)),
        _named((corpus, 0.7), (third, 0.3)),
        _named((corpus, 0.7), (second, 0.2), (third, 0.1)),
        str(corpus),
    ):
        with pytest.raises(UserError, match=r"has changed since .* order and weights"):
            train(_recipe(other, run), resume=True, device="cpu")
    same = _named((corpus, 7), (second, 3))  # the same proportions
    train(_recipe(same, run), resume=True, device="cpu")
    assert len(losses(run)) == 8


def test_sources_share_a_tokenizer(corpus: Path, tmp_path: Path) -> None:
    """Catches ids of two vocabularies in one run, which trains on rubbish without a sign."""
    train_tokenizer(["another text of other pairs " * 9], 300, tmp_path / "tokenizer")
    other = _prepare(tmp_path, corpus, "other", tmp_path / "tokenizer")
    with pytest.raises(UserError, match=rf"{corpus} and {other} were made with different token"):
        train(_recipe(_named((corpus, 1), (other, 1)), tmp_path / "run"), device="cpu")
    assert not (tmp_path / "run").exists()


def test_ranks_train_on_the_same_mix(
    corpus: Path, second: Path, tmp_path: Path, pools: Pools
) -> None:
    """Catches data-parallel ranks of a mix that do not add up to one process's batches."""
    data = _named((corpus, 0.7), (second, 0.3))
    train(_recipe(data, tmp_path / "one"), device="cpu")
    settings = _recipe(data, tmp_path / "two").to_dict()
    pools(2).run(run_on_ranks, settings, None)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def test_each_source_has_its_own_end_of_a_document(mix: Mix) -> None:
    """Conversations may end with another token than text. Catches the first source's for all."""
    sources = [replace(source, eos_id=1000 * n + 7) for n, source in enumerate(mix.sources, 1)]
    windows = replace(mix, eos_id=1007, sources=tuple(sources), made={}).windows("train", SEQ)
    drawn = [windows.draw(1, entry) for entry in range(200)]
    tokens, _ = windows.read(drawn)
    begins = windows.begins(drawn, tokens, 1007)
    assert begins is not None
    after = (tokens[:, :-1] % 1000 == 7).nonzero().tolist()
    assert {int(tokens[row, 0]) // 1000 for row, _ in after} == {1, 2, 3}
    assert begins[:, 1:].nonzero().tolist() == after
