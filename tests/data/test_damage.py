"""Prepared folders that are damaged: what is wrong is named, and nothing trains on it unnoticed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ladder.config import LARGEST, build
from ladder.data import verify
from ladder.data.mix import open_sources
from ladder.data.prepared import open_data
from ladder.data.verify import Verification, check_shards
from ladder.eval.offline import build_tasks
from ladder.models.errors import UserError
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from tests.distributed import Pools
from tests.train.runs import flip, recipe


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of a prepared folder, of 400 tokens and several shards."""
    return Path(shutil.copytree(prepared, tmp_path / "data"))


def edit(folder: Path, keys: list[Any], value: Any) -> None:
    """Set a value of the index; ... removes its key."""
    path = folder / "index.json"
    index = inner = json.loads(path.read_text())
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    if value is ...:
        del inner[keys[-1]]
    path.write_text(json.dumps(index))


SHARD = ["splits", "train", "shards", 0]


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        (["eos_id"], 400, "eos_id=400 must be a whole number, 0 or more and below 400"),
        (["eos_id"], -1, "eos_id=-1 must be"),
        (["eos_id"], "0", "eos_id='0' must be"),
        (["eos_id"], None, "eos_id=None must be"),
        (["eos_id"], True, "eos_id=True must be"),
        (["eos_id"], 1.5, "eos_id=1.5 must be"),
        (["eos_id"], float("nan"), "eos_id=nan must be"),
        (["eos_id"], ..., "it lacks eos_id"),
        (["vocab_size"], 0, "vocab_size=0 must be"),
        (["vocab_size"], "400", "vocab_size='400' must be"),
        (["tokenizer_sha256"], 5, "tokenizer_sha256=5 must be a text"),
        (["token_bytes"], "../token_bytes.npy", "must be the name of a file in the folder"),
        (["token_bytes"], None, "token_bytes=None must be"),
        (["source"], [], r"source=\[\] must be an object"),
        (["splits"], [3], r"splits=\[3\] must be an object"),
        (["splits", "train"], None, "train=None must be an object"),
        (["splits", "train", "shards"], {}, "shards={} must be a list"),
        (["splits", "train", "bytes"], -1, "split 'train': bytes=-1 must be"),
        (["splits", "train", "documents"], None, "documents=None must be"),
        (["splits", "train", "tokens"], 7, "tokens=7, and its shards have"),
        (SHARD, 5, "shard 5 must be an object"),
        ([*SHARD, "file"], "/etc/passwd", "file='/etc/passwd' must be the name"),
        ([*SHARD, "file"], "..", "file='..' must be the name"),
        ([*SHARD, "tokens"], 100.0, "tokens=100.0 must be a whole number"),
        ([*SHARD, "sha256"], ..., "sha256=None must be a text"),
    ],
)
def test_a_damaged_index_names_what_is_wrong(
    folder: Path, keys: list[Any], value: Any, words: str
) -> None:
    edit(folder, keys, value)
    with pytest.raises(UserError, match=rf"index\.json is damaged: .*{words}.*; prepare"):
        open_data(folder)


def save(folder: Path, lengths: Any) -> None:
    np.save(folder / "token_bytes.npy", lengths)


def save_header(folder: Path, shape: str) -> None:
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    header = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text
    (folder / "token_bytes.npy").write_bytes(header + b"\0" * 1600)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: save(f, np.full(400, -1, "<i4")), "is damaged: it must hold whole numbers"),
        (lambda f: save(f, np.full(400, np.nan)), "is damaged: it must hold whole numbers"),
        (lambda f: save(f, np.full(400, 2**40)), "is damaged: it must hold whole numbers"),
        (lambda f: save(f, np.full(400, "a")), "is damaged: it must hold whole numbers"),
        (lambda f: save_header(f, "(10**15,)"), "cannot be read"),
        (lambda f: save_header(f, "(1000000000000000,)"), "cannot be read"),
        (lambda f: save_header(f, "(10000000000000000000000,)"), "cannot be read"),
        (lambda f: save_header(f, "(-400,)"), "cannot be read"),
        (lambda f: save_header(f, "(400, 0)"), "cannot be read|has shape"),
        (lambda f: save_header(f, "400"), "cannot be read"),
        (lambda f: (f / "token_bytes.npy").write_bytes(b"PK\x03\x04" * 100), "cannot be read"),
        (lambda f: (f / "token_bytes.npy").write_bytes(b""), "cannot be read"),
    ],
)
def test_damaged_lengths_of_tokens_are_named(
    folder: Path, damage: Callable[[Path], object], words: str
) -> None:
    """A header that asks for a petabyte is no memory error, and not the index's fault."""
    damage(folder)
    with pytest.raises(UserError, match=rf"token_bytes\.npy ({words})"):
        open_data(folder)


def test_a_flipped_bit_among_the_lengths_of_tokens_is_told(folder: Path) -> None:
    """Bits per byte are divided by them: each number is a plausible one."""
    data = bytearray((folder / "token_bytes.npy").read_bytes())
    data[-4] ^= 1
    (folder / "token_bytes.npy").write_bytes(data)
    with pytest.raises(UserError, match=r"token_bytes\.npy is damaged: its SHA-256"):
        open_data(folder)
    edit(folder, ["token_bytes_sha256"], ...)  # as folders that were prepared before it was
    assert open_data(folder).vocab_size == 400


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read.*not whole"):
        open_data(folder)


def test_every_shard_is_compared_by_one_rank(folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    data = open_sources([{"path": str(each), "weight": 1} for each in (folder, other)])
    shares = [[path for path, _ in Verification(data, rank, 3).shards] for rank in range(3)]
    found = sorted(path for share in shares for path in share)
    assert found == sorted([*folder.glob("*.bin"), *other.glob("*.bin")])
    for path in (folder / "heldout-00000.bin", other / "train-00001.bin"):
        flip(path)
        whole = Verification(data)
        whole.start()
        assert f"{path} is damaged" in whole.soon()
        flip(path)  # back
    path.unlink()
    gone = Verification(data)
    gone.start()
    assert f"{path} cannot be read: No such file" in gone.soon()


def test_held_out_shards_are_compared_before_they_are_scored(folder: Path, tmp_path: Path) -> None:
    check_shards(open_data(folder), "heldout")
    flip(folder / "train-00000.bin")
    check_shards(open_data(folder), "heldout")
    flip(folder / "heldout-00000.bin")
    with pytest.raises(UserError, match=r"heldout-00000\.bin is damaged"):
        check_shards(open_data(folder), "heldout")
    with pytest.raises(UserError, match=r"heldout-00000\.bin is damaged"):
        build_tasks([str(folder)], tmp_path / "tasks", ["local_heldout"])


def test_a_flipped_bit_ends_a_run_before_it_begins(corpus: Path, tmp_path: Path) -> None:
    """It is a token like any other: nothing else tells."""
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    flip(data / "train-00000.bin")
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged: its SHA-256"):
        train(recipe(data, tmp_path / "run"), device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_flipped_bit_that_is_found_later_ends_a_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where terabytes are read while training goes on."""
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    flip(data / "train-00000.bin")
    later = Verification.soon
    monkeypatch.setattr(Verification, "soon", lambda self: "" if later(self) else "intact?")
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged: its SHA-256"):
        train(recipe(data, tmp_path / "run"), device="cpu")
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_run_does_not_wait_for_all_shards(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "PROMPT", 0.0)
    ended = []

    def endless(path: Path) -> str:
        (self,) = (each for each in started if each.shards[0][0] == path)
        ended.append(self._ended.wait(60))
        return ""

    started: list[Verification] = []
    start = Verification.start
    monkeypatch.setattr(Verification, "start", lambda self: (started.append(self), start(self)))
    monkeypatch.setattr(verify, "checksum", endless)
    train(recipe(corpus, tmp_path / "run"), device="cpu")
    started[0]._thread.join(60)
    assert ended == [True]  # it was told to end when the run did, and not waited for


def test_a_run_that_is_refused_compares_no_further(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a mistake that is found after the comparing has begun."""
    started: list[Verification] = []
    start = Verification.start
    monkeypatch.setattr(Verification, "start", lambda self: (started.append(self), start(self)))
    with pytest.raises(UserError, match="resume"):
        train(recipe(corpus, tmp_path / "run"), resume=True, device="cpu")
    assert [each._ended.is_set() for each in started] == [True]


def test_an_index_of_very_many_shards_is_read(corpus: Path, tmp_path: Path) -> None:
    """`prepare` writes it, however long: the limit of configs is not for it."""
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    index = json.loads((data / "index.json").read_text())
    index["source"]["files"] = [0] * (LARGEST + 1)
    (data / "index.json").write_text(json.dumps(index))
    assert open_data(data).index == index


def test_a_flipped_bit_is_told_on_every_rank(corpus: Path, tmp_path: Path, pools: Pools) -> None:
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    flip(data / "heldout-00000.bin")  # the second shard, which rank 1 compares
    settings = recipe(data, tmp_path / "run", tp=2).to_dict()
    for message in pools(2).run(fail, settings):
        assert "heldout-00000.bin is damaged" in message


def fail(rank: int, world: int, settings: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        train(build(TrainConfig, settings, "test recipe"), device="cpu")
    return str(caught.value)
