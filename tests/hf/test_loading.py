"""Loading by transformers refuses incomplete folders and quantisation.

The messages are those of `ladder convert`, which checks by the same code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from ladder.checkpoint import write_config
from ladder.convert.command import convert
from ladder.hf import LadderConfig, LadderForCausalLM
from ladder.hf.refusals import refuse_devices
from ladder.models import UserError
from tests.folders import TOKENS, YARN, make, save_llama, save_ours
from tests.hf.models import wrapped


def edited(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
            file.unlink()
        (folder / "model.safetensors.index.json").unlink()
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return apply


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop("model.layers.1.mlp.up_proj.weight")


def of_eight_bits(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def untied(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0)


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()


def pickled(folder: Path) -> None:
    edited(lambda tensors: torch.save(tensors, folder / "pytorch_model.bin"))(folder)
    (folder / "model.safetensors").unlink()


def adapter(folder: Path) -> None:
    edited(lambda tensors: None)(folder)
    (folder / "model.safetensors").unlink()
    (folder / "adapter_config.json").write_text("{}")


@pytest.mark.parametrize(
    ("changes", "damage", "message"),
    [
        ({}, edited(lacking), r"lacks the tensor 'model.layers.1.mlp.up_proj.weight'"),
        ({}, edited(of_eight_bits), "up_proj.weight' has the type F8_E4M3, and quantised weights"),
        ({}, edited(narrower), r"up_proj.weight' has the shape \[55, 32\] but the model needs"),
        ({}, edited(lambda t: t.update(more=torch.ones(1))), "does not have: more"),
        (
            {"tie_word_embeddings": True}, edited(untied),
            "lm_head.weight differs from model.embed_tokens.weight but its config.json ties them",
        ),
        ({}, adapter, "it holds an adapter: merge that into its model first"),
        ({}, pickled, "pytorch_model.bin is pickled: make safetensors of it with transformers"),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_whole_is_refused_as_convert_refuses_it(
    tmp_path: Path, changes: dict[str, Any], damage: Callable[[Path], None], message: str
) -> None:
    """transformers would make up what is missing, or take what is of another type or not tied."""
    folder = tmp_path / "llama"
    save_llama(folder, **changes)
    damage(folder)
    found = []
    for load in (
        lambda: convert(folder, tmp_path / "out"),
        lambda: LadderForCausalLM.from_pretrained(folder),
        lambda: LadderForCausalLM.from_pretrained(folder, plan="ladder", dtype=torch.bfloat16),
    ):
        with pytest.raises(UserError, match=message) as error:
            load()
        found.append(str(error.value))
    assert len(set(found)) == 1


def test_a_folder_that_lacks_a_tensor_is_refused_by_the_auto_class(tmp_path: Path) -> None:
    convert_me = tmp_path / "llama"
    save_llama(convert_me)
    convert(convert_me, tmp_path / "ours", plan="ladder")
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    lacking(tensors)
    save_file(tensors, tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks the tensor 'model.layers.1.mlp.up_proj.weight'"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "ours")


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_8bit": True},
        {"load_in_4bit": True},
        {"quantization_config": BitsAndBytesConfig(load_in_8bit=True)},
        {"quantization_config": {"load_in_4bit": True}},
    ],
)
def test_what_would_quantise_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    save_ours(tmp_path, make("ladder", None))
    for loader in (LadderForCausalLM, AutoModelForCausalLM):
        with pytest.raises(UserError, match=f"{next(iter(options))}=.* is not for our models"):
            loader.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("name", ["eager", "flash_attention_2"])
def test_another_attention_is_refused(tmp_path: Path, name: str) -> None:
    """It would not be called; transformers accepts one, and tells to install the other."""
    save_ours(tmp_path, make("ladder", None))
    said = re.escape(f"attn_implementation={name!r} is not for our models") + ".*; leave it out"
    for loader in (LadderForCausalLM, AutoModelForCausalLM):
        with pytest.raises(UserError, match=said):
            loader.from_pretrained(tmp_path, attn_implementation=name)
    model = LadderForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    with pytest.raises(UserError, match=said):
        model.set_attn_implementation(name)
    with pytest.raises(UserError, match=said):
        AutoModelForCausalLM.from_config(model.config, attn_implementation=name)


def test_continuous_batching_is_refused() -> None:
    """It sets an attention that nobody has given."""
    said = r"generate_batch \(continuous batching\) is not supported; use generate, or ladder.infer"
    with pytest.raises(UserError, match=said):
        wrapped().generate_batch([[1, 2, 3]], max_new_tokens=2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("num_hidden_layers", 1, "cannot replace 2 .*: change .*`model.num_layers`"),
        ("vocab_size", 90, "cannot replace 91 .*: change vocab_size in the folder's config.json"),
        ("rope_theta", 5e5, "cannot replace 10000.0 .*: change rope_theta in the folder's"),
        ("rope_scaling", {"rope_type": "linear", "factor": 4.0}, "cannot replace None"),
        ("rope_parameters", {"rope_type": "linear", "factor": 4.0}, "cannot replace None"),
        ("rms_norm_eps", 0.1, "cannot replace 1e-05 .*`model.norm_eps`"),
        ("attention_bias", True, "cannot replace False"),
        ("mlp_bias", True, "cannot replace False"),
        ("hidden_act", "gelu", "is not supported: our models compute hidden_act='silu'; leave it"),
        ("sliding_window", 8, "is not supported: our models compute sliding_window=None; leave it"),
    ],
)
def test_numbers_that_a_loaded_config_would_ignore_are_refused(
    tmp_path: Path, name: str, value: Any, message: str
) -> None:
    """A Llama's config changes what its model computes, and ours would go on with the old one."""
    save_llama(tmp_path, rms_norm_eps=1e-5)
    config = LadderConfig.from_pretrained(tmp_path)
    said = f"{name}={re.escape(repr(value))} .*{message}"
    for change in (
        lambda: LadderConfig.from_pretrained(tmp_path, **{name: value}),
        lambda: LadderForCausalLM.from_pretrained(tmp_path, **{name: value}),
        lambda: setattr(config, name, value),
    ):
        with pytest.raises(UserError, match=said):
            change()
    config.save_pretrained(tmp_path / "ours")
    with pytest.raises(UserError, match=said):
        AutoConfig.from_pretrained(tmp_path / "ours", **{name: value})


def test_numbers_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    save_llama(tmp_path)
    config = LadderConfig.from_pretrained(tmp_path)
    same: dict[str, Any] = {"hidden_act": "silu", "sliding_window": None, "num_hidden_layers": 2}
    same |= {"rope_theta": 10000.0, "rope_scaling": None}
    assert LadderForCausalLM.from_pretrained(tmp_path, **same).config.resolved == config.resolved
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}  # transformers' form
    with pytest.raises(UserError, match="rope_parameters"):
        config.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}


def test_the_longest_sequence_can_be_changed(tmp_path: Path) -> None:
    """As a Llama's; but where yarn's frequencies depend on it, in the file only."""
    save_llama(tmp_path)
    model = LadderForCausalLM.from_pretrained(tmp_path, max_position_embeddings=8)
    assert model.config.max_position_embeddings == model.transformer.config.max_seq_len == 8
    with pytest.raises(UserError, match="max_seq_len=8"):
        model(TOKENS)
    yarn = {name: value for name, value in YARN.items() if not name.startswith("original")}
    save_llama(tmp_path / "yarn", rope_parameters=yarn)
    with pytest.raises(UserError, match="max_position_embeddings=8 cannot replace 64 in a config"):
        LadderConfig.from_pretrained(tmp_path / "yarn", max_position_embeddings=8)


def test_an_early_exit_is_refused() -> None:
    with pytest.raises(UserError, match=r"generate's assistant_early_exit, .*: leave it out"):
        wrapped().generate(TOKENS[:1] % 67, max_new_tokens=2, assistant_early_exit=1)


def test_a_config_of_another_class_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path)
    theirs, ours = (each.from_pretrained(tmp_path) for each in (AutoConfig, LadderConfig))
    said = r"config is a LlamaConfig; give LadderConfig.from_pretrained\(FOLDER, plan=...\), or"
    for build in (
        lambda: LadderForCausalLM(theirs),
        lambda: LadderForCausalLM.from_pretrained(tmp_path, config=theirs),
        lambda: LadderForCausalLM.from_pretrained(tmp_path, config=theirs, plan="ladder"),
    ):
        with pytest.raises(UserError, match=said):
            build()
    with pytest.raises(UserError, match="plan='ladder' beside config= has no effect: give plan to"):
        LadderForCausalLM.from_pretrained(tmp_path, config=ours, plan="ladder")


def test_a_config_without_a_shape_says_how_to_give_one() -> None:
    said = r"model=None of a LadderConfig .*LadderConfig\(model=ModelConfig\(...\).to_dict\(\)\)"
    with pytest.raises(UserError, match=said):
        AutoModelForCausalLM.from_config(LadderConfig())
    for given in ({}, {"plan": "ladder"}, {"rope_theta": 5e5}):
        with pytest.raises(UserError, match=said):
            LadderConfig.from_dict({"model_type": "ladder"}, **given)


def test_a_plan_may_be_a_file(tmp_path: Path) -> None:
    """As on the command line."""
    (tmp_path / "model").mkdir()
    save_ours(tmp_path / "model", make("standard", None))
    plan = tmp_path / "mine.yaml"
    plan.write_text("layers: [{layers: 0-1, preset: ladder}]\n")
    for named in (plan, str(plan)):
        model = LadderForCausalLM.from_pretrained(tmp_path / "model", plan=named)
        own = model.config.resolved.plan
        assert (own.name, own.sublayers[3].own_lag) == ("mine", 1)


def test_layers_on_several_gpus_are_refused(tmp_path: Path) -> None:
    """Before any weight is on one; as `device_map="auto"` gives where there are several."""
    save_ours(tmp_path, make("ladder", None))
    for loader in (LadderForCausalLM, AutoModelForCausalLM):
        wanted = r"devices cuda:0, cuda:1, and ours .* device_map=\{'': 0\}, or"
        with pytest.raises(UserError, match=wanted):
            loader.from_pretrained(tmp_path, device_map={"model": 0, "lm_head": 1})
    assert loader.from_pretrained(tmp_path, device_map={"": "cpu"}).device.type == "cpu"
    refuse_devices({"model": 0, "lm_head": "cpu", "more": "disk"})  # all compute on one GPU
    refuse_devices({"model": 0, "lm_head": "cuda:0", "more": torch.device("cuda", 0)})


def test_weights_may_lie_elsewhere_than_they_compute(tmp_path: Path) -> None:
    """As those that a GPU has no room for: in memory, or in the folder itself."""
    accelerate = pytest.importorskip("accelerate")
    save_ours(tmp_path, make("ladder", None))
    load, places = LadderForCausalLM.from_pretrained, {"model": "cpu", "lm_head": "disk"}
    whole = load(tmp_path)
    of_disk = load(tmp_path, device_map=places, offload_folder=tmp_path / "more")
    with torch.no_grad():
        expected = whole(TOKENS).logits
        accelerate.cpu_offload(whole, execution_device=torch.device("cpu"))
        for model in (whole, of_disk):
            assert model.lm_head.weight.is_meta
            assert torch.equal(model(TOKENS).logits, expected)


def test_a_config_that_says_quantised_is_refused(tmp_path: Path) -> None:
    save_ours(tmp_path, make("ladder", None))
    data = json.loads((tmp_path / "config.json").read_text())
    data["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (tmp_path / "config.json").write_text(json.dumps(data))
    for loader in (LadderForCausalLM, AutoModelForCausalLM):
        with pytest.raises(UserError, match="has a quantization_config; quantised weights cannot"):
            loader.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_safetensors": False}, "use_safetensors=False would unpickle"),
        ({"gguf_file": "model.gguf"}, "gguf_file='model.gguf' is not for our models"),
    ],
)
def test_other_files_are_not_asked_for(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    save_ours(tmp_path, make("ladder", None))
    with pytest.raises(UserError, match=message):
        LadderForCausalLM.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("variant", [None, "fp32"])
@torch.no_grad()
def test_what_is_whole_is_loaded(tmp_path: Path, variant: str | None) -> None:
    """One head that is stored although it is tied, and files of a variant's name."""
    llama = save_llama(tmp_path, tie_word_embeddings=True)
    edited(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))(tmp_path)
    if variant is not None:
        (tmp_path / "model.safetensors").rename(tmp_path / f"model.{variant}.safetensors")
    model = LadderForCausalLM.from_pretrained(tmp_path, variant=variant)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (model(TOKENS).logits - llama(TOKENS).logits).abs().max() < 1e-5


def test_folders_of_ours_name_the_class(tmp_path: Path) -> None:
    """Trainers look there for what to load a reference model as."""
    source = tmp_path / "llama"
    save_llama(source)
    convert(source, tmp_path / "ours", plan="ladder")
    write_config(tmp_path, make().config, eos_token_id=0)
    for folder in (tmp_path, tmp_path / "ours"):
        data = json.loads((folder / "config.json").read_text())
        assert data["architectures"] == ["LadderForCausalLM"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.config.architectures == ["LadderForCausalLM"]
