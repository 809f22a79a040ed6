"""benchmarks/quality.py's table and page: groups, the frontier, panels, equal training time."""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import pages
import quality
import quality_frontier
import quality_report
from quality_frontier import Place


def made_up(plan: str, seed: int, value: float, **more: Any) -> dict[str, Any]:
    split = {"tokens": 500, "bytes": 1500, "documents": 3}
    return {
        "plan": plan, "seed": seed, "tp_degree": None, "parameters": 97_000_000, "tokens": 1000,
        "heldout_bits_per_byte": value, "heldout_loss": 2.0, "wall_s": 180.0,
        "tokens_per_second": 10.0, "mfu": 0.31, "memory_gib": 40.0, "losses": [],
        "recipe": {"model": {"name": "quality-100m", "num_layers": 12}, "eval_interval": 0},
        "data": {"train": split, "heldout": split}, "machine": {"gpu": "H200", "command": "c"},
        **more,
    }  # fmt: skip


def latency(plan: str, reducer: str, milliseconds: float, **point: Any) -> dict[str, Any]:
    names = {"model": "quality-100m", "plan": plan, "reducer": reducer, "tp": 4, "batch": 1,
             "prompt": 1024, "new_tokens": 128, "layers": 12}  # fmt: skip
    times = {"prefill_ms": 1.0, "decode_ms": milliseconds, "total_ms": 99.0, "decode_p99_ms": 1.0,
             "prefill_floor_ms": 0.5, "floor_ms": 0.1, "memory_gib": 1.0, "picked": {}}  # fmt: skip
    return {"point": names | point, "result": times, "check": {}, "without_reduces": None,
            "machine": {"gpu": "H200", "nccl": "2.28"}}  # fmt: skip


RECORDS = [
    made_up("dtp-1", 0, 1.31), made_up("ladder", 0, 1.20), made_up("standard", 1, 1.10),
    made_up("standard", 0, 1.14), made_up("ladder", 1, 1.22), made_up("parallel", 0, 1.25),
]  # fmt: skip
LATENCY = [
    latency("standard", "async", 3.0), latency("standard", "push", 2.0),
    latency("ladder", "push", 1.6), latency("dtp-1", "push", 1.8), latency("none", "push", 1.25),
    latency("ladder", "push", 9.0, batch=4), latency("ladder", "push", 9.0, model="tiny"),
    latency("standard", "async", 8.0, batch=64, p2p=False),
    latency("dtp-1", "async", 4.0, batch=64, p2p=False),
]  # fmt: skip


def write(file: Path, records: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return file


def page_of(
    tmp_path: Path, quality_files: list[list[dict[str, Any]]], latency_files: list[Any], *more: str
) -> str:
    """The page's text, its cells joined by |."""
    chosen = {"--quality": quality_files, "--latency": latency_files}
    options = []
    for option, contents in chosen.items():
        files = [
            write(tmp_path / f"{option}{n}.jsonl", content) for n, content in enumerate(contents)
        ]
        options += [option, *map(str, files)]
    out = tmp_path / "new" / "page.html"
    assert quality.main(["page", *options, "--out", str(out), *more]) == 0
    return out.read_text()


def row(*values: str) -> str:
    return "<tr>" + "".join(f"<td>{html.escape(value)}</td>" for value in values) + "</tr>"


# ---- grouping -------------------------------------------------------------------------------


def test_the_table_has_means_spreads_and_differences() -> None:
    found = [row[:6] for row in quality_report.rows(RECORDS)]
    assert found == [
        ["standard", "-", "2", "1.1200", "0.0400", "-"],
        ["parallel", "-", "1", "1.2500", "-", "+0.1300"],
        ["ladder", "-", "2", "1.2100", "0.0200", "+0.0900"],
        ["dtp-1", "-", "1", "1.3100", "-", "+0.1900"],
    ]


def test_files_are_joined_by_plan_and_t_and_repeated_runs_are_told_of(tmp_path: Path) -> None:
    """A line that was copied counts once; eval_interval may differ; another T is another plan."""
    curve = made_up("standard", 2, 1.18)
    curve["recipe"] = curve["recipe"] | {"eval_interval": 50, "a_new_key": 1}
    other = [
        RECORDS[2],
        curve,
        made_up("mine", 0, 1.0, tp_degree=4),
        made_up("mine", 0, 1.2, tp_degree=4),
        made_up("mine", 1, 0.8, tp_degree=2),
    ]
    files = [write(tmp_path / "a", RECORDS), write(tmp_path / "b", other)]
    records = quality_report.read_all(files)
    found = {row[0] + row[1]: row[2:5] for row in quality_report.rows(records)}
    assert found["standard-"] == ["3", "1.1400", "0.0800"]
    assert found["mine4"] == ["1 (2 runs)", "1.1000", "0.2000"]
    assert found["mine2"] == ["1", "0.8000", "-"]
    assert list(quality_report.by_plan(records))[-2:] == ["mine", "mine (T 2)"]
    note = quality_frontier.noise(quality_report.by_plan(records))
    assert "widest spread is that of mine, 0.2000" in note
    assert "parallel, dtp-1, mine (T 2) have one run" in note
    assert "repeated (mine)" in note


def test_runs_of_one_each_have_no_spread() -> None:
    groups = quality_report.by_plan([made_up("standard", 0, 1.0), made_up("ladder", 0, 0.9)])
    assert "any difference may be chance" in quality_frontier.noise(groups)


# ---- the frontier ---------------------------------------------------------------------------


def test_the_frontier_is_by_means_and_says_where_spreads_overlap() -> None:
    found = {
        "quick": Place(1.0, 0.96, 0.94, 0.98, 3),
        "middle": Place(2.0, 0.95, 0.93, 0.955, 3),
        "lone": Place(2.5, 0.97, 0.97, 0.97, 1),
        "good": Place(3.0, 0.90, 0.89, 0.91, 3),
        "slow": Place(4.0, 0.91, 0.905, 0.92, 3),
    }
    assert quality_frontier.frontier(found) == ["quick", "middle", "good"]
    said = {plan: quality_frontier.standing(plan, found) for plan in found}
    assert said == {
        "quick": "yes",
        "middle": "yes; spreads overlap: quick",
        "lone": "no: quick, middle; spreads overlap: quick; one run",
        "good": "yes",
        "slow": "no: good; spreads overlap: good",
    }


def test_equal_plans_are_both_on_the_frontier_and_a_tie_in_one_is_not() -> None:
    one, same = Place(1.0, 0.9, 0.9, 0.9, 1), Place(1.0, 0.9, 0.8, 1.0, 2)
    assert quality_frontier.frontier({"one": one, "same": same}) == ["one", "same"]
    assert quality_frontier.frontier({"one": one, "slower": Place(1.1, 0.9, 0.9, 0.9, 1)}) == [
        "one"
    ]


# ---- panels ---------------------------------------------------------------------------------


def test_the_page_joins_quality_and_latency(tmp_path: Path) -> None:
    """The fastest reducer of each plan in each panel; a panel without records is said."""
    page = page_of(tmp_path, [RECORDS[:2], RECORDS[2:]], [LATENCY[:1], LATENCY[1:]])
    assert page.count("<svg") == 1
    assert "<td>NCCL 2.28</td>" in page  # what the latency was measured with
    assert not any(word in page for word in ("<link", "src=", "@import"))  # it needs nothing else
    assert (
        "NVLink, batch 1: no other plan is at once better and faster than ladder, standard. "
        "P2P off, batch 64: no other plan is at once better and faster than dtp-1, standard."
    ) in page
    first = ["1.1200", "0.0400", "-", "2.000", "push", "1.000", "1.600", "yes"]
    assert row("standard", "2", *first) in page
    assert row("ladder", "2", "1.2100", "0.0200", "+0.0900", "1.600", "push", "1.250", "1.280",
               "yes") in page  # fmt: skip
    assert row("dtp-1", "1", "1.3100", "-", "+0.1900", "1.800", "push", "1.111", "1.440",
               "no: ladder; one run") in page  # fmt: skip
    assert row("dtp-1", "1", "1.3100", "-", "+0.1900", "4.000", "async", "2.000", "-",
               "yes; one run") in page  # fmt: skip
    assert "not measured in this panel: parallel." in page
    assert "not measured in this panel: parallel, ladder." in page
    assert "NVLink, batch 64: not measured" in page
    assert "P2P off, batch 1: not measured" in page
    assert "--batch 1 --p2p off" in page
    assert "NVLink, batch 1</text>" in page  # a panel of the figure
    assert "P2P off, batch 64</text>" in page
    assert "batch 4" not in page


def test_a_panel_has_one_case_and_the_newest_of_points_measured_again(tmp_path: Path) -> None:
    old, new = {"date": "2026-01-01", "commit": "aaa"}, {"date": "2026-01-02", "commit": "bbb"}
    times = [
        latency("standard", "push", 1.9) | {"machine": new},
        latency("standard", "push", 2.0) | {"machine": old},
        latency("runs/plans/T4/ladder.yaml", "push", 1.6) | {"machine": old},
        latency("standard", "push", 7.0, prompt=8) | {"machine": new},
        latency("none", "push", 7.0, prompt=8) | {"machine": new},
        latency("hybrid", "push", 7.0, prompt=8) | {"machine": new},
    ]
    found = quality_frontier.latencies([write(tmp_path / "l", times)], RECORDS)
    places = quality_frontier.places(quality_report.by_plan(RECORDS), found.chosen[True, 1])
    assert {plan: each.ms for plan, each in places.items()} == {"ladder": 1.6, "standard": 1.9}
    assert [case.partition("prompt ")[2] for case in found.left_out] == ["8, 128 new tokens"]
    note = quality_frontier.latency_note(RECORDS, found)
    assert "several commits: bbb, aaa" in note


def test_a_plan_that_differs_in_its_beginning_has_the_latency_of_the_plain_one(
    tmp_path: Path,
) -> None:
    records = [*RECORDS, made_up("desync-4x-init-sqrt", 0, 1.15, tp_degree=4)]
    times = [*LATENCY, latency("desync-4x", "push", 1.7)]
    page = page_of(tmp_path, [records], [times])
    assert row("desync-4x-init-sqrt", "1", "1.1500", "-", "+0.0300", "1.700", "push", "1.176",
               "1.360", "yes; one run") in page  # fmt: skip


def test_a_figure_names_the_number_of_runs_where_it_is_unusual(tmp_path: Path) -> None:
    page = page_of(tmp_path, [RECORDS], [LATENCY])
    assert "2 where no other n is given" in page
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", page)
    assert {"standard", "ladder: 1.210", "dtp-1, n = 1: 1.310"} <= set(texts)  # far above it


def test_latency_of_another_model_is_said_to_be_so(tmp_path: Path) -> None:
    times = [
        *LATENCY,
        latency("standard", "push", 5.0, model="llama-3-8b", layers=32),
        latency("ladder", "push", 4.0, model="llama-3-8b", layers=32),
        latency("ladder", "push", 1.0, model="llama-3-8b", layers=8),
    ]
    page = page_of(tmp_path, [RECORDS], [times], "--model", "llama-3-8b")
    assert "no llama-3-8b was trained" in page
    assert "<td>5.000</td>" in page
    assert "<td>4.000</td>" in page
    assert "<td>1.000</td><td>push</td>" not in page
    assert "P2P off, batch 64: not measured" in page


@pytest.mark.parametrize(
    ("records", "times", "words"),
    [
        (None, LATENCY, ["no results", "quality.py run"]),
        (RECORDS, None, ["no results", "ladder bench inference"]),
        (RECORDS, [latency("ladder", "push", 1.0, tp=2)], ["TP 4", "quality-100m"]),
        (RECORDS, [latency("hybrid", "push", 1.0)], ["that was trained", "ladder bench"]),
        ([*RECORDS, {"no": "plan"}], LATENCY, ["line 7", "remove"]),
        ([*RECORDS, made_up("hybrid", 0, 1.0, recipe={"model": {"num_layers": 3}})], LATENCY,
         ["another recipe", "model.num_layers"]),
        ([*RECORDS, made_up("hybrid", 0, 1.0, data={"train": {"tokens": 9}})], LATENCY,
         ["another data", "train.tokens"]),
    ],
)  # fmt: skip
def test_a_page_of_what_does_not_fit_is_refused(
    records: Any, times: Any, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "q.jsonl", tmp_path / "l.jsonl"]
    for file, content in zip(files, (records, times), strict=True):
        if content is not None:
            write(file, content)
    options = ["--quality", str(files[0]), "--latency", str(files[1])]
    assert quality.main(["page", *options, "--out", str(tmp_path / "p.html")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


# ---- equal training time --------------------------------------------------------------------


def test_quality_at_equal_time_is_read_off_the_curve() -> None:
    """1,000 tokens take standard 100 s; at 5 tokens/s that is half of the 10 steps."""
    curve = [[2, 2.0], [4, 1.5], [6, 1.3], [10, 1.2]]
    slow = made_up("ladder", 0, 1.2, tokens_per_second=5.0, heldout=curve)
    assert quality_report.training_s(slow) == 200
    assert quality_report.bits_at(slow, 100.0) == pytest.approx(1.4)
    assert quality_report.bits_at(slow, 80.0) == pytest.approx(1.5)
    assert quality_report.bits_at(slow, 160.0) == pytest.approx(1.25)
    assert quality_report.bits_at(slow, 39.0) is None  # before the first evaluation
    assert quality_report.bits_at(slow, 200.0) == 1.2
    assert quality_report.bits_at(made_up("ladder", 0, 1.2, tokens_per_second=5.0), 100.0) is None
    assert quality_report.bits_at(made_up("ladder", 0, 1.2, tokens_per_second=20.0), 100.0) == 1.2


def test_the_table_at_equal_time_says_what_is_interpolated_and_what_is_missing() -> None:
    curve = [[5, 1.4], [10, 1.2]]
    records = [
        made_up("standard", 0, 1.0),
        made_up("ladder", 0, 1.2, tokens_per_second=5.0, heldout=curve),
        made_up("ladder", 1, 1.0, tokens_per_second=12.5, heldout=curve),
        made_up("parallel", 0, 0.9, tokens_per_second=12.5),
        made_up("dtp-1", 0, 1.1, tokens_per_second=4.0),
    ]
    assert quality_report.timed_rows(records) == [
        ["standard", "1", "100", "1.00", "1.0000", "-", "ended"],
        ["parallel", "1", "80", "0.80", "0.9000", "-0.1000", "ended"],
        ["ladder", "2", "140", "1.40", "1.2000", "+0.2000", "1 of 2 interpolated"],
        ["dtp-1", "1", "250", "2.50", "-", "-", "no curve recorded"],
    ]
    assert quality_report.timed_rows(records[1:]) == []


def test_a_page_without_curves_says_what_to_record(tmp_path: Path) -> None:
    assert "eval_interval=50" in page_of(tmp_path, [RECORDS], [LATENCY])
    curved = [each | {"heldout": [[1, 2.0], [2, 1.2]]} for each in RECORDS]
    assert "eval_interval=50" not in page_of(tmp_path, [curved], [LATENCY])
    page = page_of(tmp_path, [RECORDS[:2]], [LATENCY])
    assert "no training time to compare at" in page


# ---- the recorded results -------------------------------------------------------------------


def test_the_recorded_results_have_three_panels_of_an_8b_and_one_of_their_own_shape() -> None:
    def measured(model: str | None) -> list[tuple[bool, int]]:
        _, found = pages.quality_records(model)
        return [panel for panel, members in found.chosen.items() if members]

    assert (True, 1) in measured(None)
    assert {(True, 1), (True, 64), (False, 64)} <= set(measured("llama-3-8b"))
    records, _ = pages.quality_records()
    text = " ".join(row[0] for row in quality_report.rows(records))
    assert re.search(r"\bstandard\b.*\bdesync-4x-sqrt\b", text)
