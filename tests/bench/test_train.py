"""`ladder bench train`: what it times, what it compares with what, and what it refuses."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ladder.bench import trace as tracing
from ladder.bench.training import command, measure
from ladder.bench.training.points import (
    Layout,
    TrainingPoint,
    parse_layout,
    points,
    recipe_of,
    shape_of,
)
from ladder.bench.training.table import table
from ladder.cli import main
from ladder.models import UserError
from ladder.models.config import ModelConfig
from ladder.parallel import launch
from ladder.parallel.sharding import local_tensor
from ladder.records import facts
from tests.bench.traces import on_gpu
from tests.commands import Start
from tests.distributed import Pools
from tests.parallel.calls import Dispatched


def options(**changes: Any) -> Any:
    settings = {
        "model": "tiny", "layers": 2, "plans": ["standard", "none", "ladder"], "layouts": ["ddp"],
        "seq_len": 64, "batch": 2, "micro_batch": 0, "dtype": "float32",
        "activation_checkpointing": "none", "compile": False,
    }  # fmt: skip
    return SimpleNamespace(**settings | changes)


def test_layouts() -> None:
    assert parse_layout("ddp") == Layout("ddp")
    assert parse_layout("fsdp") == Layout("fsdp", dp_shard=0)
    assert parse_layout("hsdp2") == Layout("hsdp2", dp_shard=2)
    assert parse_layout("tp4+sp+fsdp") == Layout("tp4+sp+fsdp", 4, 0, True, "sequence")
    assert parse_layout("tp4+sp+fused") == Layout("tp4+sp+fused", 4, 1, True, "fused")
    (fused,) = points(options(layouts=["tp4+sp+fused"], plans=["none"]))
    assert recipe_of(fused).reducer == "fused"
    wrong = {
        "tp4+fused": "fused without sp",
        "tp": "'tp'",
        "sp": "without tpN",
        "zero3": "'zero3'",
        "ddp2": "'ddp2'",
    }
    for text, words in wrong.items():
        with pytest.raises(UserError, match=words):
            parse_layout(text)


def test_points() -> None:
    """Each plan under TP has its bound, `none` is that of standard, and no point occurs twice."""
    found = [(p.layout, p.plan, p.no_comm) for p in points(options(layouts=["ddp", "tp2"]))]
    assert found == [
        ("ddp", "standard", False), ("ddp", "ladder", False), ("tp2", "standard", False),
        ("tp2", "standard", True), ("tp2", "ladder", False), ("tp2", "ladder", True),
    ]  # fmt: skip


def calls(rank: int, world: int) -> dict[str, list[int]]:
    """Collectives of one forward and backward pass over the TP group, by layout: with and without
    the sublayers' reduces."""
    found: dict[str, list[int]] = {}
    for layout in ("tp2", "tp2+sp"):
        for no_comm in (False, True):
            (point, *_) = points(options(layouts=[layout], plans=["ladder"]))
            point = TrainingPoint(**{**point.__dict__, "no_comm": no_comm})
            recipe = recipe_of(point)
            model, _ = measure.training_model(point, recipe, 2, torch.device("cpu"))
            tokens = torch.randint(0, 100, (2, 64), generator=torch.Generator().manual_seed(1))
            with Dispatched() as mode:
                model(tokens, tokens).mean().backward()
            found.setdefault(layout, []).append(mode.count)
            for parameter in model.parameters():
                assert parameter.grad is not None
                assert local_tensor(parameter.grad).isfinite().all()
    return found


def test_the_bound_drops_the_sublayers_reduces_alone(pools: Pools) -> None:
    """Two layers have four reduces, each forward and backward; under sequence parallelism a scatter
    and a gather each, and the final norm's gather. The embedding's and the loss's stay."""
    for found in pools(2).run(calls):
        reduced, no_comm = found["tp2"]
        assert reduced - no_comm == 2 * 4
        reduced, no_comm = found["tp2+sp"]
        assert reduced - no_comm == 2 * (4 + 5)


def test_the_table() -> None:
    def record(step: float, **changes: Any) -> dict[str, Any]:
        point = {**points(options(layouts=["tp2"], plans=["standard"]))[0].__dict__, **changes}
        result = {"step_ms": step, "steps_ms": [step, step + 1], "tokens_s_gpu": 1e6 / step}
        return {"point": point, "result": {**result, "mfu": 0.5, "memory_gib": 3.0}}

    records = [record(120.0), record(100.0, no_comm=True), record(105.0, plan="ladder"),
               record(100.0, plan="ladder", no_comm=True)]  # fmt: skip
    lines = [line.split() for line in table(records).splitlines()]
    assert lines[1][:3] == ["tp2", "standard", "120.0"]
    assert lines[1][6:8] == ["20.0%", "1.000"]
    assert lines[2][:3] == ["tp2", "none", "100.0"]
    assert lines[3][6:8] == ["5.0%", "1.143"]
    assert lines[4][1:3] == ["ladder", "no_comm"]


def test_a_trace_is_of_one_pass_forward_and_one_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels put into the trace, as there is no GPU: what was hidden is said by pass."""
    record = tracing.record_trace

    def recorded(phases: Any, device: Any, file: Path, head_start: float) -> None:
        record(phases, device, file, head_start)
        data = json.loads(gzip.decompress(file.read_bytes()))
        marks = [e for e in data["traceEvents"] if e.get("cat") == "user_annotation"]
        for event in marks:
            if event["name"] in phases:
                at = event["ts"]
                hidden = {"forward": 15, "backward": 5}[event["name"]]
                data["traceEvents"] += [
                    on_gpu("gemm", 7, at + 10, at + 30),
                    on_gpu("ncclDevKernel_ReduceScatter", 13, at + 30 - hidden, at + 50 - hidden),
                ]
        file.write_bytes(gzip.compress(json.dumps(data).encode()))

    monkeypatch.setattr(tracing, "record_trace", recorded)
    (point,) = points(options(plans=["ladder"]))
    live = measure.prepare_point(point, 4, torch.device("cpu"))
    (result,) = measure.measure([live], 1, torch.device("cpu"))
    result["trace"] = measure.trace_passes(live, torch.device("cpu"), tmp_path)
    assert all(parameter.grad is None for parameter in live.model.parameters())
    assert result["trace"]["forward"]["hidden"] == pytest.approx(0.75)
    assert result["trace"]["backward"]["hidden"] == pytest.approx(0.25)
    text = table([{"point": point.__dict__, "result": result}])
    assert "75% / 25%" in text
    result["trace"]["backward"]["exposed_ms"] = 2.56
    text = table([{"point": point.__dict__, "result": result}])
    assert "0.0 / 2.6" in text


COMMAND = ["bench", "train", "--model", "tiny", "--layers", "2", "--seq-len", "32", "--batch", "2",
           "--steps", "1", "--device", "cpu", "--dtype", "float32"]  # fmt: skip


@pytest.mark.parametrize(
    ("plans", "lines", "count"),
    [
        (["standard", "none"], ["tp2     standard", "tp2     none"], 3),
        pytest.param(
            ["standard", "none", "ladder", "desync-2x"],
            ["tp2     standard", "tp2     none", "fsdp    desync-2x", "ladder no_comm"], 9,
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_the_command(
    plans: list[str], lines: list[str], count: int, tmp_path: Path, start: Start
) -> None:
    """On two ranks, with virtual ranks where T is 4: every line is there and recorded."""
    wanted = ["--plans", *plans, "--layouts", "tp2", "fsdp"]
    command = start(main, [*COMMAND, *wanted, "--nproc", "2", "--out", str(tmp_path)])
    assert command.wait() == 0, command.err
    printed, said = command.out, command.err
    assert said.count("--plans none is left out under fsdp: without TP there is no reduce") == 1
    for line in lines:
        assert line in printed
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert len(records) == count
    assert all(record["result"]["step_ms"] > 0 for record in records)
    assert all(record["machine"]["ranks"] == 2 for record in records)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--layouts", "tp2"], "tp=2"),
        (["--layouts", "pp2"], "--layouts: 'pp2'"),
        (["--plans", "lader"], "lader"),
        (["--plans", "none"], "layout with tpN"),
        (["--steps", "0"], "--steps=0"),
        (["--batch", "0"], "--batch=0 must be 1 or more"),
        (["--batch", "-2"], "--batch=-2 must be 1 or more"),
        (["--micro-batch", "-1"], "--micro-batch=-1 must be 0 or more"),
        (["--micro-batch", "3"], "--micro-batch=3"),
        (["--dtype", "int8"], "int8"),
        (["--activation-checkpointing", "some"], "'some'"),
        (["--model", "tinny"], "tinny"),
    ],
)
def test_mistakes(wrong: list[str], words: str, tmp_path: Path, capsys: Any) -> None:
    """Before anything is timed: one line, exit code 2."""
    assert launch.world_size() == 1
    assert main([*COMMAND, "--out", str(tmp_path / "b"), *wrong]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert words in error
    assert not (tmp_path / "b").exists()


def test_a_point_has_the_degree_of_its_plan() -> None:
    """Catches two degrees of a plan that count as one point; records without one are read."""
    given = {"plans": ["standard", "desync-2x"], "steps": 1, "batch": 2}
    for degree in (4, 8):
        wanted = options(**given, model="tiny", tp_degree=degree)
        found = command.checked_points(wanted, torch.device("cpu"))
        assert [point.tp_degree for point in found] == [None, degree]
    results = {"step_ms": 1.0, "steps_ms": [1.0], "tokens_s_gpu": 1.0}
    both = [{"point": asdict(point), "result": results} for point in found]
    assert [line.split()[-4] for line in table(both).splitlines()[1:]] == ["1.000", "1.000"]
    del both[0]["point"]["tp_degree"]
    assert TrainingPoint(**both[0]["point"]) == found[0]


def test_a_trace_of_a_plans_file_is_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a folder by the name of the plan's, whose trace the next one overwrites."""

    def profiled(phases: Any, steps: Any, device: Any, file: Path, head_start: float) -> Any:
        file.parent.mkdir(exist_ok=True)
        file.touch()
        return "", {}

    monkeypatch.setattr(measure, "profile", profiled)
    point = points(options(layouts=["tp2+sp"], plans=["ladder"]))[0]
    batch = SimpleNamespace(parts=[None])
    timed: Any = SimpleNamespace(
        point=replace(point, plan="../plans/my.yaml"), batch=batch, model=torch.nn.Linear(1, 1)
    )
    for _ in range(2):
        measure.trace_passes(timed, torch.device("cpu"), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"trace-00{n}-tp2-sp-..-plans-my.yaml.json.gz" for n in range(2)
    ]


def test_a_plan_gets_its_degree() -> None:
    config = shape_of(points(options(plans=["desync-2x"]))[0], 4)
    assert isinstance(config, ModelConfig)
    assert config.tp_degree == 4
    assert shape_of(points(options(plans=["ladder"]))[0], 4).tp_degree is None


def test_a_record_names_what_nccl_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that differ in it are not the same measurement."""
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    assert facts("none")["environment"]["NCCL_MAX_CTAS"] == "2"


def test_points_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Points of a layout that fit in memory take turns; virtual ranks are alone. Catches a point
    whose steps are all timed in one go, and steps that are left out or counted twice."""
    turns: list[tuple[str, int]] = []
    timed, take_turn = measure.measure, measure.take_turn

    def noted(live: measure.TimedStep, steps: int, device: torch.device) -> None:
        turns.append((live.point.plan, steps))
        take_turn(live, steps, device)

    def measured(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(measure, "take_turn", noted)
            return timed(*arguments)

    monkeypatch.setattr(command, "measure", measured)
    wanted = ["--plans", "standard", "desync-2x", "ladder", "--layouts", "ddp", "fsdp"]
    assert main([*COMMAND, *wanted, "--steps", "4", "--out", str(tmp_path / "all")]) == 0
    of_a_layout = [
        ("standard", 2), ("ladder", 2), ("standard", 1), ("ladder", 1), ("standard", 1),
        ("ladder", 1), ("desync-2x", 2), ("desync-2x", 1), ("desync-2x", 1),
    ]  # fmt: skip
    assert turns == 2 * of_a_layout
    records = [json.loads(line) for line in (tmp_path / "all" / "train.jsonl").open()]
    assert [len(each["result"]["steps_ms"]) for each in records] == 6 * [4]
    turns.clear()
    monkeypatch.setattr(measure, "ROOM", 1e9)
    wanted = ["--plans", "standard", "ladder", "--layouts", "ddp"]
    assert main([*COMMAND, *wanted, "--steps", "2", "--out", str(tmp_path / "one")]) == 0
    assert [plan for plan, _ in turns] == ["standard", "standard", "ladder", "ladder"]


def test_figures_outlive_a_trace_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no trace")

    monkeypatch.setattr(command, "trace_passes", fails)
    monkeypatch.setattr(command, "check_profile", lambda device: None)  # as on a GPU
    wanted = ["--plans", "standard", "ladder", "--layouts", "ddp", "--profile"]
    assert main([*COMMAND, *wanted, "--out", str(tmp_path)]) == 1
    records = [json.loads(line) for line in (tmp_path / "train.jsonl").open()]
    assert [each["point"]["plan"] for each in records] == ["standard", "ladder"]


def test_a_trace_on_a_cpu_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, "--profile", "--out", str(tmp_path / "out")]) == 2
    assert "--profile traces the kernels of a GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
