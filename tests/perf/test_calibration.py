"""`ladder bench machine` on a CPU, with tiny sizes: whole files, medians, budgets, refusals."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from ladder.cli import main
from ladder.perf.calibration import command, timing
from ladder.perf.calibration.parts import CPU, Part
from ladder.perf.machine import load
from tests.distributed import Pools


def test_a_turn_counts_where_it_took_longest_and_the_median_of_turns() -> None:
    """The median of each rank's median would be 2 here, and the slowest rank's mean 6."""
    assert timing.slowest_median([[1.0, 9.0, 2.0], [3.0, 1.0, 2.0]]) == 3.0


def test_calls_take_turns_over_the_memory() -> None:
    ran: list[int] = []
    works = [lambda n=n: ran.append(n) for n in range(3)]
    times = timing.samples(works, 4, torch.device("cpu"))
    assert len(times) == timing.REPEATS
    assert ran == [0, 1, 2, 0] * (timing.REPEATS + 1)
    assert all(each > 0 for each in times)


def test_one_process_measures_all_but_what_is_between_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "here.json"
    assert main(["bench", "machine", "--device", "cpu", "--out", str(out)]) == 0
    found = load(str(out))
    assert (found.name, found.gpus) == ("here", 1)
    names = [each.split(":")[0] for each in found.missing]
    assert names == ["step_stretch", "prompt_gap_us"]  # fitted to records, and not measured
    assert [x for x, _ in found.curve("copy").points] == list(CPU.copies)
    assert found.curve("product", rows=4).points[-1][0] == 4 * CPU.hidden * CPU.outputs[-1]
    assert all("ladder bench machine" in each.provenance for each in found.curves)
    assert capsys.readouterr().out.count("missing") == 2
    assert list(tmp_path.iterdir()) == [out]


def on_ranks(rank: int, world_size: int, out: Path) -> int:
    options = argparse.Namespace(out=out, budget=5.0, nproc=1, device="cpu")
    return command.main(options)


def test_two_ranks_measure_collectives(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(on_ranks, tmp_path / "m.json") == [0, 0]
    found = load(str(tmp_path / "m.json"))
    assert (found.name, found.gpus) == ("m", 2)
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        points = found.curve(kind, algorithm="gloo").points
        assert [x for x, _ in points] == list(CPU.messages)


def test_a_spent_budget_leaves_parts_out_and_names_them() -> None:
    def run() -> dict[str, float]:
        raise AssertionError("it ran")

    parts = [Part("values", {}, run), Part("product", {"rows": 4}, run)]
    assert command.measure(parts, 0.0, "measured") == ({}, [], ["values", "product rows=4"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "0"), "--budget=0.0 must be a number of minutes above 0"),
        (("--out", "nowhere/m.json"), "--out=nowhere/m.json: name a file in a folder"),
    ],
)
def test_wrong_options_are_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "machine", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
