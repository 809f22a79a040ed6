"""Records that `ladder predict` reads: values of a wrong kind, and what is not scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ladder.cli import main
from ladder.perf.machine_files import load
from ladder.perf.prediction.records import scores

LINE: dict[str, Any] = {
    "machine": {"gpu": "NVIDIA H200", "ranks": 4}, "result": {"decode_ms": 1.2, "prefill_ms": 7.0},
    "point": {"model": "llama-3-8b", "plan": "ladder", "reducer": "push", "tp": 4, "batch": 1,
              "prompt": 1024, "new_tokens": 64, "layers": 32},
}  # fmt: skip
STEP: dict[str, Any] = {
    "machine": {"gpu": "NVIDIA H200", "ranks": 4}, "result": {"step_ms": 300.0},
    "point": {"model": "llama-3-8b", "layers": 12, "plan": "ladder", "layout": "tp4+sp",
              "seq_len": 8192, "batch": 1, "micro_batch": 1, "dtype": "bfloat16",
              "checkpointing": "none", "compile": True, "later": 1},
}  # fmt: skip
OPERATOR: dict[str, Any] = {
    "machine": {"gpu": "NVIDIA H200", "date": "2026-11-25"},
    "result": {"us": 300.0, "low_us": 299.0, "high_us": 301.0, "ect_us": 40.0, "efficiency": 0.5},
    "point": {"op": "matmul_reduce_scatter", "shape": "flux-gpt3", "m": 4096, "n": 12288,
              "k": 49152, "ranks": 2, "dtype": "bfloat16", "experts": 0, "tables": 0, "pooling": 0,
              "way": "chunked", "role": "operator", "mode": "captured"},
}  # fmt: skip


def changed(record: dict[str, Any], **values: object) -> dict[str, Any]:
    """A record with other values, of whichever part has such a key, or of its point."""
    parts = {key: dict(part) for key, part in record.items()}
    for key, value in values.items():
        part = next((each for each in parts.values() if key in each), parts["point"])
        part[key] = value
    return parts


@pytest.mark.parametrize("command", ["validate", "llama-3-8b --calibrate"])
@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        (LINE, "batch", "4"),
        (LINE, "batch", True),
        (LINE, "new_tokens", -1),
        (LINE, "p2p", "on"),
        (LINE, "decode_ms", None),
        (LINE, "decode_ms", 0),
        (LINE, "decode_ms", -1.0),
        (LINE, "decode_ms", float("nan")),
        (LINE, "prefill_ms", "3"),
        (STEP, "compile", 1),
        (STEP, "step_ms", None),
    ],
)
def test_values_of_a_wrong_kind_are_refused_in_one_line(
    record: dict[str, Any], key: str, value: object, command: str, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """`--calibrate` reads passes without communication, among those it needs."""
    lines = [changed(LINE, plan="none"), changed(record, plan="none", **{key: value})]
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(["predict", *command.split(), str(file)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{key}={value!r}" in said
    assert "`ladder bench`" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("m", "4096"),
        ("k", 0),
        ("shape", ["flux-gpt3"]),
        ("ranks", [2]),
        ("op", {}),
        ("mode", ["captured"]),
        ("mode", "graph"),
        ("way", ["chunked"]),
        ("us", float("nan")),
        ("us", 0),
        ("us", None),
        ("low_us", "1"),
        ("ect_us", float("inf")),
        ("efficiency", float("nan")),
        ("efficiency", "0.5"),
    ],
)
def test_records_of_operators_are_checked_as_those_of_models(
    key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    lines = [OPERATOR, changed(OPERATOR, **{key: value})]
    file.write_text(json.dumps(lines[0]), encoding="utf-8")
    assert main(["predict", "validate", str(file), "--machine", "h200x2", "--json"]) == 0
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(["predict", "validate", str(file), "--machine", "h200x2", "--json"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"{key}={value!r}" in said
    assert "`ladder bench`" in said


@pytest.mark.parametrize(
    "line",
    [
        [],
        3,
        {**LINE, "point": []},
        {**LINE, "machine": "h200"},
        {**LINE, "result": {"other": 1}},
        {**LINE, "point": {"new_tokens": 64}},
        {**LINE, "point": {"layout": "tp4+sp", "unknown": 1}},
    ],
)
def test_what_is_no_record_is_refused_in_one_line(
    line: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(line), encoding="utf-8")
    assert main(["predict", "validate", str(file)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert str(file) in said
    assert "`ladder bench`" in said


def test_records_in_other_formats_are_not_scored(tmp_path: Path) -> None:
    """Of weights and a cache in 8 bits there are predictions, of other such formats there are none;
    the file's other records are scored."""
    known = ({}, {"weights": "int8"}, {"cache": "fp8"})
    others = ({"cache": "int4"}, {"weights": "fp8", "activations": "fp8"}, {"reducer": "async-fp8"})
    lines = [{**LINE, "point": {**LINE["point"], **each}} for each in (*known, *others)]
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    for phase, count in (("decode", 3), ("prefill", 4)):  # prompts with reduces in 8 bits are
        assert len(scores([file], load("h200x4"), phase)) == count


def recorded_at(commit: str, folder: Path, **point: Any) -> Path:
    """A file with LINE, but of that commit and with other fields of its point."""
    line = changed(LINE, date="2026-11-30", **point)
    line["machine"]["commit"] = commit
    file = folder / "records.jsonl"
    file.write_text(json.dumps(line), encoding="utf-8")
    return file


@pytest.mark.parametrize(("commit", "steps"), [("94613e4", 0), ("f12f03a", 1)])
def test_prompts_with_older_reduces_in_8_bits_are_not_scored(
    tmp_path: Path, commit: str, steps: int
) -> None:
    file = recorded_at(commit, tmp_path, reducer="async-int8")
    assert len(scores([file], load("h200x4"), "prefill")) == steps
    assert not scores([file], load("h200x4"), "decode")


@pytest.mark.parametrize(
    ("weights", "batch", "commit", "steps"),
    [("int8", 4, "8b1d42a", 0), ("int8", 1, "8b1d42a", 1), ("int8", 4, "75e91d3", 1),
     ("fp8-block", 4, "45819bc", 0), ("fp8-block", 1, "45819bc", 1),
     ("fp8-block", 4, "b8bde8d", 1)],
)  # fmt: skip
def test_steps_of_kernels_that_are_not_kept(
    tmp_path: Path, weights: str, batch: int, commit: str, steps: int
) -> None:
    """Of several sequences; their prompts are scored."""
    file = recorded_at(commit, tmp_path, weights=weights, batch=batch)
    assert len(scores([file], load("h200x4"), "decode")) == steps
    assert len(scores([file], load("h200x4"), "prefill")) == 1


def test_cold_starts_did_not_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cold = {"point": LINE["point"], "machine": LINE["machine"], "cold": {"imports_s": 5.1}}
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, (LINE, cold))), encoding="utf-8")
    assert main(["predict", "validate", str(file)]) == 0
    said = capsys.readouterr().out
    assert "decode: not scored: 1 of cold starts, which are not predicted" in said
    assert "failed" not in said


def test_records_that_values_are_fitted_to_are_no_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(json.dumps(changed(LINE, plan="none")), encoding="utf-8")
    assert main(["predict", "validate", str(file)]) == 0
    found = capsys.readouterr().out
    assert "nothing is held out: values are fitted to these; record other plans" in found
    assert "held out, by" not in found


def test_records_that_are_not_scored_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By why: another machine's, of settings without a prediction, a model that is not here, of
    which two records are of one point. A key of a later version changes nothing."""
    others = ({"later": 1}, {"p2p": False}, {"tp": 3}, {"degree": 8}, {"weights": "int4"})
    lines = [changed(LINE, **each) for each in (*others, *2 * ({"model": "runs/gone"},))]
    lines += [STEP, changed(STEP, compile=False), changed(STEP, checkpointing="some")]
    lines += [changed(STEP, plan="standard", no_comm=True, layout="some")]
    lines += [changed(LINE, gpu="another"), {**LINE, "result": None}, {**LINE, "machine": None}]
    file = tmp_path / "records.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert main(["predict", "validate", str(file), "--json"]) == 0
    found = capsys.readouterr()
    assert [row["phase"] for row in json.loads(found.out)] == ["decode", "prefill", "train"]
    said = found.err
    assert "decode: not scored: 1 without access to peers' memory" in said
    assert "prefill: not scored: 1 on 3 GPUs, of which no machine's file has collectives" in said
    assert "decode: not scored: 1 on another" in said
    assert "decode: not scored: 1 failed when they were measured" in said
    assert "decode: not scored: 1 of virtual ranks" in said
    assert "train: not scored: 1 of steps that are not compiled, or not in bfloat16" in said
    assert "decode: not scored: 1 on GPUs that they do not name" in said
    assert "decode: not scored: 1 with weights=int4, which are unknown" in said
    assert "train: not scored: 1 with checkpointing=some, which is unknown" in said
    assert "train: not scored: 1 (--layouts: 'some' of 'some' is unknown" in said
    (gone,) = [line for line in said.splitlines() if line.startswith("decode") and "gone" in line]
    assert "not scored: 2 (" in gone
