"""`ladder convert`, the command: what it says, and which options go together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ladder import checkpoint
from ladder.cli import main
from ladder.convert import verify
from ladder.convert.command import convert
from ladder.convert.verify import tensor_checksum, verify_checksums
from ladder.models import ModelConfig, UserError
from tests.convert.folders import assert_refused, assert_same_bits, edit, save, tensors


def assert_compared(what: str, printed: str) -> None:
    """Equal in every bit, on most machines, or nearly so."""
    lines = printed.splitlines()
    near = f"{what} differ from transformers' by "
    assert f"{what} equal transformers', bit for bit" in lines or any(
        line.startswith(near) and not line.startswith(f"{near}0.0e") for line in lines
    ), printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--plan", "laddr"), ("'laddr'", "did you mean 'ladder'")),
        (("--plan", "desync-2x"), ("'desync-2x'", "tp_degree")),
        (("--plan", "ladder", "--tp-degree", "2"), ("--tp-degree=2",)),
        (("--tp-degree", "2"), ("--tp-degree=2", "--plan")),
        (("--plan", "none", "--tp-degree", "2"), ("--plan=none", "no_comm")),
        (("--plan", "ladder", "--ladder-layers", "2-3"),
         ("--ladder-layers=2-3", "add --plan hybrid instead of --plan ladder")),
        (("--ladder-layers", "2-3"), ("--ladder-layers=2-3 is for", "hybrid: add --plan hybrid")),
        (("--plan", "hybrid", "--ladder-layers", "2-9"), ("'2-9'", "0-3")),
        (("--to", "hf", "--plan", "ladder"), ("--plan=ladder", "--to hf", "give --plan standard")),
        (("--to", "hf", "--ladder-layers", "2-3"), ("--ladder-layers=2-3", "--to hf", "leave it")),
        (("--to", "hf", "--tp-degree", "2"), ("--tp-degree=2", "--to hf", "leave it")),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    assert_refused(capsys, save(tmp_path / "hf"), words, *arguments)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its output, and its errors for a ladder in Hugging Face's format and an `out` that exists."""
    source, out = save(tmp_path / "hf"), tmp_path / "out"
    words = ["convert", str(source), "--out", str(out), "--plan", "hybrid"]
    assert main([*words, "--ladder-layers", "0, 2-3"]) == 0
    said, progress = capsys.readouterr()
    assert "every checksum agrees" in said
    size = sum(each.nbytes for each in tensors(out).values()) // 1000
    assert f"convert: {size:,}/{size:,} kB, " in progress  # once, though each tensor is read back
    assert "plan ladder@0,ladder@2-3 computes another function than standard: fine-tune" in said
    assert f"init={out} teacher={source}`" in said
    assert main(["convert", str(source), "--out", str(tmp_path / "same")]) == 0
    assert "another function" not in capsys.readouterr().out
    assert checkpoint.read_config(out).plan.name == "ladder@0,ladder@2-3"
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    out.rename(tmp_path / "ladder")
    refusal = ("'ladder@0,ladder@2-3'", "add --plan standard")
    assert_refused(capsys, tmp_path / "ladder", refusal, "--to", "hf")
    assert_refused(capsys, source / "config.json", ("is a file; give a model folder",))
    with pytest.raises(UserError, match="unknown format 'huggingface'"):
        convert(source, out, to="huggingface")


def test_a_hybrid_goes_back_as_standard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the refusal says: its weights are what they were, and the wires Hugging Face's."""
    source = save(tmp_path / "hf")
    convert(source, tmp_path / "hybrid", "hybrid")
    words = ["--plan", "standard", "--to", "hf", "--out", str(tmp_path / "back")]
    assert main(["convert", str(tmp_path / "hybrid"), *words]) == 0
    assert_same_bits(tensors(tmp_path / "back"), tensors(source))
    assert_compared("logits under plan standard", capsys.readouterr().out)
    back = (tmp_path / "back" / "config.json").read_text()
    assert json.loads(back) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(
    ("plan", "limit", "compared"),
    [
        ("standard", verify.MOST_PARAMETERS, "logits"),
        ("ladder", verify.MOST_PARAMETERS, "logits under plan standard"),
        ("hybrid", 24_000, "logits of the first 2 of 4 layers under plan standard"),
        ("standard", 1, "logits of the first 1 of 4 layers"),
    ],
)
@pytest.mark.parametrize("family", ["llama 3, tied", "mistral", "qwen2", "qwen3"])
def test_other_logits_than_transformers_are_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    plan: str, limit: int, compared: str, family: str,
) -> None:  # fmt: skip
    """A config that is read wrongly, here its base of the rotary frequencies: of every plan that
    keeps the weights, and of a part of what is too large."""
    monkeypatch.setattr(verify, "MOST_PARAMETERS", limit)
    monkeypatch.setattr(verify, "ROWS", 64)
    source = save(tmp_path / "hf", family)
    edit(source / "config.json", pad_token_id=90)
    words = ["convert", str(source), "--plan", plan, "--out"]
    assert main([*words, str(tmp_path / "good")]) == 0
    assert_compared(compared, capsys.readouterr().out)

    def wrong(folder: Path) -> ModelConfig:
        return replace(checkpoint.read_config(folder), rope_theta=100.0)

    monkeypatch.setattr(verify, "read_config", wrong)
    assert main([*words, str(tmp_path / "out")]) == 2
    assert f"the {compared} differ" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_weights_are_cast_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every tensor, rounded once; the logits are compared of weights in that type."""
    source = save(tmp_path / "hf")
    words = ["convert", str(source), "--plan", "ladder", "--dtype", "bfloat16"]
    assert main([*words, "--out", str(tmp_path / "ours")]) == 0
    assert_compared("logits under plan standard with weights in bfloat16", capsys.readouterr().out)
    cast = {name: value.bfloat16() for name, value in tensors(source).items()}
    assert_same_bits(tensors(tmp_path / "ours"), cast)
    convert(source, tmp_path / "wide", "standard")
    words = ["convert", str(tmp_path / "wide"), "--to", "hf", "--dtype", "bfloat16"]
    assert main([*words, "--out", str(tmp_path / "back")]) == 0
    assert_compared("logits with weights in bfloat16", capsys.readouterr().out)
    assert_same_bits(tensors(tmp_path / "back"), cast)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    refusal = ("--dtype=bfloat16", "--weights=fp8", "leave one")
    assert_refused(capsys, source, refusal, "--dtype", "bfloat16", "--weights", "fp8")
    with pytest.raises(UserError, match="unknown dtype 'int8'"):
        convert(source, tmp_path / "out", dtype="int8")


def test_norms_that_are_folded_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--plan", "parallel", "--out", str(tmp_path / "out")]
    assert main(["convert", str(save(tmp_path / "hf")), *words]) == 0
    said = capsys.readouterr().out
    assert "not compared with those of transformers: plan 'parallel' has other" in said


def test_checksums_are_of_all_tensors_and_no_others(tmp_path: Path) -> None:
    """One more in the folder, one that is not there, one that was changed."""
    folder = save(tmp_path / "hf")
    whole = tensors(folder)
    sums = {name: tensor_checksum(value) for name, value in whole.items()}
    told: list[str] = []
    verify_checksums(folder, sums, told.append)
    assert sorted(told) == sorted(whole)
    name = "model.norm.weight"
    less = {key: value for key, value in sums.items() if key != name}
    for wrong in (less, {**less, name: "0"}):
        with pytest.raises(UserError, match=f"^{name}: the written data differs"):
            verify_checksums(folder, wrong, told.append)
    with pytest.raises(UserError, match=r"^more\.weight: the written data differs"):
        verify_checksums(folder, {**sums, "more.weight": "0"}, told.append)
