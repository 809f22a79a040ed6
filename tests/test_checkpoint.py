"""Model folders: ours and Hugging Face's, whole or sharded, on any number of ranks, or damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ladder import checkpoint
from ladder.checkpoint import load_model, newest, read_stop_tokens, write_config
from ladder.hf_config import config_from_huggingface, config_to_huggingface
from ladder.infer.engine import generate
from ladder.models import ModelConfig, UserError
from ladder.parallel.sharding import local_parameters
from ladder.reader import EMBEDDING
from ladder.train.shards import write_file
from tests.distributed import Pools, tp_mesh
from tests.folders import LLAMA_3, SCALINGS, TOKENS, YARN, make, save_llama, save_ours


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"rope_parameters": LLAMA_3}, {"head_dim": 12},
     {"attention_bias": True, "mlp_bias": True},
     *({"rope_parameters": each} for each in SCALINGS.values())],
)  # fmt: skip
@torch.no_grad()
def test_a_llama_folder_computes_what_transformers_does(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The config's translation, tied weights and the index of several files are all in this."""
    llama = save_llama(tmp_path, **changes)
    if "tie_word_embeddings" not in changes:
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = load_model(tmp_path)
    difference = model(TOKENS) - llama(TOKENS).logits
    assert difference.abs().max() < 1e-5
    greedy = llama.generate(
        TOKENS[:1], max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(model, [TOKENS[0].tolist()], max_new_tokens=8)[0].tokens == (
        greedy[0, TOKENS.shape[1] :].tolist()
    )
    assert read_stop_tokens(tmp_path) == [3, 5]


def test_older_configs_spell_rotary_apart(tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling; 5 writes rope_parameters."""
    save_llama(tmp_path, rope_parameters=LLAMA_3)
    new = checkpoint.read_config(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    scaling = dict(data.pop("rope_parameters"))
    data |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(data))
    assert checkpoint.read_config(tmp_path) == new
    assert new.rope_theta == 5e5
    assert new.rope_scaling is not None


@pytest.mark.parametrize("name", SCALINGS)
def test_rotary_scaling_round_trips(tmp_path: Path, name: str) -> None:
    """To our config.json and back, and to theirs, made anew, as older transformers spell it."""
    save_llama(tmp_path, rope_parameters=SCALINGS[name])
    config = checkpoint.read_config(tmp_path)
    assert config.rope_scaling is not None
    assert config.rope_scaling.rope_type == SCALINGS[name]["rope_type"]
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    written = config_to_huggingface(config, torch.float32)
    assert config_from_huggingface(written, "config.json") == config
    assert LlamaConfig(**written).rope_parameters["factor"] == SCALINGS[name]["factor"]


def test_dynamic_scaling_ends_where_it_would_depend_on_the_length(tmp_path: Path) -> None:
    """Up to there it is none: transformers changes all frequencies with the longest position."""
    llama = save_llama(tmp_path, rope_parameters=SCALINGS["dynamic"])
    tokens = torch.arange(128)[None] % 91
    model = load_model(tmp_path)
    with torch.no_grad():
        expected = llama(tokens[:, :64]).logits
        assert (model(tokens[:, :64]) - expected).abs().max() < 1e-5
        assert (llama(tokens).logits[:, :64] - expected).abs().max() > 1e-2
    with pytest.raises(UserError, match="longer than the model's max_seq_len=64"):
        model(tokens)
    with pytest.raises(UserError, match=r"max_seq_len=65 with rope_scaling\.rope_type"):
        replace(model.config, max_seq_len=65)


@pytest.mark.parametrize("shard_bytes", [2**30, 10_000])
def test_our_folders_round_trip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", shard_bytes)
    model = make()
    save_ours(tmp_path, model)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_bytes < 2**30)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    for (name, old), (_, new) in zip(
        model.named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(old, new), name
    assert load_model(tmp_path, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16


def test_whoever_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    """safetensors makes files that only their owner can read, for any umask."""
    before = os.umask(0o027)
    try:
        save_ours(tmp_path, make())
        write_file(tmp_path / "shard.safetensors", {"x": torch.ones(2)}, {"x": [0]})
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors", "shard.safetensors"), 0o640)


def load_on_rank(rank: int, world: int, folder: Path) -> tuple[float, int]:
    model = load_model(folder, tp_mesh(world))
    with torch.no_grad():
        logits = model(TOKENS)
    held = sum(local.numel() for _, local, _ in local_parameters(model))
    return (logits - torch.load(folder / "logits.pt", weights_only=True)).abs().max().item(), held


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_rank_reads_its_part(tmp_path: Path, pools: Pools, world: int) -> None:
    """The whole model never lies in one process: each holds about its share of the numbers."""
    model = make()
    save_ours(tmp_path, model)
    with torch.no_grad():
        torch.save(model(TOKENS), tmp_path / "logits.pt")
    whole = sum(parameter.numel() for parameter in model.parameters())
    for difference, held in pools(world).run(load_on_rank, tmp_path):
        assert difference < 1e-5
        assert held < whole / world * 1.2


def truncate(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        os.truncate(folder / name, (folder / name).stat().st_size - 100)

    return apply


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "config.json").read_text())
        data["model"] |= changes
        (folder / "config.json").write_text(json.dumps(data))

    return apply


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        data = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(data | changes))

    return apply


NORM = "model.norm.weight"
SCALED = "model.layers.0.self_attn.rotary_emb.long_factor"
INDEX = "model.safetensors.index.json"


def only_index(**content: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        edit_json(INDEX, **content)(folder)

    return apply


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate("model.safetensors"), r"model\.safetensors is missing or damaged"),
        (truncate("config.json"), r"config\.json is not valid JSON"),
        (lambda folder: (folder / "config.json").unlink(), "no model folder"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has neither .* fetch its"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            r"has neither .* pytorch_model\.bin is pickled: make safetensors of it",
        ),
        (edit_tensors(lambda t: t.update({SCALED: torch.ones(2)})), f"does not have: {SCALED}"),
        (edit_tensors(lambda t: t.pop(NORM)), f"lacks the tensor '{NORM}'"),
        (edit_tensors(lambda t: t.update({"extra": torch.ones(2)})), "does not have: extra"),
        (
            edit_tensors(lambda t: t.update({NORM: torch.ones(5)})),
            rf"'{NORM}' has the shape \[5\].* again",
        ),
        (edit_config(hidden=3), "unknown key 'hidden' of "),
        (edit_config(num_heads=6), "num_heads"),
        (edit_config(plan="ladder", tp_degree=None), "has the shape"),
        (edit_config(rope_theta="x"), "rope_theta='x'"),
        (edit_json("config.json", model=5), r"config\.json has model=5"),
        (edit_json("config.json", model=None), r"config\.json has model=None"),
        (only_index(weight_map=None), "index.json has weight_map=None"),
        (only_index(weight_map={NORM: 5}), f"index.json has 5 as the file of '{NORM}'"),
        (edit_tensors(lambda t: t.update({NORM: t[NORM].to(torch.int8)})), f"'{NORM}' .* I8"),
        (
            edit_tensors(lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)})),
            f"'{NORM}' has the type F8_E4M3",
        ),
    ],
)
def test_damaged_folders_are_refused(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    save_ours(tmp_path, make())
    load_model(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


def test_rotary_frequencies_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    """The first Llamas' folders hold them, once for each layer: the model is the same without."""
    save_ours(tmp_path, make())
    expected = load_model(tmp_path)(TOKENS)
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    edit_tensors(lambda t: t.update(old))(tmp_path)
    assert old.keys() <= load_file(tmp_path / "model.safetensors").keys()
    assert torch.equal(load_model(tmp_path)(TOKENS), expected)


def test_an_index_that_names_the_wrong_file(tmp_path: Path) -> None:
    save_llama(tmp_path)
    files = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    files[NORM] = next(file for file in files.values() if file != files[NORM])
    edit_json(INDEX, weight_map=files)(tmp_path)
    with pytest.raises(UserError, match=f"{files[NORM]} lacks the tensor '{NORM}'"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", [1.5, [[1]], "a", True, {"id": 1}])
def test_stop_tokens_of_a_wrong_type_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    edit_json(name, eos_token_id=value)(tmp_path)
    with pytest.raises(UserError, match=f"{name} has eos_token_id="):
        read_stop_tokens(tmp_path)
    edit_json(name, eos_token_id=None)(tmp_path)
    assert read_stop_tokens(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": None, "rope_parameters": None}, r"config\.json: rope_theta=None"),
        ({"rope_theta": "x", "rope_parameters": None}, r"config\.json: rope_theta='x'"),
        ({"rope_scaling": "linear"}, r"config\.json has rope_scaling='linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0}},
         "rope_type='llama3' without factor, high_freq_factor, original_max_position"),
        ({"rope_parameters": {**LLAMA_3, "factor": [8]}}, r"rope_scaling\.factor=\[8\]"),
        ({"hidden_size": "32"}, r"config\.json: hidden_size='32'"),
        ({"num_hidden_layers": 2.5}, r"num_layers=2\.5"),
        ({"num_attention_heads": None}, "num_heads=None"),
        ({"num_key_value_heads": [2]}, r"num_kv_heads=\[2\]"),
        ({"head_dim": "8"}, "head_dim='8'"),
        ({"rms_norm_eps": None}, "norm_eps=None"),
    ],
)  # fmt: skip
def test_llama_configs_with_wrong_types_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_llama(tmp_path)
    edit_json("config.json", **changes)(tmp_path)
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn' without factor; add"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "'longrope', whose freq"),
        ({"rope_parameters": {"rope_type": "x", "factor": 2.0}}, "rope_type='x'; default, llama3"),
        ({"rope_parameters": {**YARN, "mscale": "x"}}, "mscale .* must be above 0"),
        ({"rope_parameters": {**YARN, "truncate": 1}}, r"rope_scaling\.truncate=1 must be true"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, which transformers' Llama"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_other_architectures_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """A variant that the model does not compute must not load as if it did."""
    save_llama(tmp_path)
    data = json.loads((tmp_path / "config.json").read_text()) | changes
    data = {key: value for key, value in data.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        load_model(tmp_path)


@torch.no_grad()
def test_one_file_comes_before_an_index_of_several(tmp_path: Path) -> None:
    """Where a folder was written to twice, we read the weights that transformers reads."""
    save_llama(tmp_path)
    whole = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    save_file({name: 1.5 * value for name, value in whole.items()}, tmp_path / "model.safetensors")
    expected = LlamaForCausalLM.from_pretrained(tmp_path).eval()(TOKENS).logits
    assert (load_model(tmp_path)(TOKENS) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("start", [[0], ["0", "0"], [0.0, 0.0], 0])
def test_boxes_of_a_damaged_file(tmp_path: Path, start: Any) -> None:
    model = make("ladder", None)
    write_config(tmp_path, model.config, eos_token_id=0)
    starts = {name: [0] * each.dim() for name, each in model.named_parameters()}
    tensors = {name: each.detach() for name, each in model.named_parameters()}
    file = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    write_file(file, tensors, starts)
    load_model(tmp_path)
    write_file(file, tensors, starts | {EMBEDDING: start})
    with pytest.raises(UserError, match="lacks valid metadata of its shards"):
        load_model(tmp_path)


def test_a_run_that_was_killed_before_its_first_checkpoint(tmp_path: Path) -> None:
    """It is a run, of which `neither a model nor a run` says nothing."""
    (tmp_path / "recipe.json").touch()
    with pytest.raises(UserError, match=r"is a run that has no checkpoint yet; train on with --re"):
        newest(tmp_path)
    (tmp_path / "checkpoints" / "step-000002").mkdir(parents=True)
    assert newest(tmp_path).name == "step-000002"


def test_a_folder_that_holds_no_model_is_named_with_its_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^init=.* is neither a model folder"):
        newest(tmp_path, "init=")
    for step, file in (("9", "config.json"), ("10", "config.json"), ("11", "optimizer.pt")):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / file).touch()
    with pytest.raises(UserError, match=r"^init=.*of transformers' Trainer; give .*checkpoint-10$"):
        newest(tmp_path, "init=")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "meta/llama"}')
    with pytest.raises(UserError, match=r"^init=.* an adapter of meta/llama, .*merge_and_unload"):
        newest(tmp_path, "init=")
    (tmp_path / "adapter_config.json").write_text("[")
    with pytest.raises(UserError, match=r"^init=.* an adapter of a model, .*, and give OUT$"):
        newest(tmp_path, "init=")
    with pytest.raises(UserError, match=r"^init=.*none does not exist; give"):
        newest(tmp_path / "none", "init=")
    (tmp_path / "step-000002").mkdir()
    with pytest.raises(UserError, match=r"^init=.* holds checkpoints .*; give .*step-000002$"):
        newest(tmp_path, "init=")
