"""The operators' table that `ladder bench ops` writes: what enters it, and what it picks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.bench.ops.derive import summarise
from ladder.bench.ops.points import (
    BAGS,
    Variant,
)
from ladder.bench.ops.table import entries, picked_by, write_table
from ladder.models.errors import UserError
from ladder.ops import explain
from ladder.ops.registry import Call, bucket
from ladder.ops.table import VARIABLE, read_table
from tests.bench.records import OP, registered, timed

STAGED, FAST = Variant("staged"), Variant("fast", (("chunk", 3),))
BACKEND = Variant("collective")


def unrun(group: Any, x: Any, chunk: int = 1) -> Any:
    raise AssertionError("a table asks nothing to run")


def call(m: int, op: str = OP) -> Call:
    return Call(op, "H", torch.bfloat16, 4, bucket((m, 8, 8)), exact=(m, 8, 8))


def measured(m: int, **modes: dict[Variant, float]) -> Any:
    each = [timed("alone", "alone", 1.0, mode) for mode in modes]
    each += [timed("NCCL", "collective", 50.0, mode) for mode in modes]
    each += [
        timed(str(variant), "operator", us, mode, variant=variant)
        for mode, times in modes.items()
        for variant, us in times.items()
    ]
    return call(m), summarise(each, 0.5)


@pytest.mark.parametrize(
    ("points", "picked"),
    [
        (
            [{"captured": {STAGED: 9, FAST: 8}, "eager": {STAGED: 19, FAST: 18}}],
            {"captured": FAST, "eager": FAST},
        ),
        ([{"captured": {STAGED: 9, FAST: 9}}], {"captured": STAGED}),
        ([{"captured": {STAGED: 9, FAST: 10}}], {"captured": STAGED}),
        # Slower in one mode: it is taken in the other.
        (
            [{"captured": {STAGED: 9, FAST: 2}, "eager": {STAGED: 19, FAST: 20}}],
            {"captured": FAST, "eager": STAGED},
        ),
        (
            [{"captured": {STAGED: 9}, "eager": {STAGED: 19, FAST: 2}}],
            {"captured": STAGED, "eager": FAST},
        ),
        # Slower at one m of the same bucket, or not there: it is not taken.
        ([{"eager": {STAGED: 9, FAST: 2}}, {"eager": {STAGED: 9, FAST: 10}}], {"eager": STAGED}),
        ([{"eager": {STAGED: 9, FAST: 2}}, {"eager": {STAGED: 9}}], {"eager": STAGED}),
        ([{"eager": {STAGED: 9, FAST: 10}}, {"eager": {STAGED: 9, FAST: 2}}], {"eager": STAGED}),
        # No graph holds staged: it counts as it is without one.
        (
            [{"captured": {FAST: 2}, "eager": {STAGED: 19, FAST: 30}}],
            {"captured": FAST, "eager": STAGED},
        ),
        ([{"eager": {FAST: 2}}], {}),  # staged was wrong, so nothing is known to be as fast
    ],
)
def test_nothing_slower_than_staged_enters_the_table(
    points: Any, picked: dict[str, Variant]
) -> None:
    with registered("fast", unrun):
        given = [measured(64 - n, **point) for n, point in enumerate(points)]
        found = entries(given, "a test")
    assert {each["mode"]: (each["implementation"], each["options"]) for each in found} == {
        mode: (each.name, dict(each.options)) for mode, each in picked.items()
    }
    assert len(found) == len(picked)


def test_an_entry_has_what_was_measured() -> None:
    """The sizes, the time and that of what would run without it, by mode; and how long the host
    may take: the longest call that waited for it, or else the shortest."""
    with registered("fast", None, surplus=lambda call, options: 0.0):
        points = [
            measured(40, captured={STAGED: 90, FAST: 80}, eager={STAGED: 95, FAST: 85}),
            measured(50, captured={STAGED: 70, FAST: 20}, eager={STAGED: 75, FAST: 35}),
            measured(200, captured={STAGED: 70, FAST: 20}, eager={STAGED: 75, FAST: 50}),
        ]
        captured, eager, *more = entries(points, "a test")
        assert [each["sizes"] for each in more] == [[256, 8, 8]] * 2
        assert [each["sizes"] for each in eager["measured"]] == [[40, 8, 8], [50, 8, 8]]
        assert captured["measured"][1] == {"sizes": [50, 8, 8], "us": 20, "instead_us": 70}
        assert (captured["host_us"], eager["host_us"]) == (0, 50)
        (_, alone) = entries(points[:1], "a test")
        assert alone["host_us"] == 85
        call, timed_ways = points[0]  # newer records say it themselves
        recorded = [(each, replace(result, host_us=33.0)) for each, result in timed_ways]
        assert entries([(call, recorded)], "a test")[1]["host_us"] == 33


@pytest.mark.parametrize(
    ("points", "picked"),
    [
        # Where any order is allowed, what is picked is never slower than `collective`.
        ([{"captured": {STAGED: 9, BACKEND: 6, FAST: 8}}], [("ranks", FAST), ("any", BACKEND)]),
        ([{"captured": {STAGED: 9, BACKEND: 9, FAST: 8}}], [("ranks", FAST), ("any", FAST)]),
        ([{"captured": {STAGED: 9, BACKEND: 6}}], [("ranks", STAGED), ("any", BACKEND)]),
        ([{"captured": {STAGED: 5, BACKEND: 6}}], [("ranks", STAGED), ("any", STAGED)]),
    ],
)  # fmt: skip
def test_the_backends_sums_have_entries_of_their_own(
    points: Any, picked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registered("fast", unrun):
        found = entries([measured(64, **point) for point in points], "a test")
        assert [(each["order"], each["implementation"]) for each in found] == [
            (order, variant.name) for order, variant in picked
        ]
        file = tmp_path / "table.json"
        write_table(file, entries([measured(64, eager={STAGED: 9, BACKEND: 8})], "before"))
        write_table(file, found)
        assert read_table(file) == found
        monkeypatch.setenv(VARIABLE, str(file))
        for any_order, (_, variant) in ((False, picked[0]), (True, picked[-1])):
            picked = explain(
                OP, [(64, 8), (8, 8)], ranks=4, device="H", any_order=any_order, mode="captured"
            )
            assert picked.implementation == variant.name


def test_a_lent_result_enters_no_table(tmp_path: Path) -> None:
    """It is the fastest, and the caller may keep it only until the next call."""
    lent, kept = (Variant("pushed", (("lent", flag),)) if flag else Variant("pushed")
                  for flag in (True, False))  # fmt: skip
    bags = Call(BAGS, "H", torch.float32, 4, (8, 8, 8))
    _, found = measured(64, eager={STAGED: 9, kept: 5, lent: 3})
    (entry,) = entries([(bags, found)], "a test")
    assert (entry["implementation"], entry["options"]) == ("pushed", {})
    file = tmp_path / "table.json"
    write_table(file, [entry])
    file.write_text(file.read_text().replace("{}", '{"lent": true}'))
    with pytest.raises(UserError, match="'lent'"):
        read_table(file)


def test_the_table_is_extended_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    shapes = [(64, 8), (8, 8)]
    with registered("fast", unrun):
        first = entries([measured(64, eager={STAGED: 9, FAST: 10}), measured(
            128, eager={STAGED: 9})], "one")  # fmt: skip
        write_table(file, first)
        second = entries([measured(64, eager={STAGED: 9, FAST: 5})], "two")
        write_table(file, second)
        assert read_table(file) == [first[1], *second]
        monkeypatch.setenv(VARIABLE, str(file))
        picked = explain(OP, shapes, ranks=4, device="H")
        assert (picked.implementation, dict(picked.options)) == ("fast", {"chunk": 3})
        assert picked.why == "table.json: two; 5.0 us, 9.0 without it"
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_what_a_new_table_picks() -> None:
    """In either order of sums; what was not measured in it is left out."""
    with registered("fast", unrun):
        points = [
            measured(64, captured={STAGED: 9, BACKEND: 6, FAST: 8}),
            measured(128, captured={STAGED: 60, BACKEND: 60, FAST: 70}),
        ]
        found = picked_by(points, entries(points, "a test"))
    assert found == [
        f"{OP}, captured -0.20 to 0.86 (below 0, slower than the baseline: 1 of 2)",
        f"{OP} in any order, captured -0.20 to 0.90 (below 0, slower than the baseline: 1 of 2)",
    ]
