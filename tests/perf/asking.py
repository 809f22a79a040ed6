"""Questions to `ladder predict`, and what they are about: folders and machine files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ladder.cli import main
from ladder.files import write_text
from ladder.models.config import ModelConfig
from ladder.models.presets import resolve_plan
from ladder.perf.machine import Value
from ladder.perf.machine_files import load, write

Out = pytest.CaptureFixture[str]
SMALL = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2,
    "num_heads": 4, "num_kv_heads": 2, "max_seq_len": 128,
}  # fmt: skip


def asked(capsys: Out, *words: str) -> dict[str, Any]:
    assert main(["predict", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def with_memory(path: Path, gib: float) -> str:
    machine = load("h200x4")
    write(replace(machine, values={**machine.values, "memory_gib": Value(gib, "declared")}), path)
    return str(path)


def folder(path: Path, plan: str = "ladder", degree: int | None = None) -> Path:
    """A folder of our own format with a config and no weights."""
    path.mkdir()
    config = ModelConfig(**SMALL, plan=resolve_plan(plan, 2, degree), tp_degree=degree)
    write_text(
        path / "config.json", json.dumps({"model_type": "ladder", "model": config.to_dict()})
    )
    return path
