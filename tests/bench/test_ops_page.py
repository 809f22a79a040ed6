"""What `ladder bench ops` derives of times: ECT and E, the best beside the aims, the page."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ladder.bench import figures
from ladder.bench.ops.best import best_rows
from ladder.bench.ops.derive import records, summarise, text_table
from ladder.bench.ops.page import finding, newest, normalised, picked_ranges, write_page
from ladder.bench.ops.points import BAGS, EXPERTS, FEW, OpPoint
from tests.bench.records import timed

OP = "matmul_all_reduce"


def test_ect_efficiency_and_floor() -> None:
    """By hand: the collective costs 160 - 100 = 60 us; of that, ours leaves 115 - 100 = 15."""
    captured = [
        timed("alone", "alone", 110.0), timed("alone, B contiguous", "alone", 100.0),
        timed("NCCL, by table", "collective", 170.0), timed("NCCL", "collective", 160.0),
        timed("ours", "operator", 115.0),
        timed("slow", "operator", 175.0), timed("free", "torch", 100.0),
    ]  # fmt: skip
    # Another mode has a product and a collective of its own.
    eager = [
        timed("alone", "alone", 200.0, "other"), timed("NCCL", "collective", 300.0, "other"),
        timed("ours", "operator", 280.0, "other"),
    ]  # fmt: skip
    found = {(e.name, e.mode): result for e, result in summarise([*captured, *eager], 40.0)}
    assert [found[name, "eager"].ect_us for name in ("NCCL", "ours", "slow")] == [60, 15, 75]
    e = [found[name, "eager"].efficiency for name in ("NCCL", "ours", "slow", "free")]
    assert e == [0.0, 0.75, -0.25, 1.0]
    assert found["ours", "other"].efficiency == pytest.approx(0.2)
    assert (found["ours", "eager"].floor_us, found["ours", "eager"].of_floor) == (100.0, 1.15)
    linked = {each.name: result for each, result in summarise(captured, 130.0)}
    assert (linked["ours"].link_us, linked["ours"].floor_us) == (130.0, 130.0)
    # A collective that costs nothing leaves nothing to hide.
    idle = [timed("alone", "alone", 100.0), timed("NCCL", "collective", 100.0)]
    assert [result.efficiency for _, result in summarise(idle, 40.0)] == [None, None]
    assert summarise(captured[2:], 40.0) == []  # no product: it was wrong
    # Of lookups, the bytes count: what is looked up again comes from a cache.
    floors = {result.floor_us for _, result in summarise(captured, 40.0, 60.0)}
    assert floors == {60.0}
    assert {result.floor_us for _, result in summarise(captured, 70.0, 60.0)} == {70.0}


def test_the_best_way_beside_the_aim() -> None:
    """By hand: the collective costs 160 - 100 us; at m 1024 an E of 0.30 is aimed at, 142 us."""
    found: list[dict[str, Any]] = []
    for shape, op, m, us in (
        ("flux-gpt3", OP, 1024, 140.0), ("flux-gpt3", OP, 2048, 140.0), ("flux-gpt3", OP, 64, 90.0),
        ("llama-3-8b o", OP, 1024, 115.0), ("llama-3-8b o", OP, 64, 115.0),
        ("gemv", "linear_all_reduce", 8, 102.1), (("dlrm"), BAGS, 512, 110.0),
    ):  # fmt: skip
        point = OpPoint(op, shape, m, 8, 8, 4, "bfloat16", 0, 2 * (op == BAGS), 2)
        each = [
            timed("alone", "alone", 100.0), timed("NCCL", "collective", 160.0),
            timed("staged", "operator", 170.0), timed("tracked:pieces=2", "operator", us),
            timed("torch fused", "torch", 130.0), timed("torch native", "torch", 145.0),
        ]  # fmt: skip
        found += records(point, summarise(each, 40.0), {"ranks": 4})
    head, *cells = best_rows(found)
    assert (head[2], head[4:8]) == ("path", ["us", "ECT", "E", "floor"])
    assert {row[2] for row in cells} == {"tracked:pieces=2"}
    first = cells[0]
    assert first[4:11] == ["140.0", "40.0", "0.33", "100.0", "1.40", "60.0", "0.50"]
    # E 0.30, E 0.50, none, 1.05 x 100 + 10, none, 100 + 2, 1.10 x 100
    assert [row[-2:] for row in cells] == [
        ["142.0", "yes"], ["130.0", "no"], ["-", "-"], ["115.0", "yes"], ["-", "-"],
        ["102.0", "no"], ["110.0", "yes"],
    ]  # fmt: skip
    page = write_page(found)
    assert "tracked:pieces=2" in page
    if figures.available():
        assert "140 us, ECT 40, E 0.33" in page
        assert "m 1024: torch fused" in page


def several() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for op, tables in ((OP, 0), (BAGS, 2)):
        for m, us in ((64, 115.0), (128, 175.0)):
            point = OpPoint(op, "x", m, 8, 8, 2, "float32", 0, tables, tables)
            each = [
                timed("alone", "alone", 100.0), timed("NCCL", "collective", 160.0),
                timed("staged", "operator", us, picked=True),
            ]  # fmt: skip
            found += records(point, summarise(each, 40.0), {"ranks": 2, "link_gb_s": 369.0})
    return found


def test_the_page_has_figures_and_says_what_lost() -> None:
    found = several()
    behind = "-0.25 to 0.75 (below 0, slower than the baseline: 1 of 2)"
    said = (
        f"Overlap efficiency of what is picked: matmul_all_reduce {behind}; "
        f"embedding_bag_all_to_all {behind}."
    )
    assert finding(found) == said
    page = write_page(found)
    assert said in page
    assert "115.0 (0.75)*" in page
    assert "369 GB/s of the link" in page
    if figures.available():
        assert page.count("<figure>") == 4  # E by m, bars by m and of the largest, and all bags
        assert "{128 | 2}, pooling 2: product" not in page
        assert "{128 | 2}, pooling 2: staged (picked)" in page
    newer = summarise([timed("alone", "alone", 90.0), timed("NCCL", "collective", 160.0)], 40.0)
    again = records(OpPoint(OP, "x", 64, 8, 8, 2, "float32"), newer, {"ranks": 2})
    page = write_page([*found, *again])
    assert page.count("90.0") == 1  # a newer run replaces the older
    assert "115.0 (0.75)*" not in page.partition("embedding_bag")[0]  # all of it


def run_of(ranks: int, dtype: str, gpu: str, **ways: float) -> list[dict[str, Any]]:
    """A run of one point; the fastest way is picked."""
    each = [
        timed(name, "operator", us, picked=us == min(ways.values())) for name, us in ways.items()
    ]
    each += [timed("alone", "alone", 100.0), timed("NCCL", "collective", 160.0)]
    point = OpPoint(OP, "x", 64, 8, 8, ranks, dtype)
    return records(point, summarise(each, 40.0), {"ranks": ranks, "gpu": gpu})


def test_runs_of_other_ranks_types_and_gpus_are_tables_of_their_own() -> None:
    """Catches rows of 2 and 4 ranks under one caption, and figures that keep only one."""
    found = [
        *run_of(2, "float32", "none", staged=115.0),
        *run_of(4, "float32", "none", staged=125.0),
        *run_of(2, "bfloat16", "none", staged=135.0),
        *run_of(2, "float32", "H200", staged=145.0),
    ]
    settings = ["float32, 2 ranks", "float32, 4 ranks", "bfloat16, 2 ranks",
                "float32, 2 ranks, H200"]  # fmt: skip
    page, text = write_page(found), text_table(found)
    parts = page.split("<h2>")
    for setting, us in zip(settings, ("115.0", "125.0", "135.0", "145.0"), strict=True):
        assert f"{OP}, eager, {setting}, microseconds (E)\n" in text
        (part,) = [each for each in parts if each.startswith(f"{OP}, eager, {setting}</h2>")]
        assert f"Microseconds (E), {setting}</" in part
        assert [cell for cell in ("115.0", "125.0", "135.0", "145.0") if cell in part] == [us]
        if figures.available():
            assert f"{us[:3]} us" in part
    assert [row[0] for row in best_rows(found)[1:]] == [f"{OP}, eager, {s}" for s in settings]
    assert best_rows(found[:3])[1][0] == f"{OP}, eager"  # of one alone, its head says it
    assert [line.partition(", float32, 4")[0] for line in picked_ranges(found)][1] == OP
    assert picked_ranges(found)[3] == f"{OP}, float32, 2 ranks, H200, 0.25"


def test_a_points_ways_are_those_of_its_newest_run() -> None:
    """Catches a way that is no longer there, as the fastest; and two that are picked."""
    older = run_of(2, "float32", "none", staged=115.0, gone=105.0)
    newer = run_of(2, "float32", "none", staged=125.0)
    page = write_page([*older, *newer])
    assert "gone" not in page
    assert "125.0 (0.58)*" in page
    assert finding([*older, *newer]).endswith(f"{OP} 0.58.")
    # Another run by its machine, though no way is there twice.
    found = newest([*older[1:2], *[{**each, "machine": {"gpu": "none"}} for each in newer]])
    assert [each["result"]["us"] for each in found] == [125.0, 100.0, 160.0]


def test_times_over_the_baseline_as_the_papers_figures() -> None:
    """By hand: 80 and 120 us over the 160 of the faster baseline; the floor is 100 us."""
    for op, label in ((FEW, "x, m 8"), (EXPERTS, "x, m 8"), (BAGS, "{8 | 4}, pooling 3")):
        bags = (4, 3) if op == BAGS else (0, 0)
        point = OpPoint(op, "x", 8, 8, 8, 2, "float32", 0, *bags)
        each = [
            timed("alone", "alone", 100.0), timed("NCCL", "collective", 160.0),
            timed("NCCL, by table", "collective", 200.0),
            timed("staged", "operator", 120.0), timed("pushed", "operator", 80.0),
        ]  # fmt: skip
        found = records(point, summarise(each, 40.0), {"ranks": 2})
        text = json.dumps(found[0]["point"])
        bars = [(bar.name, bar.value, bar.bound) for bar in normalised(text, found)]
        ours, floor = (f"{label}: pushed", 0.5, False), (f"{label}: floor", 0.625, True)
        assert bars == [(f"{label}: staged", 0.75, False), ours, floor]
        fastest = [(bar.name, bar.value, bar.bound) for bar in normalised(text, found, True)]
        assert fastest == [ours, floor]
        if figures.available():
            page = write_page(found)
            assert f"{label}: pushed: 0.5 x" in page
            assert (f"{label}: staged: 0.75 x" in page) == (op == BAGS)  # of others the fastest
