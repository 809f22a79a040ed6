"""benchmarks/formats.py: the figures against a model's own, and the command."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ladder.convert.command import convert
from ladder.data.prepared import open_data, text_bytes
from ladder.infer.cache import reading
from ladder.infer.load import load_for_inference
from tests import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import formats


def test_a_table_of_formats(
    llama: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures by hand, of a format that needs a cache; what is there is not measured again."""
    out = tmp_path / "out"
    command = ["run", str(llama), "--data", str(corpus), "--out", str(out), "--no-suite",
               "--windows", "2", "--batch", "1", "--device", "cpu", "--dtype", "float32",
               "--formats", "float32", "int8", "fp8 + cache"]  # fmt: skip
    assert formats.main(command) == 0
    printed = capsys.readouterr().out
    lines = (out / "formats.jsonl").read_text().splitlines()
    exact, _, small = (json.loads(line) for line in lines)
    assert [json.loads(line)["format"] for line in lines] == command[-3:]
    models = [load_for_inference(llama, dtype="float32", weights=w) for w in ("auto", "fp8")]
    data = open_data(corpus)
    heldout = data.windows("heldout", exact["seq_len"])
    nats = apart = size = 0.0
    for window in heldout.spread(2):
        tokens, targets = heldout.read([window])
        with torch.no_grad():
            theirs = models[0](tokens).double().log_softmax(-1)
            ours = models[1](tokens, **reading(models[1], tokens, "fp8")).double().log_softmax(-1)
        nats += float(F.nll_loss(ours[0], targets[0], reduction="sum"))
        apart += float((theirs.exp() * (theirs - ours)).sum())
        size += int(text_bytes(data, targets).sum())
    assert small["tokens"] == 2 * exact["seq_len"]
    assert small["divergence"] == pytest.approx(apart / small["tokens"], rel=1e-3)
    assert small["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert exact["divergence"] == pytest.approx(0.0, abs=1e-6)
    assert small["matrix_bytes"] < 0.4 * exact["matrix_bytes"]
    assert (out / "formats.txt").read_text() in printed
    assert formats.main(command) == 0
    assert (out / "formats.jsonl").read_text().splitlines() == lines
    fewer = ["1" if word == "2" else word for word in command[:-2]]
    assert formats.main(fewer) == 0  # measured, and no row of the same table
    capsys.readouterr()
    assert formats.main(["report", str(out / "formats.jsonl")]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if "held-out tokens" in line]
    assert [f"{2 * exact['seq_len']:,} held-out" in line for line in heads] == [True, False]
    convert(llama, tmp_path / "small", weights="int8")
    assert formats.main(["run", str(tmp_path / "small"), *command[2:]]) == 2
    said = capsys.readouterr().err
    assert "small holds int8 weights: give the folder that it was converted from" in said
    for wrong, text in (
        (["--formats", "fp4"], "unknown format of --formats 'fp4'"),
        (["--formats", "reduce fp8"], "--formats 'reduce fp8' needs several ranks"),
        (["--windows", "0"], "--windows=0 must be 1 or more"),
        (["--dtype", "int8"], "--dtype=int8 must be auto, float32 or bfloat16"),
    ):
        capsys.readouterr()
        assert formats.main([*command[:3], *command[3:6], "--no-suite", *wrong]) == 2
        assert text in capsys.readouterr().err
