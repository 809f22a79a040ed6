"""`ladder bench machine` on a CPU, with tiny sizes: whole files, medians, budgets, refusals."""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ladder.cli import main
from ladder.models.eight_bits import EIGHT_BITS
from ladder.perf.calibration import command, exchanges, timing, together
from ladder.perf.calibration.options import FAMILIES, family, family_of_value
from ladder.perf.calibration.parts import halved
from ladder.perf.calibration.sizes import CPU, Part
from ladder.perf.calibration.table import table
from ladder.perf.machine import IN_8_BITS, SPEEDS, TURNS, VALUES, Curve, Machine, Value
from ladder.perf.machine_files import load, write
from tests.distributed import Pools

HERE = Machine("here", "none", 1, {"launch_us": Value(7.0, "declared: a test")})


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
    fitted = ["step_stretch", "prompt_gap_us", "training_bytes"]  # to records, and not measured
    assert names == fitted
    assert [x for x, _ in found.curve("copy").points] == list(CPU.copies)
    assert found.value("prompt_attention_half") >= 1.0
    assert found.curve("product", rows=4).points[-1][0] == 4 * CPU.hidden * CPU.outputs[-1]
    stored = found.curve(IN_8_BITS, rows=4, weights="fp8-block")
    assert [x for x, _ in stored.points] == [round(129 / 128 * CPU.hidden * 64)]
    assert len(found.family(IN_8_BITS)) == len(EIGHT_BITS) * len(CPU.rows)
    assert all("ladder bench machine" in each.provenance for each in found.curves)
    said = capsys.readouterr().out
    assert said.splitlines()[0] == (
        "no GPU: a rehearsal in tiny sizes; predictions cannot use this file"
    )
    assert said.count("missing") == len(fitted)
    assert f"{found.values['launch_us'].value:g}" in said
    assert list(tmp_path.iterdir()) == [out]


def on_ranks(rank: int, world_size: int, out: Path) -> int:
    options = argparse.Namespace(out=out, budget=5.0, nproc=1, device="cpu", only=None)
    with contextlib.ExitStack() as patched:
        for module in (timing, together, exchanges, command):  # times are not looked at
            patched.enter_context(mock.patch.object(module, "REPEATS", 3))
        return command.main(options)


def test_two_ranks_measure_collectives_and_what_runs_beside_them(
    pools: Pools, tmp_path: Path
) -> None:
    assert pools(2).run(on_ranks, tmp_path / "m.json") == [0, 0]
    found = load(str(tmp_path / "m.json"))
    assert (found.name, found.gpus) == ("m", 2)
    for kind in ("all-reduce", "all-gather", "reduce-scatter"):
        points = found.curve(kind, algorithm="gloo").points
        assert [x for x, _ in points] == list(CPU.messages)
    steps = [rows * CPU.hidden * CPU.dtype.itemsize for rows in CPU.together.steps]
    speeds = [found.value("product_beside_nccl"), found.value("nccl_beside_product")]
    for name in SPEEDS:
        points = found.curve(name).points
        assert [x for x, _ in points] == steps
        speeds += [speed for _, speed in points]
    assert all(0 < speed <= 1 for speed in speeds)
    for name in TURNS:
        points = found.curve(name).points
        assert [x for x, _ in points] == steps
        assert all(us > 0 for _, us in points)
    assert {"product_beside_nccl", "nccl_beside_product"} <= set(found.values)


class Beside:
    """Work of 4 us that takes 8 beside other work; `needs`: turns of this until its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, needs: float) -> None:
        self.needs, self.asked = needs, list[int]()
        self.one, self.two = together.Turn(lambda: None), together.Turn(lambda: None)
        monkeypatch.setattr(together, "_beside_in_thread", self.beside)
        monkeypatch.setattr(
            together, "cooled", lambda run, device: 4.0 if run is self.one.run else 2.0
        )

    def beside(self, timed: Any, other: Any, pieces: int) -> tuple[float, float]:
        self.asked.append(pieces)
        return 8.0, self.needs / pieces

    def speed(self) -> float:
        return together.speed_beside(self.one, self.two, torch.device("cpu"))


@pytest.mark.parametrize(
    ("needs", "asked"),
    [
        (16, [16]),  # 8 times 4 us, of 2 us each
        (17, [16, 32]),  # twice as much at least
        (100, [16, 150]),  # half as much again as it took
    ],
)
def test_other_work_runs_longer_until_the_timed_work_is_done(
    needs: int, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A speed is a ratio of medians."""
    found = Beside(monkeypatch, needs)
    assert found.speed() == 0.5
    assert sorted(set(found.asked)) == asked
    assert found.asked.count(asked[-1]) == timing.REPEATS + 1


def test_work_that_never_ends_beside_other_work_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever runs beside it, the timed work ends after it: what then was waiting is no speed."""
    found = Beside(monkeypatch, 0)
    monkeypatch.setattr(
        together, "_beside_in_thread", lambda timed, other, pieces: (2.0 * pieces + 4, 1.01)
    )
    said = r"4 us beside other work is not done .* times 2 us, of at most 500000; its speed is less"
    with pytest.raises(RuntimeError, match=said):
        found.speed()


def test_a_speed_is_at_most_that_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Beside(monkeypatch, 1)
    monkeypatch.setattr(together, "cooled", lambda run, device: 9.0)
    assert found.speed() == 1.0


def test_a_spent_budget_leaves_parts_out_and_names_them() -> None:
    def run() -> dict[str, float]:
        raise AssertionError("it ran")

    parts = [Part("values", {}, run), Part("product", {"rows": 4}, run)]
    found = command.measure(parts, HERE, None, 0.0, "measured")
    assert found == command.Outcome(HERE, ["values", "product rows=4"], [])


def test_every_part_is_in_the_file_before_the_next_begins(tmp_path: Path) -> None:
    """And a part that fails is named, and costs nothing of the others."""
    out, seen = tmp_path / "here.json", list[dict[str, Any]]()

    def values() -> dict[str, float]:
        return {"launch_us": 1.23456}

    def fails() -> dict[str, float]:
        seen.append(load(str(out)).to_dict())
        raise ValueError("no such kernel\non line 2")

    def curve() -> list[tuple[float, float]]:
        return [(1, 2.0), (2, 3.0)]

    parts = [Part("values", {}, values), Part("copy", {}, fails), Part("copy", {}, curve)]
    found = command.measure(parts, HERE, out, math.inf, "measured: here")
    assert found.failed == ["copy: ValueError: no such kernel"]
    assert seen[0]["values"]["launch_us"] == {"value": 1.235, "provenance": "measured: here"}
    assert seen[0]["curves"] == []
    assert load(str(out)).to_dict() == found.machine.to_dict()
    assert found.machine.curve("copy").points == ((1, 2.0), (2, 3.0))


def test_only_measures_some_parts_and_keeps_the_rest(tmp_path: Path) -> None:
    out = tmp_path / "here.json"
    attention = Curve("attention", {"keys": 8}, ((2.0, 1.0),), "measured: before")
    copies = Curve("copy", {}, ((1.0, 1.0),), "measured: before")
    write(Machine("here", "none", 1, HERE.values, (attention, copies)), out)
    words = ["bench", "machine", "--device", "cpu", "--out", str(out)]
    assert main([*words, "--only", "copy", "landing"]) == 0
    found = load(str(out))
    assert found.values == HERE.values
    assert found.family("attention") == [attention]
    assert [x for x, _ in found.curve("copy").points] == list(CPU.copies)
    assert [each.name for each in found.curves] == ["attention", *["landing"] * 2, "copy"]


OLD = Curve("copy", {}, ((1.0, 1.0),), "measured: before")
GONE = Curve("attention", {"keys": 8}, ((2.0, 1.0),), "measured: before")


@pytest.mark.parametrize("left", ["time", "a part", ""])
def test_a_file_keeps_its_parts_until_they_are_measured_anew(
    left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it, where the budget is spent or a part fails; after a whole run, the new alone."""

    def fails() -> dict[str, float]:
        raise ValueError("no such kernel")

    parts = [Part("copy", {}, lambda: [(1, 2.0), (2, 3.0)])]
    if left == "a part":
        parts.append(Part("values", {}, fails))
    monkeypatch.setattr(command, "parts", lambda *_: parts)
    out = tmp_path / "here.json"
    write(Machine("here", "none", 1, HERE.values, (OLD, GONE)), out)
    words = ["bench", "machine", "--device", "cpu", "--out", str(out)]
    budget = ["--budget", "1e-9"] if left == "time" else []
    assert main([*words, *budget]) == (left == "a part")
    found, said = load(str(out)), capsys.readouterr().out
    assert (f"{out} still has what it had of what was not measured" in said) == bool(left)
    assert found.values == (HERE.values if left else {})
    new = ((1.0, 2.0), (2.0, 3.0))
    kept = {"time": [OLD.points, GONE.points], "a part": [GONE.points, new], "": [new]}
    assert [each.points for each in found.curves] == kept[left]


def test_files_of_other_machines_and_other_files_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "other.json"
    write(Machine("other", "a GPU", 4, {}), out)
    before = out.read_bytes()
    words = ["bench", "machine", "--device", "cpu", "--out", str(out)]
    for more in ([], ["--only", "copy"]):
        assert main([*words, *more]) == 2
        error = capsys.readouterr().err
        assert "describes 4 x a GPU, and this measures 1 x none; name another file" in error
        assert out.read_bytes() == before
    out.write_text("[]")  # of something else
    assert main(words) == 2
    assert "--out is there already: " in capsys.readouterr().err
    assert out.read_text() == "[]"


def test_every_part_has_a_name_for_only() -> None:
    names = [
        "values",
        "peer copy",
        "copies to all",
        "product",
        "product beside push",
        *SPEEDS,
        *TURNS,
    ]
    assert {family(name) for name in names} <= set(FAMILIES)
    assert {family_of_value(name) for name in VALUES} <= set(FAMILIES)
    assert family("copies to all") == family_of_value("copies_to_all") == family("peer copy")
    assert family(SPEEDS[0]) == family("product beside push") == "beside"


def test_the_rate_of_attention_is_half_at_the_half() -> None:
    exact = {size: 600 / (1 + 800 / size) for size in (1024.0, 4096.0, 8192.0)}
    assert halved(exact) == pytest.approx((600, 800))
    assert halved({1024.0: 100.0, 2048.0: 400.0}) == (400.0, 1.0)  # more than twice as fast


def test_the_table_has_what_is_declared_beside_what_was_measured() -> None:
    values = {"product_beside_nccl": Value(0.7, "measured: here")}
    curve = Curve("decode beside nccl", {}, ((8192, 0.9), (524288, 0.5)), "measured: here")
    said = table(Machine("m", "a GPU", 2, values, (curve,))).splitlines()
    assert said[1].split() == ["product_beside_nccl", "0.7", "0.64"]
    assert "512 KiB: 0.5" in said[-1]
    assert "us" not in said[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--budget", "0"), "--budget=0.0 must be a number of minutes above 0"),
        (("--only", "copies"), "unknown part of --only 'copies' (did you mean 'copy'?); known: va"),
        (("--out", "nowhere/m.json"), "--out=nowhere/m.json: name a file in a folder"),
    ],
)
def test_wrong_options_are_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "machine", "--device", "cpu", *words]) == 2
    assert said in capsys.readouterr().err
