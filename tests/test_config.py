"""Mistakes in configs, options and run files: one line that names them, never a traceback."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.cli import main
from ladder.config import (
    apply_overrides,
    find,
    load_mapping,
    load_plan,
    load_yaml,
    model_config,
)
from ladder.data.tokenizer import train_tokenizer
from ladder.infer.sampling import Sampling, choose_tokens, draws
from ladder.models import ModelConfig, UserError, resolve_plan
from ladder.train import metrics
from ladder.train.config import load_train_config


@pytest.mark.parametrize("model", [None, 5, ["tiny"], {"num_layers": 2}, {"name": None}])
def test_a_model_that_is_no_name_or_mapping(model: Any) -> None:
    with pytest.raises(UserError, match="model="):
        model_config(model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model"], "override 'model' is not of the form key=value; write model=VALUE$"),
        (["model", "tiny"], "override 'model' is not of the form key=value; write model=tiny$"),
        (["model", "plan=ladder"], "override 'model' is not of .*; write model=VALUE$"),
        (["=5"], "override '=5' is not of the form key=value; write KEY=VALUE$"),
        (["model.=5"], "override 'model.=5' is not of the form"),
        ([".num_layers=5"], "override '.num_layers=5' is not of the form"),
        (["model=5", "model.num_layers=2"], "reaches into model=5"),
        (["model=null", "model.num_layers=2"], "reaches into model=None"),
        (["model=[tiny]", "model.num_layers=2"], r"reaches into model=\['tiny'\]"),
        (["model=[tiny"], "is not valid YAML"),
    ],
)
def test_overrides_that_cannot_be_applied(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_overrides({"model": "tiny"}, overrides)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["model.num_layers=2", "model=tiny"], "give model=tiny first"),
        (["convert_layers.every=1", "convert_layers={}"], "give convert_layers={} first"),
    ],
)
def test_an_override_that_undoes_another_is_refused(overrides: list[str], remedy: str) -> None:
    message = "override '{1}' comes after '{0}', which it would undo; ".format(*overrides)
    with pytest.raises(UserError, match=f"^{re.escape(message + remedy)}$"):
        load_train_config("tiny", overrides)


def test_a_later_value_of_a_key_counts() -> None:
    """So that words may be appended to a command."""
    given = ["steps=200", "model.num_layers=2", "steps=300", "model.num_layers=3"]
    found = load_train_config("tiny", given)
    assert (found.steps, found.model) == (300, {"name": "tiny", "num_layers": 3})


@pytest.mark.parametrize("name", ["init", "teacher", "wandb"])
def test_a_word_for_none_is_no_text(name: str, tmp_path: Path) -> None:
    """A folder or a project of that name would be taken, or asked for, in silence."""
    file = tmp_path / "a.yaml"
    for word in ("null", "None", "false", "~", "off"):
        message = f"{name}={word} would name a .*; give its name, or for none leave {name} out"
        with pytest.raises(UserError, match=message):
            load_train_config("tiny", [f"{name}={word}"])
    for value in ("false", "'null'"):
        file.write_text(f"data: d\nout: o\n{name}: {value}\n")
        message = f"{name}=.* would name a .*; give its name, or for none leave {name}"
        with pytest.raises(UserError, match=message):
            load_train_config(str(file), [])
    for value in ("", "null", "''"):
        file.write_text(f"data: d\nout: o\n{name}: {value}\n")
        assert getattr(load_train_config(str(file), []), name) == ""
    assert getattr(load_train_config("tiny", [f"{name}=nullable"]), name) == "nullable"
    assert load_train_config("tiny", ["out=null"]).out == "null"


def test_overrides_reach_into_a_named_model() -> None:
    data = apply_overrides({"model": "tiny"}, ["model.num_layers=2", "lr=1"])
    assert data == {"model": {"name": "tiny", "num_layers": 2}, "lr": 1}
    assert model_config(data["model"]).num_layers == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"plan": "ladder"}, "model.plan='ladder' .* plan=ladder"),
        ({"tp_degree": 4}, "model.tp_degree=4 .* tp_degree=4"),
        ({"vocab_size": 300}, "model.vocab_size=300 .* comes from the data"),
    ],
)
def test_what_is_no_part_of_the_shape_is_not_ignored(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        model_config({"name": "tiny", **fields}, vocab_size=500)


def test_configs_are_found_by_name_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that has a config's name must not hide it."""
    data = load_mapping(find("models", "tiny"))
    monkeypatch.chdir(tmp_path)
    for name in ("shape.json", "shape"):
        Path(name).write_text(json.dumps(data))
        assert model_config(name) == model_config("tiny")
    Path("tiny").mkdir()
    assert load_mapping(find("models", "tiny")) == data
    Path("plan.json").write_text(json.dumps(resolve_plan("ladder", 2).to_dict()))
    assert resolve_plan(load_plan("plan.json"), 2) == resolve_plan("ladder", 2)
    Path("folder").mkdir()
    with pytest.raises(UserError, match="model config 'folder' is a folder"):
        find("models", "folder")
    for name in ("tinny", ""):
        with pytest.raises(UserError, match=f"unknown model config '{name}'"):
            find("models", name)


@pytest.mark.parametrize("line", ["garbage", '{"step": 2', "", "5", '{"loss": 1.0}', "\xff"])
def test_a_damaged_line_of_metrics_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / metrics.FILE
    text = f'{{"step": 1}}\n{line}\n{{"step": 3}}\n'
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 is"):
        metrics.read_metrics(tmp_path)
    path.write_bytes(f'{{"step": 1}}\n{line}'.encode("latin-1"))  # torn: not an error
    assert metrics.read_metrics(tmp_path) == [{"step": 1}]


@pytest.mark.parametrize("seed", [0, 1, 2**43, 2**63 - 1])
def test_large_seeds_draw(seed: int) -> None:
    """From 2^32 on the upper bits count, too, of which torch's generator reads none."""
    drawn = draws(Sampling(1.0, seed=seed), 2, 3)
    small = torch.Generator().manual_seed(seed * 1_000_003 % 2**63)
    assert torch.equal(drawn[:, 0], torch.rand(3, generator=small)) == (seed < 2**32)
    assert not torch.equal(drawn[:, 0], drawn[:, 1])
    assert torch.all((drawn >= 0) & (drawn < 1))


def test_chances_that_overflow_are_no_token() -> None:
    """The logits are finite; divided by the temperature they are not."""
    logits = torch.tensor([[1e37, 1.0, 0.0], [1.0, 2.0, 0.0]])
    first, second = choose_tokens(logits, torch.zeros(2), Sampling(1e-5)).tolist()
    assert (first, second) == (-1, 1)


@pytest.mark.parametrize("size", [256, 2**24 + 1, 10**20])
def test_vocabularies_out_of_bounds(tmp_path: Path, size: int) -> None:
    with pytest.raises(UserError, match=f"vocab_size={size} is too"):
        train_tokenizer(["text"], size, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: 5\nlr: 1\nsteps: 7", "key 'steps' given twice, line 3, column 1"),
        ("steps: 5\n'steps': 7", "key 'steps' given twice, line 2, column 1"),
        ("layers: [{layers: 0, mlp: {own_lag: 1}, mlp: {}}]", "key 'mlp' given twice, line 1, "),
    ],
)
def test_a_key_given_twice_is_refused(text: str, message: str, tmp_path: Path) -> None:
    """The last one would count, and the other be lost."""
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"a.yaml is not valid YAML: {message}"):
        load_yaml(path)


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"caf\xe9: 1")
    with pytest.raises(UserError, match=r"latin\.yaml: not UTF-8 text \(byte 3 is 0xe9\);"):
        load_train_config(str(path), [])


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, y: 4}\n")
    assert load_yaml(path)["c"] == {"x": 3, "y": 4}


@pytest.mark.parametrize("number", ["010", "0100", "-010", "1:30", "1:30.5", "1_0", "0b11", "0x1f"])
def test_a_number_that_is_not_decimal_is_refused(number: str, tmp_path: Path) -> None:
    """YAML 1.1 would read 010 as 8 and 1:30 as 90."""
    remedy = f"the number {number}: write it in decimal, without leading zeros, _ or :"
    with pytest.raises(UserError, match=f"override 'seed={number}' is not valid YAML: {remedy}"):
        apply_overrides({}, [f"seed={number}"])
    (tmp_path / "a.yaml").write_text(f"a: 1\nlayers: [{{own_lag: {number}}}]")
    with pytest.raises(UserError, match=rf"{remedy}, .*, line 2, column 20"):
        load_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("+5", 5), ("-12", -12), ("0.5", 0.5), ("1.0e-5", 1e-5), (".inf", float("inf")),
     ("0-3", "0-3"), ("'010'", "010"), ("2026-02-03", "2026-02-03"), ("a_1", "a_1")],
)  # fmt: skip
def test_other_numbers_and_texts_stay(text: str, value: Any) -> None:
    assert apply_overrides({}, [f"a={text}"]) == {"a": value}


@pytest.mark.parametrize("value", ["1_0e-4", "1_0"])
def test_a_rate_with_an_underscore_is_refused(value: str) -> None:
    """Python, which reads what YAML takes for text, ignores it."""
    with pytest.raises(UserError, match=f"lr=.*{value}"):
        load_train_config("tiny", [f"lr={value}"])


@pytest.mark.parametrize("name", ["plan", "model", "tp_degree", "convert_layers"])
def test_an_empty_override_does_not_mean_the_default(name: str) -> None:
    """As of a shell's variable that is not set."""
    with pytest.raises(UserError, match=f"{name}= is empty; .*{name}=null for none"):
        load_train_config("tiny", [f"{name}="])
    assert load_train_config("tiny", [f"{name}=null"]).plan in ("ladder", "standard")


def test_a_printed_plan_is_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `ladder plans NAME --json` prints, and its one entry; records of another T are told."""
    words = ["plans", "dtp-1", "--layers", "4", "--tp-degree", "2", "--json"]
    assert main(words) == 0
    printed, file = capsys.readouterr().out, tmp_path / "mine.json"
    expected = resolve_plan("dtp-1", 4, 2)
    for text in (printed, json.dumps(json.loads(printed)[0])):
        file.write_text(text)
        assert resolve_plan(load_plan(file), 4, 2) == expected
        with pytest.raises(UserError, match="tp_degree=4 holds records of another T, tp_degree=2;"):
            resolve_plan(load_plan(file), 4, 4)
        assert main(["plans", str(file)]) == 0  # of the T that it says
        assert "1.41421" in capsys.readouterr().out
    assert main(["plans", "ladder", *words[1:]]) == 0
    file.write_text(capsys.readouterr().out)
    with pytest.raises(UserError, match=r"mine\.json holds 2 plans; give a file of one"):
        load_plan(file)


def test_a_recipe_takes_the_degree_of_its_plans_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("tp_degree: 2\nlayers: [{layers: 0-3, preset: accumulate-4x-lag2}]\n")
    config = load_train_config("tiny", [f"plan={file}"]).model_config(67)
    assert config.tp_degree == 2
    assert config.plan.sublayers == resolve_plan("accumulate-4x-lag2", 4, 2).sublayers


def test_a_file_may_have_a_presets_name(tmp_path: Path) -> None:
    """Its records are its own, also after they were saved with a model."""
    own = "{reduce: none, own_scale: 3}"
    file = tmp_path / "accumulate-2x.yaml"
    file.write_text(f"layers: [{{layers: 0-3, attention: {own}, mlp: {{reduce: accumulated}}}}]\n")
    config = model_config("tiny", file, 4, vocab_size=67)
    assert config.plan.sublayers[0].own_scale == 3
    assert ModelConfig.from_dict(config.to_dict()) == config
