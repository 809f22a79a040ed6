"""The plugin for Axolotl: what a YAML may say, which needs no Axolotl, and a run, which does."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

pytest.importorskip("transformers")

from ladder.checkpoint import load_model, read_config
from ladder.config import load_plan
from ladder.hf import LadderForCausalLM
from ladder.hf.axolotl_options import (
    WITH_ADAPTERS,
    Planned,
    check_plugins,
    check_yaml,
    check_yaml_keys,
)
from ladder.models import UserError, resolve_plan
from ladder.train.config import load_train_config
from tests import ROOT
from tests.chats import TEMPLATE, make_chats, write_chats
from tests.folders import make, save_llama, save_ours

PAPER = ROOT / "configs/axolotl/paper-sft.yaml"
GOOD = {"cls_model_config": "LadderConfig", "attn_implementation": "sdpa", "micro_batch_size": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cls_model_config": None}, "cls_model_config=None must be 'LadderConfig'"),
        ({"adapter": "qlora"}, "adapter='qlora' is not for our models: only lora is"),
        ({"adapter": "lora", "lora_qkv_kernel": True}, "lora_qkv_kernel=True .* they patch"),
        ({"adapter": "lora", "merge_method": "memory_efficient"}, "without the plan; say legacy"),
        ({"load_in_8bit": True}, "load_in_8bit=True is not for our models"),
        ({"flash_attention": True}, "flash_attention=True .* attention with code of their own"),
        ({"attn_implementation": "flex_attention"}, "'flex_attention' .* say sdpa"),
        ({"activation_offloading": True}, "activation_offloading=True .* layers"),
        ({"gradient_checkpointing": "offload"}, "'offload' .* true or false"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 .* use FSDP"),
        ({"context_parallel_size": 4}, "context_parallel_size=4 .* each rank would train"),
        ({"model_type": "LlamaForCausalLM"}, "'LlamaForCausalLM' would load another model"),
        ({"model_config": {"rope_theta": 1e6}}, "model_config.rope_theta is ignored"),
        ({"model_config": {"plan": "ladder"}}, "model_config.plan is ignored: use ladder_plan"),
        ({"fsdp_config": {"fsdp_version": 1}}, "fsdp_version=1 must be 2"),
        ({"fsdp": ["full_shard"]}, "fsdp_version=None must be 2"),
        (
            {"fsdp_version": 2, "fsdp_config": {"transformer_layer_cls_to_wrap": "Layer"}},
            "'Layer' must be 'Attention,MLP'",
        ),
    ],
)
def test_what_axolotl_would_swallow_is_an_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_yaml({**GOOD, **options})


def test_what_is_for_our_models_is_none() -> None:
    check_yaml(GOOD)
    check_yaml({**GOOD, "tensor_parallel_size": 1, "adapter": None, "gradient_checkpointing": True})
    check_yaml({**GOOD, "adapter": "lora", **WITH_ADAPTERS})
    check_yaml({**GOOD, "model_type": "AutoModelForCausalLM", "model_config": {"eos_token_id": 3}})
    check_yaml({**GOOD, "fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}})


def test_plugins_that_are_not_there_or_patch_other_models() -> None:
    class Other:
        pass

    loaded = {name: Other() for name in ("liger.Plugin", "spectrum.Plugin", "own.Plugin")}
    for name, plugin in loaded.items():
        module = name.removesuffix(".Plugin")
        plugin.__class__ = type(  # type: ignore[assignment]
            "Plugin", (Other,), {"__module__": f"axolotl.integrations.{module}"}
        )
    type(loaded["own.Plugin"]).__module__ = "own"
    check_plugins(["spectrum.Plugin", "own.Plugin"], loaded)
    with pytest.raises(UserError, match=r"liger\.Plugin patches other models"):
        check_plugins(["liger.Plugin"], loaded)
    with pytest.raises(UserError, match=r"nowhere\.Plugin could not be imported"):
        check_plugins(["own.Plugin", "nowhere.Plugin"], loaded)


def test_keys_that_axolotl_would_ignore() -> None:
    pydantic = pytest.importorskip("pydantic")

    class DataSet(pydantic.BaseModel):
        path: str | None = None
        field_messages: str | None = None

    class Schema(pydantic.BaseModel):
        sample_packing: bool | None = None
        kind: str | None = pydantic.Field(default=None, alias="model_type")
        version: int | None = pydantic.Field(
            default=None, validation_alias=pydantic.AliasChoices("version", "fsdp_version")
        )
        datasets: list[DataSet | str] | None = None

    good = {"sample_packing": True, "model_type": "x", "fsdp_version": 2, "debug": False}
    check_yaml_keys({**good, "datasets": [{"path": "x"}, "y"]}, [Schema], {"debug"})
    with pytest.raises(UserError, match=r"sample_paking .* did you mean 'sample_packing'"):
        check_yaml_keys({"sample_paking": True}, [Schema])
    with pytest.raises(UserError, match=r"datasets\[0\]\.field_mesages .*'field_messages'"):
        check_yaml_keys({"datasets": [{"field_mesages": "x"}]}, [Schema])


def test_a_folder_under_the_yamls_plan(tmp_path: Path) -> None:
    llama = tmp_path / "llama"
    save_llama(llama)
    (tmp_path / "plan.yaml").write_text("layers: [{layers: 0-1, preset: ladder}]")
    for plan in ("ladder", str(tmp_path / "plan.yaml")):
        config = Planned.of({"ladder_plan": plan, "sequence_len": 64}).from_pretrained(llama)
        assert config.resolved.plan.sublayers == resolve_plan("ladder", 2, None).sublayers
    model = LadderForCausalLM.from_pretrained(llama, config=config)
    checkpoint = tmp_path / "out/checkpoint-12"
    model.save_pretrained(checkpoint)
    (tmp_path / "out/checkpoint-3").mkdir()
    going_on = {"output_dir": str(tmp_path / "out"), "auto_resume_from_checkpoints": True}
    assert Planned.of(going_on).from_pretrained(checkpoint).resolved == config.resolved

    def refused(options: dict[str, Any], message: str, source: Path = llama) -> None:
        with pytest.raises(UserError, match=message):
            Planned.of(options).from_pretrained(source)

    refused({}, "ladder_plan is missing, .* is a llama folder")
    refused({"ladder_plan": "ladder"}, "is no model folder", tmp_path)
    refused({"ladder_plan": "ladder", "sequence_len": 65}, "sequence_len=65 is longer")
    refused({"ladder_plan": "desync-2x", "ladder_tp_degree": 2}, "ladder convert FOLDER")
    refused({"ladder_plan": "standard", **going_on}, r"checkpoint-12, from which the run resumes")
    named = {"resume_from_checkpoint": str(checkpoint)}
    refused({"ladder_plan": "standard", **named}, "is not the plan of .*checkpoint-12")


def test_adapters_are_for_plans_that_do_not_depend_on_t(tmp_path: Path) -> None:
    """Not at the first step: PEFT's products have other shapes than those of virtual ranks."""
    for plan, degree in (("ladder", None), ("desync-2x", 4)):
        (tmp_path / plan).mkdir()
        save_ours(tmp_path / plan, make(plan, degree))
    lora = Planned.of({"adapter": "lora"})
    assert lora.from_pretrained(tmp_path / "ladder").resolved.plan.name == "ladder"
    with pytest.raises(UserError, match=r"adapter='lora' is for plans .* 'desync-2x' does"):
        lora.from_pretrained(tmp_path / "desync-2x")


def test_the_papers_yaml() -> None:
    """As Ladder Residual 4.2.1, and as our own recipe of it."""
    options = yaml.safe_load(PAPER.read_text())
    check_yaml(options)
    ours = load_train_config("paper-sft", [])
    plans = [
        resolve_plan(load_plan(each), 32, None) for each in (options["ladder_plan"], ours.plan)
    ]
    assert plans[0].sublayers == plans[1].sublayers
    batch = options["micro_batch_size"] * options["gradient_accumulation_steps"] * 8
    assert (batch, options["num_epochs"]) == (ours.batch_size, ours.epochs)
    assert (options["learning_rate"], options["warmup_steps"]) == (ours.lr, ours.warmup_steps)
    assert (options["adam_beta1"], options["adam_beta2"]) == ours.betas
    assert options["weight_decay"] == ours.weight_decay
    assert options["sequence_len"] == ours.seq_len
    assert (options["lr_scheduler"], ours.min_lr) == ("cosine", 0)
    assert [each["name"] for each in options["datasets"]] == ["7M", "Gen"]


def run_python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home"),
                "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    file = folder / "run.py"
    file.write_text(code)
    return subprocess.run(
        [sys.executable, str(file), *arguments],
        env={**os.environ, **settings, "PYTHONPATH": path},
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


MISSING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Hidden())
try:
    import ladder.hf.axolotl
except Exception as error:
    print(isinstance(error, ImportError), error)
"""


def test_an_old_transformers_is_no_import_error(tmp_path: Path) -> None:
    """After an ImportError, Axolotl would go on without the plugin."""
    said = run_python(MISSING, tmp_path, "transformers.distributed.tensor_parallel").stdout
    assert said.startswith("False")
    assert "needs transformers 5.16 or later, and found" in said


def test_a_missing_axolotl_is_no_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == "axolotl" or name == "ladder.hf.axolotl":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "axolotl", None)  # an ImportError
    with pytest.raises(Exception, match=r"a plugin of Axolotl 0\.19, which cannot be") as caught:
        importlib.import_module("ladder.hf.axolotl")
    assert not isinstance(caught.value, ImportError)


RUN = """
import sys, torch

if __name__ == "__main__":
    from axolotl.cli.train import do_cli
    from axolotl.core.trainers.base import AxolotlTrainer

    losses, compute = [], AxolotlTrainer.compute_loss

    def record(self, model, inputs, *args, **options):
        kept = {name: value.clone() for name, value in inputs.items()}
        result = compute(self, model, inputs, *args, **options)
        losses.append((kept, float(result[0] if isinstance(result, tuple) else result)))
        return result

    AxolotlTrainer.compute_loss = record
    sys.argv = sys.argv[:1]
    do_cli("tiny.yaml")
    torch.save(losses, "losses.pt")
"""


@pytest.mark.skipif(find_spec("axolotl") is None, reason="axolotl is not installed")
@pytest.mark.parametrize("packing", [True, False])
def test_axolotl_trains_our_model(tmp_path: Path, corpus: Path, packing: bool) -> None:
    """Every loss of the first step is that of each conversation alone, by our own forward."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(corpus / "tokenizer.json"))
    tokenizer.add_special_tokens({})
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.chat_template = TEMPLATE.strip()
    save_llama(tmp_path / "llama", vocab_size=len(tokenizer), max_position_embeddings=256)
    tokenizer.save_pretrained(tmp_path / "llama")
    write_chats(tmp_path / "chats.jsonl", make_chats(60))
    data = {"path": "chats.jsonl", "ds_type": "json", "type": "chat_template"}
    options = {
        "plugins": ["ladder.hf.axolotl.LadderPlugin"], "cls_model_config": "LadderConfig",
        "base_model": "llama", "ladder_plan": "ladder@1", "datasets": [data],
        "sequence_len": 256, "sample_packing": packing, "attn_implementation": "sdpa",
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": 3, "num_epochs": 1,
        "learning_rate": 0.01, "optimizer": "adamw_torch", "bf16": False, "tf32": False,
        "output_dir": "out", "dataset_prepared_path": "prepared", "val_set_size": 0,
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(options))
    done = run_python(RUN, tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    losses = torch.load(tmp_path / "losses.pt")
    config = Planned.of(options).from_pretrained(tmp_path / "llama")
    ours = LadderForCausalLM.from_pretrained(tmp_path / "llama", config=config).transformer
    inputs, loss = losses[0]
    total, count = 0.0, 0
    for row, (tokens, labels) in enumerate(zip(inputs["input_ids"], inputs["labels"], strict=True)):
        starts = [0]
        if packing:
            starts += [i for i, p in enumerate(inputs["position_ids"][row]) if i and p == 0]
        else:
            size = int(inputs["attention_mask"][row].sum())
            tokens, labels = tokens[:size], labels[:size]
        assert len(starts) > 2 or not packing
        for first, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            target = labels[first + 1 : end]
            with torch.no_grad():
                logits = ours(tokens[None, first:end])[0, :-1]
            total += float(F.cross_entropy(logits, target, ignore_index=-100, reduction="sum"))
            count += int((target != -100).sum())
    assert loss == pytest.approx(total / count, abs=1e-5)
    assert losses[-1][1] < loss - 0.1
    assert read_config(tmp_path / "out") == config.resolved
    assert "ladder_hf_modeling.py" in os.listdir(tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "ladder"
    trained = load_model(tmp_path / "out")
    assert not torch.equal(trained.lm_head.weight, ours.lm_head.weight)
