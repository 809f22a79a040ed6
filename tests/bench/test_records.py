"""Ratios, figures and the page derived from records of `ladder bench inference`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ladder.bench.inference import measure
from ladder.bench.inference.derive import (
    HEAD,
    cells,
    derive_rows,
    improvements,
    pareto,
    text_table,
)
from ladder.bench.inference.page import COLD_PARTS, decode_bars, write_page
from ladder.bench.inference.points import resolve
from ladder.bench.results import read_results
from ladder.models.errors import UserError
from ladder.records import append
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


def of(machine: dict[str, Any], *records: Any) -> list[Any]:
    return [{**each, "machine": machine} for each in records]


OLD, NEW = {"gpu": "H100", "commit": "a"}, {"gpu": "H200", "commit": "a"}


def test_no_figure_compares_two_machines() -> None:
    """NCCL's standard and `none` of an H100 beside push of an H200, in one file."""
    plain = replace(POINT, reducer="async")
    before = of(OLD, record(plain, decode=4.0), record(replace(POINT, plan="none"), decode=3.2))
    found = derive_rows([*before, *of(NEW, record(POINT, decode=2.0))])
    assert found[0]["decode_exposed"] == pytest.approx(4 / 3.2 - 1)
    assert found[-1]["point"] == POINT
    for name in ("x_nccl", "x_none", "exposed"):
        assert found[-1][f"decode_{name}"] is None, name
    assert found[-1]["decode_x_standard"] == 1
    page = write_page(found, [], [])
    for gpu in ("H100", "H200"):
        assert page.count(f"4 new tokens, gpu {gpu}</caption>") >= 1
    assert "gpu H100: standard is the fastest, 4.000 ms a step" in page  # the most points
    started = [{"point": asdict(POINT), "cold": dict.fromkeys(COLD_PARTS, 1.0)}] * 2
    cold = write_page([], of(OLD, started[0]) + of(NEW, started[1]), [])
    assert cold.count(">point</th>") == 2


def test_curves_and_frontiers_are_of_one_machine() -> None:
    def cases(batch: int) -> list[Any]:
        own = replace(POINT, batch=batch)
        ladder = record(replace(own, plan="ladder"), total=80.0 + batch)
        return [record(own, total=100.0 + batch), ladder]

    one, two = cases(1), cases(4)
    assert write_page(derive_rows(of(NEW, *one, *two)), [], []).count("<svg") == 3
    assert write_page(derive_rows(of(OLD, *one) + of(NEW, *two)), [], []).count("<svg") == 1


def test_a_point_is_compared_with_the_counterpart_of_its_run() -> None:
    """Then of its reducer, then with the newest: `none` was measured in each of two runs."""
    plain = replace(POINT, reducer="async")
    none, none_too = (replace(each, plan="none") for each in (POINT, plain))
    ladder = replace(plain, plan="ladder")
    first, second = {**NEW, "command": "first"}, {**NEW, "command": "second"}
    earlier = of(first, record(POINT, decode=3.0), record(none, decode=2.0))
    earlier += of(first, record(replace(ladder, reducer="push", no_comm=True), decode=1.0))
    later = of(second, record(plain, decode=6.0), record(none_too, decode=4.0))
    later += of(
        second, record(ladder, decode=6.0), record(replace(ladder, no_comm=True), decode=3.0)
    )
    found = rows(*earlier, *later)
    assert found["standard", "push"]["decode_exposed"] == pytest.approx(0.5)
    assert found["standard", "async"]["decode_exposed"] == pytest.approx(0.5)
    assert found["standard", "async"]["decode_x_none"] == pytest.approx(1.5)
    assert found["ladder", "async"]["decode_exposed"] == pytest.approx(1.0)
    third = of({**NEW, "command": "third"}, record(replace(POINT, plan="parallel"), decode=6.0))
    assert rows(*earlier, *later, *third)["parallel", "push"]["decode_x_none"] == pytest.approx(3)
    fused = of({**NEW, "command": "third"}, record(replace(POINT, reducer="fused"), decode=6.0))
    found = rows(*earlier, *later, *fused)
    assert found["standard", "fused"]["decode_exposed"] == pytest.approx(0.5)  # the newest: 4
    # a point that was measured again is as new as its newest record
    again = of({**NEW, "command": "again"}, record(none, decode=3.0))
    found = rows(*earlier, *later, *again, *fused)
    assert found["standard", "fused"]["decode_exposed"] == pytest.approx(1.0)


def test_products_in_fp8_have_no_floor_of_bf16() -> None:
    """Older records have one, and their shares may be above 1."""
    eight = replace(POINT, weights="fp8", activations="fp8")
    new = record(eight)
    new["result"]["prefill_floor_ms"] = None
    for each in (record(eight, prefill=4.0), new):
        (row,) = derive_rows([each])
        assert row["prefill_of_floor"] is None
        assert cells(row)[HEAD.index("of floor")] == "-"
        assert row["decode_of_floor"] == pytest.approx(0.5)
    (row,) = derive_rows([record(replace(POINT, weights="fp8"))])
    assert row["prefill_of_floor"] == pytest.approx(0.5)
    check: Any = None
    session: Any = SimpleNamespace(
        model=SimpleNamespace(reducer=None, runtime=SimpleNamespace(pick=None))
    )
    timings = measure.Timings([2.0], [[1.0]], [3.0])
    for point in (eight, replace(eight, activations="bf16")):
        timed = measure.TimedSession(point, resolve(point), session, 1.0, check)
        floor = measure._result(timed, timings, 1e12, 1e12).prefill_floor_ms
        assert (floor is None) == (point is eight)


def test_figures_are_of_one_kind_of_point() -> None:
    """Captions tell formats apart, and names of plans T."""
    wide = replace(POINT, plan="desync-2x", degree=8)
    narrow = replace(wide, degree=4)  # T is the TP degree
    found = derive_rows(
        [
            record(replace(each, batch=batch), decode=ms, total=100 * ms)
            for batch in (1, 4)
            for each, ms in ((POINT, 4.0), (wide, 3.0), (narrow, 2.0))
        ]
    )
    ((_, gains),) = improvements(found).items()
    assert {plan: gain[1] for plan, gain in gains.items()} == {
        "desync-2x": pytest.approx(100.0),
        "desync-2x (T 8)": pytest.approx(100 / 3),
    }
    assert list(pareto(found)[replace(POINT.case, tp=0, batch=0)]) == [
        "standard",
        "desync-2x (T 8)",
        "desync-2x",
    ]
    names = [bar.name for bar in decode_bars(found[:3])]
    assert names == ["standard, push", "desync-2x (T 8), push", "desync-2x, push", "memory floor"]
    eight: dict[str, Any] = {"weights": "fp8", "activations": "fp8", "cache": "fp8"}
    records = [
        record(replace(POINT, batch=batch, plan=plan, **more), total=100.0 + 10 * batch)
        for more in (dict[str, Any](), eight)
        for batch in (1, 4)
        for plan in ("standard", "ladder")
    ]
    page = write_page(derive_rows(records), [], [])
    kinds = "4 new tokens", "4 new tokens, fp8 weights, fp8 activations, fp8 cache"
    for kind in kinds:
        assert page.count(f"tiny, 4 layers, prompt 8, {kind}, TP 4; each plan") == 1
        assert page.count(f"tiny, 4 layers, prompt 8, {kind}; the frontier") == 1


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


def test_what_follows_an_interrupted_line_is_a_line_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    for text, kept in (("", 0), ('{"a": 1}\n', 1), ('{"a": 1}\n{"po', 2)):
        file.write_text(text)
        append(file, [{"b": 2}, {"c": 3}])
        lines = file.read_text().splitlines()
        assert lines[:kept] == text.splitlines()
        assert [json.loads(line) for line in lines[kept:]] == [{"b": 2}, {"c": 3}]
    file.unlink()
    append(file, [])
    append(file, [{"b": 2}])
    assert file.read_text() == '{"b": 2}\n'


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
