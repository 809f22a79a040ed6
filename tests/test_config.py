"""Mistakes in configs, options and run files: one line that names them, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.config import apply_overrides, find, load_mapping, load_plan, model_config
from ladder.data.tokenizer import train_tokenizer
from ladder.infer.sampling import Sampling, choose_tokens, draws
from ladder.models import UserError, resolve_plan
from ladder.train import metrics


@pytest.mark.parametrize("model", [None, 5, ["tiny"], {"num_layers": 2}, {"name": None}])
def test_a_model_that_is_no_name_or_mapping(model: Any) -> None:
    with pytest.raises(UserError, match="model="):
        model_config(model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model"], "override 'model' is not of the form"),
        (["=5"], "override '=5' is not of the form"),
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
    drawn = draws(Sampling(1.0, seed=seed), 2, 3)
    small = torch.Generator().manual_seed(seed * 1_000_003 % 2**63)
    assert torch.equal(drawn[:, 0], torch.rand(3, generator=small))
    assert not torch.equal(drawn[:, 0], drawn[:, 1])


def test_chances_that_overflow_are_no_token() -> None:
    """The logits are finite; divided by the temperature they are not."""
    logits = torch.tensor([[1e37, 1.0, 0.0], [1.0, 2.0, 0.0]])
    first, second = choose_tokens(logits, torch.zeros(2), Sampling(1e-5)).tolist()
    assert (first, second) == (-1, 1)


@pytest.mark.parametrize("size", [256, 2**24 + 1, 10**20])
def test_vocabularies_out_of_bounds(tmp_path: Path, size: int) -> None:
    with pytest.raises(UserError, match=f"vocab_size={size} is too"):
        train_tokenizer(["text"], size, tmp_path)
