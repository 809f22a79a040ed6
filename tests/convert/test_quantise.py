"""`ladder convert --weights`: the folder loads without the original, and nothing trains on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ladder.checkpoint import load_model, model_entries, read_config, write_config, write_tensors
from ladder.cli import main
from ladder.convert.command import convert
from ladder.hf import LadderForCausalLM
from ladder.infer.load import load_for_inference
from ladder.models import Transformer, UserError
from ladder.models.quantised import quantise_model
from ladder.models.storage import QUANTISED, scale_dtype
from tests.samples import full_model, small_config

TOKENS = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))


def stored(folder: Path, plan: str, degree: int = 0, **fields: Any) -> Transformer:
    """The model of a new folder, in bfloat16."""
    model = full_model(small_config(plan, degree, degree > 0, **fields), 5, torch.bfloat16)
    folder.mkdir()
    write_config(folder, model.config, None)
    write_tensors(folder, "model", model_entries(model), writer=True)
    return model


@pytest.mark.parametrize("kind", [*QUANTISED])
@pytest.mark.parametrize(("plan", "tied"), [("ladder", True), ("parallel", False)])
def test_a_folder_is_what_loading_makes(tmp_path: Path, plan: str, tied: bool, kind: str) -> None:
    """The same logits, bit for bit, as with --weights at load; matrices of one byte."""
    stored(tmp_path / "source", plan, tie_embeddings=tied, qkv_bias=True, intermediate_size=320)
    convert(tmp_path / "source", tmp_path / "out", weights=kind)
    model = load_for_inference(tmp_path / "out")
    with torch.no_grad():
        found = model(TOKENS)
        for weights in ("auto", kind):
            again = load_for_inference(tmp_path / "out", weights=weights)
            assert torch.equal(again(TOKENS), found)
        at_load = load_for_inference(tmp_path / "source", weights=kind)
        assert torch.equal(at_load(TOKENS), found)
        in_float32 = load_for_inference(tmp_path / "out", dtype="float32")
        difference = in_float32(TOKENS) - found
        assert 0 < difference.abs().max() < 0.05 * found.abs().max()
    assert model.lm_head.weight.dtype == QUANTISED[kind]
    assert model.lm_head.scales.dtype == scale_dtype(kind)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_types_that_are_mixed(tmp_path: Path) -> None:
    """What is loaded holds every value: in the type of the embedding one would be infinite."""
    source, name = tmp_path / "source", "model.layers.0.mlp.up_proj.weight"
    stored(source, "standard")
    tensors = load_file(source / "model.safetensors")
    tensors[name][0, 0] = 2.0**17
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half()
    save_file(tensors, source / "model.safetensors")
    found = load_model(source).get_parameter(name).detach()
    assert (found.dtype, float(found[0, 0])) == (torch.float32, 2.0**17)
    convert(source, tmp_path / "out", to="hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_plan_and_8_bits_in_one_step(tmp_path: Path) -> None:
    """Norms of merged sublayers are folded once by the plan, and then are 1."""
    stored(tmp_path / "source", "standard")
    convert(tmp_path / "source", tmp_path / "whole", plan="parallel")
    convert(tmp_path / "source", tmp_path / "out", plan="parallel", weights="int8")
    expected = load_model(tmp_path / "whole", dtype=torch.float32)
    quantise_model(expected, "int8")
    found = load_model(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(found(TOKENS), expected(TOKENS))


def test_the_command_writes_8_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And ends well; what is in 8 bits cannot be fine-tuned."""
    stored(tmp_path / "source", "standard")
    words = ["convert", str(tmp_path / "source"), "--weights", "fp8", "--out"]
    assert main([*words, str(tmp_path / "same")]) == 0
    assert "another function" not in capsys.readouterr().out
    assert main([*words, str(tmp_path / "ladder"), "--plan", "ladder"]) == 0
    said = capsys.readouterr().out
    assert "another function than standard: fine-tune it before use, converted without" in said


def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(tmp_path / "source", "standard")
    stored(tmp_path / "desync", "desync-2x", 2)
    convert(tmp_path / "source", tmp_path / "fp8", weights="fp8")
    out, source = str(tmp_path / "out"), str(tmp_path / "source")
    small = str(tmp_path / "fp8")
    only = "holds fp8 weights, which are for inference only"
    for arguments, text in (
        (["convert", source, "--weights", "fp4", "--out", out], "fp4"),
        (["convert", source, "--weights", "fp8", "--to", "hf", "--out", out], "--to hf"),
        (["convert", str(tmp_path / "desync"), "--weights", "int8", "--out", out], "plan 'desync"),
        (["convert", small, "--out", out], only),
    ):
        capsys.readouterr()
        assert main(arguments) != 0
        line = capsys.readouterr().err
        assert text in line, line
        assert line.startswith("error: ")
        assert line.count("\n") == 1
        assert not Path(out).exists()
    with pytest.raises(UserError, match=only):
        read_config(tmp_path / "fp8")
    for options, text in (
        ({"weights": "int8"}, "--weights=int8: .* holds fp8 weights"),
        ({"weights": "fp4"}, "unknown type of --weights 'fp4'.*bf16, fp8, fp8-block, int8"),
        ({"weights": "bf16", "dtype": "float32"}, "--weights=bf16 with --dtype=float32"),
    ):
        with pytest.raises(UserError, match=text):
            load_for_inference(tmp_path / "fp8", **options)
    with pytest.raises(UserError, match="quantization_config"):
        LadderForCausalLM.from_pretrained(tmp_path / "fp8")


def test_a_config_that_says_otherwise_is_refused(tmp_path: Path) -> None:
    stored(tmp_path / "source", "standard")
    convert(tmp_path / "source", tmp_path / "fp8", weights="fp8")
    path = tmp_path / "fp8" / "config.json"
    data = json.loads(path.read_text())
    for kind, text in (
        ("int8", "has the type torch.float8_e4m3fn"), ("fp4", "'fp4'"), (["fp8"], r"\['fp8'\]"),
    ):  # fmt: skip
        data["quantization_config"]["weights"] = kind
        path.write_text(json.dumps(data))
        with pytest.raises(UserError, match=text):
            load_for_inference(tmp_path / "fp8")
    del data["quantization_config"]
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="tensors that the model does not have"):
        load_for_inference(tmp_path / "fp8")
