"""Input that is too large, too deep or no text at all: one line that says so, at once."""

from __future__ import annotations

import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ladder.checkpoint import huggingface_config, read_config
from ladder.cli import main
from ladder.config import apply_overrides, load_yaml, model_config
from ladder.convert.command import convert
from ladder.hf_config import config_from_huggingface
from ladder.models import ModelConfig, Reducer, Transformer, UserError, resolve_plan
from ladder.models.loss import LossFunctions, token_losses
from ladder.parallel.sharding import initialise, shard_model
from ladder.train.config import load_train_config
from tests.distributed import Pools, tp_mesh

SHAPE = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 2,
}  # fmt: skip
TOO_LARGE = [
    ("num_layers", 10**7),
    ("hidden_size", 10**18),
    ("vocab_size", 2**62),
    ("intermediate_size", 10**18),
    ("num_heads", 10**9),
    ("max_seq_len", 2**40),
    ("rope_theta", 10**400),
    ("norm_eps", 10**9),
    ("tp_degree", 10**9),
    ("rope_scaling", {"factor": 10**400}),
]


@pytest.mark.parametrize(("name", "value"), TOO_LARGE, ids=lambda item: str(item)[:20])
def test_a_shape_has_limits(name: str, value: Any, tmp_path: Path) -> None:
    """In our own config, and in one of Hugging Face's."""
    named = "factor" if name == "rope_scaling" else name
    with pytest.raises(UserError, match=f"{named}=10+|{named}={value} .*is too large"):
        ModelConfig(**{**SHAPE, name: value})
    if name == "tp_degree":
        return
    theirs = {
        "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    }  # fmt: skip
    data = {"model_type": "llama", **{theirs.get(key, key): each for key, each in SHAPE.items()}}
    if name == "rope_scaling":
        original = {"original_max_position_embeddings": 99}
        frequencies = {"low_freq_factor": 1, "high_freq_factor": 4}
        value = {"rope_type": "llama3", **original, **frequencies, **value}
    data[theirs.get(name, name)] = value
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=rf"config\.json: .*{named}=.* is too large"):
        read_config(tmp_path)


def test_a_deep_model_is_planned_in_a_moment() -> None:
    """Each of these once took time that grows with the square of the layers."""
    for name in ("standard", "none", "dtp-10000"):
        assert resolve_plan(name, 10_000, 4).equal_reads[0]
    with pytest.raises(UserError, match="num_layers=10001 must be a whole number from 1 to 10,000"):
        resolve_plan("ladder", 10_001)


def test_a_model_that_no_memory_holds(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each size is within its limit; the allocator's own error is a traceback."""
    sizes = ["model.hidden_size=1048576", "model.intermediate_size=4194304", "seq_len=16"]
    assert main(["train", "tiny", f"data={corpus}", f"out={tmp_path / 'run'}", *sizes]) == 2
    assert re.search(
        r"error: this process's weights take [\d,.]+ GB, more than the [\d,.]+ GB that fit on cpu",
        last(capsys),
    )
    assert not (tmp_path / "run").exists()


def last(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("plan", ["desync-{}x", "dtp-{}", "ladder@0-{}", "ladder@{}"])
def test_numbers_of_thousands_of_digits_in_a_plan(plan: str) -> None:
    """Python refuses to read such a number, by an error of its own."""
    with pytest.raises(UserError, match=r"more than 9 digits|outside the model's layers"):
        resolve_plan(plan.format("9" * 5000), 4, 2)


def tenfold(form: str) -> str:
    """YAML whose each line holds the one before it ten times."""
    pairs = pairwise("abcdefghi")
    return "".join(f"{b}: &{b} {form.format(', '.join([f'*{a}'] * 10))}\n" for a, b in pairs)


BAD_YAML = {
    "[" * 100_000: "nested more than 100 deep, line 1",
    "- " * 100_000: "nested more than 100 deep, line 1",
    "{a: " * 500 + "1" + "}" * 500: "nested more than 100 deep",
    "a: &a [*a]": "nested more than 100 deep",
    "a: " + "9" * 5000: "a number of 5,000 digits, line 1, column 4",
    "a: 0x" + "f" * 5000: "a number of 5,002 digits",
    'a: "\\0"': "NUL",
    'a: "\\ud800"': "not UTF-8",
    "a: !!timestamp 2026-02-30": "day is out of range",
    "a: !!timestamp 2026-02-20": "type date",
    f"a: &a [1]\n{tenfold('[{}]')}": "more than 1,000,000 values",
    f"a: &a {{x: 1}}\n{tenfold('{{<<: [{}]}}')}": "more than 1,000,000 keys",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD_YAML, ids=lambda text: text[:12])
def test_yaml_without_bounds(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UserError, match="bad.yaml is not valid YAML: .*" + BAD_YAML[text]):
        load_yaml(tmp_path / "bad.yaml")
    with pytest.raises(UserError, match="override '.*" + BAD_YAML[text]):
        apply_overrides({}, [f"data={text}"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested more than 100 deep"),
        ('{"a": %s}' % ("9" * 5000), "a number of 5,000 digits"),
        ('{"a": ' + "[" * 200 + "]" * 200 + "}", "nested more than 100 deep"),
        ('{"model_type": ["llama"]}', r"model_type=\['llama'\]"),
        ('{"model_type": {}}', "model_type={}"),
        ('{"model_type": "\\ud800"}', "not UTF-8"),
    ],
    ids=lambda item: item[:12],
)
def test_a_config_json_without_bounds(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=rf"config\.json .*{message}"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "out", ["2026-02-30", "2026-02-20", "2026", "on", "null", "1e3", "[a", "a: b", "0x10", "a # b"]
)
def test_a_text_option_takes_text(out: str) -> None:
    """YAML makes dates, numbers, switches and mistakes of them."""
    assert load_train_config("tiny", [f"out={out}"]).out == out
    assert load_train_config("tiny", [f"out='{out}'"]).out == out


@pytest.mark.parametrize("name", ["batch_size", "micro_batch_size", "tp", "dp_shard", "steps"])
def test_a_step_has_limits(name: str) -> None:
    with pytest.raises(UserError, match=f"{name}={10**25} is too large; [0-9,]+ is the most"):
        load_train_config("tiny", [f"{name}={10**25}"])


def test_epochs_have_a_limit() -> None:
    """Times the windows they are the steps, which may not overflow."""
    with pytest.raises(UserError, match=r"epochs=1e\+308 is too large; [0-9,]+ is the most"):
        load_train_config("tiny", ["epochs=1e308"])


def test_a_text_option_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("data: d\nout: 2026-02-30\n")
    assert load_train_config(str(tmp_path / "a.yaml"), []).out == "2026-02-30"
    (tmp_path / "a.yaml").write_text("data: d\nout: 007\n")
    with pytest.raises(UserError, match=r"the number 007: write it in decimal, .* in quotes if it"):
        load_train_config(str(tmp_path / "a.yaml"), [])


def test_names_that_are_too_long(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For any option, in one line, of a length that can be read."""
    name = "x" * 300
    for command in (
        ["train", "tiny", f"data={corpus}", f"out={name}"],
        ["train", "tiny", f"data={corpus}", f"model={name}", f"out={tmp_path}"],
        ["finetune", "tiny", f"data={corpus}", f"init={name}", f"out={tmp_path / 'run'}"],
        ["plans", "--model", name],
        ["generate", name, "--prompt", "a"],
        ["tokenizer", "train", "--out", name],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        said = r"the path '.* [.]{3} .*' is too long|--out=.* [.]{3} .* \(File name too long\)"
        assert re.fullmatch(rf"error: ({said}); .*\n", error), error
        assert len(error) < 200
    assert main(["plans", name * 30]) == 2
    assert 1000 < len(capsys.readouterr().err) < 2100


def test_dates_are_text_wherever_they_stand() -> None:
    assert apply_overrides({}, ["data=[2026-02-20, 2026-02-30]"]) == {
        "data": ["2026-02-20", "2026-02-30"]
    }
    with pytest.raises(UserError, match="unknown model config '2026-02-20'"):
        model_config("2026-02-20")


# ---- tokens beyond the vocabulary


def test_a_target_beyond_the_vocabulary_has_no_loss() -> None:
    """It had that of a token whose logit is 0; no device is waited for, so that it is NaN."""
    logits = torch.randn(1, 4, 10, requires_grad=True)
    targets = torch.tensor([[3, 10, -100, 2**40]])
    losses = token_losses(logits, targets, 0, Reducer(), LossFunctions())
    assert torch.isnan(losses[0]).tolist() == [False, True, False, True]
    losses[0, 1].backward()
    assert logits.grad is not None
    assert torch.isnan(logits.grad[0, 1]).all()


@pytest.mark.parametrize("wrong", [-1, 64, 2**40])
def test_tokens_outside_the_vocabulary_are_refused_on_a_cpu(wrong: int) -> None:
    model = Transformer(ModelConfig(**SHAPE))
    shard_model(model)
    initialise(model, 1)
    tokens = torch.tensor([[1, wrong]])
    with pytest.raises(UserError, match=f"tokens hold {wrong}, which is outside vocab_size=64"):
        model(tokens)
    targets = torch.tensor([[-100, wrong]])
    if wrong < 0:
        assert model(torch.tensor([[1, 2]]), targets)[0].tolist() == [0, 0]
        return
    with pytest.raises(UserError, match=f"targets hold {wrong}, which is outside vocab_size=64"):
        model(torch.tensor([[1, 2]]), targets)


@pytest.mark.parametrize("shape", [[1], [1, 2, 3]])
def test_tokens_are_sequences_of_a_batch(shape: list[int]) -> None:
    model = Transformer(ModelConfig(**SHAPE))
    with pytest.raises(UserError, match=rf"tokens of the shape \{shape} must be \[B, S\]"):
        model(torch.zeros(shape, dtype=torch.int64))


def beyond(rank: int, world: int) -> tuple[list[bool], list[bool]]:
    """Which embeddings and losses are no numbers."""
    model = Transformer(ModelConfig(**SHAPE))
    shard_model(model, tp_mesh(world))
    initialise(model, 1)
    ids = torch.tensor([[0, 63, 64, -1]])
    embedded: Tensor = model.reducer.sum_(model.model.embed_tokens(ids))
    logits = torch.zeros(1, 4, 32)
    losses = token_losses(logits, ids, 32 * rank, model.reducer, LossFunctions())
    return torch.isnan(embedded).all(-1)[0].tolist(), torch.isnan(losses)[0].tolist()


def test_tokens_outside_the_vocabulary_of_two_ranks(pools: Pools) -> None:
    """Without a check they would have an embedding of zeros, and a loss."""
    for embedded, losses in pools(2).run(beyond):
        assert embedded == [False, False, True, True]
        assert losses == [False, False, True, False]


# ---- generating


def test_a_prompt_that_is_not_utf8(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--prompt", "a\udcff"], ["--prompt", "a", "--stop", "\udcff"]):
        assert main(["generate", str(llama), *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert "\\udcff' is not UTF-8 (character" in said.err


def test_weights_that_are_no_numbers(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error that names the model, and no text."""
    shutil.copytree(llama, tmp_path / "model")
    weights = load_file(llama / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for more in ([], ["--temperature", "1"], ["--prompt", "b"]):
        assert main(["generate", str(tmp_path / "model"), "--prompt", "a", *more]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"error: {tmp_path / 'model'}: the model's logits of prompt 0")
        assert said.err.count("\n") == 1


@pytest.mark.parametrize("kept", [True, "a", [1], 1.5])
def test_a_kept_config_that_is_no_object(kept: Any) -> None:
    with pytest.raises(UserError, match=r"config.json has huggingface=.*, no object"):
        huggingface_config({"model_type": "ladder", "huggingface": kept})


@pytest.mark.parametrize(
    "changes", [{"max_window_layers": [1]}, {"layer_types": 5}, {"layer_types": {"a": 1}}]
)
def test_windows_of_no_type(changes: dict[str, Any]) -> None:
    theirs = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    theirs["num_kv_heads"] = "num_key_value_heads"
    shape = {theirs.get(key, key): value for key, value in SHAPE.items()}
    data = {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, **shape}
    with pytest.raises(UserError, match="these must be a whole number and a list"):
        config_from_huggingface({**data, **changes}, "here")


@pytest.mark.parametrize("out", ["", "/", "..", "."])
def test_a_folder_without_a_name(out: str, llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(llama), "--plan", "ladder", "--out", out]) == 2
    assert "no name for a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("window", [1.5, "a", 10**30])
def test_what_transformers_cannot_run(window: Any, llama: Path, tmp_path: Path) -> None:
    """A key that a Llama does not know, and that transformers reads all the same."""
    shutil.copytree(llama, tmp_path / "model")
    data = json.loads((llama / "config.json").read_text()) | {"sliding_window": window}
    (tmp_path / "model" / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"transformers cannot load or run .*; correct its config"):
        convert(tmp_path / "model", tmp_path / "out", "ladder")
    assert not (tmp_path / "out").exists()
