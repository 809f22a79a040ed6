"""What files of the same GPU agree on, and that each of them answers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ladder.cli import main
from ladder.config import model_config
from ladder.perf import machine_files, phases, training_phase
from ladder.perf.cost_prefill import PromptCost
from ladder.perf.machine import Machine
from ladder.perf.machine_files import load as load_measured
from ladder.perf.machine_files import shipped
from ladder.perf.nodes import for_degree, load, names, relatives, with_training_bytes
from ladder.perf.prediction.command import kind_of
from ladder.perf.prediction.records import scores, summary
from tests import ROOT
from tests.perf.asking import Out, asked

SHAPE = model_config("llama-3-8b")
RESULTS = ROOT / "benchmarks/results"


@pytest.mark.parametrize("name", [*shipped(), *names()])
def test_every_machine_answers_for_every_phase(name: str, capsys: Out) -> None:
    for words in ([], ["--prefill"], ["--train"]):
        head = ["predict", "llama-3-70b", *words, "--batch", "1", "--plans", "standard"]
        assert main([*head, "--machine", name]) == 0, capsys.readouterr().err
        said = capsys.readouterr().out
        assert "Recommended" in said or "othing fits" in said


@pytest.mark.parametrize("name", ["h200x8", "h100x8"])
@pytest.mark.parametrize("words", [("--batch", "16"), ("--context", "8192")])
def test_prompts_on_eight_gpus(name: str, words: tuple[str, ...], capsys: Out) -> None:
    found = asked(capsys, "llama-3-8b", "--prefill", "--machine", name, "--tp", "8", *words)
    assert {each["way"] for each in found["rows"]} >= {"push", "async"}


@pytest.mark.parametrize("transport", ["direct", "copy-kernels"])
def test_exchanges_of_eight_continue_those_of_fewer(transport: str) -> None:
    """Copies to a peer are as they were; an exchange has more of them, of 7/8 of the bytes."""
    eight, four, two = load("h200x8"), load("h200x4"), load("h200x2")
    assert eight.curve("peer copy").points == four.curve("peer copy").points
    curves = [each.curve("exchange", transport=transport) for each in (two, four, eight)]
    for size, us in curves[-1].points:
        assert us > curves[1].at(size).us > curves[0].at(size).us
        assert curves[-1].at(size).basis == "extrapolated"
    last = [each.points[-1][1] for each in curves]
    assert last[2] - last[1] < 2 * (last[1] - last[0])  # no more than by the number of ranks
    costs = [PromptCost(SHAPE, each, each.gpus, 16, 1024) for each in (four, eight)]
    moved = [cost.exchange("copy-kernels", cost.tp + 3) for cost in costs]
    assert moved[0] is not None
    assert moved[1] is not None
    assert 7 / 6 < moved[1].us / moved[0].us < 1.5


def test_files_of_the_package_are_read_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And again once they are written again; those of a user each time."""
    opened: list[Path] = []

    def read(path: Path) -> Machine:
        opened.append(path)
        return real(path)

    real = machine_files.read
    monkeypatch.setattr(machine_files, "read", read)
    machine = load("h100x8")
    for _ in range(20):
        assert [each.gpus for each in relatives(machine)] == [1, 2, 4, 8]
        assert for_degree(machine, 2).gpus == 2
    assert len(opened) == len(set(opened))
    own = tmp_path / "own.json"
    machine_files.write(load_measured("h100x1"), own)
    for values in ({}, {"copy_tb_s": machine.values["copy_tb_s"]}):
        machine_files.write(Machine("own", "a GPU", 1, values), own)
        assert machine_files.load(str(own)).values.keys() == values.keys()
        assert machine_files.read_own(own).values.keys() == values.keys()


def test_bytes_of_training_are_those_of_the_same_gpu_and_said() -> None:
    two = load("h100x2").values["training_bytes"]
    for name in ("h100x1", "h100x4", "h100x8"):
        found = with_training_bytes(load(name)).values["training_bytes"]
        assert found.value == two.value
        assert found.provenance == f"declared: training_bytes as of h100x2; {two.provenance}"
        shape = model_config("quarter-8b")
        step = training_phase.train(shape, load(name), "ddp", 4096, 1, gpus=1)
        assert found.provenance in step.provenance
        likewise = training_phase.train(shape, load("h100x2"), "ddp", 4096, 1, gpus=1)
        assert step.us == pytest.approx(likewise.us, rel=0.02)
    assert with_training_bytes(load("h200x1")) == load("h200x1")
    other = with_training_bytes(Machine("own", "another GPU", 4, {})).values["training_bytes"]
    assert other.value == load("h200x4").value("training_bytes")


def test_power_goes_with_the_gpus_that_its_limit_was_fitted_to() -> None:
    one = load("h100x1")
    for name in ("h100x4", "h100x8"):
        for value in ("power_limit", "power_exponent", "idle_power", "boost_ms", "fp8_power"):
            assert load(name).value(value) == one.value(value), (name, value)


@pytest.mark.parametrize("name", [*shipped(), *names()])
def test_a_kernel_takes_a_launch_at_least(name: str) -> None:
    """`prompt_gap_us` of one H100 was fitted to nothing."""
    machine = load(name)
    found = phases.prefill(model_config("tiny"), machine, 1, "push", 1, 512)
    assert found.us >= 0.999 * found.launches * machine.value("launch_us")


@pytest.mark.parametrize(
    ("record", "phase", "points", "most"),
    [
        ("29-half-8b-ahead", "prefill", 32, 0.03),
        ("28-train-8b", "train", 6, 0.02),
        ("28-train-backward", "train", 8, 0.02),
    ],
)
def test_two_gpus_are_predicted_by_their_own_file_as_well(
    record: str, phase: str, points: int, most: float
) -> None:
    """As by that of four, whose errors its intervals are made of."""
    file = RESULTS / f"2026-11-{record}-h200x2.jsonl"
    own, of_four = (
        summary(scores([file], load(name), phase), kind_of)["held out",]
        for name in ("h200x2", "h200x4")
    )
    assert own[0] == points
    assert own[1] < 100 * most
    assert own[1] == pytest.approx(of_four[1], abs=0.4)


def test_steps_grow_with_sequences() -> None:
    """By no more than 1 % the other way. From two to four rows products become tiles, which
    recorded steps of `standard` fall by as well: 1.547 and 1.506 ms, and a ladder's grow by as
    little as from 1.121 to 1.148 (2026-11-29-two-cuts-h200x4, 2026-11-29-inference-cuts-h200x4)."""
    machine, batches = load("h200x4"), (3, 4, 5, 6, 8, 12, 16, 17, 24, 32, 48, 63, 64)
    for plan in ("standard", "ladder"):
        shape = model_config("llama-3-8b", plan=plan)
        steps = [phases.decode(shape, machine, 4, "push", n, 1024).us for n in (1, 2, *batches)]
        one, two, *more = steps
        assert one < two
        recorded = 1.506 / 1.547 if plan == "standard" else 1.148 / 1.121
        assert more[1] / two == pytest.approx(recorded, abs=0.03)
        assert all(after > 0.99 * us for us, after in pairwise(more))
