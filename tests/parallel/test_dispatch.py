"""The dispatch table: which all-reduce for which size, from measurements to the choice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench import communication as comm
from ladder.cli import main, make_parser
from ladder.models.errors import UserError
from ladder.parallel import dispatch
from ladder.parallel.dispatch import (
    DEFAULT,
    Dispatch,
    Prefill,
    derive,
    load_dispatch,
    read_table,
    size_text,
    write_table,
)
from ladder.parallel.reducers import PushReducer
from ladder.records import append

KIB, MIB = 1024, 2**20
TABLE = Dispatch(((64 * KIB, "push"), (4 * MIB, "two-shot")), "a test")


@pytest.fixture(autouse=True)
def _no_table_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LADDER_DISPATCH", raising=False)


def test_each_size_goes_where_its_range_says() -> None:
    assert [TABLE.pick(size * KIB) for size in (8, 64, 65, 4096, 4097)] == [
        "push", "push", "two-shot", "two-shot", "nccl",
    ]  # fmt: skip
    assert TABLE.pick(8 * KIB + 8) == "nccl"  # no whole number of 16 bytes
    assert (TABLE.largest("two-shot"), TABLE.largest("push")) == (4 * MIB, 64 * KIB)
    assert (TABLE.hand_over, Dispatch((), "").hand_over) == (4 * MIB, 0)
    assert TABLE.describe().splitlines() == [
        "push     up to 64 KiB",
        "two-shot beyond 64 KiB, up to 4 MiB",
        "nccl     beyond 4 MiB",
    ]
    assert Dispatch((), "").describe() == "nccl     all sizes"
    assert [size_text(size) for size in (100, 8192, MIB, 3 * 512 * KIB)] == [
        "100 bytes", "8 KiB", "1 MiB", "1536 KiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("times", "until"),
    [
        # the fastest at each size, ranges joined, NCCL beyond the last
        (
            {
                8: {"push": 3, "two-shot": 5, "nccl": 13, "torch one-shot": 1},
                16: {"push": 4, "two-shot": 5, "nccl": 13},
                32: {"push": 9, "two-shot": 6, "nccl": 14},
                64: {"two-shot": 20, "nccl": 15},
                128: {"two-shot": 40, "nccl": 16},
            },
            ((16, "push"), (32, "two-shot")),
        ),
        # never beyond what was measured; NCCL in between stays
        (
            {64: {"push": 3, "nccl": 9}, 8: {"push": 3, "nccl": 9}, 32: {"push": 9, "nccl": 8}},
            ((8, "push"), (32, "nccl"), (64, "push")),
        ),
        ({8: {"push": 5.0, "nccl": 5.0}}, ()),  # a tie is NCCL's
        ({}, ()),
    ],
)
def test_the_table_follows_from_the_times(
    times: dict[int, dict[str, float]], until: tuple[tuple[int, str], ...]
) -> None:
    assert derive(times) == until


def test_types_that_no_kernel_of_ours_adds_go_to_nccl() -> None:
    reducer = PushReducer.__new__(PushReducer)
    reducer.dispatch, reducer.picked = TABLE, {}
    assert reducer._kernel(torch.zeros(KIB, dtype=torch.float64)) is None
    assert reducer.picked == {8 * KIB: "nccl"}


def test_the_packaged_table_and_the_default() -> None:
    entries = read_table(dispatch.PACKAGED)
    assert all(entry["source"] for entry in entries)
    keys = [(entry["gpu"], entry["world"]) for entry in entries]
    assert len(set(keys)) == len(keys)
    known = load_dispatch("NVIDIA H200", 4)
    assert known.pick(8 * KIB) == "push"
    assert known.hand_over >= 256 * KIB
    assert load_dispatch("Abacus 9", 4) is DEFAULT
    assert load_dispatch("NVIDIA H200", 3) is DEFAULT
    assert DEFAULT.pick(MIB) == "nccl"


def test_a_users_table_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written, added to, replaced, and found by option and by environment variable."""
    file, other = tmp_path / "mine.json", Dispatch(((16, "push"),), "another")
    write_table(file, "NVIDIA H200", 4, other)
    write_table(file, "Abacus 9", 2, other)
    write_table(file, "NVIDIA H200", 4, TABLE)
    assert [entry["gpu"] for entry in read_table(file)] == ["Abacus 9", "NVIDIA H200"]
    assert load_dispatch("NVIDIA H200", 4, file).until == TABLE.until
    packaged = load_dispatch("NVIDIA H200", 4)
    assert packaged.until != TABLE.until
    monkeypatch.setenv("LADDER_DISPATCH", str(file))
    assert load_dispatch("NVIDIA H200", 4).until == TABLE.until
    assert load_dispatch("Abacus 9", 2).until == other.until
    monkeypatch.setenv("LADDER_DISPATCH", "")
    assert load_dispatch("NVIDIA H200", 4) == packaged


GOOD = {"gpu": "g", "world": 2, "until": [[16, "push"]], "source": "s"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot read"),
        ("{}", "must be a list"),
        (json.dumps([GOOD | {"worlds": 2}]), "did you mean 'world'"),
        (json.dumps([GOOD | {"world": "2"}]), "world='2'"),
        (json.dumps([{"gpu": "g"}]), "world=None"),
        (json.dumps([GOOD | {"until": [[16, "pushy"]]}]), "unknown algorithm"),
        (json.dumps([GOOD | {"until": [[32, "push"], [16, "nccl"]]}]), "must ascend"),
        (json.dumps([GOOD | {"until": [[16, "push"], [16, "nccl"]]}]), "must ascend"),
        (json.dumps([GOOD | {"until": [16, "push"]}]), "must be pairs"),
        (json.dumps([GOOD | {"until": [["16", "push"]]}]), "must be pairs"),
    ],
)
def test_a_table_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(UserError, match=r"table\.json") as error:
        load_dispatch("g", 2, file)
    assert words in str(error.value)
    with pytest.raises(UserError):  # nothing is lost by writing over it
        write_table(file, "g", 2, TABLE)
    assert file.read_text() == text


def test_a_table_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LADDER_DISPATCH", "/nowhere/table.json")
    with pytest.raises(UserError, match=r"/nowhere/table\.json"):
        load_dispatch("NVIDIA H200", 4)


def test_the_report_of_measured_times(tmp_path: Path) -> None:
    """Ratios are to the best of NCCL and torch, and only ours and NCCL are picked."""
    times: dict[int, dict[str, list[float]]] = {
        8192: {"nccl": [13.0] * 9, "torch one-shot": [7.0, 8.0, 9.0], "torch two-shot": [6.0] * 3,
               "push": [2.0, 3.0, 100.0], "two-shot": [6.0] * 3},
        8 * MIB: {"nccl": [60.0] * 3, "torch one-shot": [90.0] * 3, "torch two-shot": [50.0] * 3,
                  "two-shot": [55.0] * 3},
    }  # fmt: skip
    results = {size: comm.summarise(row, size) for size, row in times.items()}
    push = results[8192]["push"]
    assert (push.us, push.ratio) == (3.0, 0.5)
    assert push.low_us < 3.0 < push.high_us
    assert push.algbw_gb_s == pytest.approx(8192 / 3.0 / 1e3)
    assert results[8 * MIB]["two-shot"].ratio == pytest.approx(1.1)
    lines = comm.table(results).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[:2] == ["8", "KiB"]
    assert lines[1].split()[-2] == "0.50"
    assert lines[2].split()[-4:-2] == ["-", "55.0"]  # no push of that size
    known = load_dispatch("NVIDIA H100 80GB HBM3", 2)
    chosen = comm.dispatch_of(results, "a test", known)
    assert chosen.prefill == known.prefill != Prefill(), "what it does not measure stays"
    assert chosen.until == ((8192, "push"), (8 * MIB, "two-shot"))
    assert "uses NCCL above 8 MiB" in comm.verdict(chosen)
    assert "uses NCCL for all sizes" in comm.verdict(Dispatch((), ""))

    class Options:
        programs, dtype = 32, "bfloat16"

    file = tmp_path / "comm.jsonl"
    for size, row in results.items():
        append(file, comm.records(row, size, Options, {"gpu": "g"}))
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(found) == 9
    assert {each["point"]["programs"] for each in found} == {None, 32}
    assert all(set(each) == {"point", "result", "machine"} for each in found)


def test_a_table_is_of_the_default_sizes() -> None:
    """And they may be finer, or reach further."""
    words = ["bench", "comm", "--write-table", "t.json"]
    options = make_parser().parse_args(words)
    assert tuple(options.sizes) == comm.TABLE_SIZES
    comm._check_whole(options)
    options.sizes = [16, *options.sizes, 2**27]
    comm._check_whole(options)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--dtype", "int8"], "unknown --dtype 'int8'"),
        (["--sizes", "8192", "20"], "--sizes=20"),
        (["--sizes", "0"], "--sizes=0"),
        (["--programs", "0"], "--programs=0"),
        (
            ["--write-table", "t.json", "--dtype", "float32"],
            "--write-table with --dtype=float32: the table is of bfloat16; leave one",
        ),
        (
            ["--write-table", "t.json", "--sizes", "8192", "67108864"],
            "--write-table with --sizes=8192 67108864: the table is of all default sizes, and 16 K",
        ),
        (["--write-table", "/nowhere/t.json"], "--write-table=/nowhere/t.json"),
        (["--write-table", __file__], "cannot read the dispatch table"),
        ([], "needs GPUs" if not torch.cuda.is_available() else "one rank per GPU"),
        pytest.param(
            ["--nproc", "2"], "needs GPUs",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without GPUs"),
        ),
    ],
)  # fmt: skip
def test_mistakes_of_bench_comm_are_one_line(
    arguments: list[str], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    out: Any = tmp_path / "out"
    assert main(["bench", "comm", "--out", str(out), *arguments]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert words in errors[0]
    assert not out.exists()
