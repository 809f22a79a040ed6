"""`ladder predict MODEL`: models of folders, and machines of several files."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from ladder.cli import main, make_parser
from ladder.files import write_text
from ladder.models import UserError
from ladder.perf.machine import Curve, Machine
from ladder.perf.machine_files import load, write
from ladder.perf.planner.subject import machines
from tests.perf.asking import Out, asked, folder


def test_a_folder_is_asked_about_with_its_own_plan(tmp_path: Path, capsys: Out) -> None:
    """Its plan comes first, once; recommended, the folder generates."""
    path = folder(tmp_path / "model")
    words = (str(path), "--context", "64")
    found = asked(capsys, *words)
    names = {row["plan"] for row in found["rows"]}
    assert "checkpoint" in names
    assert "ladder" not in names
    own = asked(capsys, str(path / "config.json"), "--context", "64", "--plans", "checkpoint")
    command = shlex.split(own["command"])
    assert command[:3] == ["ladder", "generate", str(path)]
    make_parser().parse_args(command[1:])


def test_a_plan_of_another_degree_is_left_out_with_a_line(tmp_path: Path, capsys: Out) -> None:
    path = folder(tmp_path / "model", "desync-2x", 2)
    found = asked(capsys, str(path), "--context", "64", "--plans", "checkpoint")
    assert {row["tp"] for row in found["rows"]} == {1, 2}
    assert any("checkpoint at TP 4: T is 2" in line for line in found["left_out"])
    assert (
        main(["predict", str(path), "--context", "64", "--plans", "checkpoint", "--tp", "4"]) == 2
    )
    assert "nothing is left to predict: checkpoint at TP 4" in capsys.readouterr().err
    slow = str(folder(tmp_path / "slow", "standard"))
    assert main(["predict", slow, "--context", "64", "--tp", "4"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "times as fast as the best of checkpoint" in said


def test_hugging_face_configs_are_read(tmp_path: Path, capsys: Out) -> None:
    data = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256,
            "num_hidden_layers": 2, "num_attention_heads": 4,
            "max_position_embeddings": 128}  # fmt: skip
    write_text(tmp_path / "config.json", json.dumps(data))
    found = asked(capsys, str(tmp_path / "config.json"), "--context", "64")
    assert found["model"] == str(tmp_path)
    assert found["recommended"]["plan"]


def test_degrees_come_from_files_of_the_same_gpu(tmp_path: Path) -> None:
    """TP 2 of h200x4 has the collectives of h200x2, and h200x4's own products."""
    found = machines(["h200x4"])
    assert list(found) == [1, 2, 4]
    assert found[2].curve("all-reduce", algorithm="push") == load("h200x2").curve(
        "all-reduce", algorithm="push"
    )
    assert found[2].value("step_stretch") == load("h200x4").value("step_stretch")
    assert not found[1].family("all-reduce")
    other = replace(load("h200x2"), gpu="NVIDIA H100")
    write(other, tmp_path / "h100x2.json")
    with pytest.raises(UserError, match=r"h100x2.json: it has NVIDIA H100, and h200x4 NVIDIA H200"):
        machines(["h200x4", str(tmp_path / "h100x2.json")])


def test_a_file_of_ones_own_adds_a_degree(tmp_path: Path) -> None:
    def named(gpus: int, us: float) -> Machine:
        curve = Curve("all-reduce", {"algorithm": "push"}, ((8192.0, us), (16384.0, us)), "made up")
        return replace(load("h200x4"), name=f"x{gpus}", gpu="other", gpus=gpus, curves=(curve,))

    for gpus, us in ((2, 2.0), (8, 8.0)):
        write(named(gpus, us), tmp_path / f"{gpus}.json")
    found = machines([str(tmp_path / "8.json"), str(tmp_path / "2.json")])
    assert list(found) == [1, 2, 8]
    assert found[2].curve("all-reduce", algorithm="push").points[0][1] == 2.0


def test_a_folder_in_8_bits_is_predicted_as_it_is(tmp_path: Path, capsys: Out) -> None:
    path = folder(tmp_path / "small")
    plain = asked(capsys, str(path), "--context", "64", "--tp", "4")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"weights": "int8"}
    write_text(path / "config.json", json.dumps(config))
    found = asked(capsys, str(path), "--context", "64", "--tp", "4")
    assert (plain["weights"], found["weights"]) == ("bf16", "int8")
    assert found["command"].startswith("ladder generate")
    assert "--weights" not in found["command"]
    other = asked(capsys, str(path), "--context", "64", "--tp", "4", "--plans", "standard")
    assert other["command"].startswith("ladder bench inference")
    assert "--weights int8" in other["command"]  # which it does not take from the folder
    assert found["rows"][0]["memory"]["weights"] < plain["rows"][0]["memory"]["weights"]
    assert main(["predict", str(path), "--weights", "fp8"]) == 2
    assert "holds int8 weights; leave it out" in capsys.readouterr().err
    assert main(["predict", "llama-3-8b", "--weights", "int4"]) == 2
    assert "--weights" in capsys.readouterr().err
    assert main(["predict", "llama-3-8b", "--train", "--weights", "fp8"]) == 2
    assert "--weights=fp8 is of inference" in capsys.readouterr().err
