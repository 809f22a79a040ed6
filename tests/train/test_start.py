"""Runs that start from a folder's weights, under its plan or another one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ladder.checkpoint import newest, read_config
from ladder.convert.command import convert
from ladder.data.prepared import open_data
from ladder.models import UserError
from ladder.parallel.apply import make_model
from ladder.train.config import TrainConfig
from ladder.train.loop import train
from ladder.train.start import starting_point
from tests.corpus import swap_two_tokens
from tests.distributed import Pools
from tests.train.runs import fail_on_ranks, flip, losses, recipe, run_on_ranks, untimed, weights

CPU = torch.device("cpu")
BESIDE = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@pytest.fixture(scope="module")
def standard(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run of plan `standard`."""
    run = tmp_path_factory.mktemp("standard") / "run"
    train(recipe(corpus, run, plan="standard", steps=8), device="cpu")
    return run


def from_run(corpus: Path, out: Path, folder: Path, **changes: Any) -> TrainConfig:
    settings = {"model": None, "plan": None, "init": str(folder)}
    return recipe(corpus, out, **settings | changes)


def test_a_hybrid_starts_as_the_standard_model_that_it_was(
    corpus: Path, tmp_path: Path, standard: Path
) -> None:
    """Shape and weights are the folder's, the plan the recipe's. Catches random weights, and the
    folder's own plan."""
    config = from_run(corpus, tmp_path / "run", standard, plan="hybrid", steps=3)
    start = starting_point(config, open_data(corpus), None)
    assert start.config.plan.name == "hybrid"
    assert start.config.hidden_size == 32
    model = make_model(start.config, torch.float32, None, CPU)
    start.fill(model, 0)
    stored = weights(standard)
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: v.shape for n, v in stored.items()
    }
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
    train(config, device="cpu")
    assert read_config(newest(tmp_path / "run")).plan.name == "hybrid"
    assert losses(tmp_path / "run")[0] < losses(standard)[0] - 0.5


def test_norms_of_each_rank_begin_as_the_folders(
    corpus: Path, tmp_path: Path, standard: Path, pools: Pools
) -> None:
    """As if it had been converted first, to the bit; taught by a model that has no T. On ranks each
    process fills its own virtual ranks' norms, or its slices of their rows."""
    settings = {"plan": "desync-4x@0-1", "tp_degree": 4, "teacher": str(standard)}
    direct = from_run(corpus, tmp_path / "direct", standard, **settings)
    train(direct, device="cpu")
    convert(newest(standard), tmp_path / "converted", "desync-4x@0-1", 4)
    own = tmp_path / "own"
    train(from_run(corpus, own, tmp_path / "converted", teacher=str(standard)), device="cpu")
    assert untimed(tmp_path / "direct") == untimed(own)
    before, after = weights(standard), weights(own)
    for name, value in weights(tmp_path / "direct").items():
        assert torch.equal(value, after[name]), name
    norm = "model.layers.1.input_layernorm.weight"
    assert (before[norm].shape, after[norm].shape) == ((32,), (4, 32))
    assert not torch.equal(after[norm][0], after[norm][1])

    stopped = from_run(corpus, tmp_path / "stopped", standard, **settings)
    train(stopped, device="cpu", stop_after=2)
    train(stopped, device="cpu", resume=True)
    assert untimed(tmp_path / "stopped") == untimed(own)
    for layout in ({"tp": 2}, {"dp_shard": 0}):
        config = from_run(corpus, tmp_path / next(iter(layout)), standard, **settings, **layout)
        pools(2).run(run_on_ranks, config.to_dict(), None)
        assert losses(Path(config.out)) == pytest.approx(losses(own), abs=1e-4)


def test_a_plan_left_out_is_the_folders(corpus: Path, tmp_path: Path) -> None:
    """With the T that it depends on."""
    before = recipe(corpus, tmp_path / "desync", plan="desync-2x", tp_degree=2, steps=3)
    train(before, device="cpu")
    train(from_run(corpus, tmp_path / "on", tmp_path / "desync", steps=3), device="cpu")
    assert read_config(newest(tmp_path / "on")) == read_config(newest(tmp_path / "desync"))


def test_it_goes_on_without_the_folder_and_on_ranks(
    corpus: Path, tmp_path: Path, standard: Path, pools: Pools
) -> None:
    init, eos = tmp_path / "init", open_data(corpus).eos_id
    shutil.copytree(newest(standard), init)
    for name in BESIDE:  # which the data has not
        (init / name).write_text(name)
    (init / "generation_config.json").write_text('{"top_p": 0.9, "eos_token_id": 5}')
    train(from_run(corpus, tmp_path / "whole", init, plan="ladder"), device="cpu")
    stopped = from_run(corpus, tmp_path / "stopped", init, plan="ladder")
    train(stopped, device="cpu", stop_after=2)
    ranks = from_run(corpus, tmp_path / "ranks", init, plan="ladder", tp=2)
    pools(2).run(run_on_ranks, ranks.to_dict(), None)
    shutil.rmtree(init)
    train(stopped, device="cpu", resume=True)
    for run in ("whole", "ranks", "stopped"):
        for name in BESIDE[:2]:
            assert (newest(tmp_path / run) / name).read_text() == name
        settings = json.loads((newest(tmp_path / run) / "generation_config.json").read_text())
        assert settings == {"top_p": 0.9, "eos_token_id": [eos, 5]}  # with the data's end token
    assert untimed(tmp_path / "stopped") == untimed(tmp_path / "whole")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "whole"), abs=1e-4)


def test_a_hugging_face_folder(corpus: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "llama")
    start = starting_point(
        from_run(corpus, tmp_path / "run", tmp_path / "llama"), open_data(corpus), None
    )
    model = make_model(start.config, torch.float32, None, CPU)
    start.fill(model, 0)
    tokens = torch.randint(0, 300, (2, 9))
    assert torch.allclose(model(tokens), theirs(tokens).logits, atol=1e-5)


def test_a_trained_mistral_goes_back_as_one(corpus: Path, tmp_path: Path) -> None:
    """Also after a resume. With the type that its weights have now, and its tokens that end a text,
    one of which is the data's."""
    transformers = pytest.importorskip("transformers")
    eos = open_data(corpus).eos_id
    config = transformers.MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=8,
        sliding_window=None, eos_token_id=[eos, 5],
    )  # fmt: skip
    theirs = transformers.MistralForCausalLM(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "mistral")
    run = from_run(corpus, tmp_path / "run", tmp_path / "mistral", plan="hybrid", steps=4)
    train(run, device="cpu", stop_after=2)
    train(run, device="cpu", resume=True)
    convert(newest(tmp_path / "run"), tmp_path / "back", plan="standard", to="hf")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert isinstance(back, transformers.MistralForCausalLM)
    assert back.dtype == torch.float32
    assert back.config.eos_token_id == [eos, 5]
    assert set(back.generation_config.eos_token_id) == {eos, 5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "tiny"}, "model='tiny' beside init="),
        ({"plan": "parallel"}, r"post_attention_layernorm.weight: \[32\] there, absent here"),
        (
            {"plan": "desync-2x", "tp_degree": 2, "convert_layers": {"start_step": 1, "every": 1}},
            "convert_layers with plan 'desync-2x', which depends on T",
        ),
        ({"plan": "ladder", "tp_degree": 2}, "leave tp_degree out"),
        ({"init": "/nowhere"}, "^init=/nowhere does not exist"),
        ({"seq_len": 4096}, "seq_len=4096 is longer than the model's max_seq_len=.*; lower it$"),
    ],
)
def test_what_does_not_fit_is_refused(
    corpus: Path, tmp_path: Path, standard: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        train(from_run(corpus, tmp_path / "run", standard, **changes), device="cpu")
    assert not (tmp_path / "run").exists()


def test_norms_that_no_other_plan_has(corpus: Path, tmp_path: Path, standard: Path) -> None:
    """Norms of two ranks are no norms of four, nor shared ones. `ladder convert` refuses them, too,
    so it is no remedy."""
    remedy = "such a model cannot be converted; start from the model it was made from, or keep its"
    for source, degree, changes, said in (
        ("desync-2x", 2, {"plan": "desync-2x", "tp_degree": 4},
         r"tp_degree=2 there, tp_degree=4 here; .*: \[2, 32\] there, \[4, 32\] here"),
        ("desync-2x", 2, {"plan": "ladder"}, r"plan='ladder' \(model.*: \[2, 32\] there, \[32\] h"),
        ("parallel", None, {"plan": "ladder"}, r"absent there, \[32\] here"),
    ):  # fmt: skip
        folder = tmp_path / source
        if not folder.exists():
            convert(newest(standard), folder, source, degree)
        config = from_run(corpus, tmp_path / "run", folder, **changes)
        with pytest.raises(UserError, match=f"{said}.*{remedy} plan") as error:
            train(config, device="cpu")
        assert "ladder convert" not in str(error.value)
        with pytest.raises(UserError, match="convert a model of another plan"):
            convert(folder, tmp_path / "again", changes["plan"], changes.get("tp_degree"))


def test_a_schedule_has_plans_of_the_same_tensors(corpus: Path, tmp_path: Path) -> None:
    """Without `init` nothing could be converted first."""
    schedule = {"start_step": 1, "every": 1}
    config = recipe(corpus, tmp_path / "run", plan="parallel", steps=8, convert_layers=schedule)
    with pytest.raises(UserError, match=r"convert_layers has .* here\); choose a plan that"):
        train(config, device="cpu")


def test_damaged_weights_are_told_on_every_rank(
    corpus: Path, tmp_path: Path, standard: Path, pools: Pools
) -> None:
    """Without a check they would load, as other weights."""
    init = tmp_path / "init"
    shutil.copytree(newest(standard), init)
    flip(init / "model.safetensors")
    config = from_run(corpus, tmp_path / "run", init, tp=2)
    for message in pools(2).run(fail_on_ranks, config.to_dict(), False):
        assert "model.safetensors is damaged" in message
        assert "start from another checkpoint" in message
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_is_refused(corpus: Path, tmp_path: Path, standard: Path) -> None:
    init = tmp_path / "init"
    shutil.copytree(newest(standard), init)
    swap_two_tokens(init / "tokenizer.json")
    with pytest.raises(UserError, match=r"another vocabulary than .* of init="):
        train(from_run(corpus, tmp_path / "run", init), device="cpu")
    assert not (tmp_path / "run").exists()
