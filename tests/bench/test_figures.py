"""Figures and report pages: names where lines end, the committed figures, `make pages`."""

from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ladder.bench import figures
from ladder.bench.figures import Bar, bars, lines, spread
from tests import ROOT
from tests.bench.drawing import labels, values

sys.path.insert(0, str(ROOT / "benchmarks"))
import pages


def test_positions_are_apart_in_order_and_near() -> None:
    assert spread([5.0, 20.0], 10, 0, 100) == [5.0, 20.0]
    assert spread([31.0, 30.0, 32.0], 10, 0, 100) == [31.0, 21.0, 41.0]  # centred, in their order
    assert spread([10.0, 12.0, 60.0, 61.0], 10, 0, 100) == [6.0, 16.0, 55.5, 65.5]
    assert spread([99.0, 100.0], 10, 0, 100) == [90.0, 100.0]  # not above the top
    assert spread([0.0, 1.0], 10, 0, 100) == [0.0, 10.0]
    assert spread([], 10, 0, 100) == []


def test_names_stand_where_lines_end_and_do_not_overlap() -> None:
    series: dict[str, Any] = {f"plan-{n}": ([1, 2, 3], [n, 10, 20 + n / 100]) for n in range(6)}
    series["short"] = ([1, 2], [5.0, 5.0])
    svg = lines(series, "x", "y", zero="nothing")
    found = labels(svg)
    heights = sorted(found[name][1] for name in series if name != "short")
    assert all(below - above >= figures.GAP - 0.01 for above, below in pairwise(heights))
    assert found["short"][0] < found["plan-0"][0]  # at its own end
    order = sorted((name for name in series if name != "short"), key=lambda name: -found[name][1])
    assert order == [f"plan-{n}" for n in range(6)]  # as the lines end, from the bottom
    assert "nothing" in found
    for name in series:
        assert found[name][0] + figures.FONT / 2 * len(name) < figures.WIDTH


def test_the_same_data_gives_the_same_bytes() -> None:
    def draw() -> str:
        return lines({"ladder": ([1, 2], [3.0, 4.0])}, "x", "y", title="A < B", subtitle="here")

    svg = draw()
    assert svg == draw()
    assert values(svg) == ["A &lt; B", "ladder: x 1, y 3", "ladder: x 2, y 4"]
    assert "<metadata" not in svg  # no date
    assert 'href="http' not in svg
    assert figures.INK in svg
    assert figures.INK not in figures.inline(svg)  # a page's own colours


def test_a_long_name_is_not_cut_off() -> None:
    name = "a plan with quite a long name"
    svg = lines({name: ([0.1, 1.1], [100.0, 2000.0])}, "x", "y")
    assert labels(svg)[name][0] + figures.FONT / 2 * len(name) < figures.WIDTH


def test_ticks_are_plain_numbers() -> None:
    long = labels(lines({"ladder": ([0, 4_000_000], [0.1, 0.3])}, "tokens", "loss"))
    assert {"1,000,000", "0.15", "0.20"} <= set(long)
    found = labels(lines({"a": ([1, 64], [2, 200])}, "x", "y", ticks=[1, 64], y_ticks=[2, 200]))
    assert set(found) == {"1", "64", "2", "200", "a", "x", "y"}


def test_bars_have_room_for_what_stands_at_their_ends() -> None:
    svg = bars([Bar("a", 100.0, "s" * 40), Bar("b", 1.0, "1", bound=True)], "ms")
    assert values(svg) == ["a: 100 ms", "b: 1 ms"]
    found = labels(svg)
    (slow,) = (place for text, place in found.items() if text.startswith("ss"))
    assert slow[0] + 40 * 5 < figures.WIDTH
    assert found["b"][1] > found["a"][1]


# Two of each kind of page, but for operators' bags, those of short lines; the slow test has all.
SOME = (
    pages.LATENCY,
    "2026-11-21-cold-h200x4",
    "2026-11-21-comm-h200x4",
    "2026-11-22-comm-h200x2",
    "2026-11-21-train-8b-again-h200x4",
    "2026-11-24-train-virtual-h200",
    "2026-11-21-adapt-tenth-h200x4",
    "2026-11-21-adapt-cpu",
    pages.OPS_BAGS,
    "2026-11-21-convert-cpu",
)


def draw(out: Path) -> Path:
    """What `make pages` draws."""
    assert pages.main(["--out", str(out / "html"), "--figures", str(out / "figures")]) == 0
    return out


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    some = [pages.RESULTS / f"{name}.jsonl" for name in SOME]
    assert set(some) < set(pages.record_files())
    with mock.patch.object(pages, "record_files", return_value=some):
        return draw(tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("name", pages.FIGURES)
def test_the_committed_figures_are_what_the_records_give(name: str, drawn: Path) -> None:
    """Their titles and each of their values; bytes differ between versions of matplotlib."""
    committed = (ROOT / "docs" / "figures" / name).read_text(encoding="utf-8")
    again = (drawn / "figures" / name).read_text(encoding="utf-8")
    assert values(committed) == values(again), "run `make pages` and commit docs/figures"
    assert len(values(committed)) > 5
    assert len(committed) < 40_000
    assert not list((ROOT / "docs" / "figures").glob("*.html"))


def test_the_figures_follow_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    read = pages.read

    def slower(name: str) -> list[dict[str, Any]]:
        found = read(name)
        for each in found:
            each["result"]["decode_ms"] *= 2
        return found

    before = values(pages.latency())
    monkeypatch.setattr(pages, "read", slower)
    after = values(pages.latency())
    assert after[0] == before[0]  # the ratio is the same
    assert not set(after[1:-1]) & set(before[1:-1])


def test_a_page_leads_with_its_finding_and_needs_nothing_else(drawn: Path) -> None:
    check_pages(drawn, at_least=len(SOME))


@pytest.mark.slow
def test_so_do_the_pages_of_all_records(tmp_path: Path) -> None:
    check_pages(draw(tmp_path), at_least=70)


def check_pages(drawn: Path, at_least: int) -> None:
    index = (drawn / "html" / "index.html").read_text(encoding="utf-8")
    linked = re.findall(r'href="([^"]+)"', index)
    files = {file.name for file in (drawn / "html").iterdir()} - {"index.html"}
    assert set(linked) == files
    assert len(files) >= at_least
    assert f"{pages.QUALITY[0]}.html" in files
    assert f"{pages.LATENCY}.html" in files
    # What README.md says of the same records.
    assert (
        "2.5 us for 8 KiB, 2.6 x as fast as the better of NCCL and torch, and is ahead up to"
        in (index)
    )
    assert "ladder is the fastest, 1.298 ms a step, 1.18 x as fast as standard (1.527 ms)" in index
    assert "recovers 89 % of the bits per byte" in index
    for name in files:
        text = (drawn / "html" / name).read_text(encoding="utf-8")
        assert "http" not in text.replace("http://www.w3.org", ""), name
        assert not any(word in text for word in ("<link", "src=", "@import")), name
        finding, first_table = text.index('class="finding"'), text.index("<table")
        assert text.index("<h1>") < finding < first_table, name
        assert "<svg" not in text or finding < text.index("<svg") < first_table, name
        assert text.count('<div class="wide"><table') == text.count("<table"), name  # scrolls
        runs = text.rindex("<table")
        assert text.rindex("<h2>") == text.index("<h2>Runs</h2>") < runs, name


def test_without_matplotlib_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    assert pages.main(["--out", str(tmp_path / "new"), "--figures", str(tmp_path / "svg")]) == 2
    assert "pip install -e '.[report]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
