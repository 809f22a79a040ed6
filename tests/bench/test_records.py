"""Ratios, figures and the page derived from records of `ladder bench inference`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ladder.bench.inference.derive import derive_rows, improvements, pareto, text_table
from ladder.bench.inference.page import write_page
from ladder.bench.results import read_results
from ladder.models.errors import UserError
from tests.bench.records import POINT, record


def rows(*records: Any) -> dict[tuple[str, str], Any]:
    return {(row["point"].plan, row["point"].reducer): row for row in derive_rows(records)}


def test_ratios_by_hand() -> None:
    ladder = replace(POINT, plan="ladder")
    found = rows(
        record(replace(POINT, batch=64), 1.0, 1.0, 1.0),  # another case
        record(POINT, 20.0, 3.0, 200.0),
        record(replace(POINT, reducer="async"), 16.0, 4.0, 320.0),
        record(replace(POINT, plan="none"), 12.0, 2.0, 160.0),
        record(ladder, 15.0, 2.4, 180.0),
        record(replace(ladder, no_comm=True), 10.0, 1.6, 150.0),
    )
    row = found["ladder", "push"]
    assert row["prefill_x_standard"] == pytest.approx(16 / 15)  # the best of each phase
    assert row["decode_x_standard"] == pytest.approx(3 / 2.4)
    assert row["total_x_standard"] == pytest.approx(200 / 180)
    assert row["decode_x_nccl"] == pytest.approx(4 / 2.4)
    assert row["decode_x_none"] == pytest.approx(2.4 / 2)
    assert row["decode_exposed"] == pytest.approx(2.4 / 1.6 - 1)
    assert row["prefill_exposed"] == pytest.approx(0.5)
    assert found["standard", "push"]["decode_exposed"] == pytest.approx(3 / 2 - 1)
    # (compute 2 + comm 1) / max: 1.5 times as fast is ideal, 1.25 is reached
    assert row["decode_ideal"] == pytest.approx(1.25 / 1.5)
    assert found["none", "push"]["decode_exposed"] is None
    assert row["decode_of_floor"] == pytest.approx(1 / 2.4)
    assert row["prefill_of_floor"] == pytest.approx(5 / 15)
    # batch 2, 4 new tokens each, in 0.18 s, on 4 GPUs
    assert row["tokens_s_user"] == pytest.approx(4 / 0.18)
    assert row["tokens_s"] == pytest.approx(8 / 0.18)
    assert row["tokens_s_gpu"] == pytest.approx(2 / 0.18)
    text = text_table(list(found.values()))
    assert "ladder    push" in text
    assert "50.0%" in text  # exposed
    assert "1.250" in text  # x standard
    assert "8192 bytes push" in text
    assert "ladder, push prefill: sharded, copy (16 tokens)" in text
    assert "ladder, push decode: decode (2 sequences)" in text
    assert "no_comm" not in text


def test_virtual_ranks_are_compared_with_their_own_kind() -> None:
    """T 4 on two ranks: not with what T 2 takes without communication, measured beside it."""
    virtual = replace(POINT, plan="ladder", tp=2, degree=4)
    pair = [replace(virtual, no_comm=True), replace(virtual, degree=0, no_comm=True)]
    found = derive_rows([record(virtual, 15.0), record(pair[0], 10.0), record(pair[1], 5.0)])
    assert [row["prefill_exposed"] for row in found] == [pytest.approx(0.5)]


def test_what_was_not_measured_is_left_blank() -> None:
    (row,) = derive_rows([record(replace(POINT, plan="ladder"))])
    for name in ("x_standard", "x_nccl", "x_none", "exposed", "ideal"):
        assert row[f"decode_{name}"] is None
    assert " - " in text_table([row])


def test_one_process_reduces_nothing_and_old_records_hold_no_choice() -> None:
    alone, old = record(replace(POINT, tp=1)), record(POINT)
    del old["result"]["chosen"]
    for each in (alone, old):
        assert "decode (" not in text_table(derive_rows([each]))


def test_the_papers_figures_by_hand() -> None:
    def case(plan: str, tp: int, batch: int, total: float, reducer: str = "push") -> Any:
        point = replace(POINT, plan=plan, tp=tp, batch=batch, reducer=reducer)
        return record(point, total=total)

    found = derive_rows(
        [
            case("standard", 4, 1, 100.0),
            case("standard", 4, 1, 150.0, "async"),
            case("standard", 4, 64, 400.0),
            case("ladder", 4, 1, 80.0),
            case("ladder", 4, 1, 120.0, "async"),
            case("ladder", 4, 64, 320.0),
            case("ladder", 2, 1, 90.0),  # no standard beside it
            case("ladder", 2, 64, 300.0),
        ]
    )
    shape = replace(POINT.case, tp=0, batch=0)
    assert improvements(found) == {(shape, 4): {"ladder": {1: 25.0, 64: 25.0}}}
    assert improvements(found, "async") == {(shape, 4): {"ladder": {1: 25.0}}}
    frontier = pareto(found)[shape]["ladder"]
    # 4 new tokens: (s, tokens/s/GPU); (0.09, 22.2), (0.3, 426.7) beat (0.12, 8.3), (0.32, 200)
    assert frontier == [
        (0.08, pytest.approx(4 / 0.08 / 4)),
        (0.09, pytest.approx(4 / 0.09 / 2)),
        (0.3, pytest.approx(256 / 0.3 / 2)),
    ]


def test_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [
        record(replace(POINT, reducer="async"), decode=4.0),
        record(replace(POINT, plan="ladder"), decode=3.0, total=80.0),
    ]
    more = [
        record(replace(POINT, batch=4, reducer="async"), decode=5.0, total=120.0),
        record(replace(POINT, batch=4, plan="ladder"), decode=4.0, total=90.0),
    ]
    found = derive_rows([*alone, *more])
    times = dict.fromkeys(("imports_s", "group_s", "weights_s", "capture_s", "prefill_s"), 2.0)
    started = [{"point": asdict(POINT), "cold": {**times, "total_s": 10.25}}]
    facts = {"gpu": "<none>", "gpus": 4, "command": "ladder bench"}
    page = write_page(found, started, [facts, {**facts, "gpu": "H200"}, facts])
    assert page.count("<td>4x &lt;none&gt;</td>") == 1  # what was run on what: once each
    assert page.index("4x H200") > page.rindex("10.25")  # and last
    assert page.index("<svg") < page.index("<table")  # a figure first
    # 3 ms for 4: the first case with the most points
    assert "ladder is the fastest, 3.000 ms a step, 1.33 x as fast as standard (4.000 ms)" in page
    assert "25.00%" in page  # decode: 1 - 3/4; tokens/s: 100/80 - 1
    assert "10.25" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is fetched
    assert page.count("<svg") == 3  # steps; best reducers; no case with NCCL alone; the frontier
    assert write_page(derive_rows(alone), [], []).count("<svg") == 1  # no curves of one batch size
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    bare = write_page(found, [], [])
    assert "need matplotlib" in bare
    assert "25.00%" in bare
    assert "<svg" not in bare


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"# A page\n", r"line 1 of .* is not JSON .*: name the results of a benchmark, a .jsonl"),
        (b"\xff\xfe", r"is no text; name the results of a benchmark, a .jsonl"),
        (b"[1]\n", r"line 1 of .* is no record of a benchmark; name the results of"),
        (
            b'{"point": {}}\n{"po',
            r"line 2 of .* is not JSON .*: its writing was interrupted; remove",
        ),
    ],
)
def test_what_are_no_records_is_told_from_a_line_that_was_cut(
    text: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / "records.jsonl").write_bytes(text)
    with pytest.raises(UserError, match=words):
        read_results(tmp_path / "records.jsonl")


def test_records_made_before_no_comm_had_its_name_are_read(tmp_path: Path) -> None:
    """`dropped` and `without_reduces` of inference, `silent` of training: files recorded so far."""
    ladder = replace(POINT, plan="ladder")
    new = [record(ladder, 15.0), record(replace(ladder, no_comm=True), 10.0)]
    old = json.dumps(new[0]).replace('"no_comm": ["', '"without_reduces": ["')
    file = tmp_path / "inference.jsonl"
    file.write_text(f"{old}\n{json.dumps(new[1])}\n".replace('"no_comm"', '"dropped"'))
    assert read_results(file) == new
    (row,) = derive_rows(read_results(file))
    assert row["prefill_exposed"] == pytest.approx(0.5)
    file.write_text('{"point": {"layout": "tp2", "silent": true}}\n')
    assert read_results(file) == [{"point": {"layout": "tp2", "no_comm": True}}]
